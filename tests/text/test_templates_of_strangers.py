"""Chat templates come from anybody: what they may cost here, and in the process that renders the others."""

from __future__ import annotations

import threading
import time
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest

from headway.bundled import STORY
from headway.text import process
from headway.text.chat_template import BUILT_IN, ChatTemplate
from headway.text.plain_template import NotPlain
from headway.text.process import TextProcess, TooLong
from headway.text.tokenizer import Tokenizer
from headway.text.tokenizer_files import TextError

TURNS: list[dict[str, Any]] = [
    {"role": "user", "content": "Hello <b>{{ there }}</b>"},
    {"role": "assistant", "content": "Good day!"},
    {"role": "user", "content": "A story\nof two lines, please."},
]
DOUBLED = (
    "{% set it = namespace(x='aaaaaaaa') %}{% for i in range(60) %}{% set it.x = it.x ~ it.x %}{% endfor %}{{ it.x }}"
)
COSTLY = [
    "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
    "{% for i in range(100000) %}{% set x = messages | tojson | length %}{% endfor %}",
    "{{ 'a' * (4000000000 + messages | length) }}",
    "{{ messages | tojson(indent=100000000) }}",
    "{{ lipsum(n=99999) }}",
    "{{ (2 + messages | length) ** 100000000 }}",
    "{{ '%1000000000d' | format(messages | length) }}",
    "{{ 'a'.center(1000000000) }}",
    "{{ 'a'.ljust(1000000000) }}",
    "{% macro f(n) %}{{ f(n + 1) }}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "{{ messages | map('tojson') | list | batch(2, 'x') | list }}",
    DOUBLED,
]


@pytest.fixture(scope="module")
def worker() -> Iterator[TextProcess]:
    worker = TextProcess()
    yield worker
    worker.close()


@pytest.mark.parametrize("name", BUILT_IN)
def test_the_usual_templates_are_plain_and_write_the_same(name: str) -> None:
    template = ChatTemplate.load(Tokenizer.load(STORY), name)
    assert template is not None
    for turns in (TURNS[:1], TURNS, [{"role": "system", "content": "Be brief."}, *TURNS]):
        for going_on in (True, False):
            whole = template.render(turns, add_generation_prompt=going_on)
            assert template.render(turns, add_generation_prompt=going_on, plainly=True) == whole


@pytest.mark.parametrize("source", COSTLY)
def test_what_may_take_long_is_not_plain(source: str) -> None:
    with pytest.raises((NotPlain, TextError)):
        ChatTemplate(source, {}).render(TURNS, plainly=True)


def test_a_constant_is_not_computed_while_a_template_is_compiled() -> None:
    tracemalloc.start()
    try:
        template = ChatTemplate("{{ 'a' * 40000000 }}", {})
        with pytest.raises(NotPlain):
            template.render(TURNS, plainly=True)
        assert tracemalloc.get_traced_memory()[1] < 4_000_000
    finally:
        tracemalloc.stop()


def test_a_template_that_is_nested_too_deeply_is_one_line() -> None:
    with pytest.raises(TextError, match="nested too deeply"):
        ChatTemplate("{% if a %}" * 3000 + "{% endif %}" * 3000, {})


def test_the_process_renders_as_here(worker: TextProcess) -> None:
    template = ChatTemplate(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ mood }}\n{% endfor %}", {"eos": "x"}
    )
    assert worker.render(template, TURNS, variables={"mood": "!"}) == template.render(TURNS, variables={"mood": "!"})
    with pytest.raises(TextError, match="at most 10 can fit"):
        worker.render(template, TURNS, 10)
    with pytest.raises(TextError, match="does not accept these messages: no"):
        worker.render(ChatTemplate("{{ raise_exception('no') }}", {}), TURNS)


def test_a_template_that_loops_is_ended_and_the_next_is_rendered(
    worker: TextProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "RENDER_S", 0.3)
    with pytest.raises(TooLong, match=r"the chat template took more than 0\.3 s for these messages"):
        worker.render(ChatTemplate(COSTLY[0], {}), TURNS)
    monkeypatch.setattr(process, "RENDER_S", 30.0)
    assert worker.render(ChatTemplate("hello", {}), TURNS) == "hello"


def test_a_template_that_takes_all_memory_is_refused_and_the_next_is_rendered(worker: TextProcess) -> None:
    with pytest.raises(TextError):
        worker.render(ChatTemplate("{{ 'a' * (4000000000 + messages | length) }}", {}), TURNS)
    assert worker.render(ChatTemplate("hello", {}), TURNS) == "hello"


def test_the_process_encodes_as_here_and_counts_what_is_not_wanted(worker: TextProcess) -> None:
    tokenizer = Tokenizer.load(STORY)
    text = "The old house stood. " * 50
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert worker.encode(STORY, [text, "A"], False, len(ids)) == [ids, tokenizer.encode("A", add_special_tokens=False)]
    assert worker.encode(STORY, [text], False, len(ids) - 1) == [len(ids)]


def test_closing_ends_a_template_that_loops() -> None:
    worker = TextProcess()
    found: list[BaseException] = []

    def render() -> None:
        try:
            worker.render(ChatTemplate(COSTLY[0], {}), TURNS)
        except TextError as error:
            found.append(error)

    waiting = threading.Thread(target=render)
    assert worker.render(ChatTemplate("ready", {}), TURNS) == "ready"
    waiting.start()
    time.sleep(0.1)
    worker.close()
    waiting.join(timeout=4)
    assert not waiting.is_alive() and found
