"""Turns the prompts of requests into token ids."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from functools import partial
from typing import Any

import msgspec

from headway.config_files.preload import NamedPrompt
from headway.outputs.choices import TokenizedPrompt
from headway.policy.cache.preload import PreloadedPrompt
from headway.policy.step.sampling_params import SamplingParams
from headway.server.api.fields import joined, string_in
from headway.server.api.parameters import check_ids
from headway.server.api.request_body import num_marks
from headway.server.api.schemas import ChatFields, Message, Prediction, RequestBody
from headway.server.api.tools import MAX_ARGUMENT_VALUES, for_template, offered
from headway.server.encoder import TooManyTokens
from headway.server.errors import bad_request
from headway.server.service import Service
from headway.text.chat_template import ChatTemplate, advice
from headway.text.plain_template import NotPlain
from headway.text.process import MOST_CHARS, MOST_CUT
from headway.text.tokenizer import Tokenizer
from headway.text.tokenizer_files import TextError

MAX_PROMPTS = 1024


def as_list(given: Any) -> list[Any]:
    """The prompts of a completion request as a list, also where one is given without a list."""
    return [given] if isinstance(given, str) or (given and isinstance(given[0], int)) else given


async def completion_prompts(
    service: Service,
    given: Any,
    add_special_tokens: bool,
    cache_salt: str | None,
    field: str = "prompt",
    most: int = MAX_PROMPTS,
    is_cut: bool = False,
) -> list[TokenizedPrompt]:
    """Each of the prompts that a request has in a field, encoded.

    Args:
        is_cut: they may be longer than the context.

    Raises:
        ApiError: 400 when there is none, one is empty or longer than any context, or an id is not in the vocabulary.
    """
    prompts = as_list(given)
    if not prompts:
        raise bad_request(f"{field} is an empty list; give at least one prompt", field)
    if len(prompts) > most:
        raise bad_request(f"{field} has {len(prompts)} prompts; at most {most} are allowed", field)
    texts = [text for text in prompts if isinstance(text, str)]
    if texts:
        found = await prompt_ids(service, texts, add_special_tokens, cache_salt, field, is_cut)
        encoded = [TokenizedPrompt(token_ids, text) for token_ids, text in zip(found, texts, strict=True)]
    else:
        for token_ids in prompts:
            check_ids(token_ids, service.tokenizer.vocab_size, field)
        encoded = [TokenizedPrompt(list(token_ids)) for token_ids in prompts]
    for position, prompt in enumerate(encoded):
        if not prompt.token_ids:
            which = field if len(encoded) == 1 else f"{field} {position}"
            raise bad_request(f"{which} is empty; give at least one token", field)
    return encoded


def most_chars(service: Service, is_cut: bool = False) -> int:
    """The most characters of a prompt that fits the context, or with `is_cut` of one that need not fit."""
    longest = service.tokenizer.longest_token
    if longest is None:
        return MOST_CHARS
    of_context = longest * service.check_ready().max_model_len
    return min(MOST_CHARS, max(of_context, MOST_CUT) if is_cut else of_context)


async def prompt_ids(
    service: Service, texts: list[str], add_special_tokens: bool, salt: str | None, field: str, is_cut: bool
) -> list[list[int]]:
    """Token ids of prompts. Raises ApiError 400, without encoding it, for one that can't fit the context."""
    limit, room = service.check_ready().max_model_len, most_chars(service, is_cut)
    for text in texts:
        if len(text) > room:
            raise bad_request(
                f"the prompt has {len(text)} characters; the model's context is {limit} tokens, and at most {room} "
                "characters are tokenized",
                field,
            )
        if is_cut and len(text) > MOST_CUT // 4 and len(text.encode()) > room:
            raise bad_request(f"the prompt has {len(text.encode())} bytes; at most {room} are tokenized", field)
    try:
        return await service.encoder.encode_all(texts, add_special_tokens, salt, 2**31 if is_cut else limit)
    except TooManyTokens as error:
        raise bad_request(
            f"the prompt has {error.count} tokens; the model's context is {limit} tokens, so a prompt may have at most "
            f"{limit - 1}",
            field,
        ) from None
    except TextError as error:
        raise bad_request(str(error), field) from None


def most_tokens(body: RequestBody, max_model_len: int, longest: float) -> int | None:
    """Tokens to which a request's prompts are truncated, as vLLM understands it; None where they are not.

    Args:
        longest: what -1 stands for, the most tokens that a prompt of this request may have.

    Raises:
        ApiError: 400 when truncate_prompt_tokens is out of its range.
    """
    asked = body.truncate_prompt_tokens
    if asked is None or 1 <= asked <= max_model_len:
        return asked
    if asked != -1:
        raise bad_request(
            f"truncate_prompt_tokens is {asked}; it must be from 1 to {max_model_len}, the model's context, or -1 for "
            "as much as fits",
            "truncate_prompt_tokens",
        )
    return max(1, int(min(max_model_len, longest)))


