"""What techniques gain or cost a plan: the cache, batching, swapping, prefixes, pipelines, rings, drafts elsewhere.

Each is a closed form of figures that the plan has.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from headway.cost.attention import Chunk
from headway.cost.capacity import sequence_bytes
from headway.cost.loading import HOST_LINK_SHARE
from headway.cost.requests import RequestShape
from headway.cost.work import step_work, total
from headway.load.workload.lengths import longest_tokens, parse_length
from headway.planner.formula import Formula, Number, given, larger, ms
from headway.planner.plan import Plan
from headway.planner.steps import prefill_step, prompt_steps, steps_s

CHAPTERS_5_6 = "document 001, chapter 5, section 2, and chapter 6, section 3"
CHAPTER_7 = "document 001, chapter 7, section 3"
SECTION_9 = "document 003, section 9"
OF_LAYER = 11  # d × d weights of a layer, as document 001 counts: 4 of attention and 7 of a feed-forward layer
PARTS = 2  # of a stage's layers, where a pipeline is interleaved
PROBABILITY_BYTES = 2


def of_techniques(plan: Plan) -> Iterator[Formula]:
    """Formulas of everything that applies to this plan."""
    yield from _without_cache(plan)
    is_pipeline = plan.deployment.parallelism.pipeline > 1
    if plan.load == "batch" and plan.batch > 1 and plan.output_tokens_per_s is not None and not is_pipeline:
        yield from _static_batch(plan)
    yield from _preemption(plan)
    if plan.workload.cached:
        yield from _shared_prefix(plan)
    if is_pipeline:
        yield from _pipeline(plan)
    else:
        yield from _ring(plan)
    yield from _remote_draft(plan)


def _without_cache(plan: Plan) -> Iterator[Formula]:
    """A token halfway through an answer, for which a pass goes over all tokens before it again."""
    d, tokens = plan.deployment, plan.workload.mean_context + 1
    layers, width, passed = given(d.shape.layers), given(d.shape.hidden), given(tokens)
    linear, attention = 2 * layers * OF_LAYER * passed * width**2, 4 * layers * passed**2 * width
    rate, counted = d.hardware.rate(d.precision.linear.compute), "without a cache, as document 001 counts it"
    for name, rule, outcome, unit in (
        ("Products with weights", f"2 × L × {OF_LAYER} × N × d², of MHA and a feed-forward layer", linear, "FLOP"),
        ("Attention", "4 × L × N² × d, of all N × N pairs", attention, "FLOP"),
        ("Time", "both / the peak rate of one device", (linear + attention) / given(rate), "s"),
    ):
        yield Formula(f"{name} of a token {counted}", rule, outcome, unit, "document 001, chapter 5, section 2")
    naive = total(step_work(d.shape, [Chunk(tokens)], d.precision, d.flash).values()).flops
    yield Formula(
        "Arithmetic that the cache saves",
        f"FLOPs of a pass over all {tokens:,} tokens, which a token takes without a cache / FLOPs of the decode step "
        "for each sequence",
        given(naive) / (given(plan.decode.flops) / given(plan.batch)),
        "times",
        CHAPTERS_5_6,
    )
    alone = RequestShape(tokens, 1)
    pass_s, decode_s = prefill_step(d, alone, tokens).time.seconds, d.step([Chunk(1, tokens - 1)]).seconds
    yield Formula(
        "Time of a token without a cache",
        f"a pass over all {tokens:,} tokens, of one sequence",
        pass_s * 1e3,
        "ms",
        CHAPTERS_5_6,
    )
    rule = "that time / a decode step of one sequence"
    yield Formula("Time that the cache saves", rule, ms(pass_s) / ms(decode_s), "times", CHAPTERS_5_6)


def _static_batch(plan: Plan) -> Iterator[Formula]:
    """A batch that begins and ends together: prompts are padded to the longest, and seats idle after short answers."""
    request, work, batch = plan.request, plan.workload, given(plan.lane_batch)
    longest_prompt = _longest(request.input_len, plan.lane_batch, float(work.prompt))
    longest_answer: Number | float
    if request.output_len is None:
        answer, spread = given(work.output), given(work.spread)
        longest_answer = answer * (spread * (batch - 1) / (batch + 1) + 1)
        rule = "answers lie evenly in mean × (1 ± spread): mean × (1 + spread × (B - 1) / (B + 1))"
    else:
        longest_answer = _longest(request.output_len, plan.lane_batch, float(work.output))
        rule = "the mean of the longest of B draws"
    yield Formula("Longest prompt of a batch", "the mean of the longest of B", longest_prompt, "tokens", CHAPTER_7)
    yield Formula("Longest answer of a batch", rule, longest_answer, "tokens", CHAPTER_7)
    of_answer = longest_answer.value if isinstance(longest_answer, Number) else longest_answer
    for name, mean, longest in (
        ("Padding of prompts in a static batch", work.prompt, longest_prompt),
        ("Steps of seats whose answer has ended in a static batch", work.output, of_answer),
    ):
        yield Formula(name, "1 - mean / longest", 1 - given(mean) / given(longest), "of all", CHAPTER_7)
    padded = replace(work, prompt=max(work.cached + 1, round(longest_prompt)), output=1, spread=0.0)
    prefill_s = steps_s(plan.deployment, prompt_steps(padded, plan.limits.batched_tokens, plan.lane_batch))
    decode = RequestShape(padded.prompt, round(of_answer)).mean_context
    step = plan.deployment.step([Chunk(1, decode, 1, plan.lane_batch)]).seconds
    yield Formula(
        "Output tokens/s of static batching",
        "replicas × sequences × mean answer / (padded prompts + (longest answer - 1) × step at padded contexts)",
        given(plan.replicas * plan.batch * work.output) / ((ms(prefill_s) + (given(of_answer) - 1) * ms(step)) / 1000),
        "tokens/s",
        CHAPTER_7,
    )


def _longest(lengths: str | None, batch: int, mean: float) -> float:
    return mean if lengths is None else longest_tokens(parse_length(lengths), batch)


def _preemption(plan: Plan) -> Iterator[Formula]:
    """What a sequence costs that is preempted halfway through its answer."""
    d, tokens = plan.deployment, plan.workload.mean_context
    again_s = prefill_step(d, RequestShape(tokens, 1), plan.limits.batched_tokens).time.seconds
    source = "PagedAttention 2023, section 4.5; document 003, section 8"
    yield Formula(
        "Recompute of a preempted sequence", f"a prefill of its {tokens:,} tokens", again_s * 1e3, "ms", source
    )
    if d.hardware.host_bytes_per_s:
        held = sequence_bytes(d, tokens, plan.settings.block_size, plan.settings.rolling)
        yield Formula(
            "Swap of a preempted sequence",
            "2 × its cache on a device / (bandwidth to the host × share of it that is reached): out, and in again",
            2 * given(held) / (given(d.hardware.host_bytes_per_s) * HOST_LINK_SHARE) * 1000,
            "ms",
            source,
        )


def _shared_prefix(plan: Plan) -> Iterator[Formula]:
    """What the cached tokens of a prompt save: its prefill's work and time, and memory."""
    whole = prefill_step(plan.deployment, replace(plan.workload, cached=0), plan.limits.batched_tokens)
    source = "document 003, section 5: prompt caching"
    yield Formula(
        "FLOPs that the cached prefix saves",
        "a prefill of the whole prompt - the prefill",
        given(whole.flops) - given(plan.prefill.flops),
        "FLOP",
        source,
    )
    yield Formula(
        "Time that the cached prefix saves",
        "a prefill of the whole prompt - the prefill",
        ms(whole.time.seconds) - ms(plan.prefill.time.seconds),
        "ms",
        source,
    )
    block = plan.settings.block_size
    shared = plan.workload.cached // block * block
    yield Formula(
        "Memory that the shared prefix saves",
        "cache of a token × tokens of the prefix in whole blocks × further sequences",
        given(plan.kv_bytes_per_token) * given(shared) * (given(plan.batch) - 1),
        "bytes",
        "document 002, Attention Doesn't Batch Well: prefix sharing; PagedAttention 2023",
    )


