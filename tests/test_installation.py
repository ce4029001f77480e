"""Headway without the extra `serve`: everything but the engine works, and what needs it says what to install."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from headway.installation import ENGINE_MODULES, require_engine

REPOSITORY = Path(__file__).parent.parent
HIDDEN = {*ENGINE_MODULES, "triton", "llvmlite"}
WITHOUT = f"""
import sys
from importlib.machinery import PathFinder

class WithoutEngine(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in {HIDDEN} else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = WithoutEngine
"""
MAIN = "from headway.cli import main; main()"


def without_engine(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WITHOUT + program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, timeout=60)


def test_the_engine_is_there_when_all_of_its_modules_are() -> None:
    require_engine()


def test_engine_modules_are_those_of_the_extra() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    of_extra = {canonicalize_name(Requirement(text).name) for text in project["optional-dependencies"]["serve"]}
    providers = importlib.metadata.packages_distributions()
    assert {canonicalize_name(providers[name][0]) for name in ENGINE_MODULES} == of_extra - {"pydantic"}


def test_help_of_bench() -> None:
    ran = without_engine(MAIN, "bench", "--help")
    assert ran.returncode == 0, ran.stderr
    assert "--find-max-rate" in ran.stdout


def test_bench_without_a_server_says_so() -> None:
    ran = without_engine(MAIN, "bench", "--base-url", "http://127.0.0.1:9", "--num-prompts", "1")
    assert ran.returncode == 2
    assert ran.stderr.count("\n") == 1 and "127.0.0.1:9" in ran.stderr


def test_plan() -> None:
    ran = without_engine(MAIN, "plan", "llama-3.2-1b", "--hardware", "H100-SXM", "--json")
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["fits"]


def test_every_other_room_can_be_imported() -> None:
    rooms = ("bench", "cli", "cost", "planner", "policy", "report", "text")
    files = [path.relative_to(REPOSITORY) for room in rooms for path in (REPOSITORY / "headway" / room).rglob("*.py")]
    names = [".".join(file.with_suffix("").parts).removesuffix(".__init__") for file in files]
    ran = without_engine("import importlib; [importlib.import_module(name) for name in sys.argv[1:]]", *names)
    assert len(names) > 100 and ran.returncode == 0, ran.stderr


@pytest.mark.parametrize(
    "program",
    [
        f"{MAIN} #serve",
        f"{MAIN} #calibrate",
        f"{MAIN} #bench profile",
        "import runpy; runpy.run_module('headway.calibration', run_name='__main__') #",
    ],
)
def test_what_needs_the_engine_says_in_one_line_what_to_install(program: str) -> None:
    code, arguments = program.split("#")
    ran = without_engine(code, *arguments.split())
    assert ran.returncode == 2
    assert not ran.stdout
    assert ran.stderr.startswith("headway: the engine is not installed here (there is no torch, numba, ")
    assert ran.stderr.endswith("pip install 'headway[serve]'\n") and ran.stderr.count("\n") == 1


def test_the_library_says_what_to_install() -> None:
    ran = without_engine("from headway import SamplingParams, LLM")
    assert ran.returncode == 1
    assert ran.stderr.splitlines()[-1].startswith("headway.installation.EngineNotInstalled: the engine is not")
