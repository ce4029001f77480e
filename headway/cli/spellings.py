"""What other tools call our commands and options, so that a newcomer's first guess gets the right word."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches

COMMANDS = {
    "run": "headway serve MODEL (a server) or headway chat MODEL (a conversation in this terminal)",
    "start": "headway serve MODEL",
    "server": "headway serve MODEL",
    "launch": "headway serve MODEL",
    "launch_server": "headway serve MODEL",
    "api_server": "headway serve MODEL",
    "complete": "headway chat --message TEXT",
    "generate": "headway chat --message TEXT",
    "list": "headway models",
    "ls": "headway models",
    "ps": "headway models",
    "benchmark": "headway bench",
    "perf": "headway bench",
    "profile": "headway bench profile",
    "tune": "headway bench --find-max-rate or headway plan levers",
    "estimate": "headway plan",
    "sim": "headway simulate",
}
SUBCOMMANDS = {
    "rm": "revoke",
    "remove": "revoke",
    "delete": "revoke",
    "create": "add",
    "new": "add",
    "ls": "list",
    "show": "list",
}
# What vLLM, SGLang, llama.cpp, TGI, ollama and load generators call each of our options.
_ALIASES = {
    "--max-model-len": "--ctx-size -c --n-ctx --num-ctx --context-length --max-total-tokens --max-seq-len",
    "--kv-cache-memory": "--kv-cache-memory-bytes",
    "--gpu-memory-utilization": "--mem-fraction-static",
    "--kv-cache-dtype": "--cache-type-k --cache-type-v",
    "--max-num-seqs": "--batch-size --parallel --max-running-requests --max-concurrent-requests --max-batch-size",
    "--max-num-batched-tokens": "--ubatch-size --chunked-prefill-size --max-batch-prefill-tokens",
    "--random-output-len": "--n-predict --output-tokens --osl --max-tokens",
    "--lora-modules": "--lora --lora-paths",
    "--max-loras": "--max-loras-per-batch",
    "--max-cpu-loras": "--max-loaded-loras",
    "--served-model-name": "--alias",
    "--tensor-parallel-size": "--tp --tp-size",
    "--pipeline-parallel-size": "--pp-size",
    "--node-rank": "--headless",
    "--master-addr": "--dist-init-addr",
    "--context-parallel-size": "--prefill-context-parallel-size",
    "--threads": "--num-threads -t",
    "--base-url": "--url --server --target",
    "--request-rate": "--rate --rps --qps",
    "--max-concurrency": "--concurrency --users",
    "--concurrency": "--concurrency --users --max-concurrency",
    "--num-prompts": "--num-requests --max-requests",
    "--random-input-len": "--prompt-tokens --input-tokens --isl",
    "--prompt-tokens": "--random-input-len --input-tokens --isl",
    "--output-tokens": "--random-output-len --osl",
    "--hardware": "--gpu",
    "--dataset-name": "--dataset",
    "--result-filename": "--output-file",
    "--output": "--output-file",
}
# Their option, to ours; those of a row are tried in turn.
OPTIONS: dict[str, list[str]] = {}
for _ours, _theirs in _ALIASES.items():
    for _each in _theirs.split():
        OPTIONS.setdefault(_each, []).append(_ours)
NOT_SUPPORTED = {
    "--lora-dtype": "adapters have the type of the model; leave it out",
    "--fully-sharded-loras": "ranks always share adapters as they share layers; leave it out",
    "--lora-scaled": "give the adapter in peft's format, as --lora-modules NAME=PATH",
    "--enable-auto-tool-choice": "models may always call the tools that a request offers; leave it out",
    "--enable-reasoning": "--reasoning-parser alone is enough, and the chat template names it; leave both out",
    "--exclude-tools-when-tool-choice-none": "tools are then always left out; leave it out",
    "--tokenizer": "the tokenizer is that of the model's folder",
    "--trust-remote-code": "code of a checkpoint is never run; leave it out",
    "--n-gpu-layers": "the whole model is on one device; --device chooses it",
    "--cpu-offload-gb": "the whole model is on one device; --device chooses it",
    "--guided-decoding-backend": "there is one backend for structured output; leave it out",
    "--structured-outputs-config": "there is one backend for structured output; leave it out",
    "--hf-repo": "give the model as an argument, as owner/name or owner/name:Q4_K_M",
    "--download-dir": "models of the hub lie where HF_HOME says",
    "--jinja": "chat templates are always used; leave it out",
    "--flash-attn": "there is one kernel for attention; leave it out",
    "--cont-batching": "requests are always batched; leave it out",
    "--embeddings": "/v1/embeddings is always there; leave it out",
    "--metrics": "/metrics is always there; leave it out",
    "--mlock": "weights are packed into memory of their own; leave it out",
    "--no-mmap": "weights are packed into memory of their own; leave it out",
    "--disable-log-requests": "--log-level warning logs no requests",
    "--percentile-metrics": "all latencies are shown; --metric-percentiles chooses their percentiles",
}
# Text that is added to an error when the value of an option is none of its choices.
OF_VALUES = {"--quantization": "; the format of a quantised checkpoint is found without it"}
POSITIONAL = ("--model", "--model-path", "--model-id", "-m")
# An objective such as ttft:200, or what may be meant as one: the error must name it, not a command of that name.
_OBJECTIVE = re.compile(r"\w+:[^@=]*|(ttft|tpot|e2el)\b[^@]*|[\d.]+(ms|s)?")


def hint(given: str, known: Iterable[str], takes_model: bool = False) -> str:
    """What the user may have meant by an unknown option; "" where nothing is near.

    Args:
        given: as "--ctx-size", or as a key of a file, "ctx_size".
        known: options of the command, as "--max-model-len".
        takes_model: the command has an argument MODEL.
    """
    options = list(known)
    name = given if given.startswith("-") else f"--{given}"
    spelled = name.replace("_", "-").lower()
    if takes_model and spelled in POSITIONAL:
        return "give the model as an argument, without an option"
    if spelled in options:
        return f"did you mean {spelled}?"
    ours = next((each for each in OPTIONS.get(spelled, ()) if each in options), None)
    if ours is not None:
        return f"it is called {ours} here"
    if spelled in NOT_SUPPORTED:
        return NOT_SUPPORTED[spelled]
    near = get_close_matches(spelled, options, 1)
    return f"did you mean {near[0]}?" if near else ""


def subcommand(given: str, known: Iterable[str]) -> str:
    """Which command of a group the user may have meant; "" where none is near."""
    names = list(known)
    ours = SUBCOMMANDS.get(given.lower(), "")
    return ours if ours in names else next(iter(get_close_matches(given.lower(), names, 1)), "")


def fold_objectives(arguments: Sequence[str]) -> list[str]:
    """`--goodput ttft:200 tpot:50` becomes `--goodput "ttft:200 tpot:50"`: an option here takes one value.

    The values go on until an argument is none, such as `MODEL@HARDWARE:tp=2`.
    """
    folded: list[str] = []
    is_open = False
    for argument in arguments:
        is_value = is_open and _OBJECTIVE.fullmatch(argument) is not None
        if is_value and folded[-1] not in ("--goodput", "--slo"):
            folded[-1] += f" {argument}"
        else:
            folded.append(argument)
        is_open = is_value or argument.partition("=")[0] in ("--goodput", "--slo")
    return folded


def spread_modules(arguments: Sequence[str]) -> list[str]:
    """`--lora-modules a=x b=y` becomes `--lora-modules a=x --lora-modules b=y`, as vLLM takes several values of it."""
    spread: list[str] = []
    is_open = False
    for argument in arguments:
        is_value = not argument.startswith("-") and ("=" in argument or argument.lstrip().startswith("{"))
        if is_open and is_value and spread[-1] != "--lora-modules":
            spread.append("--lora-modules")
        spread.append(argument)
        is_open = argument.partition("=")[0] == "--lora-modules" or (is_open and is_value)
    return spread
