"""What the user of the load generator asked for: the flags of `headway bench`."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from headway.flags import Flag
from headway.load.endpoint import Api, Endpoint, lower_names
from headway.load.errors import BenchError
from headway.load.measures.numbers import PERCENTILES
from headway.load.option_values import (
    json_object,
    key_values,
    parse_goodput,
    parse_limits,
    parse_variants,
    parse_widths,
    percentiles,
)
from headway.load.request import PlannedRequest
from headway.load.workload.arrival_flags import ArrivalFlags
from headway.load.workload.spec import WorkloadSpec

_endpoint, _load = functools.partial(Flag, panel="Endpoint"), functools.partial(Flag, panel="Load")
_numbers, _results = functools.partial(Flag, panel="Numbers"), functools.partial(Flag, panel="Results")

_CHATS: dict[str, Api] = {"openai-chat": "chat", "openai-responses": "responses", "anthropic": "messages"}
_APIS_OF_VECTORS: dict[str, Api] = {"openai-embeddings": "embeddings", "vllm-rerank": "rerank", "vllm-score": "score"}


@dataclass(frozen=True, slots=True)
class Target:
    """The server, and what every request to it says."""

    base_url: Annotated[str | None, _endpoint("Address of the server: http://localhost:8000.", common=True)] = None
    host: Annotated[str, _endpoint("Host of the server, instead of --base-url.")] = "127.0.0.1"
    port: Annotated[int, _endpoint("Port of the server, instead of --base-url.", min=1, max=65535)] = 8000
    backend: Annotated[
        str,
        _endpoint(
            "openai-chat uses /v1/chat/completions, openai-responses /v1/responses, anthropic /v1/messages, "
            "openai-embeddings /v1/embeddings, vllm-rerank /v1/rerank, vllm-score /v1/score, the others "
            "/v1/completions.",
            choices=("openai", *_CHATS, "vllm", "headway", *_APIS_OF_VECTORS),
            common=True,
        ),
    ] = "openai"
    path: Annotated[str | None, _endpoint("Route of the requests. Default: the backend's.", "--endpoint")] = None
    model: Annotated[str | None, _endpoint("Model name in the requests. Default: the served model.")] = None
    served_model_name: Annotated[
        str | None, _endpoint("Model name in the requests when --model names the tokenizer, as in vLLM.")
    ] = None
    tokenizer: Annotated[
        str | None,
        _endpoint("Tokenizer: a folder or Hugging Face id. Default: auto-detected; otherwise lengths are estimated."),
    ] = None
    prompts: Annotated[
        str,
        _endpoint(
            "What made-up prompts are: random words, prose, or token-ids; text is prose for a server that speculates, "
            "and words elsewhere.",
            choices=("text", "words", "prose", "token-ids"),
        ),
    ] = "text"
    api_key: Annotated[
        str | None, _endpoint("API key, sent as a bearer token.", envvar=("HEADWAY_API_KEY", "OPENAI_API_KEY"))
    ] = None
    tenant_keys: Annotated[
        dict[str, str],
        _endpoint(
            "API key of a tenant's requests, TENANT=KEY; may be repeated.",
            "--tenant-key",
            parse=key_values,
            repeated=True,
            metavar="TENANT=KEY",
        ),
    ] = field(default_factory=dict)
    headers: Annotated[
        dict[str, str],
        _endpoint(
            "HTTP header KEY=VALUE of every request; may be repeated.", "--header", parse=key_values, repeated=True
        ),
    ] = field(default_factory=dict)
    insecure: Annotated[bool, _endpoint("Accept any TLS certificate.", "--insecure")] = False
    ready_timeout_s: Annotated[
        float, _endpoint("Seconds to wait for the server to come up.", "--ready-check-timeout-sec", min=0)
    ] = 0.0
    request_timeout_s: Annotated[
        float, _endpoint("Seconds after which a request counts as failed.", "--request-timeout", min=0.001)
    ] = 3600.0
    ignore_eos: Annotated[
        bool | None,
        _endpoint("Generate max_tokens even past the end token. Default: yes for random prompts, if supported."),
    ] = None
    temperature: Annotated[float | None, _endpoint("Sampling temperature. Default: the server's.", min=0)] = None
    top_p: Annotated[float | None, _endpoint("Nucleus sampling. Default: the server's.")] = None
    top_k: Annotated[int | None, _endpoint("Sample from the k most likely tokens. Default: the server's.")] = None
    extra_body: Annotated[
        dict[str, Any], _endpoint("JSON object with further fields of every request.", parse=json_object)
    ] = field(default_factory=dict)

    @property
    def token_ids(self) -> bool:
        """Whether made-up prompts are sent as ids."""
        return self.prompts == "token-ids"

    @property
    def url(self) -> str:
        return self.base_url or f"http://{self.host}:{self.port}"

    @property
    def api(self) -> Api:
        return _APIS_OF_VECTORS.get(self.backend) or _CHATS.get(self.backend, "completions")

    @property
    def generates(self) -> bool:
        """Whether answers are texts, and not vectors or scores."""
        return self.backend not in _APIS_OF_VECTORS

    @property
    def chat(self) -> bool:
        return self.backend in _CHATS

    @property
    def tokenizer_name(self) -> str | None:
        """Folder, or Hugging Face id, of the tokenizer that measures prompts; None looks for it."""
        return self.tokenizer or (self.model if self.served_model_name else None)

    def endpoint(self) -> Endpoint:
        """How the user wants the server to be asked. Raises BenchError when a value cannot be used."""
        return Endpoint(
            base_url=self.url,
            model=self.served_model_name or self.model,
            api=self.api,
            path=self.path,
            api_key=self.api_key,
            tenant_keys=self.tenant_keys,
            headers=self.headers,
            ignore_eos=bool(self.ignore_eos),
            extra_body=self.body_fields,
            timeout_s=self.request_timeout_s,
            insecure=self.insecure,
        )

    def check_keys(self, requests: list[PlannedRequest]) -> None:
        """Raises BenchError where a request is of a tenant whose key nobody said."""
        for each in requests:
            if each.tenant and each.tenant not in self.tenant_keys and "authorization" not in lower_names(each.headers):
                raise BenchError(
                    f"requests belong to tenant {each.tenant!r}, whose API key is unknown; give --tenant-key "
                    f"{each.tenant}=KEY"
                )

    @property
    def body_fields(self) -> dict[str, Any]:
        """Fields of every request's body, beside those that a run needs."""
        sampling = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
        return {name: value for name, value in sampling.items() if value is not None} | self.extra_body


