"""Tokens per second with drafts beside the same without, where texts are easy to foresee and where not.

    python -m benchmarks.speculation [--shapes story qwen2.5-0.5b] [--drafters ngram draft] [--batches 1 4 16]

Each step computes what it always does, but of each row the token of a given text is taken: so texts are as alike with
trained weights as with random ones, and a draft is right as often. `quote` repeats its prompt; `edit` does with a new
token in every 24; `random` has no two tokens in the same order twice but by chance; `misleading` has 32 tokens, so that
each pair has stood somewhere before and says nothing of what follows. `story` is what the bundled model itself says,
greedily, beside the bundled draft.

With `--acceptance`, a draft model computes as always, too, but each of its drafts is right by that chance: the text is
`random`, and what is said is meaningless, so this is for speed alone. Beside the bundled model stands the bundled
draft; beside another shape stands a draft of a tenth of it. Several numbers of `--num-speculative-tokens` bound the
drafts behind a token by turns. `--calibration`, an entry as `headway calibrate --output` writes, adds what the cost
model predicts: the ratio at the best number of drafts up to the bound.

It is one engine, to which nothing, n-grams or a draft model propose drafts by turns; the tokens must be the same.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.checkpoint import SHAPES
from benchmarks.machine import RESULTS, keep
from benchmarks.rounds import Rounds, number, spread
from headway import LLM, SamplingParams
from headway.bundled import DRAFT, STORY
from headway.calibration import store
from headway.cost.config import read_shape
from headway.cost.precision import Precision
from headway.cost.speculative import tpot_s
from headway.cost.timing import Deployment
from headway.engine.drafter import NgramDrafter, Speculator
from headway.engine.sampler import Sampled
from headway.policy.step.drafting import Drafting
from headway.policy.step.plan import SequenceState, StepPlan
from headway.policy.step.sampling_params import SamplingParams as Params
from headway.policy.step.speculative_config import SpeculativeConfig

PROMPT_TOKENS = 192
LOADS = ("quote", "edit", "random", "misleading")
DRAFTERS = ("ngram", "draft")
EDITED = 24
# A draft model beside another shape: as a fifth of the layers, and a third of their width.
DRAFT_OF_A_SHAPE = {
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
_FEW = 32
STORIES = [
    "Tell me a story about a fox and a lost key.",
    "Write a poem about winter.",
    "What is the moon?",
    "Once upon a time there was a king who had three sons.",
]


def text_of(load: str, index: int, new_tokens: int, vocab: int) -> list[int]:
    """A prompt and what follows it. Its first token is its own, so that texts are told apart by it."""
    rng = random.Random(f"{load} {index}")
    among = range(100, 100 + _FEW) if load == "misleading" else range(100, vocab)
    prompt = [10 + index] + [rng.choice(among) for _ in range(PROMPT_TOKENS - 1)]
    if load not in ("quote", "edit"):
        return prompt + [rng.choice(among) for _ in range(new_tokens)]
    new = (prompt[1:] * -(-new_tokens // len(prompt)))[:new_tokens]
    if load == "edit":
        new = [rng.choice(among) if at % EDITED == EDITED - 1 else token for at, token in enumerate(new)]
    return prompt + new


@contextmanager
def saying(llm: LLM, texts: list[list[int]]) -> Iterator[None]:
    """Let an engine say these texts, whatever its logits are."""
    sampler, by_first = llm.engine.runner.sampler, {text[0]: text for text in texts}
    draw = sampler.sample

    def forced(
        logits: Any, sequences: list[SequenceState], positions: list[int] | None = None, masks: Any = None
    ) -> Sampled:
        sampled = draw(logits, sequences, positions, masks)
        ends = positions or [len(sequence.tokens) for sequence in sequences]
        sampled.token_ids = [
            by_first[each.tokens[0]][at] if at < len(by_first[each.tokens[0]]) else 0
            for each, at in zip(sequences, ends, strict=True)
        ]
        return sampled

    sampler.sample = forced  # type: ignore[method-assign]
    try:
        yield
    finally:
        sampler.sample = draw  # type: ignore[method-assign]


@contextmanager
def right_by_chance(llm: LLM, texts: list[list[int]], acceptance: float) -> Iterator[None]:
    """Let a draft model say what follows in these texts, each token by this chance and else a wrong one."""
    (speculator,), by_first = llm.engine.core.hooks, {text[0]: text for text in texts}
    assert isinstance(speculator, Speculator) and speculator.model is not None
    model, chances = speculator.model, {}
    for first, text in by_first.items():
        rng = random.Random(f"{acceptance} {first}")
        chances[first] = [rng.random() < acceptance for _ in text]
    run, chain = model.run, model._chain

    def right(seq_id: int, end: int) -> int:
        first = model.tokens_of(seq_id)[0]
        text = by_first[first]
        return text[end] if end < len(text) and chances[first][end] else 0

    def forced(plan: StepPlan) -> tuple[list[float], list[int]]:
        best, chosen = run(plan)
        sampling = [item for item in plan.scheduled if item.samples]
        for at, item in enumerate(sampling):
            best[at], chosen[at] = acceptance, right(item.seq_id, item.start + item.num_tokens)
        return best, chosen

    def chained(copies: list[Any], limits: tuple[int, float, float, list[float]], hits: Any, wanted: Any) -> Any:
        most, cost, each, worths = limits
        passes, chance = 1, hits.chance(acceptance)
        while passes < most and sum(worths) * chance**passes > cost and min(worths) * chance**passes > each:
            passes += 1
        made = chain(copies, (min(most, passes), -1.0, -1.0, worths), hits, wanted)
        return [
            [(right(copy.seq_id, len(copy.tokens) + at), acceptance) for at in range(len(drafts))]
            for copy, drafts in zip(copies, made, strict=bool(made))
        ]

    model.run, model._chain = forced, chained  # type: ignore[method-assign]
    try:
        yield
    finally:
        model.run, model._chain = run, chain  # type: ignore[method-assign]


def engine(arguments: argparse.Namespace, shape: str, folder: Path) -> tuple[LLM, Speculator]:
    """An engine with a draft model, and what proposes its drafts."""
    options: dict[str, Any] = {"max_model_len": 1024, "kv_cache_memory": 1 << 30, "num_threads": arguments.threads}
    model, draft = str(STORY), str(DRAFT)
    if shape != "story":
        for name, config in (("model", SHAPES[shape]), ("draft", SHAPES[shape] | DRAFT_OF_A_SHAPE)):
            (folder / name).mkdir()
            (folder / name / "config.json").write_text(json.dumps(config))
        options |= {"skip_tokenizer_init": True, "load_format": "dummy", "dtype": "bfloat16", "weight_cache": False}
        model, draft = str(folder / "model"), str(folder / "draft")
    most = max(arguments.num_speculative_tokens)
    wanted = SpeculativeConfig(method="draft_model", model=draft, num_speculative_tokens=most)
    llm = LLM(model, speculative_config=wanted, **options)
    (speculator,) = llm.engine.core.hooks
    assert isinstance(speculator, Speculator)
    return llm, speculator


def proposers(arguments: argparse.Namespace, llm: LLM, speculator: Speculator) -> dict[str, Speculator | None]:
    """What proposes drafts to an engine, before it has learnt anything: nothing, n-grams, the draft model too."""
    scheduler, model = llm.engine.core.scheduler, speculator.model
    wanted = SpeculativeConfig(method="ngram")
    assert model is not None
    made: dict[str, Speculator | None] = {"plain": None}
    if "ngram" in arguments.drafters:
        made["ngram"] = Speculator(NgramDrafter(wanted), max(arguments.num_speculative_tokens), scheduler)
    for bound in arguments.num_speculative_tokens if "draft" in arguments.drafters else ():
        model.measure(drafting := Drafting(bound))
        made[_drafts(arguments, bound)] = Speculator(
            NgramDrafter(wanted), bound, scheduler, model=model, drafting=drafting
        )
    return made


def _drafts(arguments: argparse.Namespace, bound: int) -> str:
    """What drafts of the model are called, of which there are so many behind a token at most."""
    return "draft" if len(arguments.num_speculative_tokens) == 1 else f"draft, at most {bound}"


def predicted(arguments: argparse.Namespace, shape: str, acceptance: float, batch: int) -> dict[str, float]:
    """The cost model's ratio of tokens per second, with drafts beside without, for each bound of their number."""
    machine = store.load(arguments.calibration)
    files = [json.loads((Path(folder) / "config.json").read_text()) for folder in (STORY, DRAFT)]
    configs = files if shape == "story" else [SHAPES[shape], SHAPES[shape] | DRAFT_OF_A_SHAPE]
    of_machine = Precision.of("bfloat16"), machine.hardware, machine.efficiency
    model, draft = (Deployment(read_shape(each), *of_machine) for each in configs)
    context = PROMPT_TOKENS + arguments.new_tokens // 2
    taken = [
        tpot_s(model, draft, batch, context, drafts, acceptance)
        for drafts in range(max(arguments.num_speculative_tokens) + 1)
    ]
    return {_drafts(arguments, bound): taken[0] / min(taken[: bound + 1]) for bound in arguments.num_speculative_tokens}


