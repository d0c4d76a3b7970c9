"""A causal language model without some of its decoder layers, with a boundary operator at each cut.

Ghosted Layers (arXiv 2605.15491). The layers that stay are those of the stock architecture; ``boundary_operators`` in
the configuration says where the operators are. A checkpoint carries this file and ``boundary_operator.py`` along, and
needs nothing beside them but torch and transformers.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from transformers import GenerationMixin, LlamaConfig, LlamaForCausalLM

from stages.recovered.boundary_operator import AFTER, BEFORE, BoundaryOperator, attach

FORMAT = 2
FINGERPRINTS = "fingerprints.json"
"""SHA-256 of the files that make the model, as exported; a model saved anew has none."""


class GhostedLlamaConfig(LlamaConfig):
    """The stock configuration, and the operators: ``format_version``, ``modules``, ``dtype``.

    `modules` has, by name, the `rank` of each (null: one square matrix) and whether it has a `bias`. `dtype` is that
    the operators are kept and computed in: `model`, the model's; or `float32`.
    """

    model_type = "ghosted_llama"
    boundary_operators: dict[str, Any] | None = None


# Transformers derives a new class, one per load, from one of a checkpoint that does not name GenerationMixin itself.
class GhostedLlamaForCausalLM(LlamaForCausalLM, GenerationMixin):
    """The stock model with boundary operators. Raises ValueError when the configuration does not describe them."""

    config_class = GhostedLlamaConfig

    def __init__(self, config: GhostedLlamaConfig):
        super().__init__(config)
        for name, shape in described_operators(config.boundary_operators).items():
            layer, _, place = name.rpartition(".")
            try:
                attach(self.get_submodule(layer), place, BoundaryOperator(config.hidden_size, **shape))
            except AttributeError as error:
                raise ValueError(f"config.json: boundary_operators.modules: {name!r}: {error}") from error
        if (config.boundary_operators or {})["dtype"] == "float32":
            self._keep_in_fp32_modules_strict |= {BEFORE, AFTER}

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: Any, *arguments: Any, output_loading_info: bool = False, **options: Any
    ) -> Any:
        """As the stock model's, but a missing, unexpected or changed part is a ValueError that names it."""
        if pretrained_model_name_or_path is not None:
            check_files(Path(pretrained_model_name_or_path))
        # Weights of another size are then reported, like all that does not fit, and refused below by name.
        options["ignore_mismatched_sizes"] = True
        model, info = super().from_pretrained(
            pretrained_model_name_or_path, *arguments, output_loading_info=True, **options
        )
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            if info.get(kind):
                names = ", ".join(sorted(map(str, info[kind]))[:5])
                raise ValueError(f"{pretrained_model_name_or_path}: {kind.replace('_', ' ')}: {names}")
        return (model, info) if output_loading_info else model

    def save_pretrained(self, save_directory: Any, *arguments: Any, **options: Any) -> None:
        """As the stock model's; fingerprints of what was there before go."""
        Path(save_directory, FINGERPRINTS).unlink(missing_ok=True)
        super().save_pretrained(save_directory, *arguments, **options)


def described_operators(described: Any) -> dict[str, Any]:
    """The rank and bias of each operator by its name, such as ``model.layers.12.boundary_before``.

    Raises ValueError when `described`, of the configuration, is of another format.
    """
    where = "config.json: boundary_operators"
    if not isinstance(described, dict):
        raise ValueError(f"{where} = {described!r}: must be an object")
    version, dtype, modules = (described.get(name) for name in ("format_version", "dtype", "modules"))
    if version is True or version != FORMAT:
        raise ValueError(f"{where}.format_version = {version!r}; this code reads {FORMAT}")
    if dtype not in ("model", "float32"):
        raise ValueError(f"{where}.dtype = {dtype!r}: must be model or float32")
    if not isinstance(modules, dict):
        raise ValueError(f"{where}.modules = {modules!r}: must be an object")
    for name, shape in modules.items():
        if name.rpartition(".")[2] not in (BEFORE, AFTER):
            raise ValueError(f"{where}.modules: {name!r}: ends in neither {BEFORE} nor {AFTER}")
        rank, bias = (shape.get(key) for key in ("rank", "bias")) if isinstance(shape, dict) else (0, None)
        if not (rank is None or (type(rank) is int and rank > 0)) or type(bias) is not bool or len(shape) != 2:
            raise ValueError(f"{where}.modules: {name!r} = {shape!r}: must have a rank or null, and bias true or false")
    return modules


def check_files(folder: Path) -> None:
    """Raise ValueError when a file in `folder` is not the one that was exported."""
    fingerprints = folder / FINGERPRINTS
    if not fingerprints.is_file():
        return
    try:
        known = dict(json.loads(fingerprints.read_text(encoding="utf-8")))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{fingerprints}: is damaged: {error}") from error
    if "config.json" not in known:
        raise ValueError(f"{fingerprints}: is damaged: it does not name config.json")
    for name, expected in known.items():
        file = folder / name
        if not file.is_file():
            raise ValueError(f"{file}: is missing")
        with file.open("rb") as stream:
            if hashlib.file_digest(stream, "sha256").hexdigest() != expected:
                raise ValueError(
                    f"{file}: is damaged or was edited since the export; to load it all the same, delete {fingerprints}"
                )
