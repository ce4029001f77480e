"""The operations of a decoder layer: one interface, three implementations (reference, cpu, cuda)."""

from headway.kernels.interface import Kernels, LayerCache, Linear, StepGeometry, Weight
from headway.kernels.select import kernels_for

__all__ = ["Kernels", "LayerCache", "Linear", "StepGeometry", "Weight", "kernels_for"]
