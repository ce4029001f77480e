"""The bodies of requests: their fields and types. SamplingParams checks the ranges."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field, WithJsonSchema

from headway.policy.service_class import LONGEST_NAME

MAX_MESSAGES = 4096
LEAST, MOST = -(2**63), 2**63 - 1


def _must_be(form: str, check: Callable[[Any], bool]) -> BeforeValidator:
    """Check the whole value in one function: pydantic's unions would try and report every branch for every item."""

    def validate(value: Any) -> Any:
        if not check(value):
            raise ValueError(f"must be {form}")
        return value

    return BeforeValidator(validate)


class TokenIds(array):  # type: ignore[type-arg]
    """Many ids that were read in pieces, and so need no further look at each of them.

    A list of millions of numbers takes long even to be freed.
    """

    lowest = highest = 0

    def __new__(cls) -> Self:
        return super().__new__(cls, "q")  # type: ignore[return-value]

    def add(self, ids: list[int]) -> None:
        """Append ids; larger than any that fit into the array become the largest."""
        if ids:
            self.lowest, self.highest = min(self.lowest, min(ids)), max(self.highest, max(ids))
            fits = self.lowest >= LEAST and self.highest <= MOST
            self.extend(ids if fits else [max(LEAST, min(each, MOST)) for each in ids])


def _all_of(kind: type, value: Any) -> bool:
    if isinstance(value, TokenIds):
        return kind is int
    return isinstance(value, list) and all(type(item) is kind for item in value)


def _is_prompt(value: Any) -> bool:
    if isinstance(value, str) or _all_of(str, value) or _all_of(int, value):
        return True
    return isinstance(value, list) and all(_all_of(int, item) for item in value)


def _is_texts(value: Any) -> bool:
    return isinstance(value, str) or _all_of(str, value)


def _is_stop(value: Any) -> bool:
    return value is None or _is_texts(value)


def _are_documents(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(each, str) or (isinstance(each, dict) and each.keys() == {"text"} and isinstance(each["text"], str))
        for each in value
    )


def _is_content(value: Any) -> bool:
    return (
        value is None
        or isinstance(value, str)
        or (isinstance(value, list) and all(isinstance(part, dict) for part in value))
    )


_TEXT: dict[str, Any] = {"type": "string"}
_TEXTS = {"type": "array", "items": _TEXT, "minItems": 1}
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": _TEXT},
    "required": ["type", "text"],
    "additionalProperties": False,
}

_DOCUMENT = {"type": "object", "properties": {"text": _TEXT}, "required": ["text"], "additionalProperties": False}

PromptField = Annotated[
    Any,
    _must_be("a string, a list of strings, a list of token ids, or a list of lists of token ids", _is_prompt),
    WithJsonSchema({"anyOf": [_TEXT, _TEXTS, _IDS, {"type": "array", "items": _IDS, "minItems": 1}]}),
]
TextsField = Annotated[
    Any,
    _must_be("a string or a list of strings", _is_texts),
    WithJsonSchema({"anyOf": [_TEXT, _TEXTS]}),
]
DocumentsField = Annotated[
    Any,
    _must_be("a list of strings, or of objects with a text", _are_documents),
    WithJsonSchema({"type": "array", "items": {"anyOf": [_TEXT, _DOCUMENT]}, "minItems": 1}),
]
StopField = Annotated[
    Any,
    _must_be("a string or a list of strings", _is_stop),
    WithJsonSchema({"anyOf": [_TEXT, {"type": "array", "items": _TEXT, "maxItems": 16}, {"type": "null"}]}),
]
IdsField = Annotated[
    Any,
    _must_be("a list of token ids", lambda value: _all_of(int, value)),
    WithJsonSchema({"type": "array", "items": {"type": "integer"}}),
]
ContentField = Annotated[
    Any,
    _must_be("a string or a list of parts of type text", _is_content),
    WithJsonSchema({"anyOf": [_TEXT, {"type": "array", "items": _PART}, {"type": "null"}]}),
]

