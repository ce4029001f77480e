"""The playbook as data: levers on latency and throughput, what shows that one is due, how to apply and to verify it.

The levers are those of document 003 (steps of its chapter 11, pitfalls of chapter 14, boxes of chapter 15) and of
document 004, and what a machine without a GPU adds. `pitfalls` finds which are due on a running server.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

from headway.changes import Change, parse_change
from headway.engine.config import EngineConfig
from headway.flags import Needs
from headway.server.settings import ServerSettings

SERVE = (ServerSettings, EngineConfig)
ANY = "any"


@dataclass(frozen=True, slots=True)
class Lever:
    """One lever.

    Args:
        title: what is wrong where the lever is due.
        parts: which steps, pitfalls, boxes (of document 003) and levers (of document 004) it covers.
        signal: the measured signal that says so.
        remedy: flags to start a server with, by its kind; {names} are filled in by the diagnosis.
        advice: what to do beside or instead, by the kind of server or for `any`.
        verify: how to see that it helped.
        planned: the kind of `headway plan levers` that predicts the gain before anything runs; empty for none.
    """

    key: str
    title: str
    parts: tuple[str, ...]
    signal: str
    verify: str
    remedy: Mapping[str, str] = field(default_factory=dict)
    advice: Mapping[str, str] = field(default_factory=dict)
    planned: str = ""

    def changes(self, kind: str, values: Mapping[str, object]) -> tuple[Change, ...]:
        """The flags that a server of this kind is to be started with. Those of Headway are checked as if typed."""
        words = shlex.split(self.remedy.get(kind, "").format_map(values))
        found = []
        while words:
            flag = words.pop(0)
            value = words.pop(0) if words and not words[0].startswith("--") else None
            found.append(_change(kind, flag, value))
        return tuple(found)

    def advised(self, kind: str) -> str:
        """What to do beside the flags; empty where nothing is known."""
        return self.advice.get(kind, self.advice.get(ANY, ""))


def _change(kind: str, flag: str, value: str | None) -> Change:
    if kind == "headway":
        denied = value is None and flag.startswith("--no-")
        name = f"--{flag.removeprefix('--no-')}" if denied else flag
        return parse_change(name, value or ("false" if denied else "true"), SERVE)
    return Change(flag.lstrip("-").replace("-", "_"), value, " ".join(filter(None, (flag, value))), kind, Needs.RESTART)


_BENCH = "headway bench with the same load before and after, then headway bench --compare"

LEVERS: tuple[Lever, ...] = (
    Lever(
        "queue",
        "Requests wait in front of the engine",
        ("step 6", "step 11", "box 4", "lever batching", "lever scheduling"),
        "of a crowd sent at once fewer run together than were sent, and the others wait for a seat",
        f"{_BENCH}: TTFT of a crowd; num_requests_waiting stays at 0",
        {
            "headway": "--max-num-seqs {sequences}",
            "vllm": "--max-num-seqs {sequences}",
            "sglang": "--max-running-requests {sequences}",
            "llamacpp": "--parallel {sequences}",
        },
        {ANY: "if the seats are few on purpose, add a replica behind a gateway"},
        "load",
    ),
    Lever(
        "kv",
        "The KV cache is too small: sequences wait for blocks or are thrown out",
        ("pitfall 4", "box 6", "lever kv cache", "step 12"),
        "time in queue_blocks, preemptions, or a share of the KV cache in use near 1",
        f"{_BENCH}: TTFT P99; num_preemptions_total stands still",
        {
            "vllm": "--gpu-memory-utilization 0.95",
            "sglang": "--mem-fraction-static 0.9",
            "llamacpp": "--ctx-size {pool_tokens}",
        },
        {
            "headway": "raise --kv-cache-memory, or leave it out so that the server takes what is free; "
            "--kv-cache-dtype int8 on a CPU halves what a token takes",
            "vllm": "--kv-cache-dtype fp8 halves what a token takes; on a CPU set VLLM_CPU_KVCACHE_SPACE",
            ANY: "a narrower type of the KV cache, or a shorter context, leaves room for more sequences",
        },
        "cache",
    ),
    Lever(
        "prefix",
        "The prefix cache never hits",
        ("step 9", "box 5"),
        "a prompt that is sent again takes as long as the first time, and no token of it is found in the cache",
        f"{_BENCH} and --dataset-name prefix_repetition: prefix_cache_hits_total grows",
        {"headway": "--enable-prefix-caching", "vllm": "--enable-prefix-caching", "llamacpp": "--cache-reuse 256"},
        {
            "sglang": "start it without --disable-radix-cache",
            ANY: "put what all prompts share first, and dates, names and ids behind it",
        },
        "prefix",
    ),
    Lever(
        "chunk-large",
        "Chunks of prompts are so large that running streams stand still",
        ("step 6", "lever scheduling"),
        "the longest gap between two tokens of a stream while long prompts come, against a usual gap",
        f"{_BENCH}, short and long prompts mixed: ITL P99",
        {
            "headway": "--max-prefill-stall-ms 50 --max-num-batched-tokens {chunk}",
            "vllm": "--max-num-batched-tokens {chunk}",
            "sglang": "--chunked-prefill-size {chunk}",
            "llamacpp": "--batch-size {chunk} --ubatch-size {chunk}",
        },
        {"headway": "--scheduling-policy slo keeps the TPOT objective of running streams, too"},
        "chunks",
    ),
    Lever(
        "chunk-small",
        "Chunks of prompts are so small that each step does little but read the weights",
        ("step 12", "lever batching"),
        "prompt tokens of a step, and the time of the steps that a long prompt takes",
        f"{_BENCH}: TTFT of long prompts; step_prompt_tokens grows",
        {"headway": "--max-num-batched-tokens {chunk}", "vllm": "--max-num-batched-tokens {chunk}"},
        {
            "headway": "without --max-num-batched-tokens the server chooses what suits the device",
            "sglang": "leave out --chunked-prefill-size",
            "llamacpp": "leave out --batch-size and --ubatch-size",
        },
        "chunks",
    ),
    Lever(
        "window",
        "The batching window is too large",
        ("step 6", "pitfall 3", "box 4"),
        "time in queue_window of a request that comes alone",
        f"{_BENCH}: TTFT at a low rate; request_batching_window_seconds shrinks",
        advice={
            "headway": "in the file of --service-classes set window_ms to at most [0, 5] for interactive classes, then "
            "send SIGHUP",
            ANY: "let requests join a running batch (continuous batching) instead of waiting for one to fill",
        },
    ),
    Lever(
        "tokenizer",
        "The tokenizer takes much of the time to the first token",
        ("step 4", "pitfall 5"),
        "time of /tokenize, or the phases tokenize and receive, against TTFT",
        f"{_BENCH}: request_tokenize_time_seconds, and TTFT of long prompts",
        {"headway": "--max-known-text 64M"},
        {
            "vllm": "use a fast tokenizer; --api-server-count spreads the work over processes",
            ANY: "use a fast tokenizer; send token ids, or spread the API over several processes",
        },
    ),
    Lever(
        "host",
        "The host is slower than the device: gaps between steps",
        ("step 3", "step 4", "pitfall 2", "box 3", "lever hardware and network"),
        "phases schedule, transport, detokenize and send against the time of an answer, or an API process at the "
        "limit of a core",
        "headway bench: TPOT, and headway top beside it; GET /debug/profile shows the gaps",
        {},
        {
            "headway": "look at GET /debug/profile; on a GPU leave out --enforce-eager; let client and proxies run on "
            "other cores",
            "vllm": "leave out --enforce-eager; raise --api-server-count",
            ANY: "capture the decode step as a graph; let client and proxies run on other cores",
        },
    ),
    Lever(
        "drafts",
        "Drafts are seldom accepted: draft and target do not match",
        ("step 8", "pitfall 6", "box 8"),
        "accepted of tried drafts",
        f"{_BENCH} with your own texts: TPOT; spec_decode_num_accepted_tokens_total against draft tokens",
        {},
        {
            "headway": "leave out --speculative-config, or name a draft model of the same family and training",
            ANY: "leave out speculative decoding, or take a draft model of the same family and training",
        },
        "speculation",
    ),
    Lever(
        "threads",
        "The engine's threads do not fit the cores",
        ("step 10", "lever hardware and network"),
        "threads that take part in the work, against physical cores within affinity and quota",
        f"{_BENCH}: TPOT and tokens a second",
        {"headway": "--threads {cores}", "llamacpp": "--threads {cores} --threads-batch {cores}"},
        {"vllm": "on a CPU set VLLM_CPU_OMP_THREADS_BIND", ANY: "one thread for each physical core is best as a rule"},
    ),
    Lever(
        "parallel",
        "The tensor parallel size is larger than a single stream can use",
        ("step 10", "pitfall 1"),
        "--tensor-parallel-size of the server's command, and whether the model fits on fewer devices",
        f"{_BENCH}: TPOT of single requests",
        {},
        {ANY: "headway plan levers MODEL predicts TPOT of smaller sizes; serve replicas instead"},
        "parallel",
    ),
    Lever(
        "contended",
        "Other work takes the server's cores",
        ("lever hardware and network",),
        "time in which the engine's threads could have run but had no core",
        f"{_BENCH}: TPOT P99; /proc/PID/schedstat",
        {},
        {ANY: "give the server cores of its own (cpuset, CPUAffinity=, Guaranteed pods), or move the other work"},
    ),
    Lever(
        "steal",
        "The hypervisor takes processor time",
        ("lever hardware and network",),
        "steal in /proc/stat",
        f"{_BENCH}: TPOT P99, on dedicated cores",
        {},
        {ANY: "move to dedicated cores or another host"},
    ),
    Lever(
        "swap",
        "The server's memory is swapped out",
        ("box 6",),
        "VmSwap of its processes, and pages swapped meanwhile",
        f"{_BENCH}: TTFT P99; vmstat shows si and so at 0",
        {},
        {
            "headway": "give the cache less with --kv-cache-memory, or free memory",
            ANY: "free memory, or switch the swap space off for the server (MemorySwapMax=0)",
        },
    ),
    Lever(
        "huge-pages",
        "Weights lie in small pages",
        ("lever hardware and network",),
        "AnonHugePages of the processes, against their memory, where the setting is never",
        f"{_BENCH}: TPOT of single requests",
        {},
        {ANY: "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled, then restart the server"},
    ),
    Lever(
        "frequency",
        "The processors are clocked low under load",
        ("lever hardware and network",),
        "present against highest frequency while requests run",
        f"{_BENCH}: TPOT of single requests",
        {},
        {ANY: "set the governor performance (cpupower frequency-set -g performance); look at cooling and power limits"},
    ),
    # Levers that no fault of a running server points at: the plan ranks them.
    Lever(
        "weights",
        "Weights have more bits than needed",
        ("step 5", "box 7", "lever quantization"),
        "the time of a decode step is that of reading the weights (headway plan: decode is memory-bound)",
        f"{_BENCH}, and an evaluation of your own task beside it",
        {"headway": "--quantization int8", "vllm": "--quantization fp8", "sglang": "--quantization fp8"},
        {"llamacpp": "serve a GGUF file of fewer bits, such as Q8_0 or Q4_K_M"},
        "weights",
    ),
    Lever(
        "kernels",
        "Kernels are far from what the hardware allows",
        ("step 2", "box 2", "lever kernels"),
        "step_time_to_roofline_ratio, or growth of TTFT with the length of the prompt",
        "headway calibrate, then headway bench profile: measured against predicted times of each step",
        {},
        {ANY: "use the build of the engine that is made for this hardware"},
    ),
    Lever(
        "heads",
        "Keys and values of all heads are kept",
        ("step 7", "box 7"),
        "bytes of KV cache for a token (headway plan)",
        "headway plan compare MODEL@HARDWARE OTHER@HARDWARE, then an evaluation of your own task",
        {},
        {ANY: "take a model with grouped or multi-query attention"},
        "hardware",
    ),
    Lever(
        "baseline",
        "No baseline is known",
        ("step 1", "box 1"),
        "TTFT, TPOT and end-to-end times with percentiles",
        "headway bench --save-result keeps the run that later ones are compared with",
        {},
        {ANY: "run headway bench with the load that you expect, and keep its result"},
    ),
    Lever(
        "objectives",
        "Nobody's objectives or limits are enforced",
        ("step 11", "box 9", "lever scheduling"),
        "counts of met and missed objectives by class, and limits of tenants",
        "class_objectives_total grows; a tenant above its limit gets 429",
        {},
        {
            "headway": "give --service-classes and --tenants; examples/ has files to begin with",
            ANY: "put headway gateway in front, with classes and tenants",
        },
    ),
    Lever(
        "telemetry",
        "Nobody sees it when it goes wrong",
        ("step 12", "box 10"),
        "metrics that dashboards ask for, and traces of requests",
        "headway dashboard --output deploy, then promtool check rules",
        {},
        {ANY: "scrape /metrics, import a dashboard, and send traces to a collector"},
    ),
)
BY_KEY: dict[str, Lever] = {each.key: each for each in LEVERS}
