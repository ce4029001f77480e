"""The bodies of requests: their fields and types. SamplingParams checks the ranges."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import ConfigDict, FailFast, WithJsonSchema

from headway.policy.objectives.service_class import LONGEST_NAME
from headway.server.api.fields import LEAST, MOST, Body, Int, must_be, said
from headway.server.api.tools import MAX_TOOLS, MESSAGES, Tool, ToolCall, ToolChoiceField

MAX_MESSAGES = 4096


class TokenIds(array):  # type: ignore[type-arg]
    """Many ids that were read in pieces, and so need no further look at each of them.

    A list of millions of numbers takes long even to be freed.
    """

    lowest = highest = 0

    def __new__(cls) -> Self:
        return super().__new__(cls, "q")  # type: ignore[return-value]

    def add(self, ids: list[int]) -> None:
        """Append ids. Those that are too large for the array become the largest that fits."""
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


def _are_documents(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(each, str) or (isinstance(each, dict) and each.keys() == {"text"} and isinstance(each["text"], str))
        for each in value
    )


def _is_content(value: Any) -> bool:
    is_list = isinstance(value, list) and all(isinstance(part, dict) for part in value)
    return is_list or value is None or isinstance(value, str)


_TEXT: dict[str, Any] = {"type": "string"}
_TEXTS = {"type": "array", "items": _TEXT, "minItems": 1}
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_PART = {
    "type": "object",
    "properties": {
        "type": {"const": "text", "description": "Only text is understood."},
        "text": {**_TEXT, "description": "The text of this part."},
    },
    "required": ["type", "text"],
    "additionalProperties": False,
}

_DOCUMENT = {
    "type": "object",
    "properties": {"text": {**_TEXT, "description": "The text of the document."}},
    "required": ["text"],
    "additionalProperties": False,
}

PromptField = Annotated[
    Any,
    must_be("a string, a list of strings, a list of token ids, or a list of lists of token ids", _is_prompt),
    WithJsonSchema({"anyOf": [_TEXT, _TEXTS, _IDS, {"type": "array", "items": _IDS, "minItems": 1}]}),
]
TextsField = Annotated[
    Any, must_be("a string or a list of strings", _is_texts), WithJsonSchema({"anyOf": [_TEXT, _TEXTS]})
]
DocumentsField = Annotated[
    Any,
    must_be("a list of strings, or of objects with a text", _are_documents),
    WithJsonSchema({"type": "array", "items": {"anyOf": [_TEXT, _DOCUMENT]}, "minItems": 1}),
]
StopField = Annotated[
    Any,
    must_be("a string or a list of strings", lambda value: value is None or _is_texts(value)),
    WithJsonSchema({"anyOf": [_TEXT, {"type": "array", "items": _TEXT, "maxItems": 16}, {"type": "null"}]}),
]
IdsField = Annotated[
    Any,
    must_be("a list of token ids", lambda value: _all_of(int, value)),
    WithJsonSchema({"type": "array", "items": {"type": "integer"}}),
]
ContentField = Annotated[
    Any,
    must_be("a string or a list of parts of type text", _is_content),
    WithJsonSchema({"anyOf": [_TEXT, {"type": "array", "items": _PART}, {"type": "null"}]}),
]

EarlyStoppingField = Annotated[
    Any,
    must_be("true, false or never", lambda value: value is None or value is True or value is False or value == "never"),
    WithJsonSchema({"anyOf": [{"type": "boolean"}, {"const": "never"}, {"type": "null"}]}),
]
NullField = Annotated[
    Any,
    must_be("null or an empty list, because it is not supported", lambda value: value in (None, [])),
    WithJsonSchema({"anyOf": [{"type": "null"}, {"type": "array", "maxItems": 0}]}),
]


class StreamOptions(Body):
    include_usage: bool = said("Whether a last event with the token counts comes before [DONE]; default false.", False)
    continuous_usage_stats: bool = said("Whether every event has the token counts so far; default false.", False)


class NamesModel(Body):
    model: str | None = said("The model, by a name that /v1/models has; default the first of them.")


class OfEngine(NamesModel):
    """Fields of every request for the engine, in whichever API. A field that is null counts as left out."""

    cache_salt: str | None = said(
        "Prompts share cached prefixes only with prompts of the same salt, of 1 to 256 characters.",
        min_length=1,
        max_length=256,
    )
    priority: int = said(
        "Lower goes first, default 0; other values need a server with --scheduling-policy priority.",
        0,
        ge=-(2**31),
        le=2**31 - 1,
    )
    service_class: str | None = said(
        "The service class, with its objectives and limits; default the server's default class.",
        min_length=1,
        max_length=LONGEST_NAME,
    )


class RequestBody(OfEngine):
    """Fields of every request for the engine in OpenAI's older APIs."""

    user: str | None = said("A name of the end user; it has no effect.")
    service_tier: Literal["auto", "default", "priority", "flex"] | None = said(
        "Selects a service class by OpenAI's names."
    )
    include_timings: bool = said(
        "Whether the answer has the phases of the request, in nanoseconds; default false.", False
    )
    truncate_prompt_tokens: Int | None = said(
        "A longer prompt is cut to so many tokens, from 1 to the context; -1 is as much as fits."
    )
    truncation_side: Literal["left", "right"] | None = said(
        "The end from which a prompt is cut; default left for generation, right for embeddings and scores."
    )


