"""What of Headway is installed: everything, or everything but the engine and its server."""

from __future__ import annotations

from importlib.util import find_spec

# Modules that only the extra `serve` of pyproject.toml brings; pydantic comes with typer, too.
ENGINE_MODULES = (
    "torch",
    "numba",
    "llvmlite",
    "safetensors",
    "fastapi",
    "llguidance",
    "starlette",
    "uvicorn",
    "python_multipart",
)


class EngineNotInstalled(ImportError):
    """The extra `serve` is missing: one line that says what to install."""


def require_engine() -> None:
    """Raises EngineNotInstalled where a package of the engine or its server is missing."""
    if missing := [name for name in ENGINE_MODULES if find_spec(name) is None]:
        raise EngineNotInstalled(
            f"the engine is not installed here (there is no {', '.join(missing)}); install it with: "
            "pip install 'headway[serve]'"
        )
