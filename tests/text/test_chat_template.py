"""Chat templates against Hugging Face's, and templates that refuse or are broken."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer

from headway.text.chat_template import BUILT_IN, ChatTemplate, advice, suggested
from headway.text.tokenizer import Tokenizer
from headway.text.tokenizer_files import TextError
from tests.text.tiny_tokenizers import SPECIAL, TEMPLATE, byte_level, save, sentencepiece_style

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
    with pytest.raises(TextError, match=r"neither a template, nor the name of one (.*chatml.*), nor a readable file"):
        source(str(tmp_path / "absent.jinja"))


def test_no_template_and_no_default_one(tmp_path: Path) -> None:
    folder = save(tmp_path, byte_level())
    assert ChatTemplate.load(Tokenizer.load(folder)) is None
    for broken, says in (([{"name": "rag", "template": "x"}], "none is 'default'"), (5, "is a int")):
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": broken}))
        with pytest.raises(TextError, match=says):
            ChatTemplate.load(Tokenizer.load(folder))


# What each template of a name makes of a system message, a question, an answer and a question, for the next answer.
BUILT_IN_TEXTS = {
    "chatml": "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\nA<|im_end|>\n"
    "<|im_start|>user\nR<|im_end|>\n<|im_start|>assistant\n",
    "phi4": "<|im_start|>system<|im_sep|>S<|im_end|><|im_start|>user<|im_sep|>Q<|im_end|>"
    "<|im_start|>assistant<|im_sep|>A<|im_end|><|im_start|>user<|im_sep|>R<|im_end|><|im_start|>assistant<|im_sep|>",
    "llama3": "<B><|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nQ<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nA<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nR<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    "gemma": "<B><start_of_turn>user\nS\n\nQ<end_of_turn>\n<start_of_turn>model\nA<end_of_turn>\n"
    "<start_of_turn>user\nR<end_of_turn>\n<start_of_turn>model\n",
    "mistral-v7": "<B>[SYSTEM_PROMPT] S[/SYSTEM_PROMPT][INST] Q[/INST] A<E>[INST] R[/INST]",
    "mistral-v7-tekken": "<B>[SYSTEM_PROMPT]S[/SYSTEM_PROMPT][INST]Q[/INST]A<E>[INST]R[/INST]",
    "mistral-v3": "<B>[INST] S\n\nQ[/INST] A<E>[INST] R[/INST]",
    "mistral-v3-tekken": "<B>[INST]S\n\nQ[/INST]A<E>[INST]R[/INST]",
    "glm4": "[gMASK]<sop><|system|>\nS<|user|>\nQ<|assistant|>\nA<|user|>\nR<|assistant|>\n",
    "phi3": "<|system|>\nS<|end|>\n<|user|>\nQ<|end|>\n<|assistant|>\nA<|end|>\n<|user|>\nR<|end|>\n<|assistant|>\n",
    "granite": "<|start_of_role|>system<|end_of_role|>S<|end_of_text|>\n"
    "<|start_of_role|>user<|end_of_role|>Q<|end_of_text|>\n"
    "<|start_of_role|>assistant<|end_of_role|>A<|end_of_text|>\n<|start_of_role|>user<|end_of_role|>R<|end_of_text|>\n"
    "<|start_of_role|>assistant<|end_of_role|>",
    "command-r": "<B><|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>S<|END_OF_TURN_TOKEN|>"
    "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>Q<|END_OF_TURN_TOKEN|>"
    "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>A<|END_OF_TURN_TOKEN|>"
    "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>R<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
    "deepseek3": "<B>S<｜User｜>Q<｜Assistant｜>A<｜end▁of▁sentence｜><｜User｜>R<｜Assistant｜>",
    "llama2": "<B>[INST] <<SYS>>\nS\n<</SYS>>\n\nQ [/INST] A <E><B>[INST] R [/INST]",
    "zephyr": "<|system|>\nS<E>\n<|user|>\nQ<E>\n<|assistant|>\nA<E>\n<|user|>\nR<E>\n<|assistant|>\n",
}


def of_tokens(folder: Path, tokens: tuple[str, ...], by_pieces: bool = False) -> Tokenizer:
    """A tokenizer whose vocabulary has these besides, and nothing of ChatML."""
    backend = sentencepiece_style() if by_pieces else byte_level()
    described = json.loads(backend.to_str().replace("<|im_start|>", "<|other_1|>").replace("<|im_end|>", "<|other_2|>"))
    backend = Backend.from_str(json.dumps(described))
    backend.add_special_tokens(list(tokens))
    return Tokenizer.load(save(folder, backend, bos_token="<B>", eos_token="<E>"))


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_template_of_a_name(tmp_path: Path, name: str) -> None:
    """It is suggested for a vocabulary with its tokens, writes nothing else, and its answers end at its token."""
    family = BUILT_IN[name]
    tokenizer = of_tokens(tmp_path, (*family.tokens, *filter(None, [family.ends])), family.by_pieces is True)
    assert suggested(tokenizer) == (name if family.tokens else None)
    assert advice(tokenizer).startswith(f"--chat-template {name} (" if family.tokens else "--chat-template, a file or")
    template = ChatTemplate.load(tokenizer, name)
    assert template is not None and not template.doubt
    roles = ("system", "user", "assistant", "user")
    messages = [{"role": role, "content": text} for role, text in zip(roles, "SQAR", strict=True)]
    assert template.render(messages) == BUILT_IN_TEXTS[name]
    if family.ends is not None:
        assert tokenizer.backend.token_to_id(family.ends) in tokenizer.eos_token_ids
    continued = template.render(messages[:3], add_generation_prompt=False, continue_final_message=True)
    assert continued.endswith("A") and BUILT_IN_TEXTS[name].startswith(continued)


def test_a_template_whose_tokens_are_not_in_the_vocabulary(tmp_path: Path) -> None:
    tokenizer = of_tokens(tmp_path, ())
    template = ChatTemplate.load(tokenizer, "gemma")
    assert template is not None and tokenizer.eos_token_ids == []
    assert template.doubt == (
        "The chat template gemma writes <start_of_turn> and <end_of_turn>, which this model's vocabulary does not have"
    )


def test_template_sees_the_current_date() -> None:
    assert ChatTemplate("{{ strftime_now('%Y') }}", {}).render([]) == str(datetime.now().year)
