"""Chat templates against Hugging Face's, and templates that refuse or are broken."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from headway.text.chat_template import ChatTemplate
from headway.text.tokenizer import TextError, Tokenizer
from tests.text.tiny_tokenizers import SPECIAL, TEMPLATE, byte_level, save

TEMPLATES = {
    "chatml": TEMPLATE,
    "whitespace": """
{%- if messages[0].role == 'system' %}
    {{- bos_token + messages[0].content | trim }}
    {%- set messages = messages[1:] %}
{%- endif %}
{%- for m in messages %}
    {%- if loop.index0 == 9 %}{% break %}{% endif %}
    {{- '[' ~ m.role ~ '] ' ~ m.content | trim ~ eos_token }}
{%- endfor %}
  {% if add_generation_prompt %}
  [assistant]
  {% endif %}
""",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}|{% endfor %}",
    "json": "{{ messages | tojson(indent=2) }}{{ {'é': '<b>'} | tojson }}{{ none_given is defined }}",
    "date": "{{ strftime_now('%Y') }}{% if tools is none %}no tools{% endif %}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
}
CONVERSATIONS = [
    [{"role": "user", "content": "Hello"}],
    [
        {"role": "system", "content": " Be brief. "},
        {"role": "user", "content": "What's <b>2 + 2</b>?\n"},
        {"role": "assistant", "content": "4 😀"},
        {"role": "user", "content": "日本語"},
    ],
]


def both(tmp_path: Path, template: str) -> tuple[ChatTemplate, Any]:
    folder = save(tmp_path, byte_level(), bos_token=SPECIAL[0], eos_token=SPECIAL[2], chat_template=template)
    ours = ChatTemplate.load(Tokenizer.load(folder))
    assert ours is not None
    return ours, AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("name", TEMPLATES)
def test_prompt_equals_hugging_face(tmp_path: Path, name: str) -> None:
    ours, theirs = both(tmp_path, TEMPLATES[name])
    for messages in CONVERSATIONS:
        for generation in (True, False):
            expected = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=generation)
            assert ours.render(messages, add_generation_prompt=generation) == expected


@pytest.mark.parametrize("name", ["chatml", "whitespace"])
@pytest.mark.parametrize("content", ["Once upon", "Once upon ", " Once\n"])
def test_final_message_is_continued_as_by_hugging_face(tmp_path: Path, name: str, content: str) -> None:
    ours, theirs = both(tmp_path, TEMPLATES[name])
    messages = [*CONVERSATIONS[1], {"role": "assistant", "content": content}]
    expected = theirs.apply_chat_template(messages, tokenize=False, continue_final_message=True)
    assert ours.render(messages, add_generation_prompt=False, continue_final_message=True) == expected


def test_variables_reach_the_template() -> None:
    template = ChatTemplate("{{ enable_thinking }}{{ bos_token }}", {"bos_token": "<s>"})
    assert template.render([], variables={"enable_thinking": False}) == "False<s>"


def test_messages_cannot_be_replaced_by_a_variable() -> None:
    template = ChatTemplate("{{ messages[0].content }}", {})
    assert template.render([{"role": "user", "content": "mine"}], variables={"messages": []}) == "mine"


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].nothing.more }}", "nothing"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
    ],
)
def test_refusal_and_failure_are_one_line(source: str, says: str) -> None:
    with pytest.raises(TextError, match=says) as caught:
        ChatTemplate(source, {}).render([{"role": "user", "content": "x"}])
    assert "\n" not in str(caught.value)


def test_content_left_out_cannot_be_continued() -> None:
    with pytest.raises(TextError, match="leaves out the content"):
        ChatTemplate("nothing", {}).render([{"role": "user", "content": "x"}], continue_final_message=True)


def test_invalid_jinja_names_the_line() -> None:
    with pytest.raises(TextError, match="line 2"):
        ChatTemplate("ok\n{% if %}", {})


def test_where_the_template_comes_from(tmp_path: Path) -> None:
    folder = save(tmp_path / "m", byte_level(), chat_template=[{"name": "default", "template": "named"}])
    tokenizer = Tokenizer.load(folder)

    def source(override: str | None = None) -> str:
        template = ChatTemplate.load(tokenizer, override)
        assert template is not None
        return template.source

    assert source() == "named"
    (folder / "chat_template.jinja").write_text("of the file")
    assert source() == "of the file"
    assert source("{{ inline }}") == "{{ inline }}"
    own = tmp_path / "own.jinja"
    own.write_text("of the user")
    assert source(str(own)) == "of the user"
    with pytest.raises(TextError, match="neither a template nor a readable file"):
        source(str(tmp_path / "absent.jinja"))


def test_no_template_and_no_default_one(tmp_path: Path) -> None:
    folder = save(tmp_path, byte_level())
    assert ChatTemplate.load(Tokenizer.load(folder)) is None
    for broken, says in (([{"name": "rag", "template": "x"}], "none is 'default'"), (5, "is a int")):
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": broken}))
        with pytest.raises(TextError, match=says):
            ChatTemplate.load(Tokenizer.load(folder))


def test_template_sees_the_current_date() -> None:
    assert ChatTemplate("{{ strftime_now('%Y') }}", {}).render([]) == str(datetime.now().year)
