"""The file of service classes: what it says, and that what is wrong in it is named with its line."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from headway.config_files.classes import read_class_file

GOOD = """\
default = "chat"

[service_tiers]
priority = "chat"
flex = "night"

[[class]]  # the most urgent
name = "chat"
ttft_ms = 300
tpot_ms = 50.5
window_ms = [0, 5]
seats = 0.25
max_queued = 64
queue_timeout_s = 20
max_output_tokens = 500
when_late = "refuse"

[[class]]
name = "night"
seats = 0.5
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "classes.toml"
    path.write_text(GOOD)
    return path


def test_what_a_file_says(file: Path) -> None:
    found = read_class_file(str(file))
    chat, night = found.table
    assert (chat.ttft_ms, chat.tpot_ms, chat.window_ms, chat.when_late) == (300, 50.5, (0, 5), "refuse")
    assert (chat.max_queued, chat.queue_timeout_s, chat.max_output_tokens) == (64, 20, 500)
    assert night.ttft_ms == math.inf
    assert found.table.default_class is chat
    assert [found.table.of_tier(tier) for tier in ("priority", "auto", "flex")] == [chat, chat, night]


def test_the_example_of_the_docs(file: Path) -> None:
    root = Path(__file__).parent.parent
    shown = (root / "docs" / "classes.md").read_text().split("```toml\n")[1].split("```")[0]
    assert shown == (root / "examples" / "classes.toml").read_text()
    file.write_text(shown)
    found = read_class_file(str(file))
    assert [each.name for each in found.table] == ["chat", "batch", "offline"]


@pytest.mark.parametrize(
    ("written", "instead", "line", "says"),
    [
        ("ttft_ms = 300", "ttft_ms = -5", 9, "ttft_ms is -5; an objective is more than 0"),
        ("tpot_ms = 50.5", "tpot_ms = nan", 10, "tpot_ms is nan"),
        ("tpot_ms = 50.5", 'tpot_ms = "fast"', 10, "tpot_ms is 'fast'; it must be a number"),
        ("window_ms = [0, 5]", "window_ms = [5, 0]", 11, "window_ms is [5, 0]"),
        ("window_ms = [0, 5]", "window_ms = 5", 11, "it must be a list of two numbers"),
        ("max_queued = 64", "max_queued = 0.5", 13, "max_queued is 0.5; it must be a whole number from 1"),
        ("queue_timeout_s = 20", "queue_timeout_s = 0", 14, "queue_timeout_s is 0; it must be more than 0"),
        ("seats = 0.25", "max_kv = 0", 12, "max_kv is 0; it is a share, above 0 and at most 1"),
        ("seats = 0.25", "max_kv = 0.2\nkv = 0.3", 12, "max_kv is 0.2, below kv, 0.3; give at least as much"),
        ("seats = 0.5", "seats = 0.75", 20, "the classes' shares of seats add up to 1; keep the sum below 1"),
        ("seats = 0.5", "seats = 1", 20, "seats is 1; a share is from 0 to below 1"),
        ("seats = 0.5", "seat = 0.5", 20, "'seat' is unknown; a class has name, ttft_ms"),
        ("seats = 0.5", 'when_late = "cry"', 20, "when_late is 'cry'; choose one of serve, refuse"),
        ('name = "night"', 'name = "chat"', 19, "two classes are named 'chat'"),
        ('name = "night"', 'name = "ni\\nght"', 19, "name is 'ni\\nght'; give at most 64 printable characters"),
        ('name = "night"\n', "", 18, "a class has no name"),
        (
            'default = "chat"',
            'default = "chatty"',
            1,
            "default is 'chatty', which is not a class; there are chat, night",
        ),
        ('flex = "night"', 'flex = "day"', 5, "flex is 'day', which is not a class"),
        ('flex = "night"', 'scale = "night"', 5, "service tier 'scale' is unknown"),
        ('flex = "night"', "flex = 3", 3, "service_tiers must be a table"),
        ("[service_tiers]", "[tiers]", 3, "'tiers' is unknown; the file has default, service_tiers, class"),
        ("seats = 0.5", "seats : 0.5", 20, "is not TOML: "),
    ],
)
def test_what_is_wrong_is_named_with_its_line(file: Path, written: str, instead: str, line: int, says: str) -> None:
    text = file.read_text()
    assert written in text
    file.write_text(text.replace(written, instead))
    with pytest.raises(ValueError, match=r"classes\.toml") as refused:
        read_class_file(str(file))
    assert says in str(refused.value)
    assert f"line {line}" in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "line 1: there are no classes; write [[class]] once for each"),
        ("class = [1]", "line 1: class must be a list; write [[class]] once for each"),
        ('class = [{name = "a"}, {name = "b", kv = 2}]', "line 1: kv is 2"),
        ('service_tiers.flex = "b"\n[[class]]\nname = "a"', "line 1: flex is 'b', which is not a class"),
        ('[[class]]\nname = "a"\n[class.more]', "line 1: 'more' is unknown"),
    ],
)
def test_other_ways_to_write_it(file: Path, text: str, says: str) -> None:
    file.write_text(text)
    with pytest.raises(ValueError, match=r"classes\.toml") as refused:
        read_class_file(str(file))
    assert says in str(refused.value)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot read .*: No such file"):
        read_class_file(str(tmp_path / "none.toml"))
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="is not text in UTF-8"):
        read_class_file(str(tmp_path / "bytes"))
