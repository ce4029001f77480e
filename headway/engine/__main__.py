"""The engine process, as `python -m headway.engine DESCRIPTOR`."""

from __future__ import annotations

import sys

from headway.engine.libraries import begin_import


def run() -> int:
    """Begin to load torch before anything else is imported; see process.main."""
    begin_import()
    from headway.engine.process import main

    return main(int(sys.argv[1]))


if __name__ == "__main__":
    sys.exit(run())