class JsonSchema(Body):
    name: str = said("A name of the schema; it has no effect.", ..., min_length=1, max_length=64)
    description: str | None = said("What the schema is for; it has no effect.")
    schema_: dict[str, Any] = said("The JSON schema that the answer has to satisfy.", ..., alias="schema")
    strict: bool | None = said(
        "Whether keywords that cannot be kept are refused; with false they are left out, and a header names them."
    )


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"] = said("Any text, a JSON object, or what a schema says.", ...)
    json_schema: JsonSchema | None = said("The schema; only with the type json_schema.")


class KvTransferParams(Body):
    do_remote_decode: bool = said("Whether what is computed of the prompt is kept for another server.", False)
    do_remote_prefill: bool = said("Whether another server has computed the prompt.", False)
    remote_host: str | None = said("Where that server gives it away.", max_length=256)
    remote_port: int | None = said("Its port.", ge=0, le=65535)
    remote_request_id: str | None = said("What it is called there.", max_length=64)
    num_tokens: int | None = said("How many tokens are computed.", ge=0, le=MOST)
    content: str | None = said("A hash of these tokens.", max_length=64)
    layout: str | None = said("A hash of the model.", max_length=64)
    signature: str | None = said("A signature of all this.", max_length=128)
    remote_engine_id: NullField = said("As routers for vLLM send it; only null.")
    remote_block_ids: NullField = said("As routers for vLLM send them; only null or none.")


