"""Changes of a plan that are worth trying, as proposals."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Self

from headway.changes import Change, change_of
from headway.cost import catalogue, speculative
from headway.cost.capacity import sequence_bytes
from headway.cost.precision import ENGINE_QUANTIZATIONS, Precision
from headway.cost.timing import Deployment
from headway.planner.plan import Plan
from headway.planner.request import PlanRequest, Speculation
from headway.planner.resolve import draft_of
from headway.planner.words import gigabytes

# Leviathan et al. (2023) report 0.5 to 0.9 for drafts of a hundredth of the size; text that repeats its prompt, such as
# summaries and edited code, comes to the speedups that are published for n-grams with 0.6.
NGRAM_ACCEPTANCE, DRAFT_ACCEPTANCE = 0.6, 0.7
HIT_SHARE = 0.5
# A draft model has at most this share of the parameters.
DRAFT_SHARE = 0.25
SHOWN_BATCHES = (1, 8, 64)
_FAMILY = re.compile(r"[a-z-]+\d+")
_SERVE = "`headway serve`"
_LOADS = {"batch": ("batch_size", "batch"), "concurrency": ("concurrency", "clients")}

# The change of quality to expect, by format: an assumption, not a prediction.
_QUALITY = {
    "fp8": "quality: usually within the noise of evaluations",
    "int8": "quality: small loss, activations need calibration",
    "int4": "quality: a visible loss in evaluations, largest in small models",
}


class NotApplicable(ValueError):
    """The message says why a change is no lever here."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """Changes that are made together."""

    name: str
    kind: str  # proposals of one kind exclude each other
    changes: tuple[Change, ...] = ()
    assumes: str = ""  # what the figures rest on, and what the changes may cost
    combines: bool = True  # the proposal keeps the devices and the load, so it may be put together with others

    @classmethod
    def of(cls, name: str, kind: str, settings: dict[str, Any], assumes: str = "", combines: bool = True) -> Self:
        """Make a proposal of fields of the request, by name."""
        return cls(name, kind, changes_of(settings), assumes, combines)

    @property
    def settings(self) -> dict[str, Any]:
        """The changed fields of the request, by name."""
        return {each.field: each.value for each in self.changes}


def changes_of(settings: dict[str, Any]) -> tuple[Change, ...]:
    """The changes of fields of a request, by name."""
    return tuple(
        _speculation_of(value) if name == "speculation" else change_of(PlanRequest, name, value)
        for name, value in settings.items()
    )


def _speculation_of(asked: Speculation) -> Change:
    words = f"--num-speculative-tokens {asked.tokens} --acceptance-rate {asked.acceptance:g}"
    return Change("speculation", asked, words + (f" --draft-model {asked.draft}" if asked.draft else ""), "Engine")


def proposals(base: Plan) -> Iterator[Proposal | tuple[str, str]]:
    """Proposals of all kinds but load and hardware; where one cannot be made, its name and why not."""
    yield from _weights(base)
    yield from _cache(base)
    yield from _speculation(base)
    yield from _prefix(base)
    yield from _parallel(base, "tensor", 2)
    yield from _parallel(base, "tensor", 4)
    yield from _parallel(base, "pipeline", 2)
    yield from _chunks(base)
    yield from _heads(base)


def _weights(base: Plan) -> Iterator[Proposal | tuple[str, str]]:
    """Weights in formats with fewer bits. What the hardware cannot multiply in such a format is widened first."""
    hardware = base.deployment.hardware
    is_ours = base.engine.is_headway
    now = base.deployment.precision.of_experts if base.quantization == "mxfp4" else base.deployment.precision.linear
    for name in ("fp8", "int8", "int4"):
        native = name in hardware.flops_per_s or name == "int4"
        scheme = name if native else f"{name}-weight-only"
        if Precision.named(quantization=scheme).linear.bits >= now.bits:
            yield f"{name} weights", f"weights have {now.bits} bits already"
            continue
        if is_ours and scheme not in ENGINE_QUANTIZATIONS:
            yield f"{name} weights", f"{_SERVE} does not quantise to {name}; a checkpoint of it may be served"
            continue
        if is_ours and base.quantization not in ENGINE_QUANTIZATIONS:
            yield f"{name} weights", f"{_SERVE} keeps the format of a checkpoint that is quantised, {base.quantization}"
            continue
        how = "" if native else f"; {hardware.key} does not multiply in {name}, so they are widened"
        yield Proposal.of(f"{name} weights", "weights", {"quantization": scheme}, _QUALITY[name] + how)


def _cache(base: Plan) -> Iterator[Proposal | tuple[str, str]]:
    if base.deployment.precision.kv.bits <= 8:
        yield "fp8 KV cache", f"the cache has {base.deployment.precision.kv.bits} bits already"
        return
    loss = "quality: small loss, most in long contexts"
    if not base.engine.is_headway:
        yield Proposal.of("fp8 KV cache", "cache", {"kv_cache_dtype": "fp8"}, loss)
        return
    yield "fp8 KV cache", f"{_SERVE} keeps int8 in about as many bytes, and more exactly"
    yield Proposal.of("int8 KV cache", "cache", {"kv_cache_dtype": "int8"}, loss)


def _speculation(base: Plan) -> Iterator[Proposal | tuple[str, str]]:
    names = ("n-gram drafts", "draft model")
    if base.request.speculation is not None:
        yield from ((name, "the plan has speculative decoding already") for name in names)
        return
    if base.engine.is_headway and base.deployment.shape.recurrent:
        yield from ((name, f"{_SERVE} takes no drafts back from recurrent layers") for name in names)
        return
    lossless = "lossless; the best k for this batch; TTFT stays"
    yield Proposal.of(
        names[0],
        "speculation",
        {"speculation": Speculation(4, NGRAM_ACCEPTANCE)},
        f"acceptance {NGRAM_ACCEPTANCE:g} of proposals that take no time, for text that repeats itself; {lossless}; "
        + _by_batch(base, NGRAM_ACCEPTANCE, None),
    )
    draft = draft_model(base)
    if draft is None:
        yield names[1], "no model of its family with at most a quarter of the parameters is in the catalogue"
        return
    yield Proposal.of(
        names[1],
        "speculation",
        {"speculation": Speculation(4, DRAFT_ACCEPTANCE, draft)},
        f"acceptance {DRAFT_ACCEPTANCE:g}; {lossless}; " + _draft_memory(base, draft),
    )


def _draft_memory(base: Plan, name: str) -> str:
    """What a draft model takes, and what it makes of decoding."""
    draft = draft_of(name, base.deployment)
    weights = draft.precision.linear.bytes_of(draft.device.num_parameters)
    cache = sequence_bytes(draft, 1, 1, rolling=False)
    memory = f"the draft's {gigabytes(weights)} and {cache / 1000:.0f} kB of cache for a token are not counted"
    return f"{_by_batch(base, DRAFT_ACCEPTANCE, draft)}; {memory}"


def _by_batch(base: Plan, acceptance: float, draft: Deployment | None) -> str:
    """What the best number of drafts makes of TPOT, by batch."""
    found = []
    for batch in SHOWN_BATCHES:
        costs = base.deployment, draft, batch, base.workload.mean_context
        best = speculative.best_tokens(*costs, acceptance)
        gain = speculative.tpot_s(*costs, 0, 0.0) / speculative.tpot_s(*costs, best, acceptance)
        found.append(f"{gain:.2f} x at batch {batch}")
    return "decoding " + ", ".join(found)


def draft_model(base: Plan) -> str | None:
    """The smallest of the catalogue's models of the same family and vocabulary (to 1 %), if it is small enough."""
    shape = base.deployment.shape
    family = _FAMILY.match(base.model)
    choices = []
    for key, known in catalogue.models().items():
        own = _FAMILY.match(key)
        alike = family is not None and own is not None and own[0] == family[0]
        if alike and known.parameters_b * 1e9 <= DRAFT_SHARE * shape.num_parameters:
            small = known.shape
            if abs(small.vocab - shape.vocab) <= 0.01 * shape.vocab:
                choices.append((small.num_parameters, key))
    return min(choices)[1] if choices else None


