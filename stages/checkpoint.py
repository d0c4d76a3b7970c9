"""Loading what the stage `model` prepared: ``data/model/<model>`` is a checkpoint, or says where one is."""

from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from stages.artifacts import read_json
from stages.decoder import check_architecture
from stages.device import forward_device
from stages.errors import UserError
from stages.paths import model_folder

SOURCE = "source.json"
"""In ``data/model/<model>``: kind (`gguf`, `path` or `id`), location, revision, fingerprints."""


def location(name: str) -> tuple[str, dict[str, Any]]:
    """What ``from_pretrained`` takes for a model: a folder or a Hub id, and keyword arguments.

    Raises UserError when a local checkpoint's files are not those that the stage `model` saw.
    """
    source = read_json(model_folder(name) / SOURCE)
    if source["kind"] == "gguf":
        return str(model_folder(name)), {}
    if source["kind"] == "id":
        return source["location"], {"revision": source["revision"]}
    folder = Path(source["location"])
    for file, known in source["files"].items():
        size = (folder / file).stat().st_size if (folder / file).exists() else None
        if size != known["size"]:
            found = "is missing" if size is None else f"has {size} bytes instead of {known['size']}"
            raise UserError(
                f"{folder / file}: {found}; the checkpoint changed since it was recorded: `dvc repro -f model@{name}`"
            )
    return str(folder), {}


def load_config(name: str, trust_remote_code: bool) -> PreTrainedConfig:
    """The configuration of a model. Raises UserError when its architecture is not supported."""
    place, extra = location(name)
    config = _load(AutoConfig, place, trust_remote_code=trust_remote_code, **extra)
    check_architecture(config, f"params.yaml: models.{name}")
    return cast(PreTrainedConfig, config)


def load_tokenizer(name: str, trust_remote_code: bool) -> Tokenizer:
    """The tokenizer of a model."""
    place, extra = location(name)
    return cast(Tokenizer, _load(AutoTokenizer, place, trust_remote_code=trust_remote_code, **extra))


def load_model(name: str, dtype: str, trust_remote_code: bool) -> PreTrainedModel:
    """The model in evaluation mode, in `dtype`, on the forward device.

    Raises UserError when the checkpoint cannot be read, or when its weights are not exactly those that the
    architecture needs (missing ones would be random).
    """
    load_config(name, trust_remote_code)
    place, extra = location(name)
    model, info = _load(
        AutoModelForCausalLM,
        place,
        dtype=getattr(torch, dtype),
        trust_remote_code=trust_remote_code,
        use_safetensors=True,
        output_loading_info=True,
        **extra,
    )
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        if info.get(kind):
            raise UserError(f"{place}: {kind.replace('_', ' ')} in the checkpoint: {sorted(map(str, info[kind]))[:5]}")
    return cast(PreTrainedModel, model.to(forward_device()).eval())


def _load(loader: Any, place: str, **options: Any) -> Any:
    try:
        return loader.from_pretrained(place, **options)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{place}: cannot be loaded: {str(error).strip()}") from error
    except Exception as error:
        # safetensors raises its own type for a truncated file.
        if type(error).__name__ != "SafetensorError":
            raise
        raise UserError(f"{place}: a weights file cannot be read: {error}") from error