class GenerationBody(RequestBody):
    """Fields that completions and chat completions share."""

    temperature: float | None = said("Randomness, from 0 (the likeliest token) to 100; default 1 or the checkpoint's.")
    top_p: float | None = said(
        "Only the likeliest tokens that have this probability together are drawn; default 1 or the checkpoint's."
    )
    n: Int | None = said("Choices of each prompt, 1 to 128; default 1.")
    stop: StopField = said("Strings that end the text and are not in it: up to 16, of up to 1,024 characters each.")
    stream: bool | None = said("Whether the answer comes token by token, as server-sent events; default false.")
    stream_options: StreamOptions | None = said("What the events of a stream have besides text; only with stream.")
    seed: Int | None = said(
        "The same seed and prompt draw the same tokens again, a whole number of 64 bits; default random."
    )
    presence_penalty: float | None = said(
        "Subtracted from the logits of tokens that the answer has already, -2 to 2; default 0."
    )
    frequency_penalty: float | None = said(
        "Subtracted from a token's logit for each time that the answer has it, -2 to 2; default 0."
    )
    logit_bias: dict[str, float] | None = said(
        "Added to the logits of token ids, which are the keys: up to 1,024, of -100 to 100."
    )
    allowed_token_ids: list[int] | None = said(
        "Only these tokens may come; the model's end token only if it is one of them."
    )

    top_k: Int | None = said(
        "Only so many of the likeliest tokens are drawn; 0 or -1 is all, default all or the checkpoint's."
    )
    min_p: float | None = said(
        "Only tokens this fraction as likely as the likeliest are drawn, 0 to 1; default 0 or the checkpoint's."
    )
    repetition_penalty: float | None = said(
        "Above 1, up to 100, tokens that were there become less likely, below more; default 1 or the checkpoint's."
    )
    ignore_eos: bool = said("Whether the answer goes on behind the model's end token; default false.", False)
    min_tokens: Int | None = said("Tokens before which no stop string and no end token ends the answer; default 0.")
    stop_token_ids: list[int] | None = said("Token ids that end the answer, up to 128.")
    include_stop_str_in_output: bool = said(
        "Whether the text contains the stop string that ended it; default false.", False
    )
    skip_special_tokens: bool = said("Whether special tokens are left out of the text; default true.", True)
    prompt_logprobs: Int | None = said(
        "Alternatives, 0 to 20, with log-probabilities for each token of the prompt; default none."
    )
    return_token_ids: bool | None = said("Whether the answer has the token ids of prompt and text; default false.")
    return_tokens_as_token_ids: bool | None = said(
        "Whether log-probabilities name tokens by their ids, as token_id:5; default false."
    )
    response_format: ResponseFormat | None = said("What the text of the answer has to be.")
    structured_outputs: dict[str, Any] | None = said(
        "The same in vLLM's form: one of json, json_object, regex, choice and grammar (Lark or GBNF)."
    )
    guided_json: Any = said("A JSON schema, or its text: an older name of structured_outputs.json.")
    guided_regex: str | None = said("An older name of structured_outputs.regex.")
    guided_choice: list[str] | None = said("An older name of structured_outputs.choice.")
    guided_grammar: str | None = said("An older name of structured_outputs.grammar.")
    use_beam_search: bool | None = said(
        "Whether the likeliest texts are searched for, in place of drawing tokens; default false."
    )
    kv_transfer_params: KvTransferParams | None = said(
        "Hands the prompt over to another server, or says where another has computed it; only with --role."
    )
    best_of: Int | None = said("Beams of a beam search, n to 64; default n. Without beam search the same as n.")
    length_penalty: float | None = said(
        "With beam search, texts are ranked by their log-probability divided by their length to this power, -10 to 10; "
        "default 1."
    )
    early_stopping: EarlyStoppingField = said(
        "When a beam search ends: true at best_of texts, false (default) if no beam is better, never if none can be."
    )


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: PromptField = said("What is continued: a text, token ids, or a list of up to 1,024 of either.", ...)
    max_tokens: Int | None = said(
        "Tokens of an answer at most, default 16 or the checkpoint's; 0 only with echo or prompt_logprobs."
    )
    echo: bool | None = said("Whether the text begins with the prompt; default false.")
    logprobs: Int | None = said(
        "Alternatives, 0 to 20, whose log-probabilities are given for each token; default none."
    )
    add_special_tokens: bool = said("Whether the tokenizer adds its special tokens to the prompt; default true.", True)

    @property
    def prompt_only(self) -> bool:
        """Whether nothing is to follow the prompt."""
        return self.max_tokens == 0 and (bool(self.echo) or self.prompt_logprobs is not None)


class InferBody(Body):
    """POST /infer: the least that asks for a text."""

    prompt: str = said("What is continued.", ...)
    max_tokens: Int | None = said("Tokens of the text at most; default 100.", 100)
    temperature: float | None = said("Randomness, from 0 (the likeliest token) to 100; default 0.7.", 0.7)
    request_id: str | None = said("What the answer calls the request; default its header x-request-id.", max_length=128)