@dataclass(frozen=True, slots=True)
class Claims:
    """What the numbers are asked for.

    Args:
        objectives: {"ttft": 200.0, ...}, for requests whose class has none of its own.
        price_per_hour: in any currency.
    """

    objectives: Annotated[
        dict[str, float],
        _numbers(
            "Objectives in ms, such as ttft:200 tpot:50 e2el:5000.",
            "--goodput",
            short="--slo",
            parse=parse_goodput,
            repeated=True,
            metavar="KEY:MS ...",
            common=True,
        ),
    ] = field(default_factory=dict)
    percentiles: Annotated[
        tuple[float, ...],
        _numbers("Percentiles to report.", "--metric-percentiles", parse=percentiles, default="50,90,95,99,99.9"),
    ] = PERCENTILES
    price_per_hour: Annotated[
        float | None, _numbers("Price of the hardware per hour, to report the cost per token.", min=0, max=1e12)
    ] = None
    attainment: Annotated[
        float, _numbers("Share of requests that must meet --goodput.", "--slo-attainment", min=0.5, max=0.9999)
    ] = 0.99
    max_failed_share: Annotated[
        float, _numbers("Share of failed requests above which a run is not valid.", min=0, max=1)
    ] = 0.01


@dataclass(frozen=True, slots=True)
class Output:
    """The flags that say where results go."""

    save: Annotated[bool, _results("Write the result as JSON.", "--save-result/--no-save-result")] = True
    detailed: Annotated[
        bool, _results("Add the per-request lists of `vllm bench serve --save-detailed`.", "--save-detailed")
    ] = False
    result_dir: Annotated[Path, _results("Folder of the results.")] = Path("bench-results")
    result_filename: Annotated[
        str | None, _results("File name of the result. Default: from backend, rate, model and time.")
    ] = None
    csv: Annotated[bool, _results("Also write a CSV file with a row per request.", "--csv")] = False
    report: Annotated[
        Path | None, _results("Write an HTML report to this file; its figures are inside.", common=True)
    ] = None
    label: Annotated[str | None, _results("Name of the run, for its file and its report.")] = None
    verbose: Annotated[
        bool, _results("Print all tables and notes, not only the summary.", "--verbose", common=True)
    ] = False
    metadata: Annotated[
        dict[str, str], _results("KEY=VALUE to keep in the result; may be repeated.", parse=key_values, repeated=True)
    ] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Sweep:
    """Runs at one value after the other: of the request rate (per second), or of the users of a closed loop."""

    over: Literal["rate", "concurrency"]
    values: tuple[float, ...]

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a sweep like "rate:1,2,4" or "concurrency:1,8,64".

        Raises:
            BenchError: it is neither, or has a value that is not above 0 (for a concurrency, not whole).
        """
        over, colon, rest = text.partition(":")
        if not colon or over not in ("rate", "concurrency"):
            raise BenchError(f"--sweep is {text!r}; write rate:1,2,4 (requests per second) or concurrency:1,8,64")
        values = []
        for part in rest.split(","):
            try:
                value = float(part)
            except ValueError:
                value = math.nan
            if not (0 < value < math.inf) or (over == "concurrency" and value != int(value)):
                needed = "a whole number above 0" if over == "concurrency" else "a number above 0"
                raise BenchError(f"--sweep {over} has {part!r}; each value must be {needed}")
            values.append(value)
        return cls("rate" if over == "rate" else "concurrency", tuple(dict.fromkeys(values)))


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """All options of `headway bench`."""

    target: Target
    arrivals: ArrivalFlags
    workload: WorkloadSpec
    max_concurrency: Annotated[
        int | None,
        _load(
            "Without a rate: clients of a closed loop. With a rate: limit of requests in flight.", min=1, common=True
        ),
    ] = None
    probe_rate: Annotated[
        float | None,
        _load("Short probe requests per second in addition to the load, reported separately.", min=0.001, max=1e4),
    ] = None
    reuse_prefix_cache: Annotated[
        bool,
        _load("Allow prefix cache hits from earlier runs. Default: each run has its own salt.", "--reuse-prefix-cache"),
    ] = False
    random_batch_size: Annotated[
        int, _load("Texts of a request for embeddings, or documents of one for rankings and scores.", min=1, max=2048)
    ] = 1
    client_processes: Annotated[
        int,
        _load(
            "Processes that send the requests, for loads that one cannot read in time; their results are one.",
            min=1,
            max=256,
        ),
    ] = 1
    num_warmups: Annotated[int, _load("Warm-up requests, which are not measured.", min=0)] = 3
    drain_timeout_s: Annotated[
        float,
        _load(
            "Seconds without a finished request, after the last send, until the rest count as failed.",
            "--drain-timeout",
            min=0.001,
        ),
    ] = 600.0
    stop_at: Annotated[
        dict[str, int],
        _load(
            "End a run, and a sweep with it, once so many requests have failed or are in flight: failures:20 or "
            "in-flight:500, or both with a comma between them.",
            parse=parse_limits,
            metavar="KEY:N[,KEY:N]",
        ),
    ] = field(default_factory=dict)
    repeat_until: Annotated[
        dict[str, float],
        _load(
            "Repeat the run, each time with another seed, until the 95 % interval of each figure's mean is within so "
            "many percent of it: ttft:5,throughput:2. Keys: ttft, tpot, itl, e2el (medians), throughput.",
            parse=parse_widths,
            metavar="KEY:PERCENT[,...]",
        ),
    ] = field(default_factory=dict)
    max_repeats: Annotated[int, _load("Most runs of --repeat-until.", min=3, max=1000)] = 20
    find_max_rate: Annotated[
        bool, _load("Find the highest rate that meets --goodput.", "--find-max-rate", common=True)
    ] = False
    sweep: Annotated[
        Sweep | None,
        _load("Measure several loads: rate:1,2,4 (requests/s) or concurrency:1,8,64.", parse=Sweep.parse, common=True),
    ] = None
    start: Annotated[
        str | None,
        _load(
            "Start the server by this command, with {port} and the names of --vary where their values belong.",
            metavar="COMMAND",
        ),
    ] = None
    vary: Annotated[
        dict[str, tuple[str, ...]],
        _load(
            "Measure each load with each of these values of a name in --start; may be repeated, for all combinations.",
            parse=parse_variants,
            repeated=True,
            metavar="NAME=A,B",
        ),
    ] = field(default_factory=dict)
    max_search_seconds: Annotated[
        float, _load("Time limit of --find-max-rate in seconds; no run starts after it.", min=1)
    ] = 3600.0
    stall_s: Annotated[
        float,
        _load(
            "Longest stall in seconds that the result of --find-max-rate covers; longer stalls need a longer search.",
            "--stall-seconds",
            min=0,
        ),
    ] = 1.0
    claims: Claims = field(default_factory=Claims)
    output: Output = field(default_factory=Output)


@dataclass(frozen=True, slots=True)
class ParetoOptions:
    """What is shown.

    Args:
        devices: devices that each run had.
    """

    devices: Annotated[
        int, Flag("Devices that each run had; tokens/s are divided by them.", min=1, max=100_000, common=True)
    ] = 1
    ttft_ms: Annotated[
        float | None, Flag("Leave out runs whose median TTFT is above so many milliseconds.", min=0, common=True)
    ] = None
    report: Annotated[Path | None, Flag("Write an HTML report to this file; its figures are inside.", common=True)] = (
        None
    )
