"""The rules of the house: who may import whom, and how files are named and sized."""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import itertools
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import headway

REPOSITORY = Path(__file__).parent.parent
PACKAGE = REPOSITORY / "headway"
MOST_LINES = 500
VAGUE_NAMES = {"utils", "util", "common", "helpers", "helper", "misc"}

# Modules that read a clock or chance, wait, or talk to the outside: whoever decides is given the time and the seed.
CLOCKS_AND_IO = {
    "asyncio",
    "datetime",
    "multiprocessing",
    "os",
    "random",
    "secrets",
    "select",
    "signal",
    "socket",
    "subprocess",
    "tempfile",
    "threading",
    "time",
    "uuid",
}
BUILT_IN_IO = {"open", "print", "input"}


@dataclass(frozen=True)
class Room:
    """What a folder of the package may import.

    `ours` lists modules of this package (a folder stands for all that is in it; None allows all but the
    command line), `packages` the third-party packages (None allows all but `forbidden`).
    """

    ours: set[str] | None
    packages: set[str] | None = None
    forbidden: frozenset[str] = frozenset()


NO_DEVICE = frozenset({"torch", "numba", "triton"})
NO_SERVER = frozenset({"fastapi", "starlette", "uvicorn"})
TEST_ONLY = frozenset({"transformers", "openai", "pytest", "hypothesis"})

ROOMS = {
    "policy": Room(ours={"policy", "flags"}, packages={"msgspec"}, forbidden=frozenset(CLOCKS_AND_IO)),
    "cost": Room(ours={"cost", "policy"}, packages={"msgspec", "numpy"}, forbidden=frozenset(CLOCKS_AND_IO)),
    "calibration": Room(
        ours={"calibration", "cost", "policy", "models", "kernels", "engine", "bundled", "files", "installation"},
        forbidden=NO_SERVER,
    ),
    "kernels": Room(ours={"kernels", "models", "files"}, forbidden=NO_SERVER),
    "models": Room(
        ours={"models", "kernels", "bundled", "cost.config", "cost.layers", "cost.shape", "cost.values", "files"},
        forbidden=NO_SERVER,
    ),
    "text": Room(ours={"text"}, forbidden=NO_DEVICE | NO_SERVER),
    "grammars": Room(
        ours={"grammars", "policy.step.structured_outputs", "text.bounded", "text.tokenizer", "text.tokenizer_files"},
        forbidden=NO_DEVICE | NO_SERVER,
    ),
    "engine": Room(
        ours={"engine", "policy", "cost", "grammars", "models", "kernels", "files", "flags", "version"},
        forbidden=frozenset({"fastapi", "uvicorn"}),
    ),
    "server": Room(
        ours={
            "server",
            "text",
            "policy",
            "grammars",
            "outputs",
            "config_files",
            "files",
            "engine.client",
            "engine.messages",
            "engine.config",
            "flags",
        },
        forbidden=NO_DEVICE,
    ),
    "gateway": Room(
        ours={
            "gateway",
            "server.edge",
            "server.admission",
            "server.classes",
            "server.door",
            "server.errors",
            "server.metrics.families",
            "server.metrics.tenants",
            "server.quotas",
            "policy",
            "config_files",
            "flags",
        },
        forbidden=NO_DEVICE,
    ),
    "llm": Room(
        ours={
            "llm",
            "outputs",
            "engine.client",
            "engine.config",
            "engine.core",
            "engine.messages",
            "engine.libraries",
            "engine.start",
            "grammars.compile",
            "models.folder",
            "policy",
            "text",
        },
        forbidden=NO_SERVER,
    ),
    "quantize": Room(
        ours={
            "quantize",
            "models",
            "kernels",
            "cost.layers",
            "cost.shape",
            "cost.values",
            "engine.memory",
            "flags",
            "llm",
            "policy.step.sampling_params",
            "text.tokenizer",
        },
        forbidden=NO_SERVER,
    ),
    "outputs": Room(ours={"outputs", "text", "policy", "engine.messages"}, forbidden=NO_DEVICE | NO_SERVER),
    "config_files": Room(ours={"config_files", "policy", "files"}, forbidden=NO_DEVICE | NO_SERVER),
    "load": Room(ours={"load", "policy", "cost.price", "flags", "text.tokenizer"}, forbidden=NO_DEVICE | NO_SERVER),
    "report": Room(ours={"report", "files"}, forbidden=NO_DEVICE | NO_SERVER),
    "bench": Room(ours=None, forbidden=NO_DEVICE),
    "advisor": Room(ours=None, forbidden=NO_DEVICE | NO_SERVER),
    "planner": Room(
        ours={
            "planner",
            "bundled",
            "changes",
            "cost",
            "report",
            "calibration.store",
            "calibration.samples",
            "engine.config",
            "flags",
            "load.workload.lengths",
            "models.gguf",
            "policy.objectives.objectives",
            "policy.cache.kv_groups",
            "policy.cache.sizing",
            "policy.step.step_budget",
            "simulator.serving",
        },
        forbidden=NO_DEVICE | NO_SERVER,
    ),
    "simulator": Room(
        ours={
            "simulator",
            "changes",
            "policy",
            "cost",
            "bench",
            "load",
            "config_files",
            "engine.config",
            "files",
            "flags",
            "planner.request",
            "planner.engines",
            "planner.models",
            "planner.resolve",
            "planner.words",
            "report",
            "text.tokenizer",
        },
        forbidden=NO_DEVICE | NO_SERVER,
    ),
    "cli": Room(ours=None, forbidden=NO_DEVICE),
}


