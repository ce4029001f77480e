"""Checks grammars of strangers in a process of their own: by time and memory, and by what a step of each would cost.

A grammar that passes is compiled again where it is used. The process compiles it with a smaller stack than there, and
walks through it once.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from pathlib import Path

import msgspec
import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from headway.grammars.compile import GrammarError, matcher, said, translated
from headway.grammars.vocabulary import load_vocabulary
from headway.policy.step.structured_outputs import StructuredOutputs
from headway.text.bounded import BoundedProcess, Closed, limit_memory, serve

CHECK_BYTES = 2**30
STACK_BYTES = 2**22  # threads that compile and step in an engine have twice as much
# Steps of a walk through the grammar, and the most that one may take: a slow one delays the answer, never others'.
_WALKED, STEP_S = 48, 0.5


class Checked(msgspec.Struct):
    """What came of it."""

    grammar: StructuredOutputs | None = None  # in the library's form; None where it is refused
    refusal: str = ""
    left_out: list[str] = []  # what of a relaxed schema is not kept


class GrammarProcess:
    """The process, from this side. One grammar at a time; for any thread.

    Args:
        folder, vocab_size, eos_token_ids: as load_vocabulary() has them.
    """

    def __init__(self, folder: Path, vocab_size: int, eos_token_ids: list[int]) -> None:
        self._process = BoundedProcess(__name__, str(folder), str(vocab_size), ",".join(map(str, eos_token_ids)))

    def check(self, asked: StructuredOutputs, seconds: float) -> Checked:
        """The checked grammar, or why it is refused. Raises TimeoutError: it took longer than this."""
        try:
            return msgspec.msgpack.decode(self._process.ask(msgspec.msgpack.encode(asked), seconds), type=Checked)
        except Closed as error:
            return Checked(refusal=str(error))
        except TimeoutError:
            raise
        except OSError:
            return Checked(refusal="it takes more memory to compile than it may")

    def close(self) -> None:
        self._process.close()


# --- in the process ---------------------------------------------------------------------------------


class _Worker:
    def __init__(self, folder: Path, vocab_size: int, eos_token_ids: list[int]) -> None:
        self._vocab_size, self._ends = vocab_size, set(eos_token_ids)
        self._refusal = ""  # of all
        try:
            self._vocabulary = load_vocabulary(folder, vocab_size, eos_token_ids)
        except GrammarError as error:
            self._refusal = str(error)

    def do(self, message: bytearray) -> bytes:
        limit_memory(CHECK_BYTES)
        answer = Checked(refusal="it takes more memory to compile than it may")
        asked = msgspec.msgpack.decode(message, type=StructuredOutputs)

        def work() -> None:
            nonlocal answer
            try:
                answer = self._check(asked)
            except GrammarError as error:
                answer = Checked(refusal=str(error))
            except MemoryError:
                pass
            except Exception as error:  # of the library: nothing but this request is at fault
                answer = Checked(refusal=f"it cannot be compiled: {error!r:.200}")

        thread = threading.Thread(target=work)  # it has STACK_BYTES
        thread.start()
        thread.join()
        return msgspec.msgpack.encode(answer)

    def _check(self, asked: StructuredOutputs) -> Checked:
        if self._refusal:
            raise GrammarError(self._refusal)
        grammar, left_out = translated(asked)
        made = matcher(grammar.text, self._vocabulary)
        left_out += made.get_grammar_warnings()
        _walk(made, self._vocab_size, self._ends)
        return Checked(grammar, left_out=left_out)


def _walk(made: LLMatcher, vocab_size: int, ends: set[int]) -> None:
    """Take some steps at random. Raises GrammarError where there are none, or one takes too long."""
    chance, row = random.Random(0), np.zeros((vocab_size + 31) // 32, np.int32)
    for step in range(_WALKED):
        began = time.monotonic()
        made.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        took = time.monotonic() - began
        if made.is_error():
            raise GrammarError(said(made))
        if took > STEP_S:
            raise GrammarError(f"a token of it takes {took:.2g} s to decide; at most {STEP_S:g} s are allowed")
        allowed = [token for token in _tokens_of(row) if token not in ends]
        if not allowed:
            if step == 0 and not made.is_accepting():
                raise GrammarError("no token of the model can begin it")
            return
        made.consume_token(chance.choice(allowed))


def _tokens_of(row: NDArray[np.int32]) -> list[int]:
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()


def main(descriptor: int, parent: int, folder: str, vocab_size: int, eos_token_ids: list[int]) -> None:
    """Check what is asked until the parent has gone."""
    threading.stack_size(STACK_BYTES)
    serve(descriptor, parent, _Worker(Path(folder), vocab_size, eos_token_ids).do)


if __name__ == "__main__":
    _, descriptor, parent, folder, vocab_size, ends = sys.argv
    main(int(descriptor), int(parent), folder, int(vocab_size), [int(each) for each in ends.split(",") if each])
