"""Counting what becomes of the schemas and documents of a suite."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import json_schemas


def case(schema: Any, **documents: Any) -> dict[str, Any]:
    tests = [{"description": name, "data": data, "valid": name.startswith("valid")} for name, data in documents.items()]
    return {"description": "a case", "schema": schema, "tests": tests}


CASES = [
    case({"const": {"a": 1, "b": [2]}}, valid={"b": [2.0], "a": 1.0}, invalid={"a": 1, "b": [3]}),
    case({"maxItems": 1.0}, valid=[0], invalid=[0, 0]),
    case({"not": {}}, invalid=1),
    case({"oneOf": [{"minimum": 1}, {"maximum": 2}]}, valid=0, invalid=2),
    case({"format": "date"}, valid="any text", invalid="2021-02-30"),
    case(
        {"properties": {"a": {"$ref": "#/definitions/a", "maxItems": 1, "not": {}}}, "definitions": {"a": True}},
        valid={"a": [1, 2]},
    ),
]


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr("sys.argv", ["json_schemas", *map(str, arguments)])
    json_schemas.main()


def test_schemas_and_documents_are_counted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for draft in json_schemas.DRAFTS:
        folder = tmp_path / "tests" / draft
        folder.mkdir(parents=True)
        (folder / "some.json").write_text(json.dumps(CASES))
    run(monkeypatch, "--suite", tmp_path, "--output", tmp_path / "found.json")
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    new, old = (next(row for row in rows if row["draft"] == draft) for draft in json_schemas.DRAFTS)
    assert new["way"] == old["way"] == "headway"
    assert new["refusals"] == {"not": 2, "oneOf": 1} and old["refusals"] == {"not": 1, "oneOf": 1}
    assert (new["kept"], new["valid"], new["valid accepted"]) == (3, 3, 2)
    assert (old["kept"], old["valid"], old["valid accepted"]) == (4, 4, 3)  # what stands beside $ref says nothing
    assert new["invalid"] == 3 and new["invalid accepted"] == 0
    assert new["wrong"] == ["some.json: a case: valid"]
    assert "| draft7, headway | 4 | 2 | 0 of 3 | 3 of 4 |" in capsys.readouterr().out.splitlines()


def test_a_folder_without_the_suite_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, "--suite", tmp_path, "--output", tmp_path / "found.json")
    assert ended.value.code == 2 and len(capsys.readouterr().err.splitlines()) == 1
