"""Connections: kept and used again, closed and cut, encrypted, over IPv6, in every framing."""

from __future__ import annotations

import asyncio
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop

from headway.bench.client.openai_client import OpenAIClient
from headway.load.endpoint import Endpoint
from headway.load.record import FailureKind, RequestRecord
from tests.bench.client.sending import planned, send
from tests.bench.scripted_server import ScriptedServer

# --- kept connections -------------------------------------------------------------------------------


async def test_a_connection_is_used_again_and_the_latest_first(client: OpenAIClient, server: ScriptedServer) -> None:
    records = [RequestRecord(index) for index in range(3)]
    await asyncio.gather(*(client.send(planned(r.index, chunks=2, ttft_s=0.1 * r.index), r) for r in records))
    assert client.http.opened == 3
    assert all(record.ok and record.connected_ns > record.sent_ns for record in records)
    again = await send(client, 3)
    assert again.ok and client.http.opened == 3
    assert again.connected_ns == again.sent_ns  # nothing to connect
    assert server.log("3")["connection"] == server.log("2")["connection"]  # the one that became free last


async def test_a_connection_that_the_server_says_it_closes_is_not_used_again(client: OpenAIClient) -> None:
    assert (await send(client, close=True)).ok
    assert (await send(client, 1, framing="close")).ok
    assert (await send(client, 2)).ok
    assert client.http.opened == 3


async def test_a_connection_that_was_closed_while_idle_is_not_used_again(client: OpenAIClient) -> None:
    assert (await send(client, drop=True)).ok
    await asyncio.sleep(0.05)  # its end has come by now
    assert (await send(client, 1)).ok
    assert client.http.opened == 2


async def test_a_request_lost_on_a_stale_connection_is_sent_once_more(
    client: OpenAIClient, server: ScriptedServer
) -> None:
    assert (await send(client, 0)).ok
    record = await send(client, 1, fail="close_if_reused", chunks=3)
    assert record.ok and len(record.chunk_ns) == 3
    assert record.resent == 1 and client.http.opened == 2
    log = server.log("1")
    assert log["before"]["received_ns"] >= record.sent_ns  # the time that was lost is not left out
    assert record.connected_ns > log["before"]["received_ns"]


async def test_a_request_is_not_sent_again_when_its_response_had_begun(
    client: OpenAIClient, server: ScriptedServer
) -> None:
    assert (await send(client, 0)).ok
    record = await send(client, 1, fail="half_headers")
    assert record.failure is not None and record.failure.kind is FailureKind.CUT
    assert record.resent == 0 and "before" not in server.log("1")


async def test_a_request_is_sent_again_only_once(client: OpenAIClient, server: ScriptedServer) -> None:
    assert (await send(client, 0)).ok
    record = await send(client, 1, fail="close")
    assert record.failure is not None and record.failure.kind is FailureKind.CUT
    assert record.resent == 1 and "before" not in server.log("1")["before"]


# --- ends -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_a_cancelled_request_is_abandoned_and_its_connection_closed(server: ScriptedServer, run: Any) -> None:
    async def main() -> RequestRecord:
        record = RequestRecord(0)
        async with OpenAIClient(Endpoint(server.url), keep_text=True) as client:
            task = asyncio.ensure_future(client.send(planned(0, chunks=1000, gap_s=0.01), record))
            while len(record.chunk_ns) < 3:
                await asyncio.sleep(0.005)
            assert len(client.busy_sockets()) == 1
            time.sleep(0.1)  # so that there is something to read at the time of the cancelling
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            seen = len(record.chunk_ns)
            assert client.busy_sockets() == []
            while "left_ns" not in server.log("0"):
                await asyncio.sleep(0.01)
            assert len(record.chunk_ns) == seen  # what is measured does not change after its end
        return record

    record = run(main())
    assert record.failure is not None and record.failure.kind is FailureKind.ABANDONED
    assert len(record.chunk_ns) >= 3 and not record.ok
    assert record.last_token_ns <= record.end_ns and record.text == "tok " * len(record.chunk_ns)


async def test_cancelled_while_it_connects() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        port = full.getsockname()[1]
        waiting = [socket.socket() for _ in range(3)]
        for one in waiting:
            one.setblocking(False)
            one.connect_ex(("127.0.0.1", port))  # fills the backlog: further ones get no answer
        try:
            async with OpenAIClient(Endpoint(f"http://127.0.0.1:{port}", connect_timeout_s=0.2)) as client:
                record = RequestRecord(0)
                task = asyncio.ensure_future(client.send(planned(0), record))
                await asyncio.sleep(0.05)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                assert record.failure is not None and record.failure.kind is FailureKind.ABANDONED
                late = await send(client, 1)
                assert late.failure is not None and late.failure.kind is FailureKind.CONNECT
                assert "within 0.2 s" in late.failure.message
        finally:
            for one in waiting:
                one.close()


async def test_closing_the_client_ends_what_is_under_way(server: ScriptedServer) -> None:
    client = OpenAIClient(Endpoint(server.url))
    task = asyncio.ensure_future(send(client, 0, fail="hang", fail_at=1, chunks=3))
    while not client.busy_sockets():
        await asyncio.sleep(0.005)
    client.close()
    record = await asyncio.wait_for(task, 5)
    assert record.failure is not None and record.failure.kind is FailureKind.CUT
    assert record.failure.message == "the client closed the connection"


# --- bytes ------------------------------------------------------------------------------------------


