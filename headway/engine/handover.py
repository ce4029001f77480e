"""Hands the keys and values of prompts from the engine that has computed them to the one that goes on.

The engine that computes a prompt copies its blocks to host memory after each chunk. With the first chunk it gives a
handle to whoever asked. The one that goes on is given the handle with the request. It fetches the blocks into its own
host memory, in a thread, while the next chunks are computed. When it has all of them, it admits the request as if it
had been preempted here. Whatever is wrong with a handle, and wherever the blocks end before the last one, the prompt is
computed again: no request is lost, and none waits for a chunk longer than the time limit. Blocks that nobody has
fetched within that limit are given up.

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
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import msgspec

from headway.engine.config import EngineConfig
from headway.engine.hooks import StepHooks
from headway.engine.messages import AddRequest, SequenceOutput, SequenceTimings
from headway.engine.swap import HostBlocks
from headway.models.folder import weight_files
from headway.policy.cache.handle import KEY_VARIABLE, Handle, content_of
from headway.policy.cache.swap import Handed, Swapped
from headway.policy.step.ledger import Phase
from headway.policy.step.plan import StepPlan
from headway.policy.step.request import NEVER, FinishReason, cache_key
from headway.policy.step.request import Sequence as RequestSequence
from headway.policy.step.scheduler import Scheduler
from headway.version import __version__

THREADS = 64  # prompts that are sent, or fetched, at a time; most of them wait for a chunk
_KEY_BYTES = 32  # of the name of a prompt, in hexadecimal digits
_HEAD = struct.Struct("!4s32sQQQ")  # a mark, the content's hash, tokens, blocks, bytes of a block
_PART = struct.Struct("!Q")  # how many blocks follow
_END = struct.Struct("!32sQH")  # the content's hash, nanoseconds since it was computed, bytes of its phases
_KEPT, _GONE, _DONE = b"hwkv", b"gone", b"!"
_phases = msgspec.msgpack.Decoder(dict[Phase, int])
_READ = 1 << 20
logger = logging.getLogger("headway.engine")
Buffer = TypeVar("Buffer", bytearray, memoryview)


@dataclass(slots=True)
class _Kept:
    """A prompt that is to be fetched."""

    handle: Handle
    handed: Handed
    before: Mapping[Phase, int]  # phases of its sequence when the handle was given, in nanoseconds
    until_ns: int = NEVER  # it is given up then; NEVER while it is computed, and 0 where it is not computed to its end
    ready: int = 0  # how many of its blocks can be sent
    ready_ns: int = 0  # when the last of these had been computed
    # What its sequence had spent on each by then, since the handle was given.
    phases: Mapping[Phase, int] = field(default_factory=dict)
    readers: int = 0  # how many threads send it
    is_done: bool = False  # an engine has all of it


@dataclass(frozen=True, slots=True)
class _Fetched:
    """How a fetch has ended."""

    why: str  # nothing has come; empty where all has
    at_ns: int = 0  # when it ended
    sent_ns: int = 0  # how long after the prompt was computed the last of it was sent
    phases: Mapping[Phase, int] = field(default_factory=dict)  # see _Kept


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
        self._host, self._scheduler, self._blocks = host, scheduler, blocks
        self._layout, self._clock = layout, clock
        self._key = os.environ[KEY_VARIABLE].encode()
        self._timeout_ns = round(config.kv_transfer_timeout * 1e9)
        self._threads = ThreadPoolExecutor(THREADS, "headway-handover")
        self._changed = threading.Condition()  # of what follows, which threads look at
        self._kept: dict[str, _Kept] = {}
        self._computing: dict[int, _Kept] = {}  # by sequence
        self._arriving: dict[str, tuple[Future[_Fetched], str]] = {}  # by request: the fetch, and the prompt's name
        self._dropped: list[tuple[Future[_Fetched], str]] = []
        self._address = ("", 0)
        if config.role == "prefill":
            self._listen(config.kv_transfer_host, config.kv_transfer_port)

    # --- what is handed over ----------------------------------------------------------------------------

    def after(
        self, plan: StepPlan, changed: list[tuple[RequestSequence, list[int]]], outputs: list[SequenceOutput], now: int
    ) -> list[SequenceOutput]:
        """See StepHooks. With each chunk of a prompt its handle is said, and how its time was spent until then."""
        known = self._scheduler.sequences.by_id
        for item in plan.scheduled if self._address[1] else ():
            sequence = known.get(item.seq_id)
            if sequence is None or not sequence.hands_over:
                continue
            self._scheduler.block_manager.hand_over(sequence)
            phases = self._scheduler.accounting.so_far(sequence, now)[1]
            kept = self._copy(sequence, phases)
            if kept is not None:
                told = {str(phase): ns for phase, ns in phases.items()}
                timings = SequenceTimings(told, now, sequence.steps, sequence.preemptions)
                said = SequenceOutput(sequence.request_id, sequence.index, [], timings=timings, handle=kept.handle)
                outputs.append(said)
        return outputs

    def ended(self, sequence: RequestSequence, output: SequenceOutput) -> None:
        """See StepHooks. A prompt that is not computed to its end is given up, also where parts of it were fetched."""
        if not sequence.hands_over:
            return
        kept = self._copy(sequence, sequence.ledger.phases_ns)
        is_whole = sequence.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        if kept is None:
            self._host.counts["not_kept"] += is_whole
            return
        self._computing.pop(sequence.seq_id, None)
        with self._changed:
            kept.until_ns = self._clock() + self._timeout_ns if is_whole else 0
            self._changed.notify_all()
        output.handle = kept.handle if is_whole else None

    def before(self) -> None:
        self.sweep()

    def idle(self) -> None:
        self.sweep()

    def _copy(self, sequence: RequestSequence, phases: Mapping[Phase, int]) -> _Kept | None:
        """Copy what the host is to have of a prompt by now, so that it can be fetched; None where it has no room.

        Args:
            phases: of the sequence until now, in nanoseconds.
        """
        handed, kept, now = sequence.handed, self._computing.get(sequence.seq_id), self._clock()
        if handed is None:
            return None
        self._blocks.run(self._host.take_swaps())
        with self._changed:
            if kept is None:
                kept = self._computing[sequence.seq_id] = _Kept(self._handle_of(sequence, handed), handed, dict(phases))
                self._kept[kept.handle.remote_request_id] = kept
            if kept.ready < handed.copied:
                since = {phase: ns - kept.before.get(phase, 0) for phase, ns in phases.items()}
                kept.ready, kept.ready_ns, kept.phases = handed.copied, now, since
                self._changed.notify_all()
        return kept

    def _handle_of(self, sequence: RequestSequence, handed: Handed) -> Handle:
        tokens, name = sequence.tokens[: handed.computed], secrets.token_hex(_KEY_BYTES // 2)
        content = content_of(tokens, sequence.cache_salt)
        self._host.lent[name] = handed
        self._host.counts["given"] += 1
        return self._signed(Handle(*self._address, name, len(tokens), content, self._layout))

    def sweep(self) -> None:
        """Take back the blocks of prompts that were fetched or given up, and of those that nobody waits for here."""
        now = self._clock()
        with self._changed:
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

    def awaited(self, request: AddRequest) -> Future[_Fetched] | None:
        """Begin to fetch what a request's handle names; None where its prompt is computed here.

        The future never raises: queued() sees what came of it.
        """
        handle = request.handle
        if handle is None:
            return None
        tokens, key = request.prompt_token_ids[:-1], cache_key(request.cache_salt, request.adapter)
        entries, swapped = self._scheduler.blocks.entries_for(len(tokens)), None
        if not hmac.compare_digest(self._signed(handle).signature, handle.signature):
            why = "its handle is not signed with the key of this server"
        elif handle.layout != self._layout:
            why = "the server that has computed it has another model, or other settings of it"
        elif (handle.num_tokens, handle.content) != (len(tokens), content_of(tokens, key)):
            why = "its handle is that of another prompt"
        elif request.params.prompt_logprobs is not None or request.params.use_beam_search:
            why = "log-probabilities of a prompt and beam search need all of it here"
        elif handle.remote_request_id in self._host.lent:
            why = "its handle is in use"
        elif (swapped := self._host.take(len(entries), len(tokens))) is None:
            why = f"it has {len(entries)} blocks, which have no room in --swap-space"
        if swapped is None:
            request.handle = None
            self._tell("refused", request.request_id, why)
            return None
        self._host.lent[handle.remote_request_id] = swapped
        numbers = [swapped.host_blocks[at] for at in sorted(range(len(entries)), key=entries.__getitem__)]
        fetch = self._threads.submit(self._fetch, handle, numbers, self._clock() + self._timeout_ns)
        self._arriving[request.request_id] = fetch, handle.remote_request_id
        return fetch

    def queued(self, request: AddRequest, sequences: list[RequestSequence]) -> None:
        if request.handle is not None:
            sequences[0].swapped = self._taken(request.request_id, sequences)

    def _taken(self, request_id: str, sequences: list[RequestSequence]) -> Swapped | None:
        """What has come for a request; None where not all has, and its prompt is computed here.

        While the prompt was being computed, its request waited for that, and not for what was on its way.
        """
        fetch, name = self._arriving.pop(request_id)
        swapped, fetched = self._host.lent.pop(name), fetch.result()
        if fetched.why:
            self._host.free(swapped)
            self._tell("lost", request_id, fetched.why)
            return None
        self._host.counts["taken"] += 1
        for ledger in [each.ledger for each in sequences]:
            transfer_ns = fetched.sent_ns + ledger.last_ns - fetched.at_ns
            waited_ns = ledger.phases_ns.get(Phase.KV_TRANSFER, 0)
            ledger.tell_apart(Phase.KV_TRANSFER, waited_ns - transfer_ns, fetched.phases)
        return swapped

    def left(self, request_id: str) -> None:
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
        """Send a prompt to whoever knows its name, each part of it as soon as it is computed."""
        with contextlib.suppress(OSError), connection:
            name = bytes(self._received(connection, bytearray(_KEY_BYTES), until_ns)).decode("ascii", "replace")
            with self._changed:
                kept = self._kept.get(name)
                if kept is None or kept.is_done:
                    connection.sendall(_HEAD.pack(_GONE, b"", 0, 0, 0))
                    return
                kept.readers += 1
            is_done = False
            try:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._send(connection, kept)
                is_done = self._received(connection, bytearray(1), self._clock() + self._timeout_ns) == _DONE
            finally:
                with self._changed:
                    kept.readers -= 1
                    kept.is_done = kept.is_done or is_done

    def _send(self, connection: socket.socket, kept: _Kept) -> None:
        """Send all of a prompt. Raises OSError where no more of it comes, or nobody takes it."""
        rows, numbers, content, at = self._blocks.rows, kept.handed.host_blocks, kept.handle.content.encode(), 0
        connection.sendall(_HEAD.pack(_KEPT, content, kept.handle.num_tokens, len(numbers), rows.shape[1]))
        while at < len(numbers):
            until_ns = self._clock() + self._timeout_ns
            with self._changed:
                while (ready := kept.ready) == at:
                    if not kept.until_ns:
                        raise ConnectionAbortedError("the prompt is given up")
                    self._changed.wait(self._left_s(until_ns))
            connection.sendall(_PART.pack(ready - at))
            for number in numbers[at:ready]:
                connection.settimeout(self._left_s(until_ns))
                connection.sendall(rows[number].data)
            at = ready
        phases = msgspec.msgpack.encode(kept.phases)
        connection.sendall(_END.pack(content, self._clock() - kept.ready_ns, len(phases)) + phases)

    def _fetch(self, handle: Handle, numbers: list[int], until_ns: int) -> _Fetched:
        """Fetch a prompt into these host blocks, in the order in which they are computed."""
        address = handle.remote_host, handle.remote_port
        try:
            with socket.create_connection(address, self._left_s(until_ns)) as connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection.sendall(handle.remote_request_id.encode())
                fetched = self._fetched(connection, handle, numbers, until_ns)
                if not fetched.why:
                    connection.sendall(_DONE)
                return fetched
        except TimeoutError:
            return _Fetched(f"a part of it did not come within {self._timeout_ns / 1e9:g} s")
        except OSError as error:
            return _Fetched(f"the server that has computed it is gone: {error.strerror or error}")
        except msgspec.MsgspecError as error:
            return _Fetched(f"the server that has computed it says what is no ledger: {error}")

    def _fetched(self, connection: socket.socket, handle: Handle, numbers: list[int], until_ns: int) -> _Fetched:
        """Take what comes. Nothing of it counts unless the end says that all was of this prompt."""
        rows, content, left = self._blocks.rows, handle.content.encode(), numbers
        mark, *said = _HEAD.unpack(self._received(connection, bytearray(_HEAD.size), until_ns))
        if mark != _KEPT:
            return _Fetched("the server that has computed it does not have it any more")
        if said != [content, handle.num_tokens, len(numbers), rows.shape[1]]:
            return _Fetched("the server that has computed it has another prompt under its name")
        while left:
            (count,) = _PART.unpack(self._received(connection, bytearray(_PART.size), until_ns))
            if not 0 < count <= len(left):
                return _Fetched(f"of the last {len(left)} blocks came {count}")
            for number in left[:count]:
                self._received(connection, rows[number].data, until_ns)
            left, until_ns = left[count:], self._clock() + self._timeout_ns
        told, sent_ns, size = _END.unpack(self._received(connection, bytearray(_END.size), until_ns))
        if told != content:
            return _Fetched("it ended as another prompt")
        phases = _phases.decode(self._received(connection, bytearray(size), until_ns))
        return _Fetched("", self._clock(), sent_ns, phases)

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
