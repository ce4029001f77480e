"""llama.cpp's own quantization, which its program llama-quantize calls; in a Python with llama-cpp-python.

PYTHON -m benchmarks.engines.quantize SOURCE TARGET q8_0|q4_0
"""

from __future__ import annotations

import sys


def main() -> None:
    source, target, kind = sys.argv[1:]
    from llama_cpp import llama_cpp  # type: ignore[import-not-found]

    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = {"q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0, "q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0}[kind]
    if code := llama_cpp.llama_model_quantize(source.encode(), target.encode(), params):
        sys.exit(f"llama_model_quantize returned {code}")


if __name__ == "__main__":
    main()