@functools.cache
def modules() -> list[Path]:
    return sorted(p for p in PACKAGE.rglob("*.py") if "bundled" not in p.relative_to(PACKAGE).parts)


@functools.cache
def imported_names(source: str, module: str) -> list[str]:
    """Every name imported anywhere in the source, absolute; `from a import b` counts as a.b."""
    names: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.split(".")[: -node.level]
                base = ".".join(package + ([base] if base else []))
            names += [f"{base}.{alias.name}" for alias in node.names]
    return names


def violations(room: Room, source: str, module: str) -> list[str]:
    """Imports of the source that its room forbids."""
    found = []
    for name in imported_names(source, module):
        top, _, rest = name.partition(".")
        if top == "headway":
            allowed = (
                rest.partition(".")[0] != "cli" or module.startswith("headway.cli")
                if room.ours is None
                else rest == "__version__" or any(rest == own or rest.startswith(own + ".") for own in room.ours)
            )
        else:
            standard = top in sys.stdlib_module_names
            allowed = top not in room.forbidden | TEST_ONLY and (
                standard or room.packages is None or top in room.packages
            )
        if not allowed:
            found.append(f"{module} imports {name}")
    return found


def dotted(path: Path) -> str:
    parts = path.relative_to(REPOSITORY).with_suffix("").parts
    return ".".join(parts)


def test_each_room_imports_only_what_it_may() -> None:
    found = []
    for path in modules():
        room = path.relative_to(PACKAGE).parts[0]
        if room in ROOMS:
            found += violations(ROOMS[room], path.read_text(), dotted(path))
    assert not found, "\n".join(found)


def circle(sources: dict[str, str]) -> list[str]:
    """Modules that import each other in a circle, wherever in them the imports stand; none where there is no circle.

    Args:
        sources: by a module's dotted name; imports of other modules do not count.
    """
    graph: dict[str, set[str]] = {}
    for module, source in sources.items():
        names = [(name, name.rpartition(".")[0]) for name in imported_names(source, module)]
        graph[module] = {next((each for each in pair if each in sources), module) for pair in names} - {module}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        found: list[str] = error.args[1]
        return found
    return []


def test_no_room_has_a_circle_between_its_modules() -> None:
    for room in ROOMS:
        paths = [p for p in modules() if p.relative_to(PACKAGE).parts[0] == room]
        found = circle({dotted(p).removesuffix(".__init__"): p.read_text() for p in paths})
        assert not found, " - ".join(found)


def test_a_circle_is_found() -> None:
    a, c = "def late():\n    from r.b import B", "if TYPE_CHECKING:\n    from r import a"
    assert set(circle({"r.a": a, "r.b": "import r.c", "r.c": c})) == {"r.a", "r.b", "r.c"}
    assert circle({"r.a": a, "r.b": "import r.c\nimport s.a", "r.c": "import time"}) == []


def test_every_folder_is_a_room_with_rules() -> None:
    folders = {p.relative_to(PACKAGE).parts[0] for p in modules() if p.parent != PACKAGE}
    assert folders == ROOMS.keys(), f"say in ROOMS what {sorted(folders ^ ROOMS.keys())} may import"


