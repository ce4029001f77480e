"""A server of a fleet as routers see it: what it has to do, and what its answers have taught."""

from __future__ import annotations

import math
import zlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from headway.policy.admission.queue_bound import QueueLimits, Queues
from headway.policy.fleet.first_tokens import FirstTokenTimes
from headway.policy.objectives.service_class import BUILT_IN, ClassTable
from headway.policy.step.request import Request
from headway.policy.step.step_time import StepWork

# Tokens of a block whose hash is remembered, and the most blocks of one prompt that are looked at.
BLOCK_TOKENS, MOST_BLOCKS = 64, 1024
# Answers of a backend from all of which its times are learnt, and of later ones every so many: it takes some 20 us.
LEARNT_ALL, LEARNT_EVERY = 256, 8
RECEIVED_GAIN = 0.1  # the share of the latest prompt that was handed over in what the next one is expected to take
# Blocks that are remembered of what a backend was sent: four million tokens, in some 10 MB.
REMEMBERED_BLOCKS = 2**16


@dataclass
class Ask:
    """A request as routers see it."""

    content: Sequence[int] | bytes = b""  # the prompt as token ids, or as bytes of text
    token_length: int = 1  # entries of `content` that make a token, about
    salt: str = ""  # prompts with another salt share nothing
    service_class: str = ""
    session: str = ""  # name of the conversation that it belongs to; empty for none
    # Milliseconds that are left until its first token is due; infinite where none is promised.
    ttft_ms: float = math.inf
    choices: int = 1
    tokens: int = field(init=False)  # tokens of the prompt, about; at least 1
    _blocks: list[int] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.tokens = max(1, len(self.content) // self.token_length)

    def beginning(self, tokens: int) -> int:
        """A hash of the first tokens."""
        return hash((zlib.crc32(self.salt.encode()), _key(self.content[: tokens * self.token_length])))

    @property
    def blocks(self) -> list[int]:
        """Hashes of the blocks of the prompt, each of which covers all before it. The last may be a part of a block."""
        if self._blocks is None:
            self._blocks = self._hashed()
        return self._blocks

    def _hashed(self) -> list[int]:
        size, chain = BLOCK_TOKENS * self.token_length, zlib.crc32(self.salt.encode())
        found: list[int] = []
        for at in range(0, min(len(self.content), size * MOST_BLOCKS), size):
            chain = hash((chain, _key(self.content[at : at + size])))
            found.append(chain)
        return found


def _key(content: Sequence[int] | bytes) -> bytes | tuple[int, ...]:
    return content if isinstance(content, bytes) else tuple(content)


def ask_of(request: Request, classes: ClassTable, waited_ns: int = 0) -> Ask:
    """What routers see of a request of token ids that came so many nanoseconds ago."""
    service = next((each for each in classes if each.name == request.service_class), classes.default_class)
    return Ask(
        request.prompt_token_ids,
        salt=request.cache_salt,
        service_class=request.service_class,
        ttft_ms=min(service.ttft_ms, request.ttft_ms) - waited_ns / 1e6,
        choices=request.params.n,
    )


class Prefixes:
    """The blocks that a backend was sent last. Where it has a block of a prompt, it has those before it too."""

    def __init__(self, most: int = REMEMBERED_BLOCKS) -> None:
        self._most = most
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def found(self, blocks: Sequence[int]) -> int:
        """How many of a prompt's first blocks are there."""
        for at, block in enumerate(blocks):
            if block not in self._blocks:
                return at
        return len(blocks)

    def add(self, blocks: Sequence[int]) -> None:
        """Note the blocks of a prompt. The last ones are the first to be forgotten."""
        for block in reversed(blocks):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._most:
            self._blocks.popitem(last=False)

    def clear(self) -> None:
        """Forget all: the backend was started anew."""
        self._blocks.clear()


@dataclass(eq=False)
class Backend:
    """One backend."""

    name: str  # tells it from others, also after a restart
    queues: Queues  # what it has to do, as far as whoever routes knows
    weight: float = 1.0  # one of twice the weight is to have twice as much to do
    labels: Mapping[str, str] = field(default_factory=dict)  # what its operator says of it, such as its accelerator
    share: float = 1.0  # share of its weight that it is to have now, above 0 to 1
    prefixes: Prefixes = field(default_factory=Prefixes)
    ttft: FirstTokenTimes = field(default_factory=FirstTokenTimes)  # learns the time to first token of its answers
    # The time to first token of late, where another server had computed the prompt, from when it had.
    received_ns: float = 0.0
    _answers: int = 0

    @property
    def crowd(self) -> float:
        """Choices with the one that comes, by weight."""
        return (self.queues.of_all.choices + 1) / (self.weight * self.share)

    @property
    def load(self) -> tuple[float, float]:
        """The crowd, and prompt tokens without output by weight."""
        return self.crowd, self.queues.of_all.tokens / (self.weight * self.share)

    def cached_share(self, ask: Ask) -> float:
        """The share of a prompt that the backend should find in its prefix cache."""
        blocks = ask.blocks
        return self.prefixes.found(blocks) / len(blocks) if blocks else 0.0

    def work_of(self, ask: Ask) -> StepWork:
        """What a request waits for there until its first token: prompts before it, its own, and who decodes beside."""
        of_all = self.queues.of_all
        return StepWork(of_all.tokens + round(ask.tokens * (1.0 - self.cached_share(ask))), of_all.choices)

    def sent(self, ask: Ask) -> StepWork:
        """Note the prompt of a request that is about to go there. answered() is told of the work."""
        work = self.work_of(ask)
        self.prefixes.add(ask.blocks)
        return work

    def answered(self, work: StepWork, ttft_ns: int) -> None:
        """Learn from the first token of a request that was sent there: from all at first, and then from some."""
        self._answers += 1
        if self._answers <= LEARNT_ALL or not self._answers % LEARNT_EVERY:
            self.ttft.observe(work, ttft_ns)

    def received(self, ttft_ns: int) -> None:
        """Learn from the first token of a request whose prompt another server had computed so long before."""
        known = self.received_ns or ttft_ns
        self.received_ns = known + RECEIVED_GAIN * (ttft_ns - known)

    def predicted_ttft_ns(self, ask: Ask) -> float:
        """Nanoseconds until the first token of a request, if it were sent there; 0 while too few were measured."""
        return self.ttft.predict_ns(self.work_of(ask))


def alone(name: str, weight: float = 1.0, labels: Mapping[str, str] | None = None) -> Backend:
    """A backend with queues of its own without bounds, for whoever has no other account of what it has to do."""
    return Backend(name, Queues(QueueLimits(), BUILT_IN), weight, labels or {})