def _pipeline(plan: Plan) -> Iterator[Formula]:
    d = plan.deployment
    stages = given(d.parallelism.pipeline)
    batches = given(max(1, min(d.parallelism.pipeline, -(-plan.batch // max(1, plan.lane_batch)))))
    yield Formula(
        "Bubble of a pipeline that fills and empties",
        "(stages - 1) / (batches + stages - 1) of the time, for a prompt or a step of so many batches",
        (stages - 1) / (batches + stages - 1),
        "of the time",
        f"GPipe 2019; {SECTION_9}",
    )
    yield Formula(
        f"The same, interleaved: each device has {PARTS} parts of the layers",
        f"(stages - 1) / ({PARTS} × batches + stages - 1), for {PARTS} times as many messages between stages",
        (stages - 1) / (PARTS * batches + stages - 1),
        "of the time",
        f"Narayanan et al. 2021, section 2.2; {SECTION_9}",
    )
    step = d.step([Chunk(1, plan.workload.mean_context, 1, plan.lane_batch)])
    yield Formula(
        "Straggler: the slowest stage",
        "time of the slowest stage / mean of all stages: what the head and a layer more make it wait",
        ms(d.pace(step)) / (ms(step.device_s) / stages),
        "times",
        "document 001, chapter 8, section 3: the straggler effect",
    )


def _ring(plan: Plan) -> Iterator[Formula]:
    """A prompt whose tokens are divided among the devices of a machine, which pass keys and values round."""
    d, link = plan.deployment, plan.deployment.hardware.link
    count = 0 if link is None else link.max_devices // d.parallelism.tensor
    if link is None or count < 2:
        return
    devices, kept = given(count), given(plan.kv_bytes_per_token) / given(d.parallelism.tensor)
    sent = kept * given(plan.workload.prompt) * (devices - 1) / devices / given(link.bytes_per_s) * 1000
    computed = ms(plan.prefill.time.seconds) / devices
    yield Formula(
        f"Prefill with its tokens divided among {count} devices (context parallelism)",
        "the longer of prefill / devices and what each sends: cache of the prompt × (devices - 1) / devices / link; "
        "each device has all weights",
        larger(computed, sent),
        "ms",
        f"Liu, Zaharia and Abbeel 2023 (Ring Attention); {SECTION_9}: sequence parallel",
    )


def _remote_draft(plan: Plan) -> Iterator[Formula]:
    """Speculation whose draft is on another device, to which tokens go and from which probabilities come."""
    found, asked, hardware = plan.speculated, plan.request.speculation, plan.deployment.hardware
    if found is None or asked is None or asked.draft is None:
        return
    tokens, vocab = given(asked.tokens), given(plan.deployment.shape.vocab)
    for link, where in ((hardware.link, "on a neighbour"), (plan.deployment.network, "in another machine")):
        if link is not None:
            sent = tokens * vocab * PROBABILITY_BYTES * given(plan.lane_batch) / given(link.bytes_per_s) * 1000
            yield Formula(
                f"TPOT with the draft {where}, by {link.kind}",
                f"(the cycle + 2 × latency + k × vocabulary × {PROBABILITY_BYTES} bytes of probabilities × sequences / "
                "link) / tokens of a step",
                (ms(found.tpot_s * found.accepted) + 2 * ms(link.latency_s) + sent) / given(found.accepted),
                "ms",
                f"{SECTION_9}: speculative across devices",
            )
