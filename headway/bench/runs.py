"""One run after another against one endpoint: from a load to numbers, files and a report."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import secrets
from abc import ABC, abstractmethod
from dataclasses import dataclass

from rich.console import Console

from headway.bench.client.early import Limited
from headway.bench.client.load import LoadListener, LoadMode, Pace
from headway.bench.options import BenchOptions
from headway.bench.report.live import LiveView
from headway.bench.reporting import Reporting, Run
from headway.bench.session import Session
from headway.bench.settings import settings_of
from headway.load.errors import BenchError
from headway.load.workload.arrival_flags import TRACES
from headway.load.workload.arrivals import AllAtOnce, Constant, Gamma, Poisson
from headway.load.workload.build import Workload, build_workload, probe_requests, warm_up_requests
from headway.load.workload.lengths import Fixed
from headway.load.workload.mix import load_mix
from headway.load.workload.prompts import Texts
from headway.load.workload.spec import WorkloadSpec, flag

TEXTS = ("sharegpt", "custom", "agents")  # datasets with prompts of their own
RATED = (Poisson, Gamma, Constant)  # arrival processes with one rate


@dataclass(frozen=True, slots=True)
class Load:
    """How the requests of one run are sent."""

    spec: WorkloadSpec
    mode: LoadMode
    max_concurrency: int | None


def load_of(spec: WorkloadSpec, most: int | None) -> Load:
    """The load that the flags describe.

    Without an arrival process: a trace keeps its own times; --max-concurrency is a closed loop of so many users; and
    otherwise everything is sent at once, as by `vllm bench serve`. Classes of a mix may have arrivals of their own.

    Raises:
        BenchError: the mix cannot be read.
    """
    if spec.mix is not None and load_mix(spec.mix).has_own_arrivals:
        return Load(dataclasses.replace(spec, users=most or 0), LoadMode.OPEN, most)
    timeless = spec.arrival is None and (spec.mix is not None or spec.dataset_name not in TRACES)
    if timeless or isinstance(spec.arrival, AllAtOnce):
        if most is not None:
            return Load(dataclasses.replace(spec, arrival=None, users=most), LoadMode.CLOSED, most)
        return Load(dataclasses.replace(spec, arrival=AllAtOnce()), LoadMode.OPEN, None)
    return Load(spec, LoadMode.OPEN, most)


def is_made_up(spec: WorkloadSpec) -> bool:
    """Whether prompts are random words, which a model may answer with its end token at once."""
    return spec.mix is not None or spec.dataset_name not in TEXTS


def without_answers(spec: WorkloadSpec, backend: str) -> WorkloadSpec:
    """The workload where nothing is generated. Raises BenchError where a length of answers was given."""
    for name in ("output_len", "random_output_len", "sharegpt_output_len", "custom_output_len", "max_output_len"):
        if getattr(spec, name) is not None:
            raise BenchError(f"{flag(name)} was given, and --backend {backend} generates nothing; leave it out")
    return spec if spec.mix is not None else dataclasses.replace(spec, output_len=Fixed(0))


def at_rate(options: BenchOptions, spec: WorkloadSpec, rate: float) -> Load:
    """The workload at another rate: with the same seed the same arrivals, closer together or farther apart."""
    arrival = dataclasses.replace(spec.arrival, rate=rate) if isinstance(spec.arrival, RATED) else Poisson(rate)
    return Load(dataclasses.replace(spec, arrival=arrival), LoadMode.OPEN, options.max_concurrency)


def load_name(load: Load) -> str:
    if load.mode is LoadMode.CLOSED:
        return f"{load.max_concurrency} at a time"
    rate = load.spec.arrival.mean_rate if load.spec.arrival is not None else None
    return "all at once" if rate is None else f"{rate:g} requests/s"


def sweep_loads(options: BenchOptions) -> list[Load]:
    """Raises BenchError where another flag says the same thing otherwise."""
    assert options.sweep is not None
    base = options.workload
    if options.sweep.over == "concurrency":
        if base.arrival is not None or options.max_concurrency is not None:
            raise BenchError(
                "--sweep concurrency sets the clients of a closed loop; leave out --max-concurrency and rates"
            )
        return [
            Load(dataclasses.replace(spec, users=int(value)), LoadMode.CLOSED, int(value))
            for spec, value in zip(_with_new_prompts(options), options.sweep.values, strict=True)
        ]
    if base.arrival is not None and not isinstance(base.arrival, RATED):
        raise BenchError("--sweep rate needs arrivals with a constant rate: poisson, gamma or constant")
    specs = _with_new_prompts(options)
    return [at_rate(options, spec, value) for spec, value in zip(specs, options.sweep.values, strict=True)]


def _with_new_prompts(options: BenchOptions) -> list[WorkloadSpec]:
    """The same workload with other prompts, for each value of a sweep."""
    assert options.sweep is not None
    base = options.workload
    return [dataclasses.replace(base, prompt_seed=base.seed + number) for number in range(len(options.sweep.values))]


class Runner(Reporting, ABC):
    """Carries out one run after another, and keeps what comes of them. Arguments as those of Reporting."""

    @abstractmethod
    async def run(self, load: Load, label: str = "") -> Run:
        """One run, from prompts to numbers.

        Raises:
            BenchError: it cannot be made.
            Interrupted: by the user, before anything was measured.
        """


class Bench(Runner):
    """Runs loads against one endpoint."""

    def __init__(
        self, options: BenchOptions, session: Session, stop: asyncio.Event, out: Console, progress: Console
    ) -> None:
        super().__init__(options, stop, out, progress)
        self.session = session
        batch, target = options.random_batch_size, options.target
        if target.generates and batch > 1:
            raise BenchError(
                f"--random-batch-size is {batch}, and --backend {target.backend} takes one prompt; use "
                "openai-embeddings, vllm-rerank or vllm-score"
            )
        self.texts = None if target.generates else Texts(batch, query=target.api != "embeddings")

    def plan(self, spec: WorkloadSpec) -> Workload:
        """Make the prompts.

        Raises:
            BenchError: the workload cannot be made, or is too long for the model.
            Interrupted: by the user.
        """
        context = self.session.server.max_model_len
        with self.progress.status("Making prompts ...") as status:

            def show(made: int, total: int) -> None:
                status.update(f"Making prompts ... {made:,} of {total:,}")

            with self.stoppable():
                workload = build_workload(
                    spec if self.texts is None else without_answers(spec, self.options.target.backend),
                    self.session.source,
                    chat=self.options.target.chat,
                    context=context,
                    progress=show,
                    texts=self.texts,
                )
        if self.session.source.is_text and is_made_up(spec):
            why = ", as the server speculates" * (self.options.target.prompts == "text")
            workload.description += f"; made up of prose{why}"
            workload.notes.append(f"prompts are prose{why}; --prompts words takes random words")
        self.options.target.check_keys(workload.requests)
        if self.texts is not None:
            self._check_texts(workload, self.texts, context)
            return workload
        if context is not None and workload.longest_tokens > context:
            too_long = sum((each.prompt_tokens or 0) + each.output_tokens > context for each in workload.requests)
            raise BenchError(
                f"{too_long} of {len(workload.requests)} requests are longer than the model's context of {context} "
                f"tokens (prompt and answer; the longest has {workload.longest_tokens}); clip them, for example with "
                f"--max-input-len {context * 3 // 4} --max-output-len {context // 8}"
            )
        return workload

    def _check_texts(self, workload: Workload, texts: Texts, context: int | None) -> None:
        for objectives in (self.options.claims.objectives, *workload.classes.values()):
            if wrong := next((name for name in objectives if name != "e2el"), None):
                raise BenchError(
                    f"there is an objective for {wrong}, and --backend {self.options.target.backend} has no tokens to "
                    "time; give e2el:MS"
                )
        longest = max(texts.longest(each.prompt_tokens or 0) for each in workload.requests)
        if context is not None and longest > context:
            raise BenchError(
                f"the longest text has {longest} tokens, more than the model's context of {context}; clip texts, for "
                f"example with --max-input-len {context * 3 // 4}"
            )

    def _fresh(self, load: Load) -> tuple[str, Load]:
        """A salt for the run, and its load, so that no prompt finds what the server has cached in an earlier run.

        A server without salts gets prompts in other words, where they are made up.
        """
        endpoint = self.session.server.endpoint
        if self.options.reuse_prefix_cache or "cache_salt" in endpoint.extra_body:
            return "", load
        if endpoint.cache_salt:
            return secrets.token_hex(8), load
        if not is_made_up(load.spec):
            return "", load
        return "", dataclasses.replace(load, spec=dataclasses.replace(load.spec, prompt_seed=secrets.randbits(31)))

    async def run(self, load: Load, label: str = "") -> Run:
        """Do what Runner.run() promises. Raises what `plan` and `Session.measure` raise."""
        salt, load = self._fresh(load)
        workload = self.plan(load.spec)
        source, rate = self.session.source, self.options.probe_rate
        warm_ups = warm_up_requests(workload, source, self.options.num_warmups, self.texts)
        made = sum(len(each.prompt.several or (None,)) for each in warm_ups)
        probes = None if rate is None else probe_requests(workload, source, rate, made)
        last = workload.requests[-1].arrival_s if not workload.requests[-1].parents else None
        generates = self.texts is None
        limited: Limited | None = None
        async with contextlib.AsyncExitStack() as stack:
            view: LoadListener = stack.enter_context(
                LiveView(self.progress, len(workload.requests), label, expected_s=last, generates=generates)
            )
            stop = self.stop
            if self.options.stop_at:
                view = limited = Limited(self.options.stop_at, view)
                stop = limited.stop
                await stack.enter_async_context(limited.also(self.stop))
            result = await self.session.measure(
                workload,
                Pace(
                    load.mode,
                    load.max_concurrency,
                    duration_s=load.spec.duration_s,
                    drain_s=self.options.drain_timeout_s,
                ),
                settings=settings_of(self.options, self.session, load.spec, workload, load.max_concurrency, salt),
                cache_salt=salt,
                warm_ups=warm_ups,
                probes=probes,
                stop=stop,
                listener=view,
                keep_text=self.options.output.detailed,
                processes=self.options.client_processes,
            )
        if limited is not None and limited.reason:
            result.settings["ended_early"] = limited.reason
        return result, self.summarise(result, workload.notes)
