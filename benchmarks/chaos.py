"""What clients of a gateway notice while one of its backends fails, in network namespaces; needs root.

    python -m benchmarks.chaos [--rate 40] [--seconds 6] [--only partition ...]

The gateway and each of its three backends have a network namespace of their own, so that the network between them can
be lost as it is lost between machines: packets vanish, and nobody is told. The backends are scripted: a stream takes
half a second. The gateway finds them by one name, in the file of hosts of its namespace.

Each fault hits one backend for some seconds while requests come at a steady rate. A request is good if its whole answer
comes within a second. The table has how many were not, how many of these got an error that says why, how many broke
off without one, and how long after the beginning of the fault the last of them was sent. The result goes to
benchmarks/results/chaos.json (--output).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.bench_client import load, poisson
from benchmarks.gateway import HEADWAY, Proxy, running
from benchmarks.machine import RESULTS, about, own_file, save
from benchmarks.processes import ROOT, environment
from headway.load.record import FailureKind, RequestRecord

BACKENDS, PORT, TOKENS = 3, 8000, 20
NORMAL = {"ttft_s": 0.05, "gap_s": 0.02}
GOOD_S, BEFORE_S, AFTER_S = 1.0, 3.0, 10.0
DROPS = ("bfifo", "limit", "1")  # a queue that no packet fits into; every kernel has it
# Failures by which a client knows what has happened to its request.
TOLD = (
    FailureKind.REFUSED,
    FailureKind.RATE_LIMITED,
    FailureKind.CLIENT_ERROR,
    FailureKind.SERVER_ERROR,
    FailureKind.STREAM_ERROR,
)
_FILE = """
[timeouts]
connect_s = 1
first_byte_s = 3
stall_s = 2
[health]
every_s = 1
timeout_s = 1
eject_s = 2
slow_start_s = 5
[[backend]]
name = "pool"
url = "http://pool.test:8000"
resolve = true
"""
_POST = "import sys, urllib.request as u; u.urlopen(u.Request(*sys.argv[1:2], sys.argv[2].encode(), method='POST'))"


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@dataclass
class Space:
    """A network namespace."""

    name: str

    def command(self, *words: str) -> list[str]:
        return ["ip", "netns", "exec", self.name, *words]

    def run(self, *words: str) -> None:
        subprocess.run(self.command(*words), check=True, capture_output=True)

    def link(self, own: str, address: str, other: Space | None, others: str, other_address: str) -> None:
        """A cable to another namespace, or to the one that this process is in."""
        ip("link", "add", own, "netns", self.name, "type", "veth", "peer", "name", others)
        self.run("ip", "address", "add", f"{address}/30", "dev", own)
        for each in ("lo", own):
            self.run("ip", "link", "set", each, "up")
        if other is None:
            ip("address", "add", f"{other_address}/30", "dev", others)
            ip("link", "set", others, "up")
        else:
            ip("link", "set", others, "netns", other.name)
            other.run("ip", "address", "add", f"{other_address}/30", "dev", others)
            other.run("ip", "link", "set", others, "up")


class Backend:
    """A scripted server in a namespace of its own.

    Args:
        cables: its end of the cable to the gateway, and the gateway's.
    """

    def __init__(self, space: Space, gateway: Space, address: str, cables: tuple[str, str]) -> None:
        self.space, self._gateway, self.address, self._cables = space, gateway, address, cables
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "tests.bench.scripted_server", "--host", self.address, "--port", str(PORT)]
        command += ["--model", "trivial", "--no-log", "--until-stdin-closes", "--script", json.dumps(NORMAL)]
        self._process = subprocess.Popen(
            self.space.command(*command),
            cwd=ROOT,
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdout is not None
        if not self._process.stdout.readline():
            raise SystemExit("a backend did not start")

    def signal(self, which: signal.Signals) -> None:
        self._process.send_signal(which)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def post(self, path: str, body: dict[str, Any]) -> None:
        url = f"http://{self.address}:{PORT}{path}"
        self.space.run(sys.executable, "-c", _POST, url, json.dumps(body))

    def lose(self, is_lost: bool) -> None:
        """Have all packets between it and the gateway vanish, or none."""
        for space, cable in zip((self.space, self._gateway), self._cables, strict=True):
            space.run(
                "tc", "qdisc", *(("add", "dev", cable, "root", *DROPS) if is_lost else ("del", "dev", cable, "root"))
            )


@dataclass
class Place:
    """The namespaces, with the backends that run there.

    Args:
        hosts: the file of hosts of the gateway's namespace.
    """

    gateway: Space
    address: str
    hosts: Path
    backends: list[Backend]

    def name(self, backends: list[Backend]) -> None:
        """Have the name stand for these backends."""
        self.hosts.write_text("".join(f"{each.address} pool.test\n" for each in backends))


@contextlib.contextmanager
def place() -> Iterator[Place]:
    """Make the namespaces, and take them away again. Raises SystemExit where that is not allowed."""
    own, spaces = os.getpid(), list[Space]()
    folder = Path(f"/etc/netns/hw{own}g")
    try:
        for letter in ("g", *map(str, range(BACKENDS))):
            spaces.append(Space(f"hw{own}{letter}"))
            ip("netns", "add", spaces[-1].name)
        gateway, *others = spaces
        gateway.link("out", "10.213.0.2", None, f"hw{own}", "10.213.0.1")
        backends = []
        for at, space in enumerate(others):
            address = f"10.213.{at + 1}.2"
            space.link("net", address, gateway, f"to{at}", f"10.213.{at + 1}.1")
            backends.append(Backend(space, gateway, address, ("net", f"to{at}")))
        folder.mkdir(parents=True)
        made = Place(gateway, "10.213.0.2", folder / "hosts", backends)
        made.name(backends)
        yield made
        for each in backends:
            each.kill()
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", b"") or str(error).encode()
        raise SystemExit(f"this needs root, and `ip` and `tc` of iproute2: {said.decode().strip()}") from None
    finally:
        for space in spaces:
            subprocess.run(["ip", "netns", "del", space.name], check=False, capture_output=True)
        if folder.exists():
            (folder / "hosts").unlink(missing_ok=True)
            folder.rmdir()
            with contextlib.suppress(OSError):  # others use it
                folder.parent.rmdir()


Change = Callable[[Place, Backend], None]
_normal: Change = lambda of, backend: backend.post("/script", NORMAL)  # noqa: E731


def scripted(**script: Any) -> tuple[Change, Change]:
    return lambda of, backend: backend.post("/script", NORMAL | script), _normal


# How each fault begins, and ends.
FAULTS: dict[str, tuple[Change, Change]] = {
    "none": (lambda of, backend: None, lambda of, backend: None),
    "killed": (lambda of, backend: backend.kill(), lambda of, backend: backend.start()),
    "frozen": (
        lambda of, backend: backend.signal(signal.SIGSTOP),
        lambda of, backend: backend.signal(signal.SIGCONT),
    ),
    "partition": (lambda of, backend: backend.lose(True), lambda of, backend: backend.lose(False)),
    "half-open": (lambda of, backend: backend.post("/vanish", {}), lambda of, backend: None),
    "slow": scripted(ttft_s=1.5),
    "status 500": scripted(fail="status", status=500),
    "status 503": scripted(fail="status", status=503),
    "cut": scripted(fail="cut", fail_at=3),
    "stall": scripted(fail="hang", fail_at=3),
    "malformed": scripted(fail="malformed_sse", fail_at=3),
    "renamed": (
        lambda of, backend: of.name([each for each in of.backends if each is not backend]),
        lambda of, backend: of.name(of.backends),
    ),
}


def measure(fault: str, of: Place, arguments: argparse.Namespace) -> dict[str, float]:
    """One run, in which a fault begins and ends."""
    begin, end = FAULTS[fault]
    times: list[int] = []

    def trouble() -> None:
        time.sleep(BEFORE_S)
        for change, seconds in ((begin, arguments.seconds), (end, 0.0)):
            times.append(time.monotonic_ns())
            change(of, of.backends[0])
            time.sleep(seconds)

    proxy = Proxy(_FILE, tuple(of.gateway.command(*HEADWAY)), host=of.address)
    with running(proxy) as (url, _):
        requests = poisson(arguments.rate, BEFORE_S + arguments.seconds + AFTER_S, TOKENS)
        time.sleep(2.0)  # until all backends have been looked up and asked
        thread = threading.Thread(target=trouble)
        thread.start()
        outcome = load("headway", url, requests)
        thread.join()
    return figures(outcome.records, *times)


def figures(records: list[RequestRecord], began_ns: int, ended_ns: int) -> dict[str, float]:
    """What came of the requests of a run with a fault between these times."""
    bad = [each for each in records if not each.ok or each.end_ns - each.sent_ns > GOOD_S * 1e9]
    kinds = Counter(each.failure_kind for each in bad if not each.ok)
    told = sum(kinds[kind] for kind in TOLD)
    return {
        "requests": len(records),
        "not good": len(bad),
        "error": told,
        "no word": sum(kinds.values()) - told,
        "longest, s": max(each.end_ns - each.sent_ns for each in records) / 1e9,
        "last, s": max([0.0, *((each.sent_ns - began_ns) / 1e9 for each in bad)]),
        "after its end": sum(each.sent_ns > ended_ns for each in bad),
    }


def table(found: dict[str, dict[str, float]]) -> str:
    """Markdown, a row for each fault."""
    titles = list(next(iter(found.values())))
    lines = [f"| | {' | '.join(titles)} |", "|---" + "|---:" * len(titles) + "|"]
    for fault, row in found.items():
        lines.append(f"| {fault} | {' | '.join(f'{each:.3g}' for each in row.values())} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=40.0, help="requests per second")
    parser.add_argument("--seconds", type=float, default=6.0, help="of each fault")
    parser.add_argument("--only", nargs="+", choices=FAULTS, default=[*FAULTS])
    parser.add_argument("--output", type=Path, default=RESULTS / "chaos.json")
    arguments = parser.parse_args()
    found: dict[str, dict[str, float]] = {}
    with place() as of:
        for fault in arguments.only:
            found[fault] = measure(fault, of, arguments)
            print(f"{fault}: {found[fault]}", file=sys.stderr)
    print(table(found))
    settings = {"rate": arguments.rate, "seconds": arguments.seconds, "good_s": GOOD_S}
    save({"machine": about(), "settings": settings, "faults": found}, own_file(arguments.output))


if __name__ == "__main__":
    main()
