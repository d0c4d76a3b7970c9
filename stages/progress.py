"""Progress bars: shown on a terminal, silent elsewhere."""

import sys


def on_terminal() -> bool:
    """Whether somebody is watching."""
    return sys.stderr.isatty()
