"""The `headway` command, also as `python -m headway`."""

from __future__ import annotations

import sys
from typing import NoReturn


def main() -> NoReturn:
    """Entry point: headway.cli's, which may be interrupted while it is imported."""
    try:
        from headway.cli import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
