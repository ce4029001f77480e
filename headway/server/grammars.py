"""Checks what answers have to be before a request goes to the engine: in other processes, and once for each grammar."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections import OrderedDict
from functools import partial

from headway.grammars.process import Checked, GrammarProcess
from headway.policy.step.structured_outputs import StructuredOutputs
from headway.server.settings import ServerSettings
from headway.server.text_work import TextWork
from headway.text.tokenizer import Tokenizer

# A grammar that takes longer goes to a second process, so that others do not wait for it.
QUICK_S = 0.5
KEPT, KEPT_CHARS = 1024, 2**25
OUTCOMES = {"known": "checked before", "accepted": "checked and accepted", "refused": "checked and refused"}


class GrammarChecks:
    """The grammars of requests, checked.

    Attributes:
        num_checked: by outcome, which OUTCOMES has.
        waiting: requests that wait for a check.
    """

    def __init__(self, tokenizer: Tokenizer, settings: ServerSettings) -> None:
        made = partial(GrammarProcess, tokenizer.folder, tokenizer.vocab_size, tokenizer.eos_token_ids)
        work = partial(TextWork, settings.max_queued_text, threads=1, inline=-1)
        self._timeout_s = settings.grammar_timeout
        self._quick, self._slow = (made(), work()), (made(), work())
        self._known: OrderedDict[bytes, Checked] = OrderedDict()
        self._kept_chars = 0
        self._running: dict[bytes, asyncio.Task[Checked]] = {}
        self.num_checked = dict.fromkeys(OUTCOMES, 0)
        self.waiting = 0

    async def check(self, asked: StructuredOutputs) -> Checked:
        """What came of a grammar. Requests with the same grammar wait for one check.

        Raises:
            ApiError: 429 when too many characters of others wait.
        """
        said = f"{asked.kind} {asked.relaxed} {asked.text}"
        key = hashlib.sha256(said.encode(errors="surrogatepass")).digest()
        if (known := self._known.get(key)) is not None:
            self._known.move_to_end(key)
            self.num_checked["known"] += 1
            return known
        running = self._running.get(key)
        if running is None:
            running = self._running[key] = asyncio.create_task(self._check(key, asked))
            running.add_done_callback(lambda _: self._running.pop(key))
        self.waiting += 1
        try:
            return await asyncio.shield(running)
        finally:
            self.waiting -= 1

    async def _check(self, key: bytes, asked: StructuredOutputs) -> Checked:
        checked, quick_s = None, min(QUICK_S, self._timeout_s)
        for (process, work), seconds in ((self._quick, quick_s), (self._slow, self._timeout_s - quick_s)):
            if checked is None and seconds > 0.0:
                with contextlib.suppress(TimeoutError):
                    checked = await work.run(len(asked.text), partial(process.check, asked, seconds))
        if checked is None:
            message = f"it takes more than {self._timeout_s:g} s to compile (--grammar-timeout)"
            checked = Checked(refusal=message)
        self.num_checked["accepted" if checked.grammar is not None else "refused"] += 1
        self._keep(key, checked)
        return checked

    def _keep(self, key: bytes, checked: Checked) -> None:
        self._known[key] = checked
        self._kept_chars += _chars(checked)
        while len(self._known) > KEPT or self._kept_chars > KEPT_CHARS:
            _, dropped = self._known.popitem(last=False)
            self._kept_chars -= _chars(dropped)

    def close(self) -> None:
        """End the processes, whatever they do."""
        for process, work in (self._quick, self._slow):
            process.close()
            work.close()


def _chars(checked: Checked) -> int:
    return len(checked.refusal) + (0 if checked.grammar is None else len(checked.grammar.text))
