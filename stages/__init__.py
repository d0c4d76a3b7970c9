"""Ghosted Layers: one module per pipeline stage, each run by DVC as ``python -m stages.<stage>``."""

import os
import sys

# Progress bars, ours and the libraries', are for somebody who watches. tqdm reads this once, when it is imported.
if not sys.stderr.isatty():
    os.environ.setdefault("TQDM_DISABLE", "1")
