"""The model's files as each engine reads them, made once of the one checkpoint: OpenVINO's IR, GGUF, packed weights.

Precisions are bf16, int8 and int4, each as the engine rounds weights itself; kinds of GGUF, of which Headway and
llama.cpp read the same file; and packed checkpoints, which Headway and vLLM both read. What was chosen where an engine
leaves a choice is in benchmarks/README.md.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from benchmarks.awq_checkpoint import write_awq
from benchmarks.gguf_checkpoint import write_gguf
from benchmarks.processes import finish
from benchmarks.weights import write_weights
from headway.quantize.calibration import Calibration
from headway.quantize.run import quantize
from headway.quantize.schemes import Recipe

PRECISIONS = ("bf16", "int8", "int4")
GGUF_KINDS = ("q8_0", "q4_0", "q4_k_m", "q6_k")
PACKED_KINDS = ("awq", "w4a16")
_OPENVINO_FLAGS = {
    "bf16": ["--weight-format", "fp16"],
    "int8": ["--weight-format", "int8", "--sym"],
    "int4": ["--weight-format", "int4", "--sym", "--group-size", "128", "--ratio", "1.0"],
}
_LLAMA_CPP_KINDS = {"int8": "q8_0", "int4": "q4_0"}


def model_for(engine: str, precision: str, shape: str, python: str, folder: Path) -> Path:
    """The model of `shape` in the form that `engine` reads, written to folder / shape unless it is there already.

    Args:
        engine: headway, vllm, openvino or llama.cpp.
        python: that does the conversion: the one that the engine is installed in, or llama.cpp's for kinds of GGUF.

    Raises:
        SystemExit: the conversion failed; with the tail of its log.
        ValueError: weights of this shape are not known here.
    """
    checkpoint = write_weights(shape, folder)
    if precision == "awq":
        return write_awq(checkpoint)
    if precision == "w4a16":
        return _quantized(checkpoint, precision)
    if engine == "openvino":
        return _openvino(checkpoint, precision, python)
    if engine == "llama.cpp" or precision in GGUF_KINDS:
        return _gguf(write_gguf(shape, folder), precision, python)
    return checkpoint


def _quantized(checkpoint: Path, precision: str) -> Path:
    """The checkpoint as `headway quantize` rounds it, written if it is missing."""
    target = checkpoint / precision
    if not target.exists():
        quantize(
            checkpoint, target, Recipe.of(precision.upper(), "rtn", None), Calibration(), lambda _done, _what: None
        )
    return target


def _openvino(checkpoint: Path, precision: str, python: str) -> Path:
    target = checkpoint / f"openvino-{precision}"
    if target.exists():
        return target
    print(f"exporting {checkpoint.name} in {precision} for openvino ...", file=sys.stderr)
    partial = target.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    program = Path(python).parent / "optimum-cli"
    command = [str(program), "export", "openvino", "--model", str(checkpoint), "--task", "text-generation-with-past"]
    finish("optimum-cli", [*command, *_OPENVINO_FLAGS[precision], str(partial)])
    return partial.replace(target)


def _gguf(source: Path, precision: str, python: str) -> Path:
    if precision == "bf16":
        return source
    return quantized_gguf(source, _LLAMA_CPP_KINDS.get(precision, precision), python)


def quantized_gguf(source: Path, kind: str, python: str) -> Path:
    """A GGUF file beside `source`, quantised by llama.cpp to a kind as q4_k_m, unless it is there already.

    Raises:
        SystemExit: the conversion failed; with the tail of its log.
    """
    target = source.with_name(f"{kind}.gguf")
    if target.exists():
        return target
    print(f"quantizing {source.parent.name} to {kind} for llama.cpp ...", file=sys.stderr)
    partial = target.with_suffix(".partial")
    finish("llama.cpp quantize", [python, "-m", "benchmarks.engines.quantize", str(source), str(partial), kind])
    return partial.replace(target)
