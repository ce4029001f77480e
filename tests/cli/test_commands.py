"""Commands that are made of dataclasses: flags, the file of --config, and what is said of bad ones."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from headway.bench.options import BenchOptions
from headway.bench.profile.options import ProfileOptions
from headway.cli import COMMANDS, command_of, main
from headway.cli.commands import fail, with_flags
from headway.engine.config import EngineConfig
from headway.flags import Flag, flags_of, size
from headway.planner.request import PlanRequest
from headway.server.settings import ServerSettings
from headway.simulator.options import SimulateOptions


def all_sizes(texts: list[str]) -> tuple[int, ...]:
    return tuple(map(size, texts))


@dataclass
class Inner:
    name: Annotated[str | None, Flag("A name.", envvar=("TEST_NAME",))] = None
    memory: Annotated[int, Flag("Bytes.", "--memory-size", parse=size, default="1K")] = 1024


@dataclass
class Options:
    inner: Inner
    place: Annotated[Path, Flag("A place.", positional=True)]
    count: Annotated[int, Flag("A count.", min=1)] = 3
    kind: Annotated[str, Flag("A kind.", short="-k", choices=("a", "b"))] = "a"
    fast: Annotated[bool, Flag("Fast?")] = True
    tags: Annotated[list[str], Flag("Tags.", "--tag", repeated=True)] = field(default_factory=list)
    sizes: Annotated[tuple[int, ...], Flag("Sizes.", "--size", parse=all_sizes, repeated=True)] = ()
    unsaid: int = 7


class Command:
    def __init__(self) -> None:
        self.app = typer.Typer(add_completion=False)
        self.app.command()(self.run)
        self.options: Options | None = None

    @property
    def run(self) -> Any:
        @with_flags
        def run(options: Options, beside: bool = False) -> None:
            self.options, self.beside = options, beside

        return run

    def __call__(self, *arguments: object) -> Options:
        ran = CliRunner().invoke(self.app, list(map(str, arguments)))
        assert ran.exit_code == 0, ran.output
        assert self.options is not None
        return self.options

    def refused(self, *arguments: object) -> str:
        ran = CliRunner().invoke(self.app, list(map(str, arguments)))
        assert ran.exit_code == 2 and self.options is None
        return " ".join(ran.stderr.replace("│", " ").split())


@pytest.fixture
def command() -> Command:
    return Command()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "settings.toml"


def test_defaults_are_those_of_the_fields(command: Command) -> None:
    assert command("here") == Options(Inner(), Path("here"))


def test_flags_become_fields(command: Command) -> None:
    said = "here --count 5 -k b --no-fast --tag x --tag y --size 1K --size 2 --name n --memory-size 2K --beside"
    expected = Options(Inner("n", 2048), Path("here"), 5, "b", False, ["x", "y"], (1024, 2))
    assert command(*said.split()) == expected and command.beside


def test_a_file_says_the_same(command: Command, file: Path) -> None:
    file.write_text(
        "place = 'here'\ncount = 5\nkind = 'b'\nfast = false\ntag = ['x', 'y']\nsize = ['1K', 2]\nname = 'n'\n"
        "memory_size = 2048\nbeside = true\n"
    )
    expected = Options(Inner("n", 2048), Path("here"), 5, "b", False, ["x", "y"], (1024, 2))
    assert command("--config", file) == expected and command.beside


def test_the_command_line_wins_then_the_environment(
    command: Command, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text("place = 'here'\ncount = 5\nname = 'file'\nmemory-size = 1\nfast = false")
    monkeypatch.setenv("TEST_NAME", "environment")
    expected = Options(Inner("environment", 2048), Path("there"), 5, fast=True)
    assert command("--config", file, "there", "--memory-size", "2K", "--fast") == expected


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("counts = 5", "unknown key 'counts'; did you mean count?"),
        ("bogus = 5", "unknown key 'bogus'; its keys are the flags of"),
        ("unsaid = 5", "unknown key 'unsaid'"),
        ("config = 'other.toml'", "unknown key 'config'"),
        ("[table]\ncount = 5", "unknown key 'table'"),
        ("count = 0", "--count"),
        ("count = 'many'", "--count"),
        ("count = [1, 2]", "--count"),
        ("count = {a = 1}", "--count"),
        ("kind = 'c'", "'c' is not one of 'a', 'b'"),
        ("tag = 'x'", "--tag"),
        ("fast = 'quick'", "--fast"),
        ("memory-size = 'lots'", "--memory-size: 'lots' is not a size"),
        ("count = ", "is not TOML"),
        ("count = 1\ncount = 2", "is not TOML"),
    ],
)
def test_what_is_wrong_in_a_file(command: Command, file: Path, content: str, says: str) -> None:
    file.write_text(content)
    assert says in command.refused("here", "--config", file)


@pytest.mark.parametrize(
    "name",
    [
        "serve",
        "calibrate",
        "bench",
        "bench profile",
        "plan",
        "plan compare",
        "plan levers",
        "simulate",
        "simulate verify",
    ],
)
def test_every_command_reads_a_file(
    name: str, file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text("seeds = 5")
    monkeypatch.setattr(sys, "argv", ["headway", *name.split(), "--config", str(file)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(f"headway: --config {file} has the unknown key 'seeds'; ") and error.count("\n") == 1


def test_the_help_says_of_each_command_what_that_says_of_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, said in COMMANDS.items():
        command = command_of(name)
        assert command.help is not None and command.help.split("\n\n")[0].replace("\n", " ") == said
    monkeypatch.setattr(sys, "argv", ["headway", "--help"])
    with pytest.raises(SystemExit):
        main()
    listed = capsys.readouterr().out
    assert all(f"  {name:9}  {said[:20]}" in listed for name, said in COMMANDS.items())


def test_a_command_reads_its_own_modules_only() -> None:
    """What a server waits for at its start is not what others import."""
    assert not modules_of("serve") & {"headway.bench", "headway.planner", "headway.calibration"}


def test_help_imports_nothing_that_is_slow_to_import() -> None:
    slow = {"torch", "numba", "numpy", "matplotlib", "tokenizers", "jinja2", "rich", "uvloop", "httptools"}
    assert not modules_of(*COMMANDS, "bench profile", "plan levers", "simulate verify") & slow


def modules_of(*commands: str) -> set[str]:
    """The modules that `headway COMMAND --help` imports, of all commands in turn."""
    program = (
        "import sys; from headway.cli import app\n"
        f"for command in {commands}: app([*command.split(), '--help'], standalone_mode=False)\n"
        "print(*sys.modules, file=sys.stderr)"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return set(ran.stderr.split())


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("memory is 7; memory of 8", "--memory-size is 7; memory of 8"),
        ("tags and count are 'x' and 2", "--tag and count are 'x' and 2"),
        ("more than num_threads, 4; leave num_threads='x' out", "more than --threads, 4; leave num_threads='x' out"),
        ("as_json is 1, and where is 2", "--json is 1, and where is 2"),
        ("a.toml, line 3: num_threads is 0", "a.toml, line 3: num_threads is 0"),
    ],
)
def test_errors_name_options_and_not_fields(message: str, said: str) -> None:
    app = typer.Typer(add_completion=False)

    @app.command()
    @with_flags
    def run(
        options: Options,
        engine: EngineConfig,
        as_json: Annotated[bool, typer.Option("--json")] = False,
        where: Annotated[str, typer.Argument()] = "",
    ) -> None:
        fail(message)

    ran = CliRunner().invoke(app, ["here"])
    assert (ran.exit_code, ran.stderr) == (2, f"headway: {said}\n")


def test_no_file(command: Command, tmp_path: Path) -> None:
    assert "cannot read --config" in command.refused("here", "--config", tmp_path / "none.toml")
    (tmp_path / "latin").write_bytes(b"name = '\xff'")
    assert "is not TOML" in command.refused("here", "--config", tmp_path / "latin")


@pytest.mark.parametrize(
    "kind", [EngineConfig, ServerSettings, BenchOptions, ProfileOptions, PlanRequest, SimulateOptions]
)
def test_texts_of_defaults_are_the_defaults(kind: type) -> None:
    """They stand in the help, and are what a value is made of where none is given."""
    for each, hint, flag in flags_of(kind):
        if flag is None:
            test_texts_of_defaults_are_the_defaults(hint)
        elif flag.parse is not None and flag.default is not None:
            assert flag.parse(flag.default) == each.default
        elif flag.parse is not None:
            assert not (each.default_factory() if each.default is MISSING else each.default)