@pytest.mark.covering(2)
@pytest.mark.parametrize("framing", ["chunked", "length", "close"])
@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("write_bytes", [0, 5])
async def test_every_framing_line_end_and_fragment(
    server: ScriptedServer, framing: str, newline: str, write_bytes: int
) -> None:
    async with OpenAIClient(Endpoint(server.url, continuous_usage=True), keep_text=True) as client:
        for index in range(2):
            record = await send(
                client, index, chunks=3, framing=framing, newline=newline, write_bytes=write_bytes, comments=True,
                texts=["grüße, ", "世界", "\u2028"],
            )  # fmt: skip
            assert record.ok, record.failure
            assert record.text == "grüße, 世界\u2028" and record.output_tokens == 3
            assert record.finish_reason == "length"


async def test_interim_responses_are_passed_over(client: OpenAIClient) -> None:
    record = await send(client, interim=True, chunks=3)
    assert record.ok and len(record.chunk_ns) == 3
    assert (await send(client, 1)).ok and client.http.opened == 1


async def test_small_writes_are_not_held_back(client: OpenAIClient) -> None:
    task = asyncio.ensure_future(send(client, 0, ttft_s=0.2))
    while not client.busy_sockets():
        await asyncio.sleep(0.005)
    with socket.socket(fileno=client.busy_sockets()[0]) as same:
        no_delay = same.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        same.detach()
    assert no_delay
    await task


async def test_a_large_prompt_and_a_large_chunk_pass(server: ScriptedServer) -> None:
    async with OpenAIClient(Endpoint(server.url), keep_text=True) as client:
        record = await send(client, chunks=2, texts=["a" * 300_000, "b" * 300_000], message="x" * 2_000_000)
        assert record.ok and record.text == "a" * 300_000 + "b" * 300_000


# --- where to ---------------------------------------------------------------------------------------


async def test_ipv6() -> None:
    with ScriptedServer(host="::1") as server:
        assert server.url.startswith("http://[::1]:")
        async with OpenAIClient(Endpoint(server.url)) as client:
            assert (await send(client)).ok


async def test_a_name_with_several_addresses_is_tried_on_each_and_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, tried, asked = asyncio.get_running_loop(), [], []
    connect, look_up = loop.create_connection, loop.getaddrinfo

    async def create_connection(protocol: Any, host: str, *args: Any, **options: Any) -> Any:
        tried.append(host)
        return await connect(protocol, host, *args, **options)

    async def getaddrinfo(host: str, *args: Any, **options: Any) -> Any:
        if host != "two.addresses":
            return await look_up(host, *args, **options)
        asked.append(host)
        return [(0, 0, 0, "", (address, 0)) for address in ("::1", "127.0.0.1")]

    monkeypatch.setattr(loop, "create_connection", create_connection)
    monkeypatch.setattr(loop, "getaddrinfo", getaddrinfo)
    with ScriptedServer(host="127.0.0.1") as server:
        async with OpenAIClient(Endpoint(f"http://two.addresses:{server.port}")) as client:
            assert (await send(client, close=True)).ok and tried == ["::1", "127.0.0.1"]
            assert (await send(client, 1)).ok and tried[2:] == ["127.0.0.1"] and len(asked) == 1


async def test_a_path_in_front_of_the_routes() -> None:
    with ScriptedServer(path_prefix="/some/where") as server:
        for url in (server.url, server.url + "/", server.url + "/v1", server.url + "/v1/"):
            async with OpenAIClient(Endpoint(url)) as client:
                assert (await send(client)).ok


# --- TLS --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A self-signed certificate of 127.0.0.1, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate with")
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-days", "2", "-subj", "/CN=scripted", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*command, "-keyout", str(key), "-out", str(cert)], check=True, capture_output=True)
    return cert, key


@pytest.fixture(scope="module")
def tls_server(certificate: tuple[Path, Path]) -> Iterator[ScriptedServer]:
    cert, key = certificate
    with ScriptedServer(certfile=cert, keyfile=key) as server:
        yield server


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_tls_with_a_trusted_certificate(
    tls_server: ScriptedServer, certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, run: Any
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))

    async def main() -> None:
        async with OpenAIClient(Endpoint(tls_server.url), keep_text=True) as client:
            for index in range(2):
                record = await send(client, index, chunks=200, texts=["x" * 1000] * 200)
                assert record.ok, record.failure
                assert len(record.chunk_ns) == 200 and record.text == "x" * 200_000
            assert client.http.opened == 1
            assert (await send(client, 2, chunks=4, fail="cut", fail_at=2)).failure is not None

    run(main())


async def test_tls_with_a_certificate_that_nobody_vouches_for(tls_server: ScriptedServer) -> None:
    async with OpenAIClient(Endpoint(tls_server.url)) as client:
        record = await send(client)
        assert record.failure is not None and record.failure.kind is FailureKind.TLS
        assert "is not trusted: self-signed certificate" in record.failure.message
    async with OpenAIClient(Endpoint(tls_server.url, insecure=True)) as client:
        assert (await send(client)).ok


async def test_tls_with_a_certificate_of_another_host(
    tls_server: ScriptedServer, certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))
    async with OpenAIClient(Endpoint(f"https://localhost:{tls_server.port}")) as client:
        record = await send(client)
        assert record.failure is not None and record.failure.kind is FailureKind.TLS
        assert "localhost" in record.failure.message


async def test_tls_with_a_server_that_has_none(server: ScriptedServer) -> None:
    async with OpenAIClient(Endpoint(server.url.replace("http:", "https:"))) as client:
        record = await send(client)
        assert record.failure is not None and record.failure.kind is FailureKind.TLS


async def test_a_response_that_does_not_end_after_done_is_left() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        event = b'data: {"choices": [{"text": "a", "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n'
        writer.write(b"%x\r\n%b\r\n" % (len(event), event))
        await reader.read()  # until the client leaves
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server, OpenAIClient(Endpoint(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")) as client:
        record = RequestRecord(0)
        await asyncio.wait_for(client.send(planned(0), record), 30)
        assert record.ok and record.failure is None and client.busy_sockets() == []