NullField = Annotated[
    Any,
    _must_be("null or an empty list, because it is not supported", lambda value: value in (None, [])),
    WithJsonSchema({"anyOf": [{"type": "null"}, {"type": "array", "maxItems": 0}]}),
]


# Integers that the engine's messages can't carry are out of every range.
Int = Annotated[int, Field(ge=LEAST, le=MOST)]


class Body(BaseModel):
    """Refuses unknown fields, values of another JSON type, and numbers that JSON does not have."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(Body):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class RequestBody(Body):
    """Fields of every request for the engine. A field that is null counts as left out."""

    model: str | None = None
    user: str | None = None
    cache_salt: str | None = Field(default=None, min_length=1, max_length=256)
    priority: int = Field(default=0, ge=-(2**31), le=2**31 - 1)
    service_tier: Literal["auto", "default", "priority", "flex"] | None = None
    service_class: str | None = Field(default=None, min_length=1, max_length=LONGEST_NAME)
    include_timings: bool = False
    truncate_prompt_tokens: Int | None = None
    truncation_side: Literal["left", "right"] | None = None


class GenerationBody(RequestBody):
    """Fields that completions and chat completions share."""

    temperature: float | None = None
    top_p: float | None = None
    n: Int | None = None
    stop: StopField = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    seed: Int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None

    top_k: Int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool = False
    min_tokens: Int | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    prompt_logprobs: Int | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None


class ResponseFormat(Body):
    type: Literal["text"]


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: PromptField
    max_tokens: Int | None = None
    echo: bool | None = None
    logprobs: Int | None = None
    best_of: Int | None = None
    add_special_tokens: bool = True
    response_format: ResponseFormat | None = None

    @property
    def prompt_only(self) -> bool:
        """Whether nothing is to follow the prompt."""
        return self.max_tokens == 0 and (bool(self.echo) or self.prompt_logprobs is not None)


class Message(Body):
    """A message, as a client wrote it or as an answer contained it, with all the fields of answers."""

    model_config = ConfigDict(
        json_schema_extra={
            "anyOf": [
                {"properties": {"role": {"const": "assistant"}}},
                {"properties": {"content": {"type": ["string", "array"]}}},
            ]
        }
    )

    role: Literal["system", "developer", "user", "assistant"]
    content: ContentField
    name: str | None = None
    refusal: NullField = None
    annotations: NullField = None
    audio: NullField = None
    function_call: NullField = None
    tool_calls: NullField = None


class ChatFields(Body):
    """How messages become a prompt."""

    messages: Annotated[list[Message], FailFast()] = Field(min_length=1, max_length=MAX_MESSAGES)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    add_special_tokens: bool = False


class ChatBody(GenerationBody, ChatFields):
    """POST /v1/chat/completions."""

    max_tokens: Int | None = None
    max_completion_tokens: Int | None = None
    logprobs: bool | None = None
    top_logprobs: Int | None = None
    response_format: ResponseFormat | None = None
    modalities: list[Literal["text"]] | None = Field(default=None, min_length=1, max_length=1)


class EmbeddingBody(RequestBody):
    """POST /v1/embeddings."""

    input: PromptField
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Int | None = None
    add_special_tokens: bool = True


class ScoreBody(RequestBody):
    """POST /v1/score: `text_1` and `text_2`, or by their other names `queries` and `documents`."""

    model_config = ConfigDict(
        json_schema_extra={"oneOf": [{"required": ["text_1", "text_2"]}, {"required": ["queries", "documents"]}]}
    )

    text_1: TextsField = None
    text_2: TextsField = None
    queries: TextsField = None
    documents: TextsField = None
    instruction: str | None = None


class RerankBody(RequestBody):
    """POST /v1/rerank."""

    query: str
    documents: DocumentsField
    top_n: int | None = Field(default=None, ge=0, le=2**31 - 1)
    return_documents: bool | None = None
    instruction: str | None = None


class TokenizeText(Body):
    """POST /tokenize, of a text."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool | None = None


class TokenizeChat(ChatFields):
    """POST /tokenize, of messages."""

    model: str | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: IdsField