def rate(llm: LLM, prompts: list[Any], params: Params) -> tuple[dict[str, float], list[list[int]]]:
    """Tokens per second, by the clock and by the processor's time, and the tokens."""
    began, used = time.perf_counter(), time.process_time()
    outputs = llm.generate(prompts, params)
    seconds, of_processor = time.perf_counter() - began, time.process_time() - used
    tokens = [output.outputs[0].token_ids for output in outputs]
    count = sum(map(len, tokens))
    return {"tokens_per_s": count / seconds, "tokens_per_cpu_s": count / of_processor}, tokens


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    found, said = Rounds(), dict[str, dict[str, float]]()
    for shape in arguments.shapes:
        with tempfile.TemporaryDirectory() as folder:
            llm, speculator = engine(arguments, shape, Path(folder))
            speculators = proposers(arguments, llm, speculator)
            vocab = llm.engine.runner.vocab_size
            params = SamplingParams(temperature=0.0, max_tokens=arguments.new_tokens, ignore_eos=True)
            loads = [load for load in arguments.loads if shape == "story" or load != "story"]
            for load in [*loads, *arguments.acceptance]:
                if not isinstance(load, str):  # a draft model is as good as it is from the start
                    speculators = proposers(arguments, llm, speculator)
                for batch in arguments.batches:
                    kind = load if isinstance(load, str) else "random"
                    texts = [text_of(kind, index, arguments.new_tokens, vocab) for index in range(batch)]
                    prompts: list[Any] = [{"prompt_token_ids": text[:PROMPT_TOKENS]} for text in texts]
                    if load == "story":
                        prompts, texts = [STORIES[index % len(STORIES)] for index in range(batch)], []
                    name = f"{shape} {load} {batch}"
                    _one_load(found, name, llm, speculators, prompts, texts, load, params, arguments)
                    if arguments.calibration is not None and not isinstance(load, str):
                        said[name] = predicted(arguments, shape, load, batch)
    return {"values": found.values, "predicted": said}


