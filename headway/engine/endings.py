"""Why a choice that was not served has ended, in words for the user."""

from __future__ import annotations

from headway.policy.step.request import FinishReason, Sequence

UNSERVED = (FinishReason.ERROR, FinishReason.LATE, FinishReason.TIMEOUT)
_NOT_NUMBERS = "the model's logits were not numbers (NaN) for this sequence; check the weights and the dtype"
_YIELDED = {
    "oversized": "its prompt alone takes longer",
    "late": "it has waited too long",
    "overload": "it would make others late",
}


def why_unserved(sequence: Sequence, max_queue_time: float) -> str:
    """One line on a sequence that has ended for a reason in UNSERVED; the limit on waiting is in seconds."""
    service = sequence.service
    if sequence.finish_reason is FinishReason.ERROR:
        return _NOT_NUMBERS
    if sequence.finish_reason is FinishReason.LATE:
        due_ms = (sequence.due_ns - sequence.arrival_ns) / 1e6
        return (
            f"the first token would be later than the {due_ms:.0f} ms that the engine has of its objective, because "
            f"{_YIELDED[sequence.yielded]}; class {service.name!r} refuses late requests"
        )
    if max_queue_time <= service.queue_timeout_s:
        return f"it waited longer than {max_queue_time:g} s (--max-queue-time)"
    return f"it waited longer than {service.queue_timeout_s:g} s (queue_timeout_s of class {service.name!r})"