def test_who_decides_calls_nothing_outside() -> None:
    calls = [
        f"{dotted(path)} calls {node.func.id}"
        for path in modules()
        if path.is_relative_to(PACKAGE / "policy")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in BUILT_IN_IO
    ]
    assert not calls


@pytest.mark.parametrize(
    ("room", "line"),
    [
        ("policy", "import time"),
        ("policy", "from time import monotonic_ns"),
        ("policy", "import torch"),
        ("policy", "from random import random"),
        ("cost", "import os.path"),
        ("policy", "from headway.engine.messages import AddRequest"),
        ("policy", "from headway import engine"),
        ("policy", "from headway.cost.layers import AttentionSinks"),
        ("policy", "from ..engine import messages"),
        ("policy", "def late():\n    import uvicorn"),
        ("cost", "import torch.nn"),
        ("models", "from headway.policy.step.request import Sequence"),
        ("models", "from headway.cost.timing import Deployment"),
        ("kernels", "import headway.server"),
        ("text", "import torch"),
        ("text", "from headway.policy.step.request import Sequence"),
        ("engine", "from headway.text.tokenizer import Tokenizer"),
        ("server", "from headway.engine.runner import Runner"),
        ("server", "import torch"),
        ("gateway", "from headway.server.service import Service"),
        ("gateway", "from headway.engine.client import EngineClient"),
        ("bench", "from headway.cli import main"),
        ("models", "import transformers"),
    ],
)
def test_forbidden_import_is_found(room: str, line: str) -> None:
    assert violations(ROOMS[room], line, f"headway.{room}.example")


@pytest.mark.parametrize(
    ("room", "line"),
    [
        ("policy", "import math, msgspec\nfrom headway.policy.step.request import Sequence\nfrom . import ledger"),
        ("models", "from headway.kernels.interface import Kernels\nimport torch"),
        ("server", "from headway.engine import messages\nfrom headway.engine.client import EngineClient"),
        ("bench", "from headway.policy.step.ledger import Ledger"),
    ],
)
def test_permitted_import_is_let_through(room: str, line: str) -> None:
    assert violations(ROOMS[room], line, f"headway.{room}.example") == []


def test_the_planner_follows_a_load_in_one_place() -> None:
    """The simulator is asked there; values may be passed everywhere."""
    values = {f"headway.simulator.serving.{name}" for name in ("Served", "PERCENTILES")}
    paths = [path for path in (PACKAGE / "planner").glob("*.py") if path.name != "loads.py"]
    names = {name for path in paths for name in imported_names(path.read_text(), dotted(path))}
    assert {name for name in names if name.startswith("headway.simulator")} <= values


def light_modules() -> list[str]:
    """Modules that must start fast, and so without torch, whatever they import on the way."""
    rooms = ROOMS.keys() - {"calibration", "engine", "kernels", "llm", "models", "quantize"}
    light = [p for p in modules() if p.relative_to(PACKAGE).parts[0] in rooms]
    light += [
        PACKAGE / name
        for name in ("__init__.py", "choices.py", "class_file.py", "engine/messages.py", "engine/client.py")
    ]
    return [dotted(p).removesuffix(".__init__") for p in light if p.exists()]


def test_light_modules_start_without_torch() -> None:
    program = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "    for heavy in ('torch', 'numba', 'transformers'):\n"
        "        if heavy in sys.modules:\n"
        "            sys.exit(f'{name} imports {heavy}, directly or by way of another module')\n"
    )
    names = light_modules()
    assert {"headway.policy.step.request", "headway.server.app"} <= set(names)
    ran = subprocess.run([sys.executable, "-c", program, *names], capture_output=True, text=True, cwd=REPOSITORY)
    assert ran.returncode == 0, ran.stderr


def test_every_module_says_what_it_is_for() -> None:
    """An empty __init__.py has nothing to explain."""
    sources = {dotted(p): p.read_text().strip() for p in modules()}
    silent = [name for name, source in sources.items() if source and not source.startswith(('"""', 'r"""'))]
    assert not silent, f"without a docstring: {silent}"


def test_no_file_is_too_long_to_read_in_one_sitting() -> None:
    files = [*modules(), *REPOSITORY.glob("tests/**/*.py"), *REPOSITORY.glob("benchmarks/**/*.py")]
    lengths = {str(p.relative_to(REPOSITORY)): len(p.read_text().splitlines()) for p in files}
    assert {name: n for name, n in lengths.items() if n > MOST_LINES} == {}