def _one_load(
    found: Rounds,
    name: str,
    llm: LLM,
    speculators: dict[str, Speculator | None],
    prompts: list[Any],
    texts: list[list[int]],
    load: str | float,
    params: Params,
    arguments: argparse.Namespace,
) -> None:
    """Measure a load after rounds that do not count."""
    chosen = dict(speculators)
    if not isinstance(load, str):
        chosen.pop("ngram", None)
    elif texts:  # a draft of random weights says nothing of given texts
        chosen = {name: each for name, each in chosen.items() if not name.startswith("draft")}
    if len(chosen) == 1:
        return
    for at in range(-arguments.warm_up, arguments.rounds):
        said = {}
        for drafter, speculator in chosen.items() if at % 2 else reversed(chosen.items()):
            llm.engine.core.hooks = [] if speculator is None else [speculator]
            with ExitStack() as forced:
                if texts:
                    forced.enter_context(saying(llm, texts))
                if drafter.startswith("draft") and not isinstance(load, str):
                    forced.enter_context(right_by_chance(llm, texts, load))
                measured, said[drafter] = rate(llm, prompts, params)
            if at >= 0:
                found.add(name, drafter, measured)
        if any(tokens != said["plain"] for tokens in said.values()):
            raise SystemExit(f"{name}: drafts have changed tokens")
    for drafter in [each for each in chosen if each != "plain"]:
        ratios = [found.compared(name, "plain", measure, drafter) for measure in ("tokens_per_s", "tokens_per_cpu_s")]
        by_clock, by_processor = (spread(each.ratio_middle, each.ratio_low, each.ratio_high) for each in ratios)
        print(f"{name}, {drafter}: {by_clock}; by the processor's time {by_processor}", flush=True)


def table(content: dict[str, Any]) -> str:
    found, said = Rounds(content["values"]), content.get("predicted", {})
    lines = ["| model, load, batch | drafts | plain tokens/s | with drafts | ratio (by round) | predicted |"]
    lines.append("|---|---|---:|---:|---:|---:|")
    for load, things in found.values.items():
        for name in [each for each in things if each != "plain"]:
            plain = found.compared(load, "plain", "tokens_per_s", name)
            drafted = found.compared(load, name, "tokens_per_s", name)
            ratio = spread(plain.ratio_middle, plain.ratio_low, plain.ratio_high)
            expected = f"{said[load][name]:.2f}" if name in said.get(load, ()) else ""
            rates = f"{number(plain.median)} | {number(drafted.median)}"
            lines.append(f"| {load} | {name} | {rates} | {ratio} | {expected} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", choices=("story", *SHAPES), nargs="+", default=["story", "qwen2.5-0.5b"])
    parser.add_argument("--drafters", choices=DRAFTERS, nargs="+", default=list(DRAFTERS))
    parser.add_argument("--loads", choices=(*LOADS, "story"), nargs="*", default=[*LOADS, "story"])
    parser.add_argument("--acceptance", type=float, nargs="*", default=[], help="set acceptances of a draft model")
    parser.add_argument("--num-speculative-tokens", type=int, nargs="+", default=[15])
    parser.add_argument("--calibration", type=Path, help="an entry as `headway calibrate --output` writes")
    parser.add_argument("--warm-up", type=int, default=1, help="rounds that do not count")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, default=RESULTS / "speculation.json")
    arguments = parser.parse_args(argv)
    for name, least, most in (("rounds", 1, 1000), ("new_tokens", 2, 1024 - PROMPT_TOKENS)):
        if not least <= (value := getattr(arguments, name)) <= most:
            parser.error(f"--{name.replace('_', '-')} is {value}; it must be between {least} and {most}")
    if not all(0.0 <= chance <= 1.0 for chance in arguments.acceptance):
        parser.error(f"--acceptance is {arguments.acceptance}; each must be between 0 and 1")
    if not all(1 <= batch <= 64 for batch in arguments.batches):
        parser.error(f"--batches is {arguments.batches}; each must be between 1 and 64")
    keep(arguments, measure, table)


if __name__ == "__main__":
    main()