def _prefix(base: Plan) -> Iterator[Proposal | tuple[str, str]]:
    """A prefix cache that holds half of the prompt tokens that are computed now, in whole blocks."""
    request, name = base.request, "prefix cache"
    block = request.block_size
    found = int((base.workload.prompt - request.cached_tokens) * HIT_SHARE) // block * block
    if not found:
        yield name, f"half of the prompt is less than a block of {block}"
        return
    assumes = f"{found:,} more of the prompt's tokens are cached, the same for all requests; memory holds them once"
    yield Proposal.of(name, "prefix", {"cached_tokens": request.cached_tokens + found}, assumes)


def _parallel(base: Plan, which: str, times: int) -> Iterator[Proposal | tuple[str, str]]:
    """A larger parallel size: on the same devices where replicas can merge into fewer, otherwise on more devices."""
    size = times * getattr(base.deployment.parallelism, which)
    if base.engine.is_headway:
        yield f"{which[0].upper()}P {size}", f"{_SERVE} runs a model on one device"
        return
    same = base.replicas % times == 0
    devices = base.devices if same else base.devices * times
    settings = {f"{which}_parallel_size": size} | ({} if same else {"count": devices})
    if which == "pipeline" and base.deployment.parallelism.tensor > 1:
        settings["tensor_parallel_size"] = base.deployment.parallelism.tensor
    where = "the same devices in fewer replicas" if same else f"{times} times the devices, {devices} in all"
    if which == "pipeline":
        where += "; batches queue for the slowest stage"
    yield Proposal.of(f"{which[0].upper()}P {size}", "parallel", settings, where, combines=same)


