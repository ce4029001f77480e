"""Which requests may come in: the bounds of the queue, and refusals that HTTP clients understand."""

from __future__ import annotations

import time
from collections.abc import Sequence

from headway.engine.messages import Ready
from headway.policy.admission.queue_bound import Place, QueueLimits, Queues, Refusal, TenantBound
from headway.policy.objectives.service_class import BUILT_IN, ServiceClass
from headway.server.edge.settings import EdgeSettings
from headway.server.errors import bad_request, too_many

clock = time.monotonic_ns
_FLAGS = {"choices": "--max-num-queued-reqs", "tokens": "--max-num-queued-tokens"}
_WHAT = {"choices": "choices{} are waiting or running", "tokens": "prompt tokens{} wait for their first output"}


class Admission:
    """The bounds of each class and of all requests; the latter comes when the engine has said how large it is."""

    def __init__(self, settings: EdgeSettings) -> None:
        self._settings = settings
        self._ready: Ready | None = None
        self.queues = Queues(QueueLimits(), BUILT_IN)

    def fit_to(self, ready: Ready) -> None:
        """Take the limits from the settings, or from the engine's size where they are not set."""
        if ready is not self._ready:
            self._ready = ready
            self.queues.of_all.limits = QueueLimits.for_engine(
                ready.max_num_seqs,
                ready.pool_tokens,
                self._settings.max_num_queued_reqs,
                self._settings.max_num_queued_tokens,
            )

    def admit(self, choices: int, service: ServiceClass, tenant: str, lengths: Sequence[int] = ()) -> Place:
        """A place for a request of a class and a tenant, with this many choices.

        Args:
            lengths: tokens of its prompts, where they are known; add_prompts() adds others.

        Raises:
            ApiError: 429 when others have taken what it needs; 400 when even an empty server would have no room for it.
        """
        place = self.queues.place(service.name, tenant)
        self._check(place.take(choices, lengths))
        return place

    def add_prompts(self, place: Place, lengths: list[int]) -> None:
        """Count the prompts of an admitted request, each with its tokens. Raises what admit() raises."""
        self._check(place.take(prompts=lengths))

    def refuse_if_full(self) -> None:
        """Raise ApiError 429 when no request can come in, before any work is done on this one."""
        if self.queues.of_all.is_full:
            self._check(self.queues.of_all.refusal(choices=1, tokens=1))

    def _check(self, refusal: Refusal | None) -> None:
        if refusal is None:
            return
        bound, name, flag, of_class = refusal.bound, refusal.bound.service_class, _FLAGS[refusal.unit], ""
        if isinstance(bound, TenantBound):
            of_class, flag = f" of tenant {bound.tenant}", f"its share of {flag}"
        elif name:
            of_class, flag = f" of class {name}", "max_queued"
        if refusal.kept:
            flag += f", of which {refusal.kept} are kept for other classes"
        unit = "choices" if refusal.unit == "choices" else "prompt tokens"
        if refusal.is_final:
            raise bad_request(
                f"the request has {refusal.asked} {unit}, more than the limit of {refusal.limit}{of_class} ({flag}), "
                "so it could never be served; split it",
                "n" if refusal.unit == "choices" else None,
            )
        raise too_many(
            f"{refusal.present} {_WHAT[refusal.unit].format(of_class)}, and this request has {refusal.asked}; "
            f"the limit is {refusal.limit} ({flag})",
            "queue_full",
            bound.retry_after_s(refusal, clock()),
        )
