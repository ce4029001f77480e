"""Renders chat messages to a prompt by a Jinja template, that of the checkpoint or one of templates/."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes, pass_context
from jinja2.ext import Extension
from jinja2.meta import TrackingCodeGenerator
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from headway.text.plain_template import NotPlain, PlainTemplate
from headway.text.tokenizer import Tokenizer
from headway.text.tokenizer_files import TextError, read_json

# Goes after the last message when it is to be continued; the text is cut where it comes out again.
_CONTINUE_HERE = "\u2063continue\u2063here\u2063"


@dataclass(frozen=True, slots=True)
class _Family:
    """A template of templates/."""

    tokens: tuple[str, ...] = ()  # what it writes; a vocabulary that has all of them is of this family
    ends: str | None = None  # the token that ends an answer, where it is not the tokenizer's eos_token
    by_pieces: bool | None = None  # the vocabulary is SentencePiece's; None where it does not matter


_SYSTEM_PROMPT = ("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[INST]", "[/INST]")
# The built-in templates by llama.cpp's names. The first one whose tokens are in a vocabulary is suggested. One
# without tokens is never suggested, but can be named.
BUILT_IN = {
    "phi4": _Family(("<|im_start|>", "<|im_sep|>", "<|im_end|>"), "<|im_end|>"),
    "chatml": _Family(("<|im_start|>", "<|im_end|>"), "<|im_end|>"),
    "llama3": _Family(("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"), "<|eot_id|>"),
    "gemma": _Family(("<start_of_turn>", "<end_of_turn>"), "<end_of_turn>"),
    "mistral-v7": _Family(_SYSTEM_PROMPT, by_pieces=True),
    "mistral-v7-tekken": _Family(_SYSTEM_PROMPT, by_pieces=False),
    "mistral-v3": _Family(_SYSTEM_PROMPT[2:], by_pieces=True),
    "mistral-v3-tekken": _Family(_SYSTEM_PROMPT[2:], by_pieces=False),
    "glm4": _Family(("[gMASK]", "<sop>", "<|user|>", "<|assistant|>"), "<|user|>"),
    "phi3": _Family(("<|user|>", "<|assistant|>", "<|end|>"), "<|end|>"),
    "granite": _Family(("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>"), "<|end_of_text|>"),
    "command-r": _Family(("<|START_OF_TURN_TOKEN|>", "<|CHATBOT_TOKEN|>"), "<|END_OF_TURN_TOKEN|>"),
    "deepseek3": _Family(("<｜User｜>", "<｜Assistant｜>"), "<｜end▁of▁sentence｜>"),
    "llama2": _Family(),
    "zephyr": _Family(),
}


def suggested(tokenizer: Tokenizer) -> str | None:
    """The key of BUILT_IN for a checkpoint without a template; None where its vocabulary tells of none.

    It tells of the family, and not whether the checkpoint was trained to chat: a base model has the same tokens.
    """
    for name, family in BUILT_IN.items():
        fits = family.by_pieces is None or family.by_pieces != tokenizer.is_byte_level
        if family.tokens and fits and not _lacking(family, tokenizer):
            return name
    return None


def advice(tokenizer: Tokenizer) -> str:
    """The flag that gives a checkpoint without a template one, and why this one."""
    name = suggested(tokenizer)
    if name is None:
        return f"--chat-template, a file or one of {', '.join(sorted(BUILT_IN))}"
    return f"--chat-template {name} (the vocabulary has its tokens; a base model's has them, too)"


def _lacking(family: _Family, tokenizer: Tokenizer) -> list[str]:
    return [token for token in family.tokens if tokenizer.backend.token_to_id(token) is None]


MOST_SOURCE_CHARS = 2**20


class _GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's words for training; in a prompt its content stands as it is."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii, **options)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


@pass_context
def _unchanged(context: Context, value: Any) -> Any:
    return value


class _Environment(ImmutableSandboxedEnvironment):
    """Has what Hugging Face templates expect. Nothing of a template is evaluated before it is rendered."""

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            finalize=_unchanged,  # which needs a context, so that constants are not computed in advance
            extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"],
        )
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now


def _variables_of(tree: nodes.Template, environment: _Environment) -> frozenset[str]:
    """The variables that a template looks at, found without computing its constants, as `jinja2.meta` would."""
    tracker = TrackingCodeGenerator(environment)
    tracker.optimizer = None
    tracker.visit(tree)
    return frozenset(tracker.undeclared_identifiers)


class ChatTemplate:
    """A compiled chat template.

    Args:
        source: Jinja text, with the variables and functions that Hugging Face templates expect.
        special_tokens: variables such as bos_token.

    Attributes:
        variables: names of variables that the template looks at.
        doubt: why answers may not be good, as a sentence without its full stop; empty where nothing is known.

    Raises:
        TextError: when the template is not valid Jinja, or too large.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        if len(source) > MOST_SOURCE_CHARS:
            raise TextError(f"the chat template has {len(source)} characters; at most {MOST_SOURCE_CHARS} are allowed")
        self.source = source
        self.doubt = ""
        self.special_tokens = dict(special_tokens)
        environment = _Environment()
        try:
            self.variables = _variables_of(environment.parse(source), environment)
            self._template = environment.from_string(source)
            self._plain = PlainTemplate.of(environment, source)
        except jinja2.TemplateSyntaxError as error:
            raise TextError(f"the chat template is not valid Jinja: line {error.lineno}: {error.message}") from None
        except (RecursionError, MemoryError, SyntaxError):
            raise TextError("the chat template is nested too deeply") from None

    @classmethod
    def load(cls, tokenizer: Tokenizer, override: str | None = None) -> ChatTemplate | None:
        """The template of a checkpoint, or None when it has none.

        `override` is a key of BUILT_IN, a path to a template file, or the template itself. Without it
        chat_template.jinja is taken before the `chat_template` of tokenizer_config.json; of several named ones,
        "default". The token that ends an answer in a template of BUILT_IN becomes one of the tokenizer's eos_token_ids.

        Raises:
            TextError: when the template or its file is broken.
        """
        if override is not None and override in BUILT_IN:
            return cls._built_in(override, tokenizer)
        source = _read_override(override) if override else _find_source(tokenizer)
        for token in tokenizer.left_out:
            if source is not None and token in source:
                raise TextError(f"the chat template writes {token!r}, a token that the model does not have")
        return None if source is None else cls(source, tokenizer.special_tokens)

    @classmethod
    def _built_in(cls, name: str, tokenizer: Tokenizer) -> ChatTemplate:
        family = BUILT_IN[name]
        source = (Path(__file__).parent / "templates" / f"{name}.jinja").read_text(encoding="utf-8")
        template = cls(source, tokenizer.special_tokens)
        if family.ends is not None:
            tokenizer.end_with(family.ends)
        if lacking := _lacking(family, tokenizer):
            template.doubt = (
                f"The chat template {name} writes {' and '.join(lacking)}, which this model's vocabulary does not have"
            )
        return template

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
        plainly: bool = False,
    ) -> str:
        """The prompt for `messages`. A template can loop for ever, and take any amount of memory.

        Args:
            continue_final_message: end the prompt inside the last message, for the model to go on with it.
            variables: further variables for the template, such as enable_thinking.
            plainly: only if that takes a few milliseconds at most, whatever the template does.

        Raises:
            TextError: when the template refuses the messages or fails on them.
            NotPlain: only with `plainly`.
        """
        conversation = [dict(message) for message in messages]
        if continue_final_message:
            conversation[-1]["content"] = f"{conversation[-1]['content']}{_CONTINUE_HERE} "
        given = {"tools": None, "documents": None, **self.special_tokens, **(variables or {})}
        given |= {"messages": conversation, "add_generation_prompt": add_generation_prompt}
        try:
            text = self._plain.render(given) if plainly else self._template.render(given)
        except NotPlain:
            raise
        except jinja2.TemplateError as error:
            raise TextError(f"the chat template does not accept these messages: {error.message}") from None
        except Exception as error:  # a template may fail in any way that Python can
            raise TextError(f"the chat template failed: {type(error).__name__}: {error}") from None
        return _cut(text) if continue_final_message else text


