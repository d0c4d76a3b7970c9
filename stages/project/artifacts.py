"""Reading and writing artifacts: atomic writes, checked reads, the versions that made a file.

A stage never leaves a half-written artifact: it writes below ``data/.partial`` and renames when complete. The partial
name carries the process id, so a stage that outlives a killed ``dvc repro`` cannot mix its bytes with its successor's.
"""

import hashlib
import importlib.metadata
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from stages.project.errors import UserError
from stages.project.schemas import Schema

if TYPE_CHECKING:
    from torch import Tensor

PARTIAL = Path("data/.partial")
METADATA = "stage"
"""The one entry of a file's header metadata: safetensors writes several in an order that differs from run to run."""
VERSIONED = ("torch", "transformers", "tokenizers", "datasets", "lm-eval", "pyarrow", "numpy")


@contextmanager
def writing(path: Path) -> Iterator[Path]:
    """Yield a temporary path on the same file system; on success it replaces `path` (a file or a folder).

    On any exception what was written is removed and `path` stays as it was. Raises UserError when the file system
    refuses.
    """
    name = path.as_posix().replace("/", "+")
    PARTIAL.mkdir(parents=True, exist_ok=True)
    for left in PARTIAL.glob(f"{name}.*"):
        if not _alive(left.suffix[1:]):
            _remove(left)
    partial = PARTIAL / f"{name}.{os.getpid()}"
    try:
        yield partial
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            shutil.rmtree(path)
        partial.replace(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error}") from error
    finally:
        _remove(partial)


def _alive(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except (PermissionError, ValueError):
        pass
    return True


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def versions() -> dict[str, str]:
    """Versions of the installed libraries that can change a number."""
    found = {}
    for name in VERSIONED:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def sha256(file: Path) -> str:
    """The file's SHA-256 in hex."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def write_table(path: Path, frame: pd.DataFrame, schema: Schema) -> None:
    """Write `frame` as Parquet with exactly the columns and types of `schema`, library versions in the metadata.

    Raises ValueError when a column is missing, extra, or holds a null that the schema forbids.
    """
    extra = set(frame.columns) - set(schema.names)
    if extra:
        raise ValueError(f"{path}: columns {sorted(extra)} are not in the schema")
    table = pa.Table.from_pandas(frame, schema=schema.arrow(), preserve_index=False, safe=True)
    metadata = {"versions": json.dumps(versions(), sort_keys=True)}
    with writing(path) as partial:
        pq.write_table(table.replace_schema_metadata(metadata), partial)


def read_table(path: Path, schema: Schema) -> pd.DataFrame:
    """Read a Parquet artifact and check its columns.

    Raises UserError naming the file when it is missing, cannot be read, or has other columns than `schema`.
    """
    require(path)
    try:
        table = pq.read_table(path, partitioning=None)
    except (pa.ArrowException, OSError) as error:
        raise corrupted(path, error) from error
    wanted = schema.arrow()
    if not table.schema.equals(wanted, check_metadata=False):
        raise UserError(
            f"{path}: has columns {table.schema.names} of types {[str(t) for t in table.schema.types]}, expected "
            f"{wanted.names} of types {[str(t) for t in wanted.types]}; it was written by another version: "
            f"delete it and run `dvc repro`"
        )
    frame: pd.DataFrame = table.to_pandas()
    return frame


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write `content` as indented JSON with sorted keys; NaN and infinity raise ValueError."""
    text = json.dumps(content, indent=2, sort_keys=True, allow_nan=False) + "\n"
    with writing(path) as partial:
        partial.write_text(text, encoding="utf-8")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON artifact; UserError naming the file when it is missing or not a JSON object."""
    require(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise corrupted(path, error) from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: holds a {type(content).__name__}, expected a JSON object; {REMEDY}")
    return content


def write_tensors(path: Path, tensors: "dict[str, Tensor]", metadata: dict[str, str] | None = None) -> None:
    """Write named tensors atomically; `metadata` goes into the file's header."""
    import torch
    from safetensors.torch import save_file

    ready = {name: tensor.detach().to(torch.get_default_device()).contiguous() for name, tensor in tensors.items()}
    with writing(path) as partial:
        save_file(ready, partial, {METADATA: json.dumps(metadata or {}, sort_keys=True)})


def read_tensors(path: Path) -> "tuple[dict[str, Tensor], dict[str, str]]":
    """The tensors of a safetensors artifact and its metadata. Raises UserError naming a missing or corrupted file."""
    from safetensors import SafetensorError, safe_open

    require(path)
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return tensors, json.loads((file.metadata() or {}).get(METADATA, "{}"))
    except (SafetensorError, OSError, ValueError) as error:
        raise corrupted(path, error) from error


REMEDY = "delete it and run `dvc repro`, which restores or recomputes it"


def require(path: Path) -> None:
    """Raise UserError when an artifact that an earlier stage writes is not there."""
    if not path.exists():
        raise UserError(f"{path}: not found; `dvc repro` writes it, `dvc pull` fetches it from a shared cache")


def corrupted(path: Path, error: Exception) -> UserError:
    """The error for an artifact that cannot be read."""
    return UserError(f"{path}: cannot be read ({str(error).splitlines()[0]}); {REMEDY}")
