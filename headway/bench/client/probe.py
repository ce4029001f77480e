"""What a server is and understands, found before a run with a handful of tiny requests."""

from __future__ import annotations

import asyncio
import dataclasses
import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from headway.bench.client.asking import Asker, Reply, asking
from headway.bench.client.endpoint import Endpoint
from headway.bench.client.request_body import as_messages, as_text
from headway.bench.client.trial import Tried, count_by_stream, try_stream
from headway.bench.errors import BenchError
from headway.bench.request import Prompt

MAX_NAMES_SHOWN = 8
COUNTS_AT_ONCE = 8
NAMES = {"headway": "Headway", "vllm": "vLLM", "sglang": "SGLang", "llamacpp": "llama.cpp", "unknown": "unknown"}
# Honoured, not only accepted: known of these servers; of others nobody can tell from outside.
KNOWS_IGNORE_EOS = frozenset({"headway", "vllm", "sglang", "llamacpp"})
_VERSION_AT = {
    "headway": ("/version", "version"),
    "vllm": ("/version", "version"),
    "sglang": ("/get_server_info", "version"),
    "llamacpp": ("/props", "build_info"),
}


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What is known of a server.

    Args:
        kind: a key of NAMES.
        version: None where it does not tell.
        model: the one that is asked for; "" when the server lists none and none was given.
        models: those it lists; empty where it has no list.
        max_model_len: tokens of prompt and answer together; None where it does not tell.
        metrics, tokenize: whether it has these routes.
        ignore_eos: honoured; False when it is refused, None when it is not, but nobody can tell or it was not tried.
        timings: Headway's `include_timings` is honoured.
        usage, continuous_usage: `stream_options.include_usage` and `continuous_usage_stats` are.
        token_id_prompts: /v1/completions takes token ids.
        max_tokens_field: which of the two names it takes.
    """

    kind: str
    version: str | None
    model: str
    models: tuple[str, ...]
    max_model_len: int | None
    metrics: bool
    tokenize: bool
    ignore_eos: bool | None
    timings: bool
    usage: bool
    continuous_usage: bool
    token_id_prompts: bool
    max_tokens_field: Literal["max_tokens", "max_completion_tokens"]

    @property
    def name(self) -> str:
        return NAMES[self.kind]

    def applied_to(self, endpoint: Endpoint) -> Endpoint:
        """The endpoint, asked as this server understands it: with all that helps a measurement.

        Raises:
            BenchError: it was to be asked for something that this server refuses.
        """
        if endpoint.ignore_eos and self.ignore_eos is False:
            raise BenchError("--ignore-eos was given, and the server refuses the field ignore_eos; leave it out")
        return dataclasses.replace(
            endpoint,
            model=self.model or None,
            include_timings=self.timings,
            include_usage=self.usage,
            continuous_usage=self.continuous_usage,
            max_tokens_field=self.max_tokens_field,
        )


async def probe(endpoint: Endpoint, ready_timeout_s: float = 0.0) -> ServerFacts:
    """Ask a server what it is. About a dozen requests, the largest for two tokens.

    Args:
        ready_timeout_s: wait this long for a server that refuses connections or answers 503.

    Raises:
        BenchError: it cannot be reached, does not accept the key, does not serve the model, or does not answer what
            every OpenAI-compatible server answers.
    """
    async with asking(endpoint, ready_timeout_s) as asker:
        cards = await _cards(asker)
        kind = await _kind(asker, cards)
        model = _chosen(endpoint.model, cards)
        tried = await try_stream(asker, _wishes(endpoint, model, kind))
        if kind == "headway":
            cards = await _cards(asker)  # while it loads, it does not know its max_model_len
        version, max_model_len = await _version_and_length(asker, kind, cards, model)
        return ServerFacts(
            kind=kind,
            version=version,
            model=model,
            models=tuple(str(card["id"]) for card in cards),
            max_model_len=max_model_len,
            metrics=_is_metrics(await asker.look("GET", "/metrics")),
            tokenize=await _counted(asker, _tokenize_body(kind, model, Prompt(text="Hello"))) is not None,
            ignore_eos=_ignore_eos(endpoint, kind, tried),
            timings=tried.record.timings is not None,
            usage=tried.record.output_tokens is not None,
            continuous_usage=tried.record.tokens_per_chunk_known,
            token_id_prompts=await _takes_token_ids(asker, tried.endpoint),
            max_tokens_field=tried.endpoint.max_tokens_field,
        )


async def count_tokens(endpoint: Endpoint, facts: ServerFacts, prompts: Sequence[Prompt]) -> list[int]:
    """Prompt tokens as the server counts them, its chat template and special tokens included.

    By its /tokenize where it has one for this API, else by the `usage` of a request for one token.

    Raises:
        BenchError: it cannot be reached, or tells neither.
    """
    endpoint = facts.applied_to(endpoint)
    gate = asyncio.Semaphore(COUNTS_AT_ONCE)

    async def count(prompt: Prompt) -> int:
        async with gate:
            body = _tokenize_body(facts.kind, facts.model, prompt, is_chat=endpoint.api == "chat")
            found = await _counted(asker, body) if facts.tokenize and body is not None else None
            if found is None:
                found = await count_by_stream(asker, endpoint, prompt)
            if found is None:
                raise BenchError("the server tells no token counts (no /tokenize, no usage); give a --tokenizer")
            return found

    async with asking(endpoint) as asker:
        return list(await asyncio.gather(*map(count, prompts)))


# --- who it is --------------------------------------------------------------------------------------


async def _cards(asker: Asker) -> list[dict[str, Any]]:
    """Entries of /v1/models that have an id; none where there is no such route."""
    found = (await asker.ask("GET", "/v1/models")).content.get("data")
    return [card for card in found if isinstance(card, dict) and "id" in card] if isinstance(found, list) else []


def _chosen(wanted: str | None, cards: list[dict[str, Any]]) -> str:
    names = [str(card["id"]) for card in cards]
    if wanted is None:
        return names[0] if names else ""
    if names and wanted not in names:
        # Nearest first; sorting keeps the server's order among equals.
        names.sort(key=lambda name: -difflib.SequenceMatcher(None, wanted.lower(), name.lower()).ratio())
        more = f" and {len(names) - MAX_NAMES_SHOWN} more" if len(names) > MAX_NAMES_SHOWN else ""
        raise BenchError(f"--model is {wanted!r}; the server serves {', '.join(names[:MAX_NAMES_SHOWN])}{more}")
    return wanted


async def _kind(asker: Asker, cards: list[dict[str, Any]]) -> str:
    """By who owns the first model, as each of these servers says; else by what only one of them has."""
    owner = str(cards[0].get("owned_by", "")).lower() if cards else ""
    if owner in _VERSION_AT:
        return owner
    props = await asker.look("GET", "/props")
    if props.headers_by_name.get(b"server") == b"llama.cpp" or "default_generation_settings" in props.content:
        return "llamacpp"
    metrics = (await asker.look("GET", "/metrics")).bytes
    return next((kind for kind in _VERSION_AT if f"\n# TYPE {kind}:".encode() in b"\n" + metrics), "unknown")


async def _version_and_length(
    asker: Asker, kind: str, cards: list[dict[str, Any]], model: str
) -> tuple[str | None, int | None]:
    version: str | None = None
    length = next((card.get("max_model_len") for card in cards if card["id"] == model), None)
    if kind in _VERSION_AT:
        route, key = _VERSION_AT[kind]
        content = (await asker.look("GET", route)).content
        version = str(content[key]) if key in content else None
        settings = content.get("default_generation_settings")
        if length is None and isinstance(settings, dict):
            length = settings.get("n_ctx")
    return version, length if isinstance(length, int) else None


def _is_metrics(reply: Reply) -> bool:
    return reply.status == 200 and b"# TYPE " in reply.bytes


# --- what it understands ----------------------------------------------------------------------------


def _wishes(endpoint: Endpoint, model: str, kind: str) -> Endpoint:
    """All that would help a measurement, and that this kind of server may know."""
    return dataclasses.replace(
        endpoint,
        model=model or None,
        include_usage=True,
        continuous_usage=True,
        ignore_eos=endpoint.ignore_eos or kind in KNOWS_IGNORE_EOS,
        include_timings=kind == "headway",
    )


def _ignore_eos(endpoint: Endpoint, kind: str, tried: Tried) -> bool | None:
    if tried.endpoint.ignore_eos:
        return True if kind in KNOWS_IGNORE_EOS else None
    return False if endpoint.ignore_eos or kind in KNOWS_IGNORE_EOS else None


async def _takes_token_ids(asker: Asker, endpoint: Endpoint) -> bool:
    """A server that takes the list for text would count other than three tokens."""
    if endpoint.api == "chat":
        return False
    return await count_by_stream(asker, endpoint, Prompt(token_ids=(1, 2, 3))) == 3


def _tokenize_body(kind: str, model: str, prompt: Prompt, is_chat: bool = False) -> dict[str, Any] | None:
    """Of /tokenize; None when the server's has no form for this prompt."""
    if prompt.token_ids is not None:
        return None
    if kind == "llamacpp":
        return None if is_chat else {"content": as_text(prompt), "add_special": True}
    body: dict[str, Any] = {"messages": as_messages(prompt)} if is_chat else {"prompt": as_text(prompt)}
    return {"model": model, **body} if model else body


async def _counted(asker: Asker, body: dict[str, Any] | None) -> int | None:
    tokens = (await asker.look("POST", "/tokenize", body)).content.get("tokens")
    return len(tokens) if isinstance(tokens, list) else None
