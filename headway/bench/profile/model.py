"""The model that is profiled: its folder, its shape and its dtype, known before a server is started."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from headway.bundled import NAME
from headway.cost.memory import weight_bytes
from headway.cost.precision import INT8, Format, Precision
from headway.cost.shape import ModelShape
from headway.load.errors import BenchError
from headway.models.config import ModelConfig, ModelError
from headway.models.folder import resolve_model
from headway.models.quantization import EMBEDDING, rounds_to, scheme_of

_FORMATS = {"int8": INT8, "int8-weight-only": INT8, "int4": Format("int4", 4, "int8", group=32, scale_bits=8)}


@dataclass(frozen=True, slots=True)
class ProfiledModel:
    """What is served."""

    name: str
    folder: Path
    shape: ModelShape
    dtype: str  # the dtype that it runs in: float32, bfloat16 or float16
    checkpoint_bytes: int  # the bytes of its weight files; 0 where it has none (--load-format dummy)
    max_model_len: int  # the context that is served where nothing else is asked for and the cache has room
    kv_cache_dtype: str = "auto"  # auto (dtype) or int8, with a float32 scale for each token and head
    # quantization, head_quantization: those of the layers' matrices and of the head, as `headway serve` multiplies
    # them; docs/quantization.md says what each keeps.
    quantization: str = "none"
    head_quantization: str = "none"

    @property
    def precision(self) -> Precision:
        plain = Precision.of(self.dtype)
        linear, head = _FORMATS.get(self.quantization, plain.linear), _FORMATS.get(self.head_quantization, plain.head)
        precision = replace(plain, linear=linear, head=head)
        if self.kv_cache_dtype == "int8":
            kv = Format("int8", 8, "int8", group=self.shape.head_dim, scale_bits=32)
            precision = replace(precision, kv=kv)
        return precision

    @property
    def products(self) -> str:
        """The key of `MachinePeaks.gemm_flops_per_s` that bounds its matrix products.

        Weights of 8 bits alone are multiplied in words of 16 bits, as many at a time as of bfloat16.
        """
        return {"none": self.dtype, "int8-weight-only": "bfloat16"}.get(self.quantization, "int8")

    @property
    def kept_in(self) -> str:
        """What its weights are kept in, for a reader."""
        return self.dtype if self.quantization == "none" else f"{self.quantization}, the rest in {self.dtype}"

    @property
    def weight_bytes(self) -> int:
        return weight_bytes(self.shape, self.precision)

    @property
    def kv_bytes_per_token(self) -> int:
        return self.precision.kv.bytes_of(self.shape.kv_elements_per_token)


def find_model(
    name: str | None,
    dtype: str = "auto",
    load_format: str = "auto",
    kv_cache_dtype: str = "auto",
    quantization: str = "none",
) -> ProfiledModel:
    """A folder or Hugging Face id (None: the bundled model) as what will be served.

    Raises:
        BenchError: there is no such model, or it cannot be served.
    """
    try:
        folder = resolve_model(NAME if name is None else name)
        config = ModelConfig.from_folder(folder)
        quantization = rounds_to(quantization, config.packed)
    except ModelError as error:
        raise BenchError(str(error)) from None
    runs_in = (config.dtype or "float32") if dtype == "auto" else dtype
    files = [] if load_format == "dummy" else sorted(folder.glob("*.safetensors"))
    if not files and load_format != "dummy":
        raise BenchError(f"{folder} holds no *.safetensors; give a complete checkpoint, or --load-format dummy")
    shown = name or NAME
    checkpoint_bytes = sum(file.stat().st_size for file in files)
    head = EMBEDDING if config.shape.tied_embeddings else "lm_head"
    schemes = (scheme_of(each, quantization, config.packed) for each in ("model.layers.0.mlp.down_proj", head))
    return ProfiledModel(
        shown, folder, config.shape, runs_in, checkpoint_bytes, config.max_model_len, kv_cache_dtype, *schemes
    )