def truncated(
    service: Service, prompts: list[TokenizedPrompt], most: int | None, is_framed: bool, keep_end: bool, end: int = 0
) -> list[TokenizedPrompt]:
    """The first tokens of each prompt, or with `keep_end` the last: at most `most`; all where that is None.

    Args:
        is_framed: texts have the tokenizer's special tokens around them, which stay.
        end: how many tokens at the end stay in any case.

    Raises:
        ApiError: 400 when no room is left for the text.
    """
    if most is None:
        return prompts
    before, behind = service.tokenizer.num_added if is_framed and prompts[0].text is not None else (0, 0)
    behind = max(behind, end)
    room = most - before - behind
    if room < 1 and any(len(prompt.token_ids) > most for prompt in prompts):
        raise bad_request(
            f"truncate_prompt_tokens is {most}, and {before + behind} special tokens belong to each text; give at "
            f"least {before + behind + 1}",
            "truncate_prompt_tokens",
        )

    def cut(prompt: TokenizedPrompt) -> TokenizedPrompt:
        ids, at = prompt.token_ids, len(prompt.token_ids) - behind
        if len(ids) <= most:
            return prompt
        kept = ids[at - room : at] if keep_end else ids[before : before + room]
        return TokenizedPrompt([*ids[:before], *kept, *ids[at:]])

    return [cut(prompt) for prompt in prompts]


# Chats up to here are rendered at once where the template is plain; with longer texts even a plain step takes its time.
PLAIN_CHARS = 2**15
_NO_VARIABLES = frozenset(("tools", "messages", "add_generation_prompt", "continue_final_message"))
CHARS_OF_A_TURN = 50  # characters that a template adds around a message: many empty messages are a long text too


async def rendered(
    service: Service,
    messages: list[dict[str, Any]],
    field: str,
    most: int = MOST_CHARS,
    variables: Mapping[str, Any] | None = None,
    **options: Any,
) -> str:
    """The prompt for messages, by the chat template: at once if that is known to take little, else in a process.

    Args:
        most: the most characters of the prompt.

    Raises:
        ApiError: 400 when the template refuses the messages, fails on them or takes too long.
    """
    template = service.template
    assert template is not None
    size = sum(len(message["content"]) + CHARS_OF_A_TURN for message in messages)
    size += sum(len(msgspec.json.encode(message["tool_calls"])) for message in messages if "tool_calls" in message)
    if variables:
        size += len(msgspec.json.encode(variables))
    try:
        if size <= PLAIN_CHARS:
            with contextlib.suppress(NotPlain):
                return template.render(messages, variables=variables, plainly=True, **options)
        render = partial(service.text_process.render, template, messages, most, variables=variables or {}, **options)
        return await service.process_work.run(size, render)
    except TextError as error:
        raise bad_request(str(error), field) from None


def _given(variables: dict[str, Any] | None) -> dict[str, Any]:
    """The variables in chat_template_kwargs. Raises ApiError 400 where one is not allowed there."""
    for name in _NO_VARIABLES & (variables or {}).keys():
        if (variables or {})[name] not in (None, []):
            raise bad_request(
                f"chat_template_kwargs has {name}: it is a field of its own", f"chat_template_kwargs.{name}"
            )
    return variables or {}


async def chat_prompt(
    service: Service, body: ChatFields, cache_salt: str | None = None, is_cut: bool = False
) -> TokenizedPrompt:
    """The messages, formatted by the chat template and encoded.

    Args:
        is_cut: they may be longer than the context.

    Raises:
        ApiError: 400 when there is no template, or it does not accept the messages.
    """
    template = service.template
    if template is None:
        raise bad_request(
            f"the model has no chat template; use /v1/completions, or start the server with {advice(service.tokenizer)}"
        )
    if body.continue_final_message and body.add_generation_prompt:
        raise bad_request("continue_final_message needs add_generation_prompt to be false", "continue_final_message")
    tools = offered(body.tools, body.tool_choice, service.family, "tools" in template.variables)
    _check_calls(body.messages)
    knows_developer, as_text = "developer" in template.source, service.family.arguments_as_text
    messages = [_as_template_message(message, i, knows_developer, as_text) for i, message in enumerate(body.messages)]
    variables = _reasoning(body, template) | _given(body.chat_template_kwargs)
    text = await rendered(
        service,
        messages,
        "messages",
        most_chars(service, is_cut),
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        variables=variables if tools is None else variables | {"tools": tools},
    )
    token_ids = (await prompt_ids(service, [text], body.add_special_tokens, cache_salt, "messages", is_cut))[0]
    if not token_ids:
        raise bad_request("the chat template gives an empty prompt for these messages", "messages")
    return TokenizedPrompt(token_ids, text)


async def predicted_ids(service: Service, prediction: Prediction, params: SamplingParams) -> list[int]:
    """The tokens of a prediction, as many as fit the context. Raises ApiError 400 where no drafts could be of use."""
    if service.engine.config.speculative_config is None:
        raise bad_request("a prediction needs a server with --speculative-config; leave it out", "prediction")
    if without := params.without_drafts:
        raise bad_request(f"a prediction is of no use with {without}: no drafts are tried; leave it out", "prediction")
    path = "prediction.content"
    text = "" if prediction.content is None else _text(prediction.content, path)
    if not text:
        raise bad_request(f"{path} is empty; give the text that is expected, or leave prediction out", path)
    (token_ids,) = await prompt_ids(service, [text], False, None, path, is_cut=True)
    return token_ids[: service.check_ready().max_model_len]