class Message(Body):
    """A message, as a client wrote it or as an answer contained it, with all the fields of answers."""

    model_config = ConfigDict(json_schema_extra={"anyOf": MESSAGES})

    role: Literal["system", "developer", "user", "assistant", "tool"] = said("Who speaks.", ...)
    content: ContentField = said(
        "The text, or a list of parts of type text; null in a message of the assistant is an empty text."
    )
    name: str | None = said("The speaker's name, for templates that show it.")
    refusal: NullField = said("As answers have it; only null.")
    annotations: NullField = said("As answers have them; only null or none.")
    audio: NullField = said("As answers have it; only null.")
    function_call: NullField = said("As older answers have it; only null, as tool_calls replaced it.")
    tool_calls: Annotated[list[ToolCall] | None, FailFast()] = said("Calls of tools, in a message of the assistant.")
    parsed: Any = said("As the openai client adds it to an answer; it has no effect.")
    tool_call_id: str | None = said("The call that a message of a tool answers.", max_length=256)
    reasoning_content: str | None = said("What the assistant thought before it answered, for templates that show it.")
    reasoning: str | None = said("Another name of reasoning_content.")


class ChatFields(Body):
    """How messages become a prompt."""

    messages: Annotated[list[Message], FailFast()] = said(
        "The conversation so far, 1 to 4,096 messages.", ..., min_length=1, max_length=MAX_MESSAGES
    )
    tools: Annotated[list[Tool] | None, FailFast()] = said(
        f"Functions that the model may call, up to {MAX_TOOLS}, for models whose chat template knows tools."
    )
    tool_choice: ToolChoiceField = said("Whether the model may call tools: auto, the default with tools, or none.")
    add_generation_prompt: bool = said("Whether the prompt ends with the beginning of an answer; default true.", True)
    continue_final_message: bool = said(
        "Whether the answer continues the last message, instead of following it; default false.", False
    )
    chat_template_kwargs: dict[str, Any] | None = said("Further variables of the chat template.")
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = said(
        "A variable of the chat template, which must have it."
    )
    add_special_tokens: bool = said(
        "Whether the tokenizer adds its special tokens to those of the template; default false.", False
    )


class Prediction(Body):
    type: Literal["content"] = said("A text is all that is known.", ...)
    content: ContentField = said("The text, or a list of parts of type text.", ...)


class ChatBody(GenerationBody, ChatFields):
    """POST /v1/chat/completions.

    Attributes:
        reduces_max_tokens: a max_tokens that does not fit the context is reduced, and is no error.
    """

    reduces_max_tokens: ClassVar[bool] = False

    max_tokens: Int | None = said("The older name of max_completion_tokens.")
    max_completion_tokens: Int | None = said(
        "Tokens of an answer at most; default the rest of the context, or the checkpoint's."
    )
    logprobs: bool | None = said("Whether each token has its log-probability; default false.")
    top_logprobs: Int | None = said(
        "Alternatives, 0 to 20, whose log-probabilities are given too; only with logprobs, default 0."
    )
    parallel_tool_calls: bool | None = said("Whether an answer may have several calls of tools; default true.")
    include_reasoning: bool = said("Whether the answer has what the model thought before it; default true.", True)
    prediction: Prediction | None = said(
        "What most of the answer may say, as a file before an edit; only with --speculative-config."
    )
    modalities: list[Literal["text"]] | None = said(
        "What the answer consists of; only text.", min_length=1, max_length=1
    )


class EmbeddingBody(RequestBody):
    """POST /v1/embeddings."""

    input: PromptField = said("What vectors are wanted of: a text, token ids, or a list of up to 2,048 of either.", ...)
    encoding_format: Literal["float", "base64"] | None = said(
        "Vectors as lists of numbers (float, the default), or as base64 of little-endian float32."
    )
    dimensions: Int | None = said("Length of the vectors, for models that can shorten them; default the model's.")
    add_special_tokens: bool = said("Whether the tokenizer adds its special tokens to the texts; default true.", True)


class ScoreBody(RequestBody):
    """POST /v1/score: `text_1` and `text_2`, or by their other names `queries` and `documents`."""

    model_config = ConfigDict(
        json_schema_extra={"oneOf": [{"required": ["text_1", "text_2"]}, {"required": ["queries", "documents"]}]}
    )

    text_1: TextsField = said("The texts that are compared: one, or as many as text_2 has.")
    text_2: TextsField = said("The texts that they are compared with.")
    queries: TextsField = said("Another name of text_1.")
    documents: TextsField = said("Another name of text_2.")
    instruction: str | None = said("What relevance means here, for models whose template takes it.")


