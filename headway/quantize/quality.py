"""What a lever costs in quality, beside what it gains in speed: perplexity, tasks and tokens/s by scheme.

All settings see the same windows of a text, so the change of the mean logarithm is that of pairs, and its standard
error is given. Every token of a window but the first is predicted from those before it, whose keys and values are read
from the cache.
"""

from __future__ import annotations

import gc
import gzip
import json
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.kernels.interface import KV_CACHE_DTYPES
from headway.kernels.weights import QUANTIZATIONS
from headway.llm import LLM
from headway.llm.requests import RequestOutput
from headway.policy.step.sampling_params import SamplingParams
from headway.quantize.calibration import windows, written
from headway.quantize.quality_options import QualityOptions

CHOICES = 4  # continuations of a window to choose from
ENDING = 16  # tokens of a continuation
DECODED = 64  # tokens whose decoding is timed
_KV_BYTES = 1 << 30
_SEED = 1_000_000  # of the texts that the model writes: others than quantising looks at


@dataclass(frozen=True, slots=True)
class Setting:
    """What is loaded."""

    label: str  # its name in the table
    model: str  # folder of the checkpoint
    quantization: str
    kv_cache_dtype: str
    kv_heads: int | None = None  # None for those of the checkpoint


@dataclass(frozen=True, slots=True)
class Task:
    """A question with an answer."""

    prompt: tuple[int, ...]  # token ids
    # Token ids of the answers to choose from; none where the answer is to be written.
    choices: tuple[tuple[int, ...], ...]
    answer: int | str  # place of the right choice; or the text that is to be written


@dataclass(frozen=True, slots=True)
class Row:
    """What was measured of a setting."""

    label: str
    quantization: str
    kv_cache_dtype: str
    kv_heads: int | None
    perplexity: float  # over all windows
    change: float  # of the perplexity, relative to the first setting, which rounds nothing
    standard_error: float  # of `change`, over windows
    top1: float  # share of tokens that are the likeliest by the model
    solved: float  # share of the tasks
    # decode, prefill: tokens/s of one sequence, and of the windows' prompts; None where speed was not measured.
    decode: float | None = None
    prefill: float | None = None


def changed(logs: Sequence[float], plain: Sequence[float]) -> tuple[float, float]:
    """The relative change of perplexity and its standard error, from means by window. Needs two windows."""
    worse = [before - now for before, now in zip(plain, logs, strict=True)]
    change = math.expm1(statistics.fmean(worse))
    return change, (1 + change) * statistics.stdev(worse) / math.sqrt(len(worse))


def settings(options: QualityOptions, model: str, pooled: dict[int, str]) -> Iterator[Setting]:
    """All that is compared, the one that rounds nothing first.

    Args:
        pooled: folders of the model with other numbers of KV heads.

    Raises:
        ValueError: there is no such scheme, or no such type.
    """
    weights = _known("--quantization", options.quantizations, QUANTIZATIONS)
    caches = _known("--kv-cache-dtype", options.kv_cache_dtypes, tuple(KV_CACHE_DTYPES))
    for quantization in weights:
        for cache in caches:
            yield Setting(quantization, model, quantization, cache)
    for folder in options.checkpoints:
        yield Setting(Path(folder).name, folder, "none", caches[0])
    for heads, folder in pooled.items():
        yield Setting(f"{heads} KV head{'s' * (heads > 1)}", folder, "none", caches[0], heads)


def _known(flag: str, asked: tuple[str, ...] | None, known: tuple[str, ...]) -> list[str]:
    for name in asked or ():
        if name not in known:
            raise ValueError(f"{flag} is {name!r}; it must be of {', '.join(known)}")
    first = known[0]  # which rounds nothing, and which the others are compared with
    return [first, *(each for each in asked or known if each != first)]


def measure(options: QualityOptions, model: Path, pooled: dict[int, str]) -> Iterator[Row]:
    """A row for each setting. Raises ValueError where a text, a task or a checkpoint cannot be used."""
    asked = list(settings(options, str(model), pooled))
    prompts: list[list[int]] = []
    tasks: list[Task] = []
    plain: list[float] = []
    for setting in asked:
        if options.text is None and not prompts:
            prompts = written(model, options.windows, options.tokens, _SEED)
        llm = LLM(
            setting.model,
            dtype=options.dtype,
            quantization=setting.quantization,
            kv_cache_dtype=setting.kv_cache_dtype,
            max_model_len=options.tokens + max(ENDING, DECODED) + 1,
            enable_prefix_caching=False,
            kv_cache_memory=_KV_BYTES,
        )
        assert llm.tokenizer is not None
        if options.text is not None and not prompts:
            prompts = windows(llm.tokenizer, read(options.text), options.windows, options.tokens)
        tasks = tasks or (_read_tasks(options.tasks, llm) if options.tasks else list(continuations(prompts)))
        logs, top1 = predicted(llm, prompts)
        plain = plain or logs
        change, error = changed(logs, plain)
        perplexity = math.exp(-statistics.fmean(logs))
        solved = statistics.fmean(map(float, answered(llm, tasks)))
        speed = speeds(llm, prompts, options.rounds) if options.rounds else (None, None)
        kept = setting.quantization, setting.kv_cache_dtype, setting.kv_heads
        yield Row(setting.label, *kept, perplexity, change, error, top1, solved, *speed)
        del llm
        gc.collect()


