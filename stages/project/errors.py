"""The one exception for a user's mistake, and the entry point that reports it without a traceback."""

import gc
import sys
from collections.abc import Callable


class UserError(Exception):
    """A mistake the user can mend: the message says what is wrong, where it was set, what is allowed."""


def run(main: Callable[[], None]) -> None:
    """Call a stage's ``main``; a :class:`UserError` becomes one message on stderr and exit code 2."""
    try:
        main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        # The interpreter would look for garbage once more on its way out: a second, after the libraries' imports.
        gc.freeze()
