"""Which server the scripted server pretends to be: its routes beside the streams, and what it refuses."""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import msgspec

from tests.bench.script import Script

KINDS = ("unknown", "headway", "vllm", "sglang", "llamacpp", "openai")
FIELDS_OF_STREAMS = {"model", "prompt", "messages", "max_tokens", "max_completion_tokens", "stream", "stream_options"}
OPENAI_FIELDS = FIELDS_OF_STREAMS | {"temperature", "top_p", "n", "stop", "seed", "user", "logit_bias", "script"}
HEADWAY_FIELDS = OPENAI_FIELDS | {"top_k", "ignore_eos", "min_tokens", "cache_salt", "priority", "include_timings"}
Answer = tuple[int, Any, dict[str, str]]


def _error(status: int, message: str, param: str | None = None, headers: dict[str, str] | None = None) -> Answer:
    error = {"message": message, "type": "invalid_request_error", "param": param, "code": None}
    return status, {"error": error}, headers or {}


class StreamOptions(msgspec.Struct):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class GenerationRequest(msgspec.Struct):
    """The fields that matter of a body; `raw` is all of it."""

    model: str = ""
    prompt: Any = None
    messages: list[dict[str, Any]] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    include_timings: bool = False
    script: Script | None = None
    raw: bytes = b""

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def wants_continuous_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.continuous_usage_stats

    @property
    def shown(self) -> dict[str, Any]:
        """The body for the log."""
        content: dict[str, Any] = json.loads(self.raw)
        return content

    def scripted(self, default: Script) -> Script:
        """The script that came along, or the default one."""
        if self.script is not None:
            return self.script
        text = self.messages[-1]["content"] if self.messages else self.prompt
        if isinstance(text, str) and text.startswith("{"):
            return msgspec.json.decode(text, type=Script)
        return default

    def num_chunks(self, script: Script) -> int:
        if script.chunks is not None:
            return script.chunks
        wanted = self.max_completion_tokens or self.max_tokens or 16
        return -(-wanted // script.tokens_of(0))

    def usage(self, script: Script, tokens: int) -> dict[str, Any]:
        prompt = script.prompt_tokens
        if prompt is None:
            texts = [message["content"] for message in self.messages] if self.messages else [self.prompt]
            prompt = sum(len(text.split() if isinstance(text, str) else text) for text in texts)
        usage: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}
        if script.cached_tokens is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": script.cached_tokens}
        return usage

    def whole_answer(self, script: Script, is_chat: bool) -> Answer:
        """The answer to a request that does not stream; its only failure is a status."""
        if script.fail == "status":
            return _error(script.status, script.message)
        count = self.num_chunks(script)
        text = "".join(map(script.text_of, range(count)))
        content = {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
        usage = self.usage(script, sum(map(script.tokens_of, range(count))))
        choice = {"index": 0, **content, "finish_reason": script.finish_reason}
        return 200, {"id": "scripted", "model": self.model, "choices": [choice], "usage": usage}, {}


@dataclass
class Asked:
    """A request as it came."""

    method: str
    path: str
    headers: dict[bytes, bytes]
    body: bytes

    @property
    def is_chat(self) -> bool:
        return self.path == "/v1/chat/completions"

    @cached_property
    def generation_body(self) -> GenerationRequest:
        request = msgspec.json.decode(self.body, type=GenerationRequest)
        request.raw = self.body
        return request


@dataclass
class Settings:
    kind: str = "unknown"
    models: tuple[str, ...] = ("scripted",)
    max_model_len: int = 32768
    api_key: str = ""
    loading_for_s: float = 0.0
    path_prefix: str = ""
    default_script: Script = field(default_factory=Script)
    keep_log: bool = True

    def headers(self) -> dict[str, str]:
        return {"server": "llama.cpp"} if self.kind == "llamacpp" else {}

    def refusal(self, asked: Asked, is_loading: bool) -> Answer | None:
        """The answer to a request that generates nothing, or None."""
        if self.api_key and asked.headers.get(b"authorization") != b"Bearer " + self.api_key.encode():
            return _error(401, "this server needs a valid API key")
        if is_loading:
            return _error(503, "the model is loading", headers={"retry-after": "1"})
        if asked.method != "POST":
            return _error(405, f"{asked.method} is not allowed")
        if self.kind == "llamacpp":  # it serves whatever it has loaded, under any name
            return None
        try:
            model = asked.generation_body.model
        except ValueError as error:
            return _error(400, f"the body is wrong: {error}")
        if model and model not in self.models:
            return _error(404, f"The model `{model}` does not exist.", "model")
        return self._refused_field(asked)

    def _refused_field(self, asked: Asked) -> Answer | None:
        if self.kind not in ("openai", "headway"):
            return None
        content = json.loads(asked.body)
        if self.kind == "openai" and asked.is_chat and "max_tokens" in content:
            return _error(
                400,
                "Unsupported parameter: 'max_tokens' is not supported with this model. "
                "Use 'max_completion_tokens' instead.",
                "max_tokens",
            )
        options = content.get("stream_options") or {}
        known = HEADWAY_FIELDS if self.kind == "headway" else OPENAI_FIELDS
        unknown = [name for name in content if name not in known]
        if self.kind == "openai":
            unknown += [f"stream_options.{name}" for name in options if name != "include_usage"]
        if not unknown:
            return None
        return _error(400, f"Unrecognized request argument supplied: {unknown[0]}", unknown[0])


def plain_answer(settings: Settings, asked: Asked, is_loading: bool) -> Answer:
    """The answer on every other route."""
    kind, path = settings.kind, asked.path
    if path == "/v1/models":
        refusal = settings.refusal(Asked("POST", path, asked.headers, b"{}"), is_loading and kind != "headway")
        return refusal or (200, {"object": "list", "data": [_card(settings, name) for name in settings.models]}, {})
    if path == "/health" and kind not in ("unknown", "openai"):
        return _error(503, "loading") if is_loading else (200, {}, {})
    answers: dict[str, tuple[tuple[str, ...], Any]] = {
        "/version": (("headway", "vllm"), {"version": {"headway": "0.1.0"}.get(kind, "0.32.0")}),
        "/metrics": (("headway", "vllm", "sglang", "llamacpp"), f"# TYPE {kind}:num_requests_running gauge\n"),
        "/get_server_info": (("sglang",), {"version": "0.5.0", "model_path": settings.models[0]}),
        "/props": (("llamacpp",), {"build_info": "b1-scripted", "default_generation_settings": {"n_ctx": 4096}}),
    }
    kinds, content = answers.get(path, ((), None))
    if kind in kinds:
        return 200, content, {}
    if path == "/tokenize" and kind in ("headway", "vllm", "llamacpp"):
        return _tokenize(settings, json.loads(asked.body))
    close = difflib.get_close_matches(path, answers, 1)
    return _error(404, f"there is no {path}" + (f"; is {close[0]} meant?" if close else ""))


def _tokenize(settings: Settings, content: dict[str, Any]) -> Answer:
    """A word is a token."""
    wanted = "content" if settings.kind == "llamacpp" else "prompt"
    if wanted not in content:
        return _error(400, f"{wanted} is missing", wanted)
    tokens = list(range(len(content[wanted].split())))
    if settings.kind == "llamacpp":
        return 200, {"tokens": tokens}, {}
    return 200, {"count": len(tokens), "max_model_len": settings.max_model_len, "tokens": tokens}, {}


def _card(settings: Settings, name: str) -> dict[str, Any]:
    owner = {"unknown": "somebody"}.get(settings.kind, settings.kind)
    card: dict[str, Any] = {"id": name, "object": "model", "created": 1, "owned_by": owner}
    if settings.kind in ("headway", "vllm", "sglang"):
        card["max_model_len"] = settings.max_model_len
    if settings.kind == "llamacpp":
        card["meta"] = {"n_ctx_train": 32768}
    return card
