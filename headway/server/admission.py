"""Who may come in: the bound of the queue, with a refusal that HTTP clients understand."""

from __future__ import annotations

import time

from headway.engine.messages import Ready
from headway.policy.queue_bound import QueueBound, QueueLimits, Refusal
from headway.server.errors import ApiError, bad_request, too_many
from headway.server.settings import ServerSettings

clock = time.monotonic_ns
_FLAGS = {"choices": "--max-num-queued-reqs", "tokens": "--max-num-queued-tokens"}
_WHAT = {"choices": "choices are waiting or running", "tokens": "prompt tokens wait for their first output"}


class Place:
    """What one request takes of the queue, until it gives it back; a `with` block gives back what is left."""

    def __init__(self, admission: Admission, choices: int) -> None:
        self._admission = admission
        self._choices = choices
        self._tokens = 0

    def add_tokens(self, tokens: int) -> None:
        """The request's prompts have so many tokens. Raises as Admission.admit()."""
        self._admission.enter(tokens=tokens)
        self._tokens += tokens

    def leave(self, choices: int = 0, tokens: int = 0) -> None:
        """So many of its choices have ended, and prompts of so many tokens have an output."""
        choices, tokens = min(choices, self._choices), min(tokens, self._tokens)
        self._choices -= choices
        self._tokens -= tokens
        self._admission.queue.leave(clock(), choices, tokens)

    def close(self) -> None:
        """Give everything back; may be called again."""
        self.leave(self._choices, self._tokens)


class Admission:
    """The queue's bound; unlimited until the engine has said how large it is."""

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self._ready: Ready | None = None
        self.queue = QueueBound(QueueLimits())

    def fit_to(self, ready: Ready) -> None:
        """Take the limits from the settings, and those that are not set from the engine's size."""
        if ready is not self._ready:
            self._ready = ready
            self.queue.limits = QueueLimits.for_engine(
                ready.max_num_seqs,
                ready.num_blocks * ready.block_size,
                self._settings.max_num_queued_reqs,
                self._settings.max_num_queued_tokens,
            )

    def admit(self, choices: int) -> Place:
        """A place for a request with so many choices.

        Raises:
            ApiError: 429, others have taken what it needs; 400, no empty server would have room for it.
        """
        self.enter(choices=choices)
        return Place(self, choices)

    def refuse_if_full(self) -> None:
        """Raises ApiError 429 where no request can come in, before any work is done on this one."""
        if self.queue.is_full:
            self.enter(choices=1, tokens=1)

    def enter(self, choices: int = 0, tokens: int = 0) -> None:
        refusal = self.queue.enter(choices, tokens)
        if refusal is not None:
            raise self._error(refusal)

    def _error(self, refusal: Refusal) -> ApiError:
        flag, unit = _FLAGS[refusal.unit], "choices" if refusal.unit == "choices" else "prompt tokens"
        if refusal.is_final:
            return bad_request(
                f"the request has {refusal.asked} {unit}; at most {refusal.limit} may be here at once ({flag}), "
                "so it could never be served: send less at a time",
                "n" if refusal.unit == "choices" else None,
            )
        return too_many(
            f"{refusal.present} {_WHAT[refusal.unit]}, and this request has {refusal.asked}; at most {refusal.limit} "
            f"may ({flag})",
            "queue_full",
            self.queue.retry_after_s(refusal, clock()),
        )
