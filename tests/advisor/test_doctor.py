"""What `headway doctor` prints, writes as JSON and exits with."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import replace

import pytest
from rich.console import Console

from headway.advisor.doctor import as_object, exit_code, notes, print_findings
from headway.advisor.evidence import Evidence
from headway.advisor.pitfalls import findings
from headway.cli import main
from tests.advisor.evidences import healthy
from tests.advisor.test_pitfalls import one_by_one, recorded


def printed(evidence: Evidence) -> str:
    console = Console(file=io.StringIO(), width=120)
    print_findings("http://x:1", evidence, findings(evidence), console)
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def test_a_finding_has_evidence_gain_next_step_and_verification() -> None:
    said = printed(healthy(crowd=one_by_one(True)))
    assert "1  Requests wait in front of the engine  95% sure" in said
    for part in ("at most 1 ran together", "Predicted: TTFT of a crowd", "Next: restart with --max-num-seqs 32"):
        assert part in said
    assert "Or: if the seats are few" in said and "Verify: headway bench" in said
    assert "Measured: ttft alone 12 ms, tpot alone 5 ms, ttft long 60 ms" in said


def test_nothing_wrong_is_said_and_is_code_0() -> None:
    evidence = healthy(metrics=frozenset({"x"}))
    assert "Nothing is wrong that was looked for." in printed(evidence) and list(notes(evidence)) == []
    assert exit_code(findings(evidence)) == 0


def test_only_what_is_sure_enough_fails_a_pipeline() -> None:
    found = findings(recorded("vllm"))
    assert exit_code(found) == 1 and exit_code([each for each in found if each.lever.key == "prefix"]) == 0


def test_what_could_not_be_looked_at_is_said() -> None:
    said = " ".join(notes(replace(recorded("llamacpp"), skipped=("a crowd",))))
    assert "no /metrics" in said and "No requests were sent" in said and "--seconds more" in said
    assert "tells no ledger" in " ".join(notes(healthy("vllm")))
    assert "processes were not looked at" in " ".join(notes(healthy(machine=None)))


def test_json_has_every_finding_with_its_changes() -> None:
    evidence = healthy("vllm", crowd=one_by_one(False))
    told = json.loads(json.dumps(as_object("http://x:1", evidence, findings(evidence)), allow_nan=False))
    (finding,) = told["findings"]
    assert finding["key"] == "queue" and finding["changes"][0]["flag"] == "--max-num-seqs 32"
    assert finding["gain"]["range"][0] <= finding["gain"]["times"] <= finding["gain"]["range"][1]
    assert told["figures"]["ttft_alone_ms"] == 12.0 and told["kind"] == "vllm"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["doctor", "localhost:1"], "no server at http://localhost:1"),
        (["checklist", "http://127.0.0.1:1"], "no server at"),
        (["doctor", "--backend", "openai-embeddings"], "give one that generates text"),
        (["doctor", "--seconds", "0"], "--seconds is '0'; it must be at least 1"),
        (["tune"], "give --goodput"),
        (["tune", "--goodput", "ttft:200", "--budget", "soon"], "is not a duration"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["headway", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr().err
    assert ended.value.code == 2 and says in said and len(said.strip().splitlines()) == 1
