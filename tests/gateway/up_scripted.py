"""`headway up` whose servers have the scripted engine."""

from __future__ import annotations

import sys

from headway.cli import main
from headway.gateway import servers

servers.HEADWAY = (sys.executable, "-m", "tests.server.serve_scripted")
main()
