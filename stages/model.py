"""Stage `model`: turn a model's weights into a checkpoint that ``from_pretrained`` reads, or say where one is.

Reads the source named in ``params.yaml``: a GGUF file is converted, once; of a local checkpoint folder the files'
fingerprints are recorded; a Hub model is only resolved to its pinned revision. Writes ``data/model/<model>/``.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from stages.base.checkpoint import SOURCE, check_weights, from_pretrained
from stages.base.decoder import check_architecture
from stages.project import params
from stages.project.artifacts import sha256, write_json, writing
from stages.project.errors import UserError, run
from stages.project.keys import parse_row
from stages.project.paths import model_folder


def main() -> None:
    """Run the stage for one model."""
    row, _ = parse_row(__doc__)
    settings = params.load()
    params.check_name("params.yaml: models", row.model, settings.models)
    model = settings.models[row.model]
    where = f"params.yaml: models.{row.model}"
    if model.gguf is not None:
        convert_gguf(Path(model.gguf), model.dtype, model_folder(row.model), f"{where}.gguf = {model.gguf}")
    elif model.path is not None:
        source = {"kind": "path", "location": model.path, "files": fingerprints(Path(model.path), f"{where}.path")}
        write_source(row.model, source)
    else:
        assert model.id is not None
        check_hub_model(model.id, model.revision, model.trust_remote_code, where)
        write_source(row.model, {"kind": "id", "location": model.id, "revision": model.revision})


def check_hub_model(name: str, revision: str | None, trust_remote_code: bool, where: str) -> None:
    """Raise UserError unless a model of the Hub can be had at its commit, and is of a supported architecture."""
    config = from_pretrained(
        AutoConfig, name, f"{where}.id = {name}", revision=revision, trust_remote_code=trust_remote_code
    )
    check_architecture(config, where)


def write_source(name: str, source: dict[str, Any]) -> None:
    """Write a model folder that holds nothing but where the checkpoint is."""
    with writing(model_folder(name)) as folder:
        folder.mkdir()
        write_json(folder / SOURCE, source)


def fingerprints(folder: Path, where: str) -> dict[str, dict[str, Any]]:
    """Size in bytes and SHA-256 of every file of a checkpoint folder.

    Raises UserError when the folder is missing, has no configuration, or has no safetensors weights.
    """
    if not folder.is_dir():
        raise UserError(f"{where} = {folder}: no such folder")
    files = sorted(file for file in folder.iterdir() if file.is_file())
    if "config.json" not in {file.name for file in files} or not any(f.suffix == ".safetensors" for f in files):
        raise UserError(f"{where} = {folder}: not a checkpoint: needs config.json and *.safetensors")
    return {file.name: {"size": file.stat().st_size, "sha256": sha256(file)} for file in files}


def convert_gguf(file: Path, dtype: str, target: Path, where: str) -> None:
    """Dequantise a GGUF file and write model and tokenizer as a checkpoint in `dtype`.

    Raises UserError when the file is missing, empty, not a GGUF, truncated, lacks a tensor, or is of an unsupported
    architecture.
    """
    check_gguf(file, where)
    source = {"gguf_file": file.name}
    model, info = from_pretrained(
        AutoModelForCausalLM, str(file.parent), where, dtype=getattr(torch, dtype), output_loading_info=True, **source
    )
    check_architecture(model.config, where)
    check_weights(info, where)
    tokenizer = from_pretrained(AutoTokenizer, str(file.parent), where, **source)
    # A converted model is an ordinary one; `save_pretrained` refuses while it calls itself quantised. Where the file
    # came from would be this machine's path.
    del model.config.quantization_config
    model.hf_quantizer = None
    model.config.name_or_path = ""
    with writing(target) as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        files = fingerprints(folder, where)
        write_json(folder / SOURCE, {"kind": "gguf", "location": str(file), "sha256": sha256(file), "files": files})


def check_gguf(file: Path, where: str) -> None:
    """Raise UserError unless `file` is a GGUF whose last tensor ends inside the file."""
    from gguf import GGUFReader

    if not file.is_file():
        raise UserError(f"{where}: no such file")
    with file.open("rb") as stream:
        if stream.read(4) != b"GGUF":
            raise UserError(f"{where}: not a GGUF file ({file.stat().st_size} bytes)")
    try:
        tensors = GGUFReader(file).tensors
    except (ValueError, IndexError, KeyError, OverflowError, TypeError) as error:
        raise UserError(f"{where}: truncated or damaged GGUF file ({str(error).splitlines()[0]})") from error
    if not tensors:
        raise UserError(f"{where}: a GGUF file without tensors")


if __name__ == "__main__":
    run(main)
