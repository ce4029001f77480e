"""One streamed answer of the scripted server, chunk by chunk at its times."""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING, Any

from tests.bench.script import Script
from tests.bench.served_kinds import GenerationRequest

if TYPE_CHECKING:
    from tests.bench.scripted_server import Connection

GARBAGE = b"\x16\x03\x01 this is not HTTP\r\n\r\n"
MALFORMED = {
    "malformed_sse": "<html>this line is no field of an event</html>",
    "malformed_json": 'data: {"choices": [{"index": 0, "text": "to',
    "not_openai": 'data: {"choices": "none"}',
}


class ScriptedStream:
    """Sends what is due, notes when, and sleeps until the next is due.

    Delays count from when the one before was sent, less what the process stood frozen.
    """

    def __init__(
        self, connection: Connection, script: Script, body: GenerationRequest, is_chat: bool, entry: dict[str, Any]
    ) -> None:
        self._connection = connection
        self._state = connection.state
        self._transport = connection.transport
        self._script = script
        self._is_chat = is_chat
        self._entry = entry
        self._body = body
        self._chunks = body.num_chunks(script)
        self._usage_always = script.continuous_usage and body.wants_continuous_usage
        self._next = -1  # the chunk to send; -1 are the headers
        self._tokens = 0
        self._due_ns = entry["received_ns"] + round(script.headers_delay_s * 1e9)
        self._frozen_ns = self._state.frozen_ns
        self._out: list[bytes] = []
        self._timer: Any = None
        self._over = self._hangs = False
        kind, route = ("chat.completion.chunk", "chatcmpl") if is_chat else ("text_completion", "cmpl")
        head = {"id": f"{route}-{script.id or self._state.count}", "object": kind, "created": 1, "model": body.model}
        self._head = json.dumps(head)[:-1]

    # --- time ---------------------------------------------------------------------------------------

    def begin(self) -> None:
        self._run()

    def client_left(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if not self._over:
            self._over = True
            self._entry["left_ns"] = time.monotonic_ns()

    def _run(self) -> None:
        self._timer = None
        while not (self._over or self._hangs):
            thawed = self._state.frozen_ns - self._frozen_ns
            self._due_ns, self._frozen_ns = self._due_ns + thawed, self._state.frozen_ns
            left_ns = self._due_ns - time.monotonic_ns()
            early_ns = 1_500_000 if self._script.precise else 0
            if left_ns > max(early_ns, 500_000):
                self._flush()
                self._timer = self._state.loop.call_later((left_ns - early_ns) / 1e9, self._run)
                return
            if self._script.precise:
                while time.monotonic_ns() < self._due_ns:
                    pass
            self._step()
        self._flush()

    # --- what is sent -------------------------------------------------------------------------------

    def _step(self) -> None:
        script = self._script
        if self._next < 0:
            if script.fail == "hang" and script.fail_at < 0:
                self._hangs = True
                return
            if script.fail in ("status", "redirect", "garbage", "close", "half_headers", "html"):
                return self._fail_at_once()
            self._send_headers()
            self._next = 0
            self._due_ns = max(self._due_ns, self._entry["received_ns"] + round(script.ttft_s * 1e9))
        elif script.fail and self._next == script.fail_at and script.fail != "close_if_reused":
            self._fail()
        elif self._next < self._chunks:
            self._send_chunk(self._next)
            self._due_ns = time.monotonic_ns() + round(script.gap_after(self._next) * 1e9)
            self._next += 1
            if self._next == self._chunks and not (script.fail and self._next == script.fail_at):
                self._finish()
        else:
            self._finish()

    def _send_headers(self) -> None:
        script = self._script
        if script.interim:
            self._out.append(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n")
        lines = ["HTTP/1.1 200 OK", "content-type: text/event-stream; charset=utf-8"]
        lines += [f"{name}: {value}" for name, value in self._state.settings.headers().items()]
        if script.framing == "chunked":
            lines.append("transfer-encoding: chunked")
        elif script.framing == "length":
            lines.append(f"content-length: {self._length()}")
        if script.close or script.framing == "close":
            lines.append("connection: close")
        self._entry["headers_ns"] = time.monotonic_ns()
        self._out.append("\r\n".join(lines).encode() + b"\r\n\r\n")
        self._send_opening()

    def _send_opening(self) -> None:
        if self._is_chat and self._script.role_first:
            self._frame(self._event(self._chunk_json('{"role":"assistant","content":""}', None)))

    def _send_chunk(self, number: int) -> None:
        is_last = number == self._chunks - 1
        self._tokens += self._script.tokens_of(number)
        reason = self._script.finish_reason if is_last and not self._script.finish_apart else None
        sent_ns = time.monotonic_ns()
        content = self._chunk_json(self._content(number), reason, sent_ns)
        self._frame(self._event(content))
        self._entry["sent_ns"].append(sent_ns)

    def _send_ending(self) -> None:
        script = self._script
        if script.finish_apart:
            self._frame(self._event(self._chunk_json(self._empty(), script.finish_reason)))
        if script.usage and self._body.wants_usage:
            self._frame(self._event(f'{self._head},"choices":[],"usage":{self._usage()}}}'))
        if script.done:
            self._frame(self._event("[DONE]"))

    def _finish(self) -> None:
        self._send_ending()
        self._end_body()
        if self._script.close or self._script.drop:
            self._transport.close()

    def _length(self) -> int:
        """Bytes of the whole body, made once beforehand: its times have as many digits then as later."""
        twin = ScriptedStream(self._connection, self._script, self._body, self._is_chat, dict(self._entry, sent_ns=[]))
        twin._send_opening()
        for number in range(self._chunks):
            twin._send_chunk(number)
        twin._send_ending()
        return sum(map(len, twin._out))

    # --- shapes -------------------------------------------------------------------------------------

    def _content(self, number: int) -> str:
        text = self._script.text_of(number)
        if not self._is_chat:
            return json.dumps(text)
        field = self._script.field
        if field == "tool_calls":
            return json.dumps({"tool_calls": [{"index": 0, "function": {"arguments": text}}]})
        return json.dumps({field: [1] if field == "token_ids" else text})

    def _empty(self) -> str:
        return "{}" if self._is_chat else '""'

    def _chunk_json(self, content: str, finish_reason: str | None, sent_ns: int = 0) -> str:
        key = "delta" if self._is_chat else "text"
        reason = "null" if finish_reason is None else f'"{finish_reason}"'
        extras = f',"sent_ns":{sent_ns}' if sent_ns else ""
        if self._usage_always:
            extras += f',"usage":{self._usage()}'
        if finish_reason is not None and self._script.timings is not None and self._body.include_timings:
            extras += f',"timings":{json.dumps(self._script.timings)}'
        return f'{self._head},"choices":[{{"index":0,"{key}":{content},"finish_reason":{reason}}}]{extras}}}'

    def _usage(self) -> str:
        return json.dumps(self._body.usage(self._script, self._tokens))

    def _event(self, data: str) -> str:
        newline = self._script.newline
        comment = f": a comment{newline}{newline}" if self._script.comments else ""
        return f"{comment}data: {data}{newline}{newline}"

    # --- failing ------------------------------------------------------------------------------------

    def _fail_at_once(self) -> None:
        script = self._script
        if script.fail == "status":
            headers = {} if script.retry_after_s is None else {"retry-after": str(script.retry_after_s)}
            error = {"message": script.message, "type": "scripted", "param": None, "code": None}
            self._connection.answer(script.status, {"error": error}, headers)
        elif script.fail == "redirect":
            self._connection.answer(307, {}, {"location": "http://elsewhere.example/v1/completions"})
        elif script.fail == "html":
            self._connection.answer(200, "<!doctype html>\n<title>A proxy's page</title>\n", {})
        elif script.fail == "garbage":
            self._transport.write(GARBAGE)
            self._transport.close()
        elif script.fail == "half_headers":
            self._transport.write(b"HTTP/1.1 200 OK\r\ncontent-ty")
            self._transport.close()
        else:
            self._transport.close()
        self._stop()

    def _fail(self) -> None:
        fail, newline = self._script.fail, self._script.newline
        if fail in MALFORMED:
            self._frame(MALFORMED[fail] + newline + newline)
            return self._end_body()
        if fail == "error_event":
            error = {"error": {"message": self._script.message, "type": "server_error", "code": "internal_error"}}
            self._frame(self._event(json.dumps(error)))
            return self._end_body()
        if fail == "end":
            return self._end_body()
        if fail == "bad_chunk":
            self._out.append(b"not a size\r\n")
        self._flush()
        if fail == "hang":
            self._hangs = True
            return
        self._stop()
        if fail == "cut":
            self._transport.close()
        elif fail == "reset":
            self._connection.reset()

    def _end_body(self) -> None:
        if self._script.framing == "chunked":
            self._out.append(b"0\r\n\r\n")
        self._stop()
        if self._script.framing == "close":
            self._transport.close()

    # --- bytes --------------------------------------------------------------------------------------

    def _frame(self, text: str) -> None:
        data = text.encode()
        self._out.append(b"%x\r\n%b\r\n" % (len(data), data) if self._script.framing == "chunked" else data)

    def _flush(self) -> None:
        if not self._out:
            return
        data = b"".join(self._out)
        self._out.clear()
        size = self._script.write_bytes
        if not size:
            return self._transport.write(data)
        # Past the transport, which would join them again.
        fileno = self._transport.get_extra_info("socket").fileno()
        for start in range(0, len(data), size):
            os.write(fileno, data[start : start + size])
            time.sleep(0.0002)

    def _stop(self) -> None:
        """Nothing more is sent."""
        self._flush()
        self._over = True
        self._entry["ended_ns"] = time.monotonic_ns()