def test_nothing_has_a_vague_name() -> None:
    tracked = [p.relative_to(REPOSITORY) for p in modules() + list(REPOSITORY.glob("tests/**/*.py"))]
    vague = [str(p) for p in tracked if VAGUE_NAMES & {*p.parts[:-1], p.stem, p.stem.removeprefix("test_")}]
    assert not vague


def project() -> dict[str, Any]:
    """The [project] table of pyproject.toml."""
    return tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]


def test_version_is_said_once() -> None:
    declared = project()["version"]
    assert headway.__version__ == declared
    assert f"## {declared}" in (REPOSITORY / "CHANGELOG.md").read_text()


# Rooms of the extra `serve`; all others do with what `pip install headway` brings.
OF_THE_EXTRA = {
    "batch.py",
    "calibration",
    "engine",
    "gateway",
    "grammars",
    "kernels",
    "llm",
    "models",
    "quantize",
    "server",
}
# Other halves of declared dependencies, which pin them: of torch's CUDA build, numba and pydantic.
BROUGHT_ALONG = {"triton", "llvmlite", "pydantic_core"}


def test_every_imported_package_is_a_declared_dependency() -> None:
    extras = project()["optional-dependencies"]
    declared = [*project()["dependencies"], *extras["serve"], *extras["redis"], *extras["ray"]]
    assert not undeclared(OF_THE_EXTRA, declared) - BROUGHT_ALONG
    others = {p.relative_to(PACKAGE).parts[0] for p in modules()} - OF_THE_EXTRA
    assert not undeclared(others, project()["dependencies"])


def undeclared(rooms: set[str], requirements: list[str]) -> set[str]:
    """Packages that modules of these rooms import, and that the requirements do not name."""
    declared = {canonicalize_name(Requirement(text).name) for text in requirements}
    providers = importlib.metadata.packages_distributions()
    sources = [(dotted(p), p.read_text()) for p in modules() if p.relative_to(PACKAGE).parts[0] in rooms]
    tops = {name.partition(".")[0] for module, source in sources for name in imported_names(source, module)}
    outside = tops - {"headway", "__future__"} - sys.stdlib_module_names
    return {t for t in outside if not declared & {canonicalize_name(p) for p in providers.get(t, [t])}}


def test_constraints_pin_every_installed_dependency() -> None:
    """Each package that pyproject.toml asks for, and what those ask for in turn, has its version in constraints.txt."""
    lines = (REPOSITORY / "constraints.txt").read_text().splitlines()
    pinned = {canonicalize_name(Requirement(line).name) for line in lines if line and not line.startswith("#")}
    extras = project()["optional-dependencies"]
    wanted = [*project()["dependencies"], *itertools.chain.from_iterable(extras.values())]
    missing = closure([Requirement(text) for text in wanted]) - pinned
    assert not missing, f"not in constraints.txt: {sorted(missing)}"


def test_pins_are_in_the_declared_ranges() -> None:
    pins = [Requirement(line) for line in (REPOSITORY / "constraints.txt").read_text().splitlines() if line[:1] != "#"]
    pinned = {canonicalize_name(pin.name): next(iter(pin.specifier)).version for pin in pins}
    extras = project()["optional-dependencies"]
    wanted = [Requirement(text) for text in [*project()["dependencies"], *itertools.chain(*extras.values())]]
    outside = [str(each) for each in wanted if not each.specifier.contains(pinned[canonicalize_name(each.name)])]
    assert not outside


def closure(wanted: list[Requirement]) -> set[str]:
    """Names of the installed packages that the requirements need, directly or by way of another."""
    names: set[str] = set()
    visited: set[tuple[str, str]] = set()
    queue = [(canonicalize_name(w.name), extra) for w in wanted for extra in ("", *w.extras)]
    while queue:
        name, extra = queue.pop()
        if (name, extra) in visited:
            continue
        visited.add((name, extra))
        try:
            needs = [Requirement(text) for text in importlib.metadata.requires(name) or []]
        except importlib.metadata.PackageNotFoundError:
            continue
        names.add(name)
        for need in needs:
            if need.marker is None or need.marker.evaluate({"extra": extra}):
                queue += [(canonicalize_name(need.name), e) for e in ("", *need.extras)]
    return names
