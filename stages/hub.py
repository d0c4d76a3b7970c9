"""Data sets of the Hugging Face Hub, or of a mirror: a folder that holds each of them as ``<mirror>/<hub id>/``.

``GHOSTED_MIRROR`` names the mirror. It is a run-time setting, no cache key: what the stages `text` and `task` read
becomes their artifact, which later stages and other machines share. With a mirror, the Hub is never asked.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from stages.project.errors import UserError
from stages.project.paths import DATA

MIRROR = "GHOSTED_MIRROR"
CACHE = DATA / ".cache"


def place(data_set: str, config: str | None, where: str) -> str:
    """What ``datasets.load_dataset`` takes for a data set of the Hub: its id, or its folder in the mirror.

    Raises UserError, with `where` the id was set, when there is a mirror and the data set is not in it.
    """
    mirror = os.environ.get(MIRROR)
    if not mirror:
        return data_set
    folder = Path(mirror).absolute() / data_set
    if not folder.is_dir():
        missing = "is not there" if Path(mirror).is_dir() else f"is not there, and neither is {mirror}"
        raise UserError(
            f"{where}: data set {data_set}, config {config or 'default'}: its folder in the mirror ({MIRROR}), "
            f"{folder}, {missing}"
        )
    return str(folder)


def unloadable(where: str, data_set: str, config: str | None, found_at: str, error: Exception) -> UserError:
    """The error for a data set, looked for at `found_at`, that cannot be loaded."""
    reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    if Path(found_at).is_dir():
        looked, remedy = f"folder {found_at}", ""
    else:
        looked = "the Hub"
        remedy = f"; without the Hub, name a folder that holds {data_set}/ in {MIRROR}"
    return UserError(f"{where}: data set {data_set}, config {config or 'default'}, from {looked}: {reason}{remedy}")


def load(found_at: str, **options: Any) -> Any:
    """``datasets.load_dataset(found_at, **options)`` as it is now.

    The library's cache of a folder knows its name and config, not what is in it or where it is.
    """
    from datasets import load_dataset

    if not Path(found_at).is_dir():
        return load_dataset(found_at, **options)
    CACHE.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=CACHE) as cache:
        return load_dataset(found_at, **options, cache_dir=cache, keep_in_memory=not options.get("streaming"))


def column_texts(
    data_set: str, found_at: str, column: str, where: str, *, stream: bool, split: str, **options: Any
) -> Iterator[str]:
    """The texts of one column of one split, in order, of a data set that is `found_at` a folder or its Hub id.

    `stream` reads no further than it is asked to, and keeps nothing. `options` are those of ``datasets.load_dataset``
    (name, data_dir, revision). Raises UserError when the data set cannot be loaded, or the column holds no text.
    """
    config = options.get("name") or options.get("data_dir")
    try:
        rows = load(found_at, split=split, streaming=stream, **options)
        for number, row in enumerate(rows):
            text = row.get(column)
            if not isinstance(text, str):
                kind = f"{type(text).__name__} in row {number}" if column in row else "not there"
                raise UserError(f"{where}.column = {column!r}: {kind}, needs text; the columns are {', '.join(row)}")
            yield text
    except UserError:
        raise
    except Exception as error:
        # The library and those below it raise many types, for a missing network alone more than one.
        raise unloadable(where, data_set, config, found_at, error) from error