def _cut(text: str) -> str:
    position = text.rfind(_CONTINUE_HERE)
    if position < 0:
        raise TextError("continue_final_message: the chat template leaves out the content of the last message")
    kept = text[:position]
    keeps_spaces = text.startswith(f"{_CONTINUE_HERE} ", position)
    return kept if keeps_spaces else kept.rstrip()


def _read_override(override: str) -> str:
    if "{" in override or "\n" in override:
        return override
    try:
        return Path(override).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        names = ", ".join(sorted(BUILT_IN))
        raise TextError(
            f"chat template {override!r} is neither a template, nor the name of one ({names}), nor a readable file: "
            f"{error}"
        ) from None


def _find_source(tokenizer: Tokenizer) -> str | None:
    path = tokenizer.folder / "chat_template.jinja"
    if path.is_file():
        return _read_override(str(path))
    found = tokenizer.config.get("chat_template")
    if found is None:
        found = read_json(tokenizer.folder / "chat_template.json", required=False).get("chat_template")
    if isinstance(found, list):
        named = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
        found = named.get("default")
        if found is None:
            raise TextError(
                f"{tokenizer.folder}: chat_template has the names {sorted(map(str, named))} and none is 'default'; "
                "pass one with --chat-template"
            )
    if found is not None and not isinstance(found, str):
        raise TextError(f"{tokenizer.folder}: chat_template is a {type(found).__name__}; a string is needed")
    return found