class RerankBody(RequestBody):
    """POST /v1/rerank."""

    query: str = said("The text that documents are to be relevant to.", ...)
    documents: DocumentsField = said("Texts, or objects with a `text`.", ...)
    top_n: int | None = said("So many of the most relevant are returned, 0 or more; default all.", ge=0, le=2**31 - 1)
    return_documents: bool | None = said("Whether the answer repeats the documents; default true.")
    instruction: str | None = said("What relevance means here, for models whose template takes it.")


class TokenizeText(NamesModel):
    """POST /tokenize, of a text."""

    prompt: str = said(
        "The text; up to 4,194,304 characters and bytes, or what the context holds if that is more.", ...
    )
    add_special_tokens: bool = said("Whether the tokenizer adds its special tokens; default true.", True)
    return_token_strs: bool | None = said("Whether each token is also given as a text; default false.")


class TokenizeChat(ChatFields, NamesModel):
    """POST /tokenize, of messages."""

    return_token_strs: bool | None = said("Whether each token is also given as a text; default false.")


class DetokenizeBody(NamesModel):
    """POST /detokenize."""

    tokens: IdsField = said("The token ids.", ...)


@dataclass(frozen=True, slots=True)
class Unsupported:
    """An OpenAI field that this server does not have."""

    reason: str  # why it is refused
    # Whether a value changes nothing in the answer of a server without the field, and so is taken; null always is.
    # Clients send such values in every request.
    no_op: Callable[[Any], bool] = lambda value: False


_NO_TOOLS = "only chat completions have tools"
UNSUPPORTED = {
    "suffix": Unsupported("inserting before a suffix is not supported", lambda value: value == ""),
    "tools": Unsupported(_NO_TOOLS, lambda value: value == []),
    "tool_choice": Unsupported(_NO_TOOLS, lambda value: value in ("none", "auto")),
    "parallel_tool_calls": Unsupported(_NO_TOOLS, lambda value: isinstance(value, bool)),
    "functions": Unsupported("give them as tools", lambda value: value == []),
    "function_call": Unsupported("give tool_choice", lambda value: value in ("none", "auto")),
    "audio": Unsupported("only text is produced"),
    "prediction": Unsupported("only chat completions have a prediction"),
    "verbosity": Unsupported("state the length of the answer in a message"),
    "web_search_options": Unsupported("web search is not supported"),
    "store": Unsupported("nothing is stored", lambda value: value is False),
    "metadata": Unsupported("a JSON object is accepted and ignored", lambda value: isinstance(value, dict)),
    "safety_identifier": Unsupported("it must be a string", lambda value: isinstance(value, str)),
    "prompt_cache_key": Unsupported("it must be a string", lambda value: isinstance(value, str)),
    "prompt_cache_retention": Unsupported("it must be a string", lambda value: isinstance(value, str)),
    "prompt_cache_options": Unsupported("a JSON object has no effect", lambda value: isinstance(value, dict)),
    "moderation": Unsupported("nothing is moderated"),
    # Fields of vLLM's own.
    "guided_decoding_backend": Unsupported("it must be a string", lambda value: isinstance(value, str)),
    "guided_whitespace_pattern": Unsupported("white space in JSON is bounded in one way"),
    "bad_words": Unsupported("give the tokens a logit_bias of -100", lambda value: value == []),
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
    "kv_transfer_params": Unsupported("only prompts of completions are handed over"),
    "vllm_xargs": Unsupported("there are no extensions", lambda value: value == {}),
    "request_id": Unsupported("send it in the header x-request-id"),
    "return_token_offsets": Unsupported("offsets are not returned", lambda value: value is False),
    "echo": Unsupported("use continue_final_message", lambda value: value is False),
    "embed_dtype": Unsupported("vectors are float32", lambda value: value == "float32"),
    "endianness": Unsupported("vectors are little-endian", lambda value: value in ("native", "little")),
    "max_tokens_per_doc": Unsupported("use truncate_prompt_tokens", lambda value: value == 0),
}
