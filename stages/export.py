"""``python -m stages.export``: a row as an ordinary Hugging Face checkpoint that needs nothing of this project.

Reads the model, the row's adapter ``data/patch/<key>/``, and for the model card the row's artifacts. Writes
``data/export/<key>/``: weights, configuration, tokenizer, ``README.md``; and, if the row has operators, the code that
``trust_remote_code`` runs and the fingerprints that it checks. No stage of the pipeline: the folder is nobody's input.
"""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from stages import modeling_ghosted
from stages.base.checkpoint import SOURCE, from_pretrained, load_tokenizer, load_weights
from stages.base.decoder import input_device
from stages.model_card import model_card
from stages.modeling_ghosted import FINGERPRINTS, FORMAT
from stages.project import params
from stages.project.artifacts import read_json, read_table, sha256, write_json, writing
from stages.project.errors import UserError, run
from stages.project.keys import Row, parse_row
from stages.project.paths import export_folder, model_folder, patch_folder, select_file
from stages.project.schemas import SELECT
from stages.project.sections import Params
from stages.recovered import boundary_operator
from stages.recovered.adapter import read_bridges, read_description
from stages.recovered.boundary_operator import BoundaryOperator
from stages.recovered.patched import load_row

MAX_SHARD_SIZE = "5GB"
CODE = (Path(modeling_ghosted.__file__), Path(boundary_operator.__file__))
SAMPLE = "Layers 12-18 were removed; naïve, isn't it?\n\tYes."
TEMPLATE = ("LlamaForCausalLM", "LlamaConfig", "ghosted_llama")
"""What the modeling file, written for Llama, names that differs with the architecture."""


def main() -> None:
    """Export one row."""
    row, _ = parse_row(__doc__)
    settings = params.load()
    params.check_name("params.yaml: the rows of grid", row.key, [declared.key for declared in settings.rows()])
    source = settings.models[row.model]
    check_current(row, settings)
    description = None if row.dense else read_description(patch_folder(row))
    bridges = read_bridges(patch_folder(row), description) if description else {}
    card = model_card(row, settings, description, {name for bridge in bridges.values() for name in bridge.parts()})
    tokenizer = load_tokenizer(row.model, source.trust_remote_code)
    model, _ = load_row(row, settings)
    with writing(export_folder(row)) as folder:
        export(model, folder, description["operator_dtype"] if description else None)
        tokenizer.save_pretrained(folder)
        (folder / "README.md").write_text(card, encoding="utf-8")
        expected = logits(model)
        del model
        check(folder, expected, tokenizer)
    print(f"{row.key}: {export_folder(row)}")


def check_current(row: Row, settings: Params) -> None:
    """Raise UserError unless a row's base and removed layers are those that params.yaml says now.

    DVC is not asked here, as it is before a stage; the adapter itself is checked when it is loaded.
    """
    model, source = settings.models[row.model], read_json(model_folder(row.model) / SOURCE)
    wanted: dict[str, Any] = {kind: place for kind in ("gguf", "path", "id") if (place := getattr(model, kind))}
    found = {source["kind"]: source["location"]}
    if model.revision:
        wanted["revision"], found["revision"] = model.revision, source.get("revision")
    checks = [(model_folder(row.model), found, wanted)]
    if not row.dense:
        selection = read_table(select_file(row), SELECT)
        options = json.loads(selection["criterion_options"].iloc[0])
        checks.append((select_file(row), options, settings.select[row.criterion]))
    for path, was, now in checks:
        if was != now:
            raise UserError(f"{path}: made with {was}, params.yaml says {now}; run `dvc repro`")


def export(model: PreTrainedModel, folder: Path, operator_dtype: str | None) -> None:
    """Write a patched model into the new `folder`: as the stock architecture if it has no boundary operators.

    Raises UserError when it has some and its class is not one of transformers: the exported code derives from it.
    """
    modules = {
        name: {"rank": module.rank, "bias": module.bias is not None}
        for name, module in model.named_modules()
        if isinstance(module, BoundaryOperator)
    }
    if modules and not type(model).__module__.startswith("transformers."):
        raise UserError(f"{type(model).__name__} is code of the checkpoint's own; only classes of transformers export")
    # Checkpoints of some architectures name weights otherwise than the model does; a class of its own has no such map.
    model.save_pretrained(folder, max_shard_size=MAX_SHARD_SIZE, save_original_format=not modules)
    if not modules:
        return
    config = read_json(folder / "config.json")
    names = (type(model).__name__, type(model.config).__name__, f"ghosted_{config['model_type']}")
    for file in CODE:
        code = file.read_text(encoding="utf-8").replace("from stages.recovered.", "from .")
        for written, wanted in zip(TEMPLATE, names, strict=True):
            code = code.replace(written, wanted)
        (folder / file.name).write_text(code, encoding="utf-8")
    config |= {
        "model_type": names[2],
        "architectures": [f"Ghosted{names[0]}"],
        "auto_map": {
            "AutoConfig": f"modeling_ghosted.Ghosted{names[1]}",
            "AutoModelForCausalLM": f"modeling_ghosted.Ghosted{names[0]}",
        },
        "boundary_operators": {"format_version": FORMAT, "modules": modules, "dtype": operator_dtype},
    }
    write_json(folder / "config.json", config)
    checked = [folder / "config.json", *folder.glob("*.safetensors*"), *folder.glob("*.py")]
    write_json(folder / FINGERPRINTS, {file.name: sha256(file) for file in sorted(checked)})


@torch.no_grad()
def logits(model: PreTrainedModel) -> Tensor:
    """Logits of a few token ids, on the host."""
    ids = torch.arange(16, device=input_device(model))[None] % model.config.vocab_size
    found: Tensor = model(input_ids=ids).logits
    return found.to(torch.get_default_device())


def check(folder: Path, expected: Tensor, tokenizer: Tokenizer) -> None:
    """Raise UserError unless `folder` loads as others will load it, with these logits and this tokenizer's ids."""
    with TemporaryDirectory() as aside:
        # Under a name of its own, the same each time: transformers keeps the code of a checkpoint under its name.
        place = Path(aside) / "exported"
        place.symlink_to(folder.absolute(), target_is_directory=True)
        found = logits(load_weights(str(place), place.name, dtype="auto", trust_remote_code=True))
        loaded = from_pretrained(AutoTokenizer, str(place), str(folder), trust_remote_code=True)
    if not torch.equal(found, expected):
        difference = (found - expected).abs().max().item()
        raise UserError(f"{folder}: the checkpoint's logits differ from the row's, by up to {difference}")
    if loaded(SAMPLE)["input_ids"] != tokenizer(SAMPLE)["input_ids"]:
        raise UserError(f"{folder}: the tokenizer saved there reads text otherwise than the row's")


if __name__ == "__main__":
    run(main)
