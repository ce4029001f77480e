"""What a server is and understands, found before a run with a handful of tiny requests."""

from __future__ import annotations

import asyncio
import dataclasses
import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from headway.bench.client.asker import Asker, Reply
from headway.bench.client.failures import RequestFailed
from headway.bench.client.openai_client import receiver
from headway.bench.client.request_body import BodyBuilder, as_messages, as_text
from headway.load.endpoint import Endpoint
from headway.load.errors import BenchError
from headway.load.record import Failure, FailureKind, RequestRecord
from headway.load.request import Prompt

GREETING = Prompt(text="Hello")
_REFUSED = (400, 422)
# Fields that an answer of status 400 may name, and the options of the endpoint that put them into the body.
_OPTIONS_OF = {
    "continuous_usage_stats": ("continuous_usage",),
    "ignore_eos": ("ignore_eos",),
    "cache_salt": ("cache_salt",),
    "include_timings": ("include_timings",),
    "stream_options": ("continuous_usage", "include_usage"),
}
_BEYOND_OPENAI = ("continuous_usage", "ignore_eos", "cache_salt", "include_timings")
MAX_NAMES_SHOWN = 8
_COMPARED, _NAME_CHARS = 1000, 100  # names of models, and how much of one
COUNTS_AT_ONCE = 8
NAMES = {"headway": "Headway", "vllm": "vLLM", "sglang": "SGLang", "llamacpp": "llama.cpp", "unknown": "unknown"}
# Honoured, not only accepted: known of these servers; of others nobody can tell from outside.
KNOWS_IGNORE_EOS = frozenset({"headway", "vllm", "sglang", "llamacpp"})
KNOWS_CACHE_SALT = frozenset({"headway", "vllm"})
# What is among the metrics of a server only if it speculates.
SPECULATES = {"headway": b"spec_decode_num_speculative_tokens", "vllm": b"spec_decode_num_drafts"}
_VERSION_AT = {
    "headway": ("/version", "version"),
    "vllm": ("/version", "version"),
    "sglang": ("/get_server_info", "version"),
    "llamacpp": ("/props", "build_info"),
}


@dataclass(frozen=True, slots=True)
class Server:
    """What is known of a server."""

    # How it is asked: as the user wants it, with all that helps a measurement and that it understands. It has a
    # cache_salt where the server honours one.
    endpoint: Endpoint
    kind: str  # a key of NAMES
    root: str  # the folder, or the hub's id, of the model that it serves; where it does not tell, the model's name
    version: str | None  # None where it does not tell
    max_model_len: int | None  # tokens of prompt and answer together; None where it does not tell
    # metrics, tokenize: whether it has these routes.
    metrics: bool
    tokenize: bool
    token_id_prompts: bool  # /v1/completions takes token ids
    speculates: bool = False  # its metrics say that it tries drafts (Headway, vLLM)

    @property
    def name(self) -> str:
        return NAMES[self.kind]

    @property
    def about(self) -> dict[str, Any]:
        """What results say about the server."""
        model = self.endpoint.model or ""
        return {"name": self.name, "version": self.version, "model": model, "max_model_len": self.max_model_len}


async def probe(wanted: Endpoint, ready_timeout_s: float = 0.0, may_ignore_eos: bool = False) -> Server:
    """Ask a server what it is. About a dozen requests, the largest for two tokens.

    Args:
        wanted: how the user wants it to be asked; without a model's name, for the first one that is served.
        ready_timeout_s: wait this long for a server that refuses connections or answers 503.
        may_ignore_eos: ask for all the tokens where the server is known to honour it.

    Raises:
        BenchError: it cannot be reached, does not accept the key, does not serve the model, refuses what is wanted, or
            does not answer what every OpenAI-compatible server answers.
    """
    async with Asker.open(wanted, ready_timeout_s) as asker:
        cards = await _cards(asker)
        kind = await _kind(asker, cards)
        model = _chosen(wanted.model, cards)
        wishes = dataclasses.replace(
            wanted,
            model=model or None,
            include_usage=wanted.generates,
            continuous_usage=wanted.generates,
            ignore_eos=wanted.ignore_eos or (may_ignore_eos and kind in KNOWS_IGNORE_EOS),
            cache_salt="probe" if kind in KNOWS_CACHE_SALT and "cache_salt" not in wanted.extra_body else "",
            include_timings=kind == "headway",
        )
        accepted, record = await negotiate(asker, wishes)
        if wanted.ignore_eos and not accepted.ignore_eos:
            raise BenchError("--ignore-eos was given, and the server refuses the field 'ignore_eos'; leave it out")
        if kind == "headway":
            cards = await _cards(asker)  # while it loads, it does not know its max_model_len
        version, max_model_len = await _version_and_length(asker, kind, cards, model)
        metrics = await asker.look("GET", "/metrics")
        return Server(
            endpoint=dataclasses.replace(
                accepted,
                include_timings=record.timings is not None,
                include_usage=accepted.generates and record.output_tokens is not None,
                continuous_usage=record.tokens_per_chunk_known,
            ),
            kind=kind,
            root=next((str(card["root"]) for card in cards if card["id"] == model and card.get("root")), model),
            version=version,
            max_model_len=max_model_len,
            metrics=_is_metrics(metrics),
            speculates=_is_metrics(metrics) and SPECULATES.get(kind, SPECULATES["vllm"]) in metrics.raw,
            tokenize=await _counted(asker, _tokenize_body(kind, model, Prompt(text="Hello"))) is not None,
            token_id_prompts=await _takes_token_ids(asker, accepted),
        )


