"""Holds the official JSON-Schema-Test-Suite against structured outputs: a schema is kept to the letter, or refused.

    pip download --no-deps --no-binary :all: jsonschema==4.26.0 && tar xf jsonschema-4.26.0.tar.gz
    python -m benchmarks.json_schemas --suite jsonschema-4.26.0/json

The suite is a clone of github.com/json-schema-org/JSON-Schema-Test-Suite, or the folder `json` of the source package of
jsonschema. A schema that names no draft gets the name of its folder's. A document counts as accepted where its value
can be written: properties in any order, and 1.0 as 1, too. The same is counted of llguidance by itself. No time is
measured.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from benchmarks.machine import RESULTS, keep
from headway.grammars.compile import GrammarError, matcher, said, translated
from headway.policy.step.structured_outputs import StructuredOutputs

DRAFTS = {
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
    "draft7": "http://json-schema.org/draft-07/schema#",
}
FORMATS = "optional/format"
_MOST_WRITINGS = 1000
_VOCABULARY = LLTokenizer("byte")


def ours(schema: str) -> LLMatcher:
    """Raises GrammarError where the server refuses a schema."""
    return matcher(translated(StructuredOutputs("json", schema))[0].text, _VOCABULARY)


def alone(schema: str) -> LLMatcher:
    """Raises GrammarError where llguidance refuses a schema."""
    made = LLMatcher(_VOCABULARY, LLMatcher.grammar_from_json_schema(schema), log_level=0)
    if made.is_error():
        raise GrammarError(said(made))
    return made


WAYS: dict[str, Callable[[str], LLMatcher]] = {"headway": ours, "llguidance alone": alone}


def writings(value: Any) -> Iterator[Any]:
    """The value in every order of properties, with whole numbers as they are and without a fraction."""
    if isinstance(value, dict):
        for order in itertools.permutations(value):
            for each in itertools.product(*(list(_few(value[name])) for name in order)):
                yield dict(zip(order, each, strict=True))
    elif isinstance(value, list):
        yield from map(list, itertools.product(*(list(_few(item)) for item in value)))
    else:
        yield value
        if isinstance(value, float) and value.is_integer():
            yield int(value)


def _few(value: Any) -> Iterator[Any]:
    return itertools.islice(writings(value), _MOST_WRITINGS)


def accepts(grammar: LLMatcher, value: Any) -> bool:
    """Whether a value can be written under a grammar, from its beginning."""
    for each in _few(value):
        state, text = grammar.deep_copy(), json.dumps(each, ensure_ascii=False).encode(errors="surrogatepass")
        if state.try_consume_tokens(list(text)) == len(text) and state.is_accepting():
            return True
    return False


def count(folder: Path, draft: str, make: Callable[[str], LLMatcher]) -> dict[str, Any]:
    """What becomes of the schemas and documents in a folder of the suite."""
    found, refusals = Counter[str](), Counter[str]()
    wrong: list[str] = []
    for path in sorted(folder.glob("*.json")):
        for case in json.loads(path.read_text()):
            schema = case["schema"]
            if isinstance(schema, dict):
                schema = {"$schema": DRAFTS[draft], **schema}
            try:
                grammar = make(json.dumps(schema))
            except (GrammarError, ValueError) as error:
                found["refused"] += 1
                refusals[_reason(str(error))] += 1
                continue
            found["kept"] += 1
            for each in case["tests"]:
                kind, is_accepted = "valid" if each["valid"] else "invalid", accepts(grammar, each["data"])
                found[kind] += 1
                found[f"{kind} accepted"] += is_accepted
                if is_accepted != each["valid"]:
                    wrong.append(f"{path.name}: {case['description']}: {each['description']}")
    return {**found, "refusals": dict(refusals.most_common()), "wrong": wrong}


def _reason(message: str) -> str:
    """The keyword that a refusal names, or what it says."""
    words = message.split()
    return words[2] if message.startswith("schema keyword ") else message[:100]


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """A row for each folder of the suite and each way."""
    rows = []
    for draft, part in itertools.product(DRAFTS, ("", FORMATS)):
        for way, make in WAYS.items():
            of_suite = count(arguments.suite / "tests" / draft / part, draft, make)
            rows.append({"draft": draft, "part": part, "way": way, **of_suite})
    return {"suite": "/".join(arguments.suite.resolve().parts[-2:]), "rows": rows}


def table(content: dict[str, Any]) -> str:
    """The rows in markdown."""
    lines = [
        "| | schemas kept | refused | invalid documents accepted | valid documents accepted |",
        "|---|---|---|---|---|",
    ]
    for row in content["rows"]:
        documents = (f"{row.get(f'{kind} accepted', 0)} of {row.get(kind, 0)}" for kind in ("invalid", "valid"))
        name = f"{row['draft']}{', formats' if row['part'] else ''}, {row['way']}"
        lines.append(f"| {name} | {row.get('kept', 0)} | {row.get('refused', 0)} | {' | '.join(documents)} |")
    return "\n".join(lines)


def main() -> None:
    """Count, save and print."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.json_schemas",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--suite", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--output", type=Path, default=RESULTS / "json_schemas.json")
    arguments = parser.parse_args()
    missing = [draft for draft in DRAFTS if not list((arguments.suite / "tests" / draft).glob("*.json"))]
    if missing:
        print(f"--suite {arguments.suite}: there is no tests/{missing[0]} with *.json in it", file=sys.stderr)
        sys.exit(2)
    keep(arguments, measure, table)


if __name__ == "__main__":
    main()