def _reasoning(body: ChatFields, template: ChatTemplate) -> dict[str, Any]:
    """Variables of the template for `reasoning_effort`. Raises ApiError where it has none."""
    effort = body.reasoning_effort
    if effort is None:
        return {}
    if "reasoning_effort" in template.source:
        return {"reasoning_effort": effort}
    if effort == "none" and "enable_thinking" in template.source:
        return {"enable_thinking": False}
    message = f"reasoning_effort is {effort!r}, and the model's chat template does not know it; leave it out"
    raise bad_request(message, "reasoning_effort")


def preloaded(prompts: list[NamedPrompt], tokenizer: Tokenizer, template: ChatTemplate | None) -> list[PreloadedPrompt]:
    """The prompts as token ids. For a system message, they are the ids that all chats with it begin with.

    Raises:
        TextError: naming the file and the line of a prompt that cannot be encoded.
    """
    return [
        PreloadedPrompt(f"{each.where}: prompt {each.name!r}", _encoded(each, tokenizer, template), each.cache_salt)
        for each in prompts
    ]


def _encoded(prompt: NamedPrompt, tokenizer: Tokenizer, template: ChatTemplate | None) -> list[int]:
    if prompt.text:
        return tokenizer.encode_here(prompt.text)
    if template is None:
        raise TextError(f"{prompt.where}: the model has no chat template; give text instead of system")
    chats: list[list[int]] = []
    for words in ("a", "1"):
        messages = [{"role": "system", "content": prompt.system}, {"role": "user", "content": words}]
        try:
            chats.append(tokenizer.encode_here(template.render(messages), add_special_tokens=False))
        except TextError as error:
            raise TextError(f"{prompt.where}: {error}") from None
    first, second = chats
    shared = next(
        (at for at, (one, other) in enumerate(zip(first, second, strict=False)) if one != other), min(map(len, chats))
    )
    if not shared:
        raise TextError(f"{prompt.where}: the chat template does not put this system message at the start of a chat")
    return first[:shared]


def _check_calls(messages: list[Message]) -> None:
    """Raise ApiError 400 for calls that are not the assistant's, or have too many values."""
    values = 0
    for index, message in enumerate(messages):
        path = f"messages[{index}]"
        if message.tool_calls and message.role != "assistant":
            raise bad_request(f"{path}.tool_calls: only messages of the assistant have calls", f"{path}.tool_calls")
        if message.role == "tool" and message.tool_call_id is None:
            raise bad_request(f"{path}.tool_call_id is missing", f"{path}.tool_call_id")
        values += sum(num_marks(call.function.arguments.encode()) for call in message.tool_calls or ())
    if values > MAX_ARGUMENT_VALUES:
        raise bad_request(
            f"the arguments of earlier calls have some {values} values; at most {MAX_ARGUMENT_VALUES} are allowed in "
            "one request",
            "messages",
        )


def _as_template_message(message: Message, index: int, knows_developer: bool, as_text: bool) -> dict[str, Any]:
    # OpenAI's newer name for the system role; most templates know the older one only.
    role = "system" if message.role == "developer" and not knows_developer else message.role
    content = _content(message, f"messages[{index}].content")
    reasoning = message.reasoning_content if message.reasoning is None else message.reasoning
    further = {
        "name": message.name,
        "tool_call_id": message.tool_call_id,
        "tool_calls": for_template(message.tool_calls, as_text) if message.tool_calls else None,
        # Templates have one of these names.
        "reasoning_content": reasoning,
        "reasoning": reasoning,
        # This one, in gpt-oss, does not go with content before a call.
        "thinking": None if content and message.tool_calls else reasoning,
    }
    return {"role": role, "content": content} | {name: each for name, each in further.items() if each is not None}


def _content(message: Message, path: str) -> str:
    """The text of a message. Raises ApiError 400."""
    content = message.content
    if content is None:
        if "content" not in message.model_fields_set and not message.tool_calls:
            raise bad_request(f"{path} is missing", path)
        if message.role != "assistant":
            raise bad_request(f"{path} is null, which only a message of the assistant may be; give a string", path)
        return ""  # agents repeat an answer without text like this
    return _text(content, path)


def _text(content: str | list[dict[str, Any]], path: str) -> str:
    return joined(content, path, "parts", _part_text)


def _part_text(part: dict[str, Any], path: str) -> str:
    kind = part.get("type")
    if kind != "text":
        raise bad_request(f"{path} is of type {str(kind)[:60]!r}; only text is supported", f"{path}.type")
    text = string_in(part, "text", path)
    unknown = next((name for name in part if name not in ("type", "text")), None)
    if unknown is not None:
        raise bad_request(f"unknown field {path}.{unknown}", f"{path}.{unknown}")
    return text
