"""Loading what the stage `model` prepared: ``data/model/<model>`` is a checkpoint, or says where one is."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub.errors import GatedRepoError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from stages.base.decoder import check_architecture
from stages.base.device import DISK, DeviceMap, covers, device_map, forward_device
from stages.project.artifacts import read_json, sha256, write_json
from stages.project.errors import UserError
from stages.project.paths import DATA, model_folder

SOURCE = "source.json"
"""In ``data/model/<model>``: kind (`gguf`, `path` or `id`), location, revision, fingerprints."""
MEMO = DATA / ".cache/fingerprints.json"
"""SHA-256 of local checkpoints' files, so that each is read once per change and machine."""
OFFLOAD = DATA / ".cache/offload"
"""Weights that a device map puts on disk, by model, where the checkpoint's own files cannot serve."""


def location(name: str) -> tuple[str, dict[str, Any]]:
    """What ``from_pretrained`` takes for a model: a folder or a Hub id, and keyword arguments.

    Raises UserError when a local checkpoint's files are not those that the stage `model` saw.
    """
    source = read_json(model_folder(name) / SOURCE)
    if source["kind"] == "id":
        return source["location"], {"revision": source["revision"]}
    folder = model_folder(name) if source["kind"] == "gguf" else Path(source["location"])
    memo = read_json(MEMO) if MEMO.exists() else {}
    for relative, known in source["files"].items():
        file = folder / relative
        if not file.exists() or fingerprint(file, memo) != known["sha256"]:
            what = "changed" if file.exists() else "is gone"
            raise UserError(f"{file}: {what} since it was recorded; `dvc repro -f model@{name}` takes it as it is now")
    write_json(MEMO, memo)
    return str(folder), {}


def fingerprint(file: Path, memo: dict[str, Any]) -> str:
    """SHA-256 in hex; read anew only when size or modification time differ from those in `memo`, which is updated."""
    status = file.stat()
    stamp = [status.st_size, status.st_mtime_ns]
    known = memo.get(str(file.absolute()))
    if known is None or known["stamp"] != stamp:
        known = memo[str(file.absolute())] = {"stamp": stamp, "sha256": sha256(file)}
    return str(known["sha256"])


def load_config(name: str, trust_remote_code: bool) -> PreTrainedConfig:
    """The configuration of a model. Raises UserError when its architecture is not supported."""
    place, extra = location(name)
    return _config(name, place, trust_remote_code=trust_remote_code, **extra)


def _config(name: str, place: str, **options: Any) -> PreTrainedConfig:
    config = from_pretrained(AutoConfig, place, place, **options)
    check_architecture(config, f"params.yaml: models.{name}")
    return cast(PreTrainedConfig, config)


def load_tokenizer(name: str, trust_remote_code: bool) -> Tokenizer:
    """The tokenizer of a model."""
    place, extra = location(name)
    return cast(Tokenizer, from_pretrained(AutoTokenizer, place, place, trust_remote_code=trust_remote_code, **extra))


def load_model(name: str, dtype: str, trust_remote_code: bool) -> PreTrainedModel:
    """The model in evaluation mode, in `dtype`, on the forward device or as ``GHOSTED_DEVICE_MAP`` spreads it.

    Raises UserError when the checkpoint cannot be read, when its weights are not exactly those that the architecture
    needs (missing ones would be random), or when the device map does not fit the model.
    """
    place, extra = location(name)
    options = {"trust_remote_code": trust_remote_code, **extra}
    config = _config(name, place, **options)
    devices = device_map()
    if isinstance(devices, dict):
        check_device_map(devices, config, trust_remote_code, place)
    return load_weights(place, name, dtype=getattr(torch, dtype), **options)


def load_weights(place: str, name: str, **options: Any) -> PreTrainedModel:
    """The model of a checkpoint, in evaluation mode, where the run-time settings put it.

    `name` is that of a folder for what a device map puts on disk, `options` are those of ``from_pretrained``. Raises
    UserError when the checkpoint cannot be read, or its weights are not exactly the model's.
    """
    devices = device_map()
    if devices is not None:
        options |= {"device_map": devices, "offload_folder": str(OFFLOAD / name)}
    model, info = from_pretrained(
        AutoModelForCausalLM, place, place, use_safetensors=True, output_loading_info=True, **options
    )
    check_weights(info, place)
    if devices is None:
        model = model.to(forward_device())
    return cast(PreTrainedModel, model.eval())


def check_device_map(devices: DeviceMap, config: PreTrainedConfig, trust_remote_code: bool, where: str) -> None:
    """Raise UserError unless a device map names modules of the model and leaves no parameter out.

    Also when it puts one of two tied parameters on disk without the other: accelerate would fail on it, in some cases
    only in the first forward pass.
    """
    with _loading(where), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    modules = dict(model.named_modules())
    unknown = [module for module in devices if module not in modules]
    if unknown:
        known = ", ".join(name for name, _ in model.named_children())
        raise UserError(f"GHOSTED_DEVICE_MAP: {unknown[0]!r} is no module of {where}; it consists of {known}")
    parameters = list(model.state_dict())
    placed = {name: device for module, device in devices.items() for name in parameters if covers(module, name)}
    missing = [name for name in parameters if name not in placed]
    if missing:
        raise UserError(
            f"GHOSTED_DEVICE_MAP: has no device for {len(missing)} parameters of {where}, first {missing[0]}"
        )
    for tied, source in model.all_tied_weights_keys.items():
        if (placed[tied] == DISK) != (placed[source] == DISK):
            raise UserError(f"GHOSTED_DEVICE_MAP: {tied} and {source} are one weight: both on disk, or neither")


def check_weights(info: dict[str, Any], where: str) -> None:
    """Raise UserError unless a checkpoint's weights are exactly the model's; transformers makes missing ones random."""
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        if info.get(kind):
            raise UserError(f"{where}: {kind.replace('_', ' ')} in the checkpoint: {sorted(map(str, info[kind]))[:5]}")


def from_pretrained(loader: Any, place: str, where: str, **options: Any) -> Any:
    """``loader.from_pretrained(place, **options)``; whatever it raises becomes a UserError that names `where`."""
    with _loading(where):
        return loader.from_pretrained(place, **options)


@contextmanager
def _loading(where: str) -> Iterator[None]:
    """The libraries below raise many types, bare exceptions among them, for damaged or inconsistent files."""
    try:
        yield
    except Exception as error:
        if isinstance(error, GatedRepoError) or isinstance(error.__cause__, GatedRepoError):
            raise UserError(
                f"{where}: a gated model: accept its licence on its Hub page, then log in with `hf auth login` or set "
                f"HF_TOKEN; without the Hub, give a local copy as `path` in params.yaml: models"
            ) from error
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        raise UserError(f"{where}: cannot be loaded: {' '.join(lines[:3])}") from error
