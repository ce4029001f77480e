"""What a hostile client can do to a server, and to those who use it meanwhile.

    python -m benchmarks.hostile
    python -m benchmarks.hostile --checkout ../older --output before.json      # the same against other code
    python -m benchmarks.hostile --before before.json                          # a table of both
    python -m benchmarks.hostile --gateway --output hostile_gateway.json       # `headway gateway` in front of it

A server with the bundled model is attacked on 127.0.0.1, with one kind of attack after another
(`bodies`, `requests`, `floods`), each bounded in count and time. Meanwhile another process asks for `/health` on new
connections, reads a stream, and adds up the memory of the server's processes. The attacking thread has the lowest
priority, so that a real attacker's own work, which is not on this machine, hardly counts.

An attack has failed if it delays `/health` or the stream by more than 100 ms beyond what is normal in the same run,
raises the memory by more than 1 GB, gets an answer that it should not get or an error of more than 2 KB, breaks the
stream, or ends the server. A server that lost is ended, and the next attack meets a new one.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.hostile.campaign import all_attacks, campaign
from benchmarks.hostile.victim import Row
from benchmarks.machine import RESULTS, heading, own_file, save
from benchmarks.processes import ROOT


def measure(arguments: argparse.Namespace, output: Path) -> dict[str, Any]:
    """Attack, and write the file after each attack."""
    content = heading(arguments) | {"commit": _commit(arguments.checkout), "rows": []}
    known: dict[str, dict[str, Any]] = {}
    if output.exists() and (arguments.only or arguments.go_on):
        known = {row["name"]: row for row in json.loads(output.read_text())["rows"]}
    if arguments.before is not None:
        before = json.loads(arguments.before.read_text())
        content["before"] = {"commit": before["commit"], "rows": before["rows"]}
    until = time.monotonic() + arguments.seconds

    def wanted(name: str, group: str) -> bool:
        if time.monotonic() > until or (arguments.go_on and name in known):
            return False
        return not arguments.only or any(each in (group, *group.split()) or each in name for each in arguments.only)

    with campaign(arguments.checkout.resolve(), arguments.gateway) as running:
        for row in running.run(all_attacks(), wanted):
            print(_line(row), file=sys.stderr, flush=True)
            known[row.name] = asdict(row)
            save(content | {"rows": list(known.values())}, output)
    return content | {"rows": list(known.values())}


def _commit(checkout: Path) -> str:
    done = subprocess.run(["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return done.stdout.strip()


def _line(row: Row) -> str:
    return (
        f"{'fails' if row.wrong else 'holds':5} {row.group}: {row.name}: {'; '.join(row.wrong) or _cells(asdict(row))}"
    )


def _cells(row: dict[str, Any]) -> str:
    statuses = ", ".join(status if count == 1 else f"{count:,} {status}" for status, count in row["statuses"].items())
    if row["group"] == "ending":
        return f"{statuses or 'none'} | - | - | - | {row['answered_s']:.1f} s"
    answered = "-" if row["answered_s"] is None else f"{row['answered_s']:.2f} s"
    return f"{statuses or 'none'} | {row['health_ms']:.0f} | {row['gap_ms']:.0f} | {row['growth_mb']:.0f} | {answered}"


def table(content: dict[str, Any]) -> str:
    """Markdown, a row for each attack; where there is a `before`, its figures stand in brackets."""
    before = {row["name"]: row for row in content.get("before", {}).get("rows", [])}
    lines = [
        "| attack | answers | /health, ms | stream, ms | memory, MB | answered after | failed |",
        "|---|---|---:|---:|---:|---:|---|",
    ]
    for row in content["rows"]:
        lines.append(f"| {row['name']} | {_cells(row)} | {'; '.join(row['wrong'])} |")
        if row["name"] in before:
            old = before[row["name"]]
            lines.append(f"| ... before | {_cells(old)} | {'; '.join(old['wrong'])} |")
    failing = sum(bool(row["wrong"]) for row in content["rows"])
    lines += ["", f"{failing} of {len(content['rows'])} attacks do what they should not."]
    return "\n".join(lines)


def summary(content: dict[str, Any]) -> str:
    """Markdown, a row for each group: how many attacks fail, and the worst that others noticed; before and now."""
    runs = [content["before"]["rows"]] if "before" in content else []
    runs.append(content["rows"])
    lines = ["| attacks | | fail | /health, ms | stream, ms | memory, MB | largest error, bytes |"]
    lines.append("|---|---|---:|---:|---:|---:|---:|")
    for group in dict.fromkeys(row["group"] for row in content["rows"]):
        for number, rows in enumerate(runs):
            mine = [row for row in rows if row["group"] == group]
            worst = [max(row[key] for row in mine) for key in ("health_ms", "gap_ms", "growth_mb", "error_bytes")]
            shown = ["-"] * 3 if group == "ending" else [f"{each:,.0f}" for each in worst[:3]]
            failing = sum(bool(row["wrong"]) for row in mine)
            when = "now" if number == len(runs) - 1 else "before"
            cells = [group, when, f"{failing} of {len(mine)}", *shown, f"{worst[3]:,}"]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="+", help="groups of attacks, or parts of their names; the file keeps the others"
    )
    parser.add_argument("--seconds", type=float, default=1e9, help="after which no further attack is begun")
    parser.add_argument("--go-on", action="store_true", help="only attacks that are not in the file yet")
    parser.add_argument("--checkout", type=Path, default=ROOT, help="whose server is attacked; default: this one")
    parser.add_argument("--gateway", action="store_true", help="attack a gateway in front of the server")
    parser.add_argument("--before", type=Path, help="an earlier result, which goes into the file and the table")
    parser.add_argument("--output", type=Path, default=RESULTS / "hostile.json")
    arguments = parser.parse_args(argv)
    content = measure(arguments, own_file(arguments.output))
    print(f"{summary(content)}\n\n{table(content)}")


if __name__ == "__main__":
    main()
