"""Hands the keys and values of prompts from the engine that has computed them to the one that goes on.

The engine that computes copies a prompt's blocks to host memory and gives a handle to whoever asked. The one that goes
on is given the handle with the request. It fetches the blocks into its own host memory, in a thread, and admits the
request as if it had been preempted here. Whatever is wrong with a handle, the prompt is computed again: no request is
lost, and none waits longer than the time limit. Blocks that nobody has fetched by then are given up.

Blocks go over TCP, in the open. Handles are signed, so that an engine connects to no address, and believes no keys and
values, but those of an engine that knows the same key.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from headway.engine.config import EngineConfig
from headway.engine.hooks import StepHooks
from headway.engine.messages import AddRequest, SequenceOutput
from headway.engine.swap import HostBlocks
from headway.models.folder import weight_files
from headway.policy.cache.handle import KEY_VARIABLE, Handle, content_of
from headway.policy.cache.swap import Swapped
from headway.policy.step.request import Sequence as RequestSequence
from headway.policy.step.request import cache_key
from headway.policy.step.scheduler import Scheduler
from headway.version import __version__

THREADS = 4  # prompts that are sent, or fetched, at a time
_KEY_BYTES = 32  # of the name of a prompt, in hexadecimal digits
_HEAD = struct.Struct("!4s32sQQQ")  # a mark, the content's hash, tokens, blocks, bytes of a block
_KEPT, _GONE, _DONE = b"hwkv", b"gone", b"!"
_READ = 1 << 20
logger = logging.getLogger("headway.engine")
Buffer = TypeVar("Buffer", bytearray, memoryview)


@dataclass(slots=True)
class _Kept:
    """A prompt that waits to be fetched.

    Args:
        until_ns: it is given up then.
        readers: how many threads send it.
        is_done: an engine has all of it.
    """

    handle: Handle
    swapped: Swapped
    until_ns: int
    readers: int = 0
    is_done: bool = False


class Handovers(StepHooks):
    """The prompts that an engine hands over or takes over. All but its threads' work happens in the engine's thread.

    Args:
        scheduler: its host pool has the blocks.
        blocks: the memory of these.
        layout: see Handle.

    Raises:
        ValueError: it cannot listen on its address.
    """

    def __init__(
        self,
        config: EngineConfig,
        scheduler: Scheduler,
        blocks: HostBlocks,
        layout: str,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        host = scheduler.host
        assert host is not None
        self._host, self._manager, self._blocks = host, scheduler.block_manager, blocks
        self._layout, self._clock = layout, clock
        self._key = os.environ[KEY_VARIABLE].encode()
        self._timeout_ns = round(config.kv_transfer_timeout * 1e9)
        self._threads = ThreadPoolExecutor(THREADS, "headway-handover")
        self._lock = threading.Lock()  # of what follows, which threads look at
        self._kept: dict[str, _Kept] = {}
        self._arriving: dict[str, tuple[Future[str], str]] = {}  # by request: the fetch, and the prompt's name
        self._dropped: list[tuple[Future[str], str]] = []
        self._address = ("", 0)
        if config.role == "prefill":
            self._listen(config.kv_transfer_host, config.kv_transfer_port)

    # --- what is handed over ----------------------------------------------------------------------------

    def ended(self, sequence: RequestSequence, output: SequenceOutput) -> None:
        """See StepHooks."""
        if sequence.hands_over:
            output.handle = self._handle_of(sequence)

    def before(self) -> None:
        """See StepHooks."""
        self.sweep()

    def idle(self) -> None:
        """See StepHooks."""
        self.sweep()

    def _handle_of(self, sequence: RequestSequence) -> Handle | None:
        """The handle of a prompt whose sequence has ended, once its blocks are copied; None where they are not kept."""
        swapped, sequence.swapped = sequence.swapped, None
        if swapped is None:
            self._host.counts["not_kept"] += 1
            return None
        self._blocks.run(self._host.take_swaps())
        tokens, name = sequence.tokens[: swapped.computed], secrets.token_hex(_KEY_BYTES // 2)
        content = content_of(tokens, sequence.cache_salt)
        handle = self._signed(Handle(*self._address, name, len(tokens), content, self._layout))
        self._host.lent[name] = swapped
        with self._lock:
            self._kept[name] = _Kept(handle, swapped, self._clock() + self._timeout_ns)
        self._host.counts["given"] += 1
        return handle

    def sweep(self) -> None:
        """Take back the blocks of prompts that were fetched or given up, and of those that nobody waits for here."""
        now = self._clock()
        with self._lock:
            idle = [each for each in self._kept.values() if not each.readers]
            over = [each for each in idle if each.is_done or now > each.until_ns]
            for each in over:
                del self._kept[each.handle.remote_request_id]
        for each in over:
            self._host.counts["fetched" if each.is_done else "expired"] += 1
            self._host.free(self._host.lent.pop(each.handle.remote_request_id))
        for fetch, name in [each for each in self._dropped if each[0].done()]:
            self._dropped.remove((fetch, name))
            self._host.free(self._host.lent.pop(name))

    def _signed(self, handle: Handle) -> Handle:
        plain = msgspec.msgpack.encode(msgspec.structs.replace(handle, signature=""))
        return msgspec.structs.replace(handle, signature=hmac.digest(self._key, plain, "sha256").hex())

    # --- what is taken over -----------------------------------------------------------------------------

    def awaited(self, request: AddRequest) -> Future[str] | None:
        """Begin to fetch what a request's handle names; None where its prompt is computed here.

        The future never raises: queued() sees what came of it.
        """
        handle = request.handle
        if handle is None:
            return None
        tokens, key = request.prompt_token_ids[:-1], cache_key(request.cache_salt, request.adapter)
        wanted = self._manager.host_blocks_for(len(tokens)) if tokens else 0
        swapped = None
        if not hmac.compare_digest(self._signed(handle).signature, handle.signature):
            why = "its handle is not signed with the key of this server"
        elif handle.layout != self._layout:
            why = "the server that has computed it has another model, or other settings of it"
        elif (handle.num_tokens, handle.content) != (
            len(tokens),
            content_of(tokens, key),
        ):
            why = "its handle is that of another prompt"
        elif request.params.prompt_logprobs is not None or request.params.use_beam_search:
            why = "log-probabilities of a prompt and beam search need all of it here"
        elif handle.remote_request_id in self._host.lent:
            why = "its handle is in use"
        elif (swapped := self._host.take(wanted, len(tokens))) is None:
            why = f"it has {wanted} blocks, which have no room in --swap-space"
        if swapped is None:
            request.handle = None
            self._tell("refused", request.request_id, why)
            return None
        self._host.lent[handle.remote_request_id] = swapped
        fetch = self._threads.submit(self._fetch, handle, swapped, self._clock() + self._timeout_ns)
        self._arriving[request.request_id] = fetch, handle.remote_request_id
        return fetch

    def queued(self, request: AddRequest, sequences: list[RequestSequence]) -> None:
        """See StepHooks."""
        if request.handle is not None:
            sequences[0].swapped = self._taken(request.request_id)

    def _taken(self, request_id: str) -> Swapped | None:
        """What has come for a request; None where nothing has, and its prompt is computed here."""
        fetch, name = self._arriving.pop(request_id)
        swapped, why = self._host.lent.pop(name), fetch.result()
        if not why:
            self._host.counts["taken"] += 1
            return swapped
        self._host.free(swapped)
        self._tell("lost", request_id, why)
        return None

    def left(self, request_id: str) -> None:
        """See StepHooks."""
        if request_id in self._arriving:
            self._dropped.append(self._arriving.pop(request_id))

    def _tell(self, outcome: str, request_id: str, why: str) -> None:
        self._host.counts[outcome] += 1
        logger.warning("headway: the prompt of request %s is computed here: %s", request_id, why)

    # --- threads ----------------------------------------------------------------------------------------

    def _listen(self, host: str, port: int) -> None:
        try:
            listener = socket.create_server((host, port), reuse_port=False)
        except OSError as error:
            raise ValueError(
                f"kv_transfer_host is {host!r} and kv_transfer_port {port}, where this server cannot listen: "
                f"{error.strerror or error}"
            ) from None
        self._address = (host, listener.getsockname()[1])
        threading.Thread(target=self._accept, args=(listener,), daemon=True, name="headway-handover").start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            with contextlib.suppress(OSError):  # the caller has gone already, or there are too many files for now
                connection, _ = listener.accept()
                self._threads.submit(self._serve, connection, self._clock() + self._timeout_ns)

    def _left_s(self, until_ns: int) -> float:
        if (left := until_ns - self._clock()) <= 0:
            raise TimeoutError
        return left / 1e9

    def _serve(self, connection: socket.socket, until_ns: int) -> None:
        """Send a prompt to whoever knows its name."""
        with contextlib.suppress(OSError), connection:
            name = bytes(self._received(connection, bytearray(_KEY_BYTES), until_ns)).decode("ascii", "replace")
            with self._lock:
                kept = self._kept.get(name)
                if kept is None or kept.is_done:
                    connection.sendall(_HEAD.pack(_GONE, b"", 0, 0, 0))
                    return
                kept.readers += 1
            is_done = False
            try:
                rows, numbers, handle = self._blocks.rows, kept.swapped.host_blocks, kept.handle
                head = handle.content.encode(), handle.num_tokens, len(numbers), rows.shape[1]
                connection.sendall(_HEAD.pack(_KEPT, *head))
                for number in numbers:
                    connection.settimeout(self._left_s(until_ns))
                    connection.sendall(rows[number].data)
                is_done = self._received(connection, bytearray(1), until_ns) == _DONE
            finally:
                with self._lock:
                    kept.readers -= 1
                    kept.is_done = kept.is_done or is_done

    def _fetch(self, handle: Handle, swapped: Swapped, until_ns: int) -> str:
        """Fetch a prompt into host blocks. Returns why it does not come; an empty string where it has."""
        address = handle.remote_host, handle.remote_port
        rows = self._blocks.rows
        try:
            with socket.create_connection(address, self._left_s(until_ns)) as connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection.sendall(handle.remote_request_id.encode())
                mark, *said = _HEAD.unpack(self._received(connection, bytearray(_HEAD.size), until_ns))
                if mark != _KEPT:
                    return "the server that has computed it does not have it any more"
                numbers = swapped.host_blocks
                if said != [handle.content.encode(), handle.num_tokens, len(numbers), rows.shape[1]]:
                    return "the server that has computed it has another prompt under its name"
                for number in numbers:
                    self._received(connection, rows[number].data, until_ns)
                connection.sendall(_DONE)
                return ""
        except TimeoutError:
            return f"it did not come within {self._timeout_ns / 1e9:g} s"
        except OSError as error:
            return f"the server that has computed it is gone: {error.strerror or error}"

    def _received(self, connection: socket.socket, into: Buffer, until_ns: int) -> Buffer:
        """Fill a buffer with what comes. Raises OSError where the other end closes, or the time is over."""
        at, view = 0, memoryview(into)
        while at < len(view):
            connection.settimeout(self._left_s(until_ns))
            if not (count := connection.recv_into(view[at:])):
                raise ConnectionResetError("it has closed the connection")
            at += count
        return into


def layout_of(config: EngineConfig, folder: Path, about: Sequence[str], blocks: HostBlocks) -> str:
    """The hash of a model and of its blocks: engines with the same one can go on with each other's prompts.

    Of large files the first and the last mebibyte count, in which two trainings of one model differ.

    Args:
        about: what else decides the numbers, such as types.
    """
    seed = config.seed if config.load_format == "dummy" else 0
    found = hashlib.blake2b(repr([__version__, *about, seed, blocks.geometry]).encode(), digest_size=16)
    for path in [folder / "config.json", *weight_files(folder)]:
        with path.open("rb") as file:
            size = path.stat().st_size
            found.update(b"%d " % size + file.read(_READ))
            file.seek(max(0, size - _READ))
            found.update(file.read(_READ))
    return found.hexdigest()
