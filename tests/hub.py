"""Folders laid out like data sets of the Hub, for tests."""

from pathlib import Path
from typing import Any

import yaml
from datasets import Dataset, Features


def write_data_set(
    mirror: Path, name: str, splits: dict[str, list[dict[str, Any]]], config: str = "default", features: Any = None
) -> None:
    """Write a data set of one config below `mirror`; of one that is there already, one more config."""
    folder = mirror / name
    (folder / config).mkdir(parents=True)
    for split, rows in splits.items():
        Dataset.from_list(rows, features=features and Features(features)).to_parquet(
            folder / config / f"{split}.parquet"
        )
    configs = [
        {
            "config_name": found.name,
            "data_files": [
                {"split": file.stem, "path": f"{found.name}/{file.name}"} for file in sorted(found.glob("*.parquet"))
            ],
        }
        for found in sorted(folder.iterdir())
        if found.is_dir()
    ]
    (folder / "README.md").write_text(f"---\n{yaml.safe_dump({'configs': configs})}---\n", encoding="utf-8")