def _chunks(base: Plan) -> Iterator[Proposal]:
    tokens = base.limits.batched_tokens
    for name, size, assumes in (
        ("half chunks", max(1, tokens // 2), "prompts in smaller chunks stall decodes less and end later"),
        ("double chunks", tokens * 2, "prompts in larger chunks end sooner and stall decodes more"),
    ):
        yield Proposal.of(name, "chunks", {"max_num_batched_tokens": size}, assumes)


def _heads(base: Plan) -> Iterator[Proposal | tuple[str, str]]:
    """The model with the attention of document 002's table: MHA and MQA, where it has GQA."""
    shape = base.deployment.shape
    for name, count, quality in (("MHA", shape.heads, "the best"), ("MQA", 1, "lower")):
        if shape.kv_heads == count:
            yield name, f"the model has {count} KV heads already" if count > 1 else "the model has one KV head already"
        elif shape.latent is not None or shape.kinds:
            yield name, "the model's layers have no KV heads of one number"
        else:
            heads = "KV head" if count == 1 else "KV heads"
            assumes = (
                f"{count:,} {heads} for {shape.heads:,} query heads, a cache of {count / shape.kv_heads:g} x; needs a "
                f"model that is trained so, or converted and trained further; quality: {quality}"
            )
            yield Proposal.of(name, "attention", {"kv_heads": count}, assumes, combines=False)


def largest_load(base: Plan, meets: Callable[[PlanRequest], bool]) -> Iterator[Proposal | tuple[str, str]]:
    """The largest load that meets all objectives; where the plan has none, twice and half of its own load.

    Args:
        meets: whether the plan of a request fits and meets its objectives.
    """
    if base.load not in _LOADS:
        yield "more or fewer at once", "the load is a rate of arrivals, which is given"
        return
    name, what = _LOADS[base.load]
    now = int(base.load_value)
    assumes = "another load, on the same devices"
    if not base.request.slo:
        for value in (now * 2, now // 2):
            if value:
                yield Proposal.of(f"{what} {value:,}", "load", {name: value}, assumes, combines=False)
        return
    most = _largest(base, name, meets)
    if most is None:
        yield f"{what} that meet the SLO", "not even one does"
    elif most == now:
        yield f"{what} that meet the SLO", f"{now:,} is the most that does"
    else:
        yield Proposal.of(
            f"{what} {most:,}", "load", {name: most}, f"{assumes}: the most that meets the SLO", combines=False
        )


def _largest(base: Plan, name: str, meets: Callable[[PlanRequest], bool]) -> int | None:
    """The largest value of the load that meets the objectives, to 1/32, if all smaller ones meet them too."""

    def at(value: int) -> bool:
        load: dict[str, Any] = {name: value}
        return meets(replace(base.request, **load))

    groups = base.replicas if base.load == "concurrency" else 1
    low, high = 0, max(1, base.max_batch) * groups + 1
    while high - low > max(1, low // 32):
        middle = (low + high) // 2 if high <= 4 * low else max(low + 1, round((max(1, low) * high) ** 0.5))
        low, high = (middle, high) if at(middle) else (low, middle)
    return low or None


def other_hardware(base: Plan) -> Iterator[Proposal]:
    """The same number of devices of every other entry of the catalogue (GPUs for GPUs), at their list price."""
    own = base.deployment.hardware
    price = {} if base.request.price_per_hour is None else {"price_per_hour": None}
    given = " instead of the given one" if price else ""
    for key, hardware in catalogue.hardware().items():
        if key != own.key and hardware.kind == own.kind:
            listed = f"at their list price{given}" if hardware.price else "of which no price is known"
            yield Proposal.of(key, "hardware", {"hardware": key, **price}, f"as many devices, {listed}", combines=False)
