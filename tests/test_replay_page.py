"""`headway replay`: recorded decisions made again, and the page that plays them, in a browser and without one."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from headway import replay
from headway.cli.replay import replay as app
from headway.policy.objectives.service_class import ClassTable, ServiceClass
from headway.policy.step.request import FinishReason
from tests.server.browser import LOOKS, Browser, browser, keep, missing
from tests.simulator.test_replay import Recorded

CLASSES = ClassTable((ServiceClass(name="chat", ttft_ms=400.0, tpot_ms=60.0), ServiceClass(name="batch")), "chat")
SECOND = 10**9


@pytest.fixture(scope="module")
def recorded() -> Recorded:
    """Some seconds of a server with too few blocks, and a pause."""
    rng = random.Random(3)
    sim = Recorded(rng=rng, num_blocks=24, max_num_seqs=4, classes=CLASSES, longest_step_ns=50_000_000, most_drafts=0)
    for number in range(40):
        prompt = [rng.randrange(3, 100) for _ in range(rng.randrange(2, 30))]
        sim.submit(prompt, rng.randrange(2, 20), service_class=("chat", "batch")[number % 2])
        for _ in range(rng.randrange(6)):
            sim.step()
        if number == 20:
            sim.run_until_done()
            sim.now += 3 * SECOND
    sim.scheduler.abort(sim.sequences[-1], sim.now)
    sim.run_until_done()
    return sim


def looks_in(page: bytes) -> list[dict[str, Any]]:
    found = re.search(r'<script type="application/json" id="recording">(.*?)</script>', page.decode(), re.DOTALL)
    assert found is not None
    looks: list[dict[str, Any]] = json.loads(found[1])["looks"]
    return looks


def test_a_page_tells_of_every_choice_what_its_ledger_was(recorded: Recorded) -> None:
    looks = looks_in(replay.page_of([recorded.recording()]))
    ended = {each["id"]: each for look in looks for each in look["ended"]}
    assert len(ended) == len(recorded.sequences)
    for sequence in recorded.sequences:
        told, ledger = ended[f"{sequence.seq_id}/{sequence.index}"], sequence.ledger
        assert {phase: told["phases_ms"][phase] for phase in map(str, ledger.phases_ns)} == {
            str(phase): length / 1e6 for phase, length in ledger.phases_ns.items()
        }
        assert sum(told["phases_ms"].values()) == pytest.approx(told["e2e_ms"])
        assert told["reason"] == str(sequence.finish_reason) and told["tokens"] == sequence.output_len
        assert told["service_class"] == sequence.service.name
        assert (told["met"] is None) == (sequence.service.name == "batch" or sequence.output_len == 0)
    assert ended[f"{recorded.sequences[-1].seq_id}/0"]["reason"] == FinishReason.ABORT
    assert {each["met"] for each in ended.values()} == {None, True, False}
    assert looks[0]["about"]["classes"][0] == {"name": "chat", "ttft_ms": 400.0, "tpot_ms": 60.0, "e2e_ms": None}
    assert [look["at_ms"] for look in looks] == sorted(look["at_ms"] for look in looks)
    assert all("about" not in look for look in looks[1:])
    steps = [step for look in looks for step in look["steps"]]
    assert len({step["at_ms"] for step in steps}) == len(steps) > 100
    assert max(look["used_blocks"] for look in looks) > 20 and looks[-1]["running"] == looks[-1]["used_blocks"] == 0
    assert {"queue_blocks", "decode_stall_preempted"} <= {
        phase for each in ended.values() for phase in each["phases_ms"]
    }


def test_a_part_has_the_ledgers_of_the_whole(recorded: Recorded) -> None:
    whole = looks_in(replay.page_of([recorded.recording()]))
    began = whole[0]["at_ms"]
    part = looks_in(replay.page_of([recorded.recording()], 1.0, 2.0))
    assert began + 999 <= part[0]["at_ms"] <= part[-1]["at_ms"] <= began + 2001 and "about" in part[0]
    known = {each["id"]: each for look in whole for each in look["ended"]}
    assert all(known[each["id"]] == each for look in part[1:] for each in look["ended"])


def test_engines_that_followed_each_other_are_told_apart(recorded: Recorded) -> None:
    looks = looks_in(replay.page_of([recorded.recording(), recorded.recording()]))
    ids = [each["id"] for look in looks for each in look["ended"]]
    assert len(set(ids)) == len(ids) == 2 * len(recorded.sequences)


def test_a_recording_that_is_too_long_asks_for_a_part(recorded: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "MOST_LOOKS", 4)
    with pytest.raises(ValueError, match=r"a page has room for 2 s; choose a part with --from and --to"):
        replay.page_of([recorded.recording()])
    assert 2 <= len(looks_in(replay.page_of([recorded.recording()], 0.5, 2.0))) <= 5


def test_what_is_recorded_cannot_end_the_script_that_holds_it(recorded: Recorded) -> None:
    recording = recorded.recording()
    recording.engine.model = "</script><b>x"
    page = replay.page_of([recording])
    assert b"<b>x" not in page and looks_in(page)
    recording.engine.model = "/home/agatha/models/qwen"
    page = replay.page_of([recording])
    assert b'"model":"qwen"' in page and b"agatha" not in page


@pytest.fixture
def file(recorded: Recorded, tmp_path: Path) -> Path:
    path = tmp_path / "steps.jsonl"
    path.write_bytes(b"".join(msgspec.json.encode(record) + b"\n" for record in recorded.records))
    return path


def test_the_command_checks_a_recording_and_writes_its_page(file: Path, tmp_path: Path) -> None:
    ran = CliRunner().invoke(app, [str(file)])
    assert ran.exit_code == 0 and re.fullmatch(
        r"model, engine 1: \d+ steps, decided as they were recorded\n", ran.output
    )
    ran = CliRunner().invoke(app, [str(file), "--page", str(tmp_path / "a.html"), "--from", "1"])
    assert ran.exit_code == 0 and ran.output == f"{tmp_path / 'a.html'}\n"
    assert looks_in((tmp_path / "a.html").read_bytes())


def test_another_decision_is_told_with_exit_code_1(recorded: Recorded, tmp_path: Path) -> None:
    path, records = tmp_path / "other.jsonl", [*recorded.records]
    engine = msgspec.structs.replace(records[0], scheduler={**records[0].scheduler, "max_num_batched_tokens": 7})
    path.write_bytes(b"".join(msgspec.json.encode(each) + b"\n" for each in [engine, *records[1:]]))
    for more in ([], ["--page", str(tmp_path / "b.html")]):
        ran = CliRunner().invoke(app, [str(path), *more])
        assert ran.exit_code == 1 and "is decided otherwise by this version" in ran.output
    assert not (tmp_path / "b.html").exists()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["nowhere.jsonl"], "nowhere.jsonl can't be read"),
        (["{file}", "--from", "3"], "--from and --to go with --page FILE"),
        (["{file}", "--page", "/proc/a.html"], "name another file with --page"),
        (["{file}", "--page", "{page}", "--from", "5000"], "there is nothing between --from and --to"),
        (["{file}", "--page", "{page}", "--from", "3", "--to", "2"], "there is nothing between --from and --to"),
        (["{page}"], "can't be read"),
    ],
)
def test_bad_input_is_one_line(given: list[str], said: str, file: Path, tmp_path: Path) -> None:
    ran = CliRunner().invoke(app, [each.format(file=file, page=tmp_path / "c.html") for each in given])
    assert ran.exit_code == 2 and said in ran.output and ran.output.count("\n") == 1


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as window:
        yield window


def shown(page: Browser) -> float:
    """The second at which it plays."""
    return float(page.text("#position-said").split(" ")[0])


def put(page: Browser, selector: str, value: object, event: str) -> None:
    """Give a control another value, as who uses it does."""
    script = "const [name, value, event] = arguments, each = document.querySelector(name);"
    page.run(f"{script} each.value = value; each.dispatchEvent(new Event(event))", selector, value, event)


@pytest.mark.skipif(bool(missing()), reason=missing() or "-")
@pytest.mark.xdist_group("browser")
@pytest.mark.parametrize(("name", "look"), LOOKS)
def test_the_page_plays_fast_and_slow_and_jumps(
    name: str, look: dict[str, int], chromium: Browser, recorded: Recorded, tmp_path: Path
) -> None:
    recording = recorded.recording()
    path = tmp_path / "recorded.html"
    path.write_bytes(replay.page_of([recording]))
    chromium.emulate(**look)
    chromium.complaints()
    chromium.open(path.as_uri())
    chromium.until("document.querySelector('#live-said').textContent === 'Recorded'")
    length = float(chromium.text("#position-said").split(" ")[2])
    assert chromium.run("return document.querySelector('#chat').hidden && document.querySelector('nav').hidden")
    put(chromium, "#speed", "0.05", "change")
    slow = shown(chromium)
    chromium.until("parseFloat(document.querySelector('#position-said').textContent) > arguments[0]", slow)
    assert shown(chromium) < slow + 2
    put(chromium, "#position", length / 4, "input")  # before the pause
    assert abs(shown(chromium) - length / 4) < 1
    chromium.click("#pause")
    still = shown(chromium)
    put(chromium, "#speed", "20", "change")
    assert chromium.text("#live-said") == "Paused" and shown(chromium) == still
    assert "blocks of 4 tokens in use" in chromium.text("#kv-said")
    for canvas in ("timelines", "steps", "kv"):
        drawn = (
            "const context = document.getElementById(arguments[0]).getContext('2d');"
            "return new Set(new Uint32Array(context.getImageData(0, 0, 300, 100).data.buffer)).size"
        )
        assert chromium.run(drawn, canvas) > 2, canvas
    assert chromium.run("return document.documentElement.scrollWidth <= innerWidth"), "it must not scroll sideways"
    keep(chromium, f"replay-{name}")
    chromium.click("#pause")
    chromium.until("document.querySelector('#live-said').textContent === 'Paused'")
    assert shown(chromium) == pytest.approx(length, abs=0.1), "it has come to its end"
    assert "have ended" in chromium.text("#timelines-said")
    assert chromium.text("#pause") == "Continue"
    assert chromium.run("return performance.getEntriesByType('resource').length") == 0, "nothing is fetched"
    assert chromium.complaints() == []
