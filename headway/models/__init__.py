"""A Hugging Face checkpoint becomes one config-driven decoder. Importing this package imports no torch."""

from headway.models.config import ModelConfig, ModelError

__all__ = ["ModelConfig", "ModelError"]