def read(path: Path) -> str:
    """A text in UTF-8, .gz too. Raises ValueError where it cannot be read."""
    try:
        content = path.read_bytes()
        return (gzip.decompress(content) if path.suffix == ".gz" else content).decode()
    except (OSError, UnicodeDecodeError, EOFError) as error:
        said = (error.strerror or str(error)) if isinstance(error, OSError) else "it is not UTF-8"
        raise ValueError(f"{path} cannot be read: {said}") from None


# --- perplexity -------------------------------------------------------------------------------------


def predicted(llm: LLM, prompts: Sequence[Sequence[int]]) -> tuple[list[float], float]:
    """The mean log-probability of each prompt's tokens after its first; and the share that is the likeliest token."""
    found = _logprobs(llm, prompts)
    ranks = [entry.rank for entries in found for entry in entries]
    return [statistics.fmean(entry.logprob for entry in entries) for entries in found], ranks.count(1) / len(ranks)


def mean_logs(llm: LLM, prompts: Sequence[Sequence[int]]) -> list[float]:
    """The mean log-probability of each prompt's tokens after its first."""
    return predicted(llm, prompts)[0]


def _logprobs(llm: LLM, prompts: Sequence[Sequence[int]]) -> list[list[Any]]:
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    found = []
    for output in llm.generate([{"prompt_token_ids": list(ids)} for ids in prompts], params):
        assert output.prompt_logprobs is not None
        found.append([entry for entry in output.prompt_logprobs if entry is not None])
    return found


# --- tasks ------------------------------------------------------------------------------------------


def continuations(prompts: Sequence[Sequence[int]]) -> Iterator[Task]:
    """A task of each window: which of CHOICES endings is its own; the others are those of the windows after it."""
    for at, ids in enumerate(prompts):
        others = [prompts[(at + step) % len(prompts)] for step in range(CHOICES)]
        endings = [tuple(each[-ENDING:]) for each in others]
        right = at % CHOICES
        endings[0], endings[right] = endings[right], endings[0]
        yield Task(tuple(ids[:-ENDING]), tuple(endings), right)


def _read_tasks(path: Path, llm: LLM) -> list[Task]:
    assert llm.tokenizer is not None
    found, encode = [], llm.tokenizer.encode
    for number, line in enumerate(read(path).splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            prompt, choices, answer = row["prompt"], row.get("choices", []), row["answer"]
            is_choice = bool(choices) and isinstance(answer, int) and 0 <= answer < len(choices)
            if not is_choice and (choices or not isinstance(answer, str)):
                raise ValueError
            ids = tuple(encode(prompt))
            ways = [tuple(encode(prompt + each)[len(ids) :]) for each in choices]
            if not ids or not all(ways):
                raise ValueError
        except (ValueError, TypeError, KeyError, AttributeError):
            raise ValueError(
                f'{path}, line {number}: a task is {{"prompt": TEXT, "choices": [TEXT, ...], "answer": INDEX}}, '
                'or {"prompt": TEXT, "answer": TEXT}'
            ) from None
        found.append(Task(ids, tuple(ways), answer))
    if not found:
        raise ValueError(f"{path} has no task")
    return found


def answered(llm: LLM, tasks: Sequence[Task]) -> list[bool]:
    """Whether each task is solved.

    A choice is the one whose tokens are likeliest on average; a written answer begins with the right one.
    """
    chosen = [task for task in tasks if task.choices]
    scores = iter(_logprobs(llm, [[*task.prompt, *each] for task in chosen for each in task.choices]))
    right = []
    for task in chosen:
        means = [statistics.fmean(entry.logprob for entry in next(scores)[-len(each) :]) for each in task.choices]
        right.append(means.index(max(means)) == task.answer)
    asked = [task for task in tasks if not task.choices]
    params = SamplingParams(max_tokens=DECODED, temperature=0.0)
    outputs: list[RequestOutput] = llm.generate([{"prompt_token_ids": list(each.prompt)} for each in asked], params)
    for task, output in zip(asked, outputs, strict=True):
        right.append(output.outputs[0].text.strip().startswith(str(task.answer).strip()))
    return right


# --- speed ------------------------------------------------------------------------------------------


def speeds(llm: LLM, prompts: Sequence[Sequence[int]], rounds: int) -> tuple[float, float]:
    """Tokens/s of decoding one sequence, and of computing four prompts; medians, after a round that does not count."""
    four = prompts[:4]
    decode, prefill = [], []
    for number in range(rounds + 1):
        both, first, all_four = _seconds(llm, four[:1], DECODED + 1), _seconds(llm, four[:1], 1), _seconds(llm, four, 1)
        if number:
            decode.append(DECODED / max(1e-9, both - first))
            prefill.append(sum(map(len, four)) / all_four)
    return statistics.median(decode), statistics.median(prefill)


def _seconds(llm: LLM, prompts: Sequence[Sequence[int]], tokens: int) -> float:
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    began = time.perf_counter()
    llm.generate([{"prompt_token_ids": list(ids)} for ids in prompts], params)
    return time.perf_counter() - began
