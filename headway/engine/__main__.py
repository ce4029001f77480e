"""The engine process, as `python -m headway.engine DESCRIPTOR`, or another rank of it, as engine.follower says."""

from __future__ import annotations

import signal
import sys


def run() -> int:
    """Begin to load torch before anything else is imported; see process.main, or follower.main."""
    # Ctrl-C, and a service manager's signals, reach the whole group; the first process decides when this one ends.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    from headway.engine.libraries import begin_import

    begin_import()
    if len(sys.argv) > 2:
        from headway.engine import follower

        return follower.main(*map(int, sys.argv[1:]))
    from headway.engine.process import main

    return main(int(sys.argv[1]))


if __name__ == "__main__":
    sys.exit(run())