async def count_tokens(server: Server, prompts: Sequence[Prompt]) -> list[int]:
    """Prompt tokens as the server counts them, its chat template and special tokens included.

    By its /tokenize where it has one for this API, else by the `usage` of a request for one token.

    Raises:
        BenchError: it cannot be reached, or tells neither.
    """
    endpoint, gate = server.endpoint, asyncio.Semaphore(COUNTS_AT_ONCE)

    async def count(prompt: Prompt) -> int:
        async with gate:
            body = _tokenize_body(server.kind, endpoint.model or "", prompt, is_chat=endpoint.is_chat)
            found = await _counted(asker, body) if server.tokenize and body is not None else None
            if found is None:
                found = await count_by_answer(asker, endpoint, prompt)
            if found is None:
                raise BenchError("the server reports no token counts (no /tokenize, no usage); give --tokenizer")
            return found

    async with Asker.open(endpoint) as asker:
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
        if (named := next((str(card["id"]) for card in cards if card.get("root") == wanted), None)) is not None:
            return named  # a server may call a folder by another name
        # Nearest first; sorting keeps the server's order among equals.
        near = [name[:_NAME_CHARS] for name in names[:_COMPARED]]
        near.sort(key=lambda name: -difflib.SequenceMatcher(None, wanted.lower(), name.lower()).ratio())
        more = f" and {len(names) - MAX_NAMES_SHOWN} more" if len(names) > MAX_NAMES_SHOWN else ""
        raise BenchError(f"--model is {wanted!r}; the server serves {', '.join(near[:MAX_NAMES_SHOWN])}{more}")
    return wanted


async def _kind(asker: Asker, cards: list[dict[str, Any]]) -> str:
    """The kind of server, from the owner of its first model, or from what only one kind has."""
    owner = str(cards[0].get("owned_by", "")).lower() if cards else ""
    if owner in _VERSION_AT:
        return owner
    props = await asker.look("GET", "/props")
    if props.response_headers.get(b"server") == b"llama.cpp" or "default_generation_settings" in props.content:
        return "llamacpp"
    metrics = (await asker.look("GET", "/metrics")).raw
    return next((kind for kind in _VERSION_AT if f"\n# TYPE {kind}:".encode() in b"\n" + metrics), "unknown")


async def _version_and_length(
    asker: Asker, kind: str, cards: list[dict[str, Any]], model: str
) -> tuple[str | None, int | None]:
    version: str | None = None
    length = next((card.get("max_model_len") for card in cards if card["id"] == model), None)
    if kind in _VERSION_AT:
        route, key = _VERSION_AT[kind]
        content = (await asker.look("GET", route)).content
        version = str(content[key])[:_NAME_CHARS] if key in content else None
        settings = content.get("default_generation_settings")
        if length is None and isinstance(settings, dict):
            length = settings.get("n_ctx")
    return version, length if isinstance(length, int) else None


def _is_metrics(reply: Reply) -> bool:
    return reply.status == 200 and b"# TYPE " in reply.raw


# --- what it understands ----------------------------------------------------------------------------


async def _takes_token_ids(asker: Asker, endpoint: Endpoint) -> bool:
    """A server that takes the list for text would count other than three tokens, and the one that ends a text."""
    if endpoint.api not in ("completions", "embeddings"):
        return False
    return await count_by_answer(asker, endpoint, Prompt(token_ids=(1, 2, 3))) in (3, 3 + (not endpoint.generates))


