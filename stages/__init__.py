"""Ghosted Layers: one module per pipeline stage, each run by DVC as ``python -m stages.<stage>``."""

import gc
import os
import sys
from pathlib import Path

# Downloads stay in the project's folder, unless the user says where theirs are. Read when the libraries are imported.
if not {"HF_HOME", "XDG_CACHE_HOME"} & set(os.environ):
    for name, folder in {
        "HF_HUB_CACHE": "hub",
        "HF_DATASETS_CACHE": "datasets",
        "HF_MODULES_CACHE": "modules",
        "HF_XET_CACHE": "xet",
        "HF_ASSETS_CACHE": "assets",
    }.items():
        os.environ.setdefault(name, str(Path(f"data/.cache/huggingface/{folder}").absolute()))

# Progress bars, ours and the libraries', are for somebody who watches. tqdm reads this once, when it is imported.
if not sys.stderr.isatty():
    os.environ.setdefault("TQDM_DISABLE", "1")

# Importing torch, transformers and lm_eval makes a million objects that stay; the default thresholds would have the
# collector walk them over and over, up to a second in each of the pipeline's many short processes.
gc.set_threshold(100_000, 20, 20)
