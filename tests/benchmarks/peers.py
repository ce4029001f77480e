"""A program that stands for a server and for a load generator, so that sittings run without either."""

from __future__ import annotations

import sys
from pathlib import Path

_PROGRAM = """#!{python}
import http.server, json, pathlib, sys

def flag(name):
    return sys.argv[sys.argv.index(name) + 1]

class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({{"usage": {{"completion_tokens": {answered}}}}}).encode())
    def log_message(self, *arguments):
        pass

if "--version" in sys.argv:
    print("loading libraries", file=sys.stderr)
    print("version: 1.2 (scripted)")
elif "--result-dir" in sys.argv:
    {client}
elif "--port" in sys.argv:
    http.server.HTTPServer(("127.0.0.1", int(flag("--port"))), Health).serve_forever()
else:
    sys.exit("no idea what to do")
"""

_CLIENT = """
    prompts, seed = int(flag("--num-prompts")), int(flag("--seed"))
    with open({log!r}, "a") as log:
        log.write(json.dumps(sys.argv[1:]) + "\\n")
    result = {result}
    result.setdefault("total_output_tokens", result["completed"] * int(flag("--random-output-len")))
    (pathlib.Path(flag("--result-dir")) / flag("--result-filename")).write_text(json.dumps(result))
"""

RESULT = """{
        "completed": prompts, "failed": 0, "output_throughput": 100.0 + seed, "median_ttft_ms": 20.0 + seed,
        "p99_ttft_ms": 40.0, "median_itl_ms": 5.0, "p99_itl_ms": 9.0, "median_tpot_ms": 6.0, "p99_tpot_ms": 8.0,
        "headway": {"client": {"bound": False}},
    }"""


def program(
    folder: Path, name: str, *, client: str | None = None, result: str = RESULT, answered: str = 'asked["max_tokens"]'
) -> Path:
    """Write an executable to folder / name; as a client it appends its arguments to folder / name.log.

    Args:
        client: what it does as a client, instead of saving `result`.
        result: Python expression of what it saves; `prompts` and `seed` are those of its flags.
        answered: Python expression of the tokens that it says to have generated, as a server.
    """
    path = folder / name
    body = client or _CLIENT.format(log=str(folder / f"{name}.log"), result=result).strip()
    path.write_text(_PROGRAM.format(python=sys.executable, client=body, answered=answered))
    path.chmod(0o755)
    return path