def _tokenize_body(kind: str, model: str, prompt: Prompt, is_chat: bool = False) -> dict[str, Any] | None:
    """The body of a request to /tokenize; None when that of the server cannot take this prompt."""
    if prompt.token_ids is not None:
        return None
    if kind == "llamacpp":
        return None if is_chat else {"content": as_text(prompt), "add_special": True}
    body: dict[str, Any] = {"messages": as_messages(prompt)} if is_chat else {"prompt": as_text(prompt)}
    return {"model": model, **body} if model else body


async def _counted(asker: Asker, body: dict[str, Any] | None) -> int | None:
    tokens = (await asker.look("POST", "/tokenize", body)).content.get("tokens")
    return len(tokens) if isinstance(tokens, list) else None


async def negotiate(asker: Asker, wanted: Endpoint) -> tuple[Endpoint, RequestRecord]:
    """Ask for two tokens, a vector or a score, leaving out what the server refuses.

    Returns:
        The endpoint as the server accepted it, and the record of the answer; its times mean nothing.

    Raises:
        BenchError: it refuses what every server should know, or its answer cannot be read.
    """
    candidate = wanted
    while True:
        reply = await _ask(asker, candidate, GREETING, max_tokens=2)
        if reply.status not in _REFUSED or reply.failure is None:
            break
        weaker = _reduced(candidate, reply.failure.message)
        if weaker is None:
            raise BenchError(f"the server refuses {_asked_for(candidate)} ({reply.failure.message})")
        candidate = weaker
    record, failure = read_answer(reply, candidate, GREETING)
    if failure is not None and failure.kind is not FailureKind.NO_TOKENS:
        raise BenchError(_advice(failure, candidate))
    return candidate, record


async def count_by_answer(asker: Asker, endpoint: Endpoint, prompt: Prompt) -> int | None:
    """Prompt tokens by the usage of the shortest answer; None when the server refuses it, or gives no usage."""
    reply = await _ask(asker, endpoint, prompt, max_tokens=1)
    record, _ = read_answer(reply, endpoint, prompt)
    return record.prompt_tokens


def read_answer(reply: Reply, endpoint: Endpoint, prompt: Prompt) -> tuple[RequestRecord, Failure | None]:
    """The record of an answer that has come as one piece, and why it is none."""
    record = RequestRecord(0)
    answer = receiver(endpoint, record, prompt)
    answer.headers(reply.status, reply.response_headers, 1)
    try:
        answer.body(reply.raw, 1)
        failure = answer.failure(1)
    except RequestFailed as error:
        failure = error.failure
    answer.settle()
    return record, failure


async def _ask(asker: Asker, endpoint: Endpoint, prompt: Prompt, max_tokens: int) -> Reply:
    fields: dict[str, Any] = BodyBuilder(endpoint).fields(prompt, max_tokens, {})
    if endpoint.generates:
        fields.pop("min_tokens", None)  # more than max_tokens would be refused
        fields[endpoint.length_field] = max_tokens
    return await asker.ask("POST", endpoint.route, fields)


def _reduced(endpoint: Endpoint, said: str) -> Endpoint | None:
    """The endpoint without what a refusal names, or without all that may be refused; None when nothing is left."""
    if "max_completion_tokens" in said and endpoint.max_tokens_field == "max_tokens":
        return dataclasses.replace(endpoint, max_tokens_field="max_completion_tokens")
    for name, options in _OPTIONS_OF.items():
        if name in said and any(getattr(endpoint, option) for option in options):
            return _switched_off(endpoint, options)
    if any(getattr(endpoint, option) for option in _BEYOND_OPENAI):
        return _switched_off(endpoint, _BEYOND_OPENAI)
    return _switched_off(endpoint, ("include_usage",)) if endpoint.include_usage else None


def _switched_off(endpoint: Endpoint, options: Iterable[str]) -> Endpoint:
    changes: dict[str, Any] = {option: type(getattr(endpoint, option))() for option in options}
    return dataclasses.replace(endpoint, **changes)


def _advice(failure: Failure, endpoint: Endpoint) -> str:
    if failure.kind is FailureKind.NOT_FOUND:
        other = "completions" if endpoint.is_chat else "chat"
        hint = f"has it only the {other} API?" if endpoint.generates else "does it serve a model for this?"
        return f"the server does not answer on {endpoint.route} ({failure.message}); {hint}"
    return f"the server fails on {_asked_for(endpoint)} ({failure.kind}: {failure.message}); see its log"


def _asked_for(endpoint: Endpoint) -> str:
    return "a request for two tokens" if endpoint.generates else f"a text at {endpoint.route}"
