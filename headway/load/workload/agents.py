"""Recorded agents as graphs of requests: turns, waits for tools, and agents that start others.

Formats, each a line of JSON: AIPerf's sessions (`dag_jsonl` and `multi_turn`: session_id and turns, of which one may
fork or spawn other sessions), rows of sessions without times (`mooncake_trace` with session_id and delay), and the
traces of coding agents that AIPerf and GuideLLM call weka (id and requests, of which one may be a sub-agent's; also
one such object as a whole file). A weka trace has no text: prompts of the same lengths and common beginnings are made.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np

from headway.load.errors import BenchError
from headway.load.request import text_of
from headway.load.workload.datasets import DEFAULT_OUTPUT_TOKENS, Links, SampleRequest, Turns
from headway.load.workload.files import Line, lines_of, read_text
from headway.load.workload.lengths import tokens
from headway.load.workload.texts import TextDataset
from headway.load.workload.traces import checked_messages, seconds_of, session_of, sessions_of

WEKA_BLOCK_SIZE = 64
MOST_IN_A_GRAPH, DEEPEST = 100_000, 50  # requests; sessions that start each other
EXAMPLE = '{"session_id": "a", "turns": [{"messages": [{"role": "user", "content": "..."}], "max_tokens": 64}]}'
WEKA_EXAMPLE = '{"id": "a", "requests": [{"t": 0.0, "in": 900, "out": 50, "hash_ids": [1, 2]}]}'
ROW_EXAMPLE = '{"session_id": "a", "input_length": 600, "output_length": 20, "delay": 500}'


class _Spawn(msgspec.Struct, forbid_unknown_fields=True):
    children: list[str]
    join_at: int | None = None


class _Fork(msgspec.Struct, forbid_unknown_fields=True):
    child: str
    background: bool = False


class _Turn(msgspec.Struct, forbid_unknown_fields=True):
    messages: list[dict[str, Any]] | None = None
    text: str | None = None
    role: str = "user"
    max_tokens: int | None = None
    output_length: int | None = None
    model: str | None = None
    tools: list[dict[str, Any]] | None = None
    extra: dict[str, Any] = {}
    delay: float = 0.0
    timestamp: float | None = None
    forks: list[str | _Fork] = []
    spawns: list[str | _Spawn] = []
    type: str = ""


class _Round(msgspec.Struct, forbid_unknown_fields=True):
    spawns: list[str]
    think_time_ms: float | None = None


class _Session(msgspec.Struct, forbid_unknown_fields=True):
    session_id: str = ""
    turns: list[_Turn] = []
    pre_session_spawns: list[str] = []
    orchestrator: bool = False
    spawns: list[str] = []
    rounds: int | list[_Round] = 1
    think_time_ms: float = 0.0
    context_mode: str = ""
    type: str = ""

    @property
    def stages(self) -> list[_Round]:
        """The rounds of an orchestrator, which has no requests of its own."""
        if isinstance(self.rounds, list):
            return self.rounds
        return [_Round(self.spawns)] * self.rounds if self.spawns else []


class _WekaRequest(msgspec.Struct, rename={"prompt": "in", "answer": "out"}):
    t: float = 0.0
    type: str = ""
    prompt: int = 0
    answer: int = 0
    hash_ids: list[int] = []
    api_time: float | None = None
    think_time: float | None = None
    requests: list[_WekaRequest] = []


class _Weka(msgspec.Struct):
    requests: list[_WekaRequest]
    block_size: int = WEKA_BLOCK_SIZE
    hash_id_scope: str = "local"


WHOLE = "message_array_with_responses"  # context_mode of a session whose turns say all themselves


@dataclass
class Agents(TextDataset):
    """Graphs of requests. One starts when those that it waits for were answered, and its tool has worked.

    Raises:
        BenchError: naming the file and the line that is wrong.
    """

    def __post_init__(self) -> None:
        if self.source.token_ids:
            raise BenchError(
                "agents cannot be sent as token ids, because answers are text; send text or use the chat API"
            )
        self._graphs = list(self._read())
        if self.longest_prompt is not None:
            self._leave_out_long(self.longest_prompt)
        if not self._graphs:
            raise BenchError(f"{self.path} has no agent that can be replayed")
        self.rows = len(self._graphs)
        self._total = sum(map(len, self._graphs))

    @property
    def mean_turns(self) -> float:
        return self._total / len(self._graphs)

    def draw(self, count: int | None, rng: np.random.Generator) -> Sequence[Turns]:
        graphs = [self._graphs[at] for at in self._order(rng)[:count]]
        if self.output_len is None:
            return graphs
        lengths = iter(tokens(self.output_len, sum(map(len, graphs)), rng).tolist())
        return [tuple(replace(each, output_tokens=next(lengths)) for each in graph) for graph in graphs]

    def describe(self) -> str:
        return f"agents of {self.path.name}"

    def _leave_out_long(self, longest: int) -> None:
        def said(request: SampleRequest) -> int:
            texts = [request.text or "", *map(text_of, request.messages)]
            return sum(self.source.count(text) for text in texts if text)

        kept = [graph for graph in self._graphs if all(said(each) <= longest for each in graph)]
        if left := len(self._graphs) - len(kept):
            self.notes.append(f"{self.path.name}: {left} agents with a text longer than {longest} tokens left out")
        self._graphs = kept

    def _read(self) -> Iterator[Turns]:
        """The graphs, in the order of the file. Raises BenchError."""
        lines = list(lines_of(self.path))
        kind = _kind_of(*lines[0])
        if kind == "weka":
            yield from self._read_weka(lines)
        elif kind == "rows":
            yield from self._read_rows(lines)
        else:
            yield from self._read_sessions(lines)

    # --- sessions -----------------------------------------------------------------------------------

    def _read_sessions(self, lines: list[tuple[Line, str]]) -> Iterator[Turns]:
        decode = msgspec.json.Decoder(_Session).decode
        sessions: dict[str, tuple[Line, _Session]] = {}
        for at, said in lines:
            session = at.decoded(decode, said, EXAMPLE)
            if isinstance(session.rounds, int) and not 1 <= session.rounds <= MOST_IN_A_GRAPH:
                raise at.wrong(f"rounds is {session.rounds}", f"1 to {MOST_IN_A_GRAPH:,} are expected")
            name = session.session_id or f"line {at.number}"
            if name in sessions:
                raise at.wrong(f"session_id '{name}' was there before", "each session needs its own")
            if bool(session.turns) == session.orchestrator or session.orchestrator != bool(session.stages):
                raise at.wrong("turns are missing or too many", "turns, or orchestrator and spawns, are expected")
            sessions[name] = at, session
        grower = _Sessions(sessions)
        if any(session.turns and session.turns[0].timestamp is not None for _, session in sessions.values()):
            self.notes.append(f"{self.path.name}: sessions begin as the load says, not at their timestamps")
        started = {child for _, session in sessions.values() for child in _children(session)}
        roots = [name for name in sessions if name not in started]
        if not roots:
            raise BenchError(f"{self.path}: each session is started by another, so none comes first")
        for name in roots:
            yield grower.graph(name)
        self._note_unsaid(grower.unsaid)

    # --- rows ---------------------------------------------------------------------------------------

    def _read_rows(self, lines: list[tuple[Line, str]]) -> Iterator[Turns]:
        sessions = sessions_of(lines, ROW_EXAMPLE)
        for at, row in (each for rows in sessions for each in rows):
            if row.timestamp is not None:
                raise at.wrong("a timestamp", "rows with times are read by --dataset-name mooncake")
        self._note_unsaid(sum(row.output_length is None for rows in sessions for _, row in rows))
        yield from map(session_of, sessions)

    def _note_unsaid(self, count: int) -> None:
        if count and self.output_len is None:
            default = f"{DEFAULT_OUTPUT_TOKENS} taken"
            self.notes.append(f"{self.path.name}: {count} turns have no number of output tokens; {default}")

    # --- weka ---------------------------------------------------------------------------------------

    def _read_weka(self, lines: list[tuple[Line, str]]) -> Iterator[Turns]:
        decode = msgspec.json.Decoder(_Weka).decode
        text = read_text(self.path)
        whole = len(lines) > 1 and _is_json(text)
        lines = [(Line(self.path, 1), text)] if whole else lines
        found = [(at, at.decoded(decode, said, WEKA_EXAMPLE)) for at, said in lines]
        for number, (at, trace) in enumerate(found):
            if trace.block_size < 1:
                raise at.wrong(f"block_size is {trace.block_size}", "1 or more is expected")
            own = trace.hash_id_scope != "global"
            try:
                graph = _WekaGraph(at, trace, len(found) if own else 1, number if own else 0).turns
            except RecursionError:
                raise at.wrong("sub-agents in sub-agents", "fewer levels of them are expected") from None
            if graph:
                yield graph
            else:
                self.notes.append(f"{self.path.name}: the trace of line {at.number} has no request; left out")


def _is_json(text: str) -> bool:
    try:
        msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True


def _kind_of(at: Line, said: str) -> str:
    """The format of a file, by its first line; of a file that is one object, by the first part of it."""
    try:
        first = msgspec.json.decode(said)
    except (msgspec.DecodeError, RecursionError):
        return "weka" if '"requests"' in read_text(at.path) else "sessions"
    if not isinstance(first, dict):
        raise at.wrong("this is no object", f"expected as {EXAMPLE}, {ROW_EXAMPLE} or {WEKA_EXAMPLE}")
    if "requests" in first:
        return "weka"
    return "rows" if {"input_length", "text_input", "messages"} & first.keys() else "sessions"


def _children(session: _Session) -> Iterator[str]:
    yield from session.pre_session_spawns
    for stage in session.stages:
        yield from stage.spawns
    for turn in session.turns:
        yield from (each if isinstance(each, str) else each.child for each in turn.forks)
        for spawn in turn.spawns:
            yield from [spawn] if isinstance(spawn, str) else spawn.children


class _Sessions:
    """Makes graphs of sessions that start each other.

    A fork goes on from what was said; a spawn begins afresh, and the turn `join_at` of the session that spawned it (the
    next one, where nothing is said) waits for its end. Sessions before the first turn begin with it. A round of an
    orchestrator waits for the sessions of the round before.
    """

    def __init__(self, sessions: dict[str, tuple[Line, _Session]]) -> None:
        self.unsaid = 0
        self._sessions = sessions
        self._made: list[SampleRequest] = []

    def graph(self, root: str) -> Turns:
        self._made = []
        self._add(self._sessions[root][0], root, Links(), ())
        return tuple(self._made)

    def _add(self, at: Line, name: str, opens: Links, above: tuple[str, ...], think_ms: float = 0.0) -> list[int]:
        """Add a session that begins with these links. Returns the places of what a join with it waits for.

        Args:
            at: where it is named.
            think_ms: before its first turn, beside that one's own delay.
        """
        if name not in self._sessions:
            raise at.wrong(f"there is no session '{name}'", f"{len(self._sessions)} are in the file")
        at, session = self._sessions[name]
        if name in above:
            raise at.wrong(f"session '{name}' starts itself", " -> ".join((*above, name)))
        above = (*above, name)
        if len(above) > DEEPEST:
            raise at.wrong("sessions start each other too deep", f"at most {DEEPEST} are expected")
        afresh = Links(after=opens.after if opens.follows is None else (opens.follows, *opens.after))
        for child in session.pre_session_spawns:
            self._add(at, child, afresh, above)
        ends: list[int] = []
        for number, stage in enumerate(session.stages):
            links = Links(after=tuple(ends)) if number else afresh
            pause_ms = session.think_time_ms if stage.think_time_ms is None else stage.think_time_ms
            ends = [place for child in stage.spawns for place in self._add(at, child, links, above, pause_ms)]
        joins: dict[int, list[int]] = {}
        last: int | None = None
        for number, turn in enumerate(session.turns):
            if last is None:
                links = opens
            else:
                waits = tuple(joins.pop(number, ()))
                links = Links(None, (last, *waits)) if session.context_mode == WHOLE else Links(last, waits)
            began = session.turns[0].timestamp
            before = 0.0 if turn.timestamp is None or began is None else turn.timestamp - began
            last = self._put(at, turn, links, before, 0.0 if number else think_ms)
            for spawn in turn.spawns:
                children, join_at = ([spawn], None) if isinstance(spawn, str) else (spawn.children, spawn.join_at)
                join_at = number + 1 if join_at is None else join_at
                if join_at <= number or (join_at != number + 1 and join_at >= len(session.turns)):
                    raise at.wrong(f"join_at is {join_at}", f"a turn after turn {number} is expected")
                for child in children:
                    joins.setdefault(join_at, []).extend(self._add(at, child, Links(after=(last,)), above))
            for fork in turn.forks:
                child, background = (fork, False) if isinstance(fork, str) else (fork.child, fork.background)
                if not background and number + 1 < len(session.turns):
                    raise at.wrong(f"turn {number} forks '{child}' and goes on", "background: true is expected")
                branch = self._add(at, child, Links(last), above)
                ends += [] if background else branch
        return ends if last is None else [last, *ends]

    def _put(self, at: Line, turn: _Turn, links: Links, before_ms: float, think_ms: float) -> int:
        if len(self._made) == MOST_IN_A_GRAPH:
            raise at.wrong("a graph with too many requests", f"at most {MOST_IN_A_GRAPH:,} are expected")
        messages = turn.messages
        if (messages is None) == (turn.text is None):
            raise at.wrong("a turn without messages or text, or with both", f"expected as {EXAMPLE}")
        if messages is None:
            messages = [{"role": turn.role, "content": turn.text}]
        answer = turn.output_length if turn.max_tokens is None else turn.max_tokens
        self.unsaid += answer is None
        extra = {"model": turn.model, "tools": turn.tools}
        self._made.append(
            SampleRequest(
                DEFAULT_OUTPUT_TOKENS if answer is None else max(1, answer),
                messages=checked_messages(at, messages),
                extra_body={name: value for name, value in extra.items() if value is not None} | turn.extra,
                links=links,
                think_s=seconds_of(at, "delay", turn.delay + think_ms),
                not_before_s=seconds_of(at, "timestamp", before_ms),
            )
        )
        return len(self._made) - 1


class _WekaGraph:
    """The graph of a weka trace: requests of an agent one after the other, sub-agents beside them.

    Each request says all of its prompt itself. It waits for the one before and for the sub-agents that were started
    since, and then as long as the trace's client did: `think_time`, or from the recorded ends to its `t`. Where the
    trace does not say when those ended, it comes no earlier after the begin than in the trace.

    Args:
        traces, number: of the file, so that block ids of two traces differ; 1 and 0 where they mean the same.
    """

    def __init__(self, at: Line, trace: _Weka, traces: int, number: int) -> None:
        self._at, self._block_size = at, trace.block_size
        self._traces, self._number = traces, number
        self._made: list[SampleRequest] = []
        self._ended: list[float | None] = []  # of each request, in the trace
        self._began: float | None = None
        self._chain(trace.requests, (), 0.0)
        self.turns: Turns = tuple(self._made)

    def _chain(self, requests: list[_WekaRequest], waits: tuple[int, ...], spawned: float) -> tuple[int, ...]:
        """Add the requests of one agent. Returns the places of what its caller waits for.

        Args:
            waits: places of what its first request waits for.
            spawned: when it was started; its own times may count from then.
        """
        began = next((each.t for each in requests if each.type != "subagent"), 0.0)
        offset = spawned if began < spawned else 0.0
        last, beside = waits, tuple[int, ...]()
        for each in requests:
            at = each.t + offset
            if each.type == "subagent":
                beside += tuple(place for place in self._chain(each.requests, last, at) if place not in last)
            else:
                last, beside = (self._put(each, at, (*last, *beside)),), ()
        return (*last, *beside)

    def _put(self, request: _WekaRequest, at: float, waits: tuple[int, ...]) -> int:
        if min(request.prompt, request.answer, *request.hash_ids) < 0 or request.prompt == 0:
            raise self._at.wrong("a request with a number below 0, or without a prompt", WEKA_EXAMPLE)
        self._began = at if self._began is None else self._began
        ends = [self._ended[place] for place in waits]
        known = [end for end in ends if end is not None]
        think_s, not_before_s = request.think_time, 0.0
        if think_s is None and len(known) == len(ends):
            think_s = at - max(known, default=at)
        elif think_s is None:
            not_before_s = at - self._began
        blocks = request.hash_ids[: request.prompt // self._block_size]
        self._made.append(
            SampleRequest(
                max(1, request.answer),
                request.prompt,
                tuple((block * self._traces + self._number, self._block_size) for block in blocks),
                links=Links(after=waits),
                think_s=round(max(0.0, think_s or 0.0), 6),
                not_before_s=round(max(0.0, not_before_s), 6),
            )
        )
        self._ended.append(None if request.api_time is None else at + request.api_time)
        return len(self._made) - 1
