"""llama.cpp's own quantization, which its program llama-quantize calls; in a Python with llama-cpp-python.

PYTHON -m benchmarks.engines.quantize SOURCE TARGET KIND
"""

from __future__ import annotations

import sys


def main() -> None:
    source, target, kind = sys.argv[1:]
    from llama_cpp import llama_cpp  # type: ignore[import-not-found]

    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind.upper()}")
    if code := llama_cpp.llama_model_quantize(source.encode(), target.encode(), params):
        sys.exit(f"llama_model_quantize returned {code}")


if __name__ == "__main__":
    main()