@dataclass(frozen=True, slots=True)
class Unsupported:
    """An OpenAI field that this server does not have.

    Args:
        reason: for the refusal.
        no_op: whether a value changes nothing in the answer of a server without the field, and so is taken; null always
            is. Clients send such values in every request.
    """

    reason: str
    no_op: Callable[[Any], bool] = lambda value: False


_NO_TOOLS = "tool calls are not supported yet"
_NO_GRAMMAR = "answers are not held to a grammar"
_NO_BEAMS = "beam search is not supported"
UNSUPPORTED = {
    "suffix": Unsupported("inserting before a suffix is not supported", lambda value: value == ""),
    "tools": Unsupported(_NO_TOOLS, lambda value: value == []),
    "tool_choice": Unsupported(_NO_TOOLS, lambda value: value in ("none", "auto")),
    "parallel_tool_calls": Unsupported(_NO_TOOLS, lambda value: isinstance(value, bool)),
    "functions": Unsupported(_NO_TOOLS, lambda value: value == []),
    "function_call": Unsupported(_NO_TOOLS, lambda value: value in ("none", "auto")),
    "audio": Unsupported("only text is produced"),
    "prediction": Unsupported("predicted outputs are not supported"),
    "verbosity": Unsupported("state the length of the answer in a message"),
    "web_search_options": Unsupported("web search is not supported"),
    "store": Unsupported("nothing is stored", lambda value: value is False),
    "metadata": Unsupported("a JSON object is accepted and ignored", lambda value: isinstance(value, dict)),
    "safety_identifier": Unsupported("it must be a string", lambda value: isinstance(value, str)),
    "prompt_cache_key": Unsupported("it must be a string", lambda value: isinstance(value, str)),
    "prompt_cache_retention": Unsupported("it must be a string", lambda value: isinstance(value, str)),
    "prompt_cache_options": Unsupported("a JSON object has no effect", lambda value: isinstance(value, dict)),
    "moderation": Unsupported("nothing is moderated"),
    # Of vLLM's own fields.
    **dict.fromkeys(
        ("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
        Unsupported(_NO_GRAMMAR),
    ),
    "use_beam_search": Unsupported(_NO_BEAMS, lambda value: value is False),
    "early_stopping": Unsupported(_NO_BEAMS, lambda value: value is False),
    "length_penalty": Unsupported(_NO_BEAMS, lambda value: value == 1),
    "bad_words": Unsupported("give the tokens a logit_bias of -100", lambda value: value == []),
    "allowed_token_ids": Unsupported("give these tokens a logit_bias of 100"),
    "logprob_token_ids": Unsupported("only the likeliest tokens are shown, with logprobs"),
    "logits_processors": Unsupported("sampling has no plug-ins", lambda value: value == []),
    "spaces_between_special_tokens": Unsupported("it must be a boolean", lambda value: isinstance(value, bool)),
    "include_reasoning": Unsupported("it must be a boolean", lambda value: isinstance(value, bool)),
    "thinking_token_budget": Unsupported("limit the whole answer with max_tokens", lambda value: value == -1),
    "repetition_detection": Unsupported("use repetition_penalty"),
    "enable_thinking": Unsupported("pass it to the chat template in chat_template_kwargs"),
    "chat_template": Unsupported("start the server with --chat-template"),
    "documents": Unsupported("pass them to the chat template in chat_template_kwargs", lambda value: value == []),
    "prompt_embeds": Unsupported("prompts are texts or token ids"),
    "mm_processor_kwargs": Unsupported("only text is understood", lambda value: value == {}),
    "kv_transfer_params": Unsupported("prompts and answers are computed by one server"),
    "vllm_xargs": Unsupported("there are no extensions", lambda value: value == {}),
    "request_id": Unsupported("send it in the header x-request-id"),
    "return_token_offsets": Unsupported("offsets are not returned", lambda value: value is False),
    "echo": Unsupported("use continue_final_message", lambda value: value is False),
    "embed_dtype": Unsupported("vectors are float32", lambda value: value == "float32"),
    "endianness": Unsupported("vectors are little-endian", lambda value: value in ("native", "little")),
    "max_tokens_per_doc": Unsupported("use truncate_prompt_tokens", lambda value: value == 0),
}
