"""What a quantised checkpoint may hold, by the names of llm-compressor's schemes. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from headway.models.quantization import INT4_GROUP, MOST_STEPS

METHODS = ("rtn", "awq", "gptq")


@dataclass(frozen=True, slots=True)
class Scheme:
    """How matrices are rounded, and in which of compressed-tensors' formats they are written."""

    name: str
    bits: int  # the bits of a weight
    group_size: int | None = None  # inputs that share a scale; None: all of a row
    symmetric: bool = True  # there are no zero points
    floats: bool = False  # weights become e4m3 or, of four bits, e2m1, and not whole numbers
    activations: bool = False  # servers that can do so round activations too, to 8 bits, each token by itself

    @property
    def format(self) -> str:
        if self.floats:
            return (
                "float-quantized" if self.bits == 8 else f"{'nv' if self.group_size == 16 else 'mx'}fp4-pack-quantized"
            )
        return "int-quantized" if self.activations else "pack-quantized"

    @property
    def in_steps(self) -> bool:
        """Scales are whole multiples of one for the row, which is how --quantization int4 keeps them."""
        return self.activations and self.bits == 4 and self.group_size is not None and self.group_size % INT4_GROUP == 0

    @property
    def strategy(self) -> str:
        """The name that compressed-tensors has for what shares a scale."""
        if self.format == "nvfp4-pack-quantized":
            return "tensor_group"
        return "channel" if self.group_size is None else "group"

    @property
    def limits(self) -> tuple[float, float]:
        """The least and the largest number that a weight may become."""
        if self.floats:
            return (-448.0, 448.0) if self.bits == 8 else (-6.0, 6.0)
        return -(2.0 ** (self.bits - 1)), 2.0 ** (self.bits - 1) - 1


@dataclass(frozen=True, slots=True)
class Recipe:
    """A scheme, and how weights are rounded to it: one of METHODS.

    Raises:
        ValueError: the method does not fit the scheme.
    """

    scheme: Scheme
    method: str = "rtn"
    act_order: bool = True  # gptq rounds the weights of the largest inputs first

    def __post_init__(self) -> None:
        if self.scheme.floats and self.method != "rtn":
            raise ValueError(f"--method {self.method}: {self.scheme.name} has only rtn")
        if self.scheme.in_steps and self.method == "awq":  # which divides rows' scales, and leaves no whole multiples
            raise ValueError(f"--method awq: {self.scheme.name} has only rtn and gptq")

    @classmethod
    def of(cls, name: str, method: str, group_size: int | None, act_order: bool = True) -> Recipe:
        """Make a recipe from the name of a scheme, perhaps with groups of another size.

        Raises:
            ValueError: the scheme has no groups, or the method does not fit it.
        """
        scheme = SCHEMES[name]
        if group_size is not None and (scheme.group_size is None or scheme.floats):
            own = f"groups of {scheme.group_size}" if scheme.group_size else "one scale for each row"
            raise ValueError(f"--group-size {group_size}: {name} has {own}; leave --group-size out")
        return cls(replace(scheme, group_size=group_size or scheme.group_size), method, act_order)

    def quantization_config(self, ignored: list[str]) -> dict[str, Any]:
        """The quantization_config of config.json."""
        scheme = self.scheme
        weights: dict[str, Any] = {
            "num_bits": scheme.bits,
            "type": "float" if scheme.floats else "int",
            "symmetric": scheme.symmetric,
            "strategy": scheme.strategy,
            "dynamic": False,
        }
        if scheme.group_size is not None:
            weights["group_size"] = scheme.group_size
        if scheme.group_size is not None and self.method == "gptq" and self.act_order:
            weights["actorder"] = "static"
        if scheme.floats and scheme.bits == 4:
            weights["scale_dtype"] = "torch.float8_e4m3fn" if scheme.group_size == 16 else "torch.uint8"
        activations = {"num_bits": 8, "type": weights["type"], "symmetric": True, "strategy": "token", "dynamic": True}
        group = {
            "targets": ["Linear"],
            "weights": weights,
            "input_activations": activations if scheme.activations else None,
            "output_activations": None,
            "format": scheme.format,
        }
        steps = {"scale_steps": MOST_STEPS} if scheme.in_steps else {}  # which other servers pass over
        return {
            "quant_method": "compressed-tensors",
            "format": scheme.format,
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": ignored,
            "kv_cache_scheme": None,
        } | steps


SCHEMES = {
    scheme.name: scheme
    for scheme in (
        Scheme("W4A16", 4, 128),
        Scheme("W4A16_ASYM", 4, 128, symmetric=False),
        Scheme("W8A16", 8),
        Scheme("W8A8", 8, activations=True),
        Scheme("W4A8", 4, 32, activations=True),
        Scheme("FP8_DYNAMIC", 8, floats=True, activations=True),
        Scheme("NVFP4A16", 4, 16, floats=True),
        Scheme("MXFP4A16", 4, 32, floats=True),
    )
}
