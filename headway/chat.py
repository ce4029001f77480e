"""A conversation with any server that has the OpenAI API: one answer after the other, streamed, with its timings."""

from __future__ import annotations

import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

CONNECT_S = 600.0  # without a byte, until a server counts as gone: a long prompt takes its time
_MOST_BYTES = 16 << 20  # longest answer, or line of a stream
NOT_UTF8 = "the text is not UTF-8; convert it first, for example with iconv"
SHORTEST_S = 1e-3  # between the first and the last token: below it they came at once, and there is no rate


_ADDRESS = re.compile(r"(\[[0-9a-fA-F:]+\]|[\w.-]+):\d+(/.*)?")


def as_url(text: str) -> str | None:
    """The address of a server, where the text is one, with or without http://; None for the name of a model."""
    if text.startswith(("http://", "https://")):
        return text
    return f"http://{text}" if _ADDRESS.fullmatch(text) else None


class ChatError(Exception):
    """The server cannot be reached, or refuses: one line."""


@dataclass(slots=True)
class Timings:
    """How an answer came, by this client's clock, in seconds.

    Args:
        tokens: by the server's usage, else the number of pieces.
        stream_s: seconds from the first token to the last. A Headway server says it: several tokens may come at once
            here.
        phases_ms: the times of Headway's ledger, where the server gives one.
    """

    first_s: float = 0.0
    whole_s: float = 0.0
    tokens: int = 0
    phases_ms: dict[str, float] = field(default_factory=dict)
    stream_s: float | None = None

    def words(self) -> str:
        """The timings in one line."""
        if not self.tokens:
            return "no token came"
        said = f"{self.tokens} token{'s' * (self.tokens != 1)}, the first after {1e3 * self.first_s:,.0f} ms"
        stream_s = self.whole_s - self.first_s if self.stream_s is None else self.stream_s
        if self.tokens > 1 and stream_s >= SHORTEST_S:
            rate = (self.tokens - 1) / stream_s
            said += f", then {rate:,.1f} tokens/s ({1e3 / rate:,.1f} ms each)"
        slowest = sorted(self.phases_ms.items(), key=lambda phase: -phase[1])[:3]
        shares = ", ".join(f"{name.replace('_', ' ')} {ms:,.0f} ms" for name, ms in slowest if ms >= 0.5)
        return said + (f"; most of it in {shares}" if shares else "")


class Conversation:
    """Messages so far. A message that is not answered, or only in part, stays out of what comes next.

    Args:
        url: as http://localhost:8000, with or without /v1.
        model: None is the first one that is served.
        options: further fields of each request's body.

    Raises:
        ChatError: the server cannot be reached or serves no model.
    """

    def __init__(
        self, url: str, model: str | None = None, api_key: str | None = None, system: str | None = None, **options: Any
    ) -> None:
        self._base = url.rstrip("/").removesuffix("/v1")
        self._key = api_key
        self._options = {name: value for name, value in options.items() if value is not None}
        cards = self.models()
        if not cards and model is None:
            raise ChatError(f"{self._base} names no model; give --model")
        self.model = model or str(cards[0]["id"])
        self._has_ledger = any(card.get("owned_by") == "headway" for card in cards)
        self.messages: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []
        self.timings = Timings()

    def models(self) -> list[dict[str, Any]]:
        """The cards of the served models."""
        with self._open("/v1/models") as answer:
            found = json.loads(answer.read(_MOST_BYTES)).get("data")
        return [each for each in found if isinstance(each, dict) and "id" in each] if isinstance(found, list) else []

    def ask(self, text: str) -> Iterator[str]:
        """Pieces of the reasoning and the answer as they come; `timings` tells of them at the end. Raises ChatError."""
        messages = [*self.messages, {"role": "user", "content": text}]
        body: dict[str, Any] = {"model": self.model, "messages": messages, "stream": True, **self._options}
        body["stream_options"] = {"include_usage": True}
        if self._has_ledger:
            body["include_timings"] = True
        self.timings, began, pieces, thinks = Timings(), time.monotonic(), [], False
        with self._open("/v1/chat/completions", body) as stream:
            for event in _events(stream):
                if (error := event.get("error")) is not None:
                    raise ChatError(str(error.get("message", error) if isinstance(error, dict) else error))
                thought, piece = self._take(event, time.monotonic() - began)
                if thought:
                    thinks = True
                    yield thought
                if piece:
                    pieces.append(piece)
                    yield "\n\n" + piece if thinks else piece
                    thinks = False
        self.messages = [*messages, {"role": "assistant", "content": "".join(pieces)}]

    def _take(self, event: dict[str, Any], now_s: float) -> tuple[str, str]:
        """Reasoning and text of an event; what it says of times and tokens is kept."""
        timings = self.timings
        if ledger := event.get("timings"):
            timings.phases_ms = {name: ns / 1e6 for name, ns in ledger["phases_ns"].items()}
            timings.stream_s = (ledger["e2e_ns"] - ledger["ttft_ns"]) / 1e9
        choices = event.get("choices") or []
        delta = choices[0].get("delta", {}) if choices else {}
        thought, piece = str(delta.get("reasoning") or delta.get("reasoning_content") or ""), delta.get("content") or ""
        if thought or piece:
            timings.first_s, timings.whole_s = timings.first_s or now_s, now_s
            timings.tokens += 1
        if usage := event.get("usage"):
            timings.tokens = usage.get("completion_tokens") or timings.tokens
        return thought, str(piece)

    def _open(self, path: str, body: dict[str, Any] | None = None) -> Any:
        headers = {"Content-Type": "application/json", "Accept": "text/event-stream, application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        try:
            data = None if body is None else json.dumps(body, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ChatError(NOT_UTF8) from None
        try:
            return urllib.request.urlopen(
                urllib.request.Request(self._base + path, data, headers), timeout=CONNECT_S if data else 10.0
            )
        except urllib.error.HTTPError as error:
            raise ChatError(_refusal(error)) from None
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            said = str(getattr(reason, "strerror", None) or reason).lower()
            raise ChatError(f"no server answers at {self._base} ({said})") from None


def _events(stream: Any) -> Iterator[dict[str, Any]]:
    """The JSON objects of a stream of server-sent events. Raises ChatError where it ends before its end."""
    try:
        while line := stream.readline(_MOST_BYTES):
            text = line.decode(errors="replace").strip()
            if not text.startswith("data:"):
                continue
            content = text.removeprefix("data:").strip()
            if content == "[DONE]":
                return
            yield json.loads(content)
    except (OSError, ValueError) as error:
        raise ChatError(f"the stream broke ({error})") from None


def _refusal(error: urllib.error.HTTPError) -> str:
    try:
        said = json.loads(error.read(_MOST_BYTES))["error"]
        return f"{error.code}: {said['message'] if isinstance(said, dict) else said}"
    except (OSError, ValueError, KeyError, TypeError):
        return f"{error.code} {error.reason}"
