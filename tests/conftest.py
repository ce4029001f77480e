"""What all tests share: workers, quiet threads, reproducible hypothesis runs, GPU tests only where there is a GPU."""

from __future__ import annotations

import compileall
import contextlib
import fcntl
import functools
import gc
import importlib
import itertools
import logging
import os
import signal
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import typer.main
from httpx._transports import default as httpx_transport
from hypothesis import settings

import headway
from headway.files import cache_folder

# Before anything imports torch: tests are small, and threads that spin for each other only slow them down.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# What users have set for their own commands: a proxy before the servers of tests, a key for them, colours of output.
for name in list(os.environ):
    if name.lower().endswith("_proxy") or name in (
        *("HEADWAY_API_KEY", "OPENAI_API_KEY", "OPENAI_BASE_URL"),
        *("FORCE_COLOR", "PY_COLORS", "GITHUB_ACTIONS", "TTY_COMPATIBLE", "TTY_INTERACTIVE"),
    ):
        del os.environ[name]
# A script ignores SIGINT for what it starts in the background, and so would all that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# Without a place for compiled kernels, each process would compile them again.
if not os.access(next(each for each in (cache_folder(), *cache_folder().parents) if each.exists()), os.W_OK):
    os.environ["XDG_CACHE_HOME"] = os.path.join(tempfile.gettempdir(), f"headway-tests-{os.getuid()}")
# Each process that a test starts would compile the whole package again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Triton's own library is compiled or interpreted as it is imported, by whoever comes first.
if not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("TRITON_INTERPRET", "1")

# No deadline, as machines are shared; the same examples on every run, so that a failure is the change's.
# HYPOTHESIS_PROFILE=explore looks for new ones, as `make test-slow` does.
settings.register_profile("repeatable", deadline=None, derandomize=True, max_examples=40)
settings.register_profile("explore", deadline=None, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


# A test gives commands in this process, and Typer would build all of them anew for each, in a tenth of a second.
typer.main.get_command = functools.cache(typer.main.get_command)
# Each client, and each httpx.get, would read the certificates of all authorities, in 30 ms.
httpx_transport.create_ssl_context = functools.cache(httpx_transport.create_ssl_context)


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """For -n auto: a worker of 1.5 GB for each processor, and one more, as tests wait for what they have started.

    None for few tests, which start sooner without.
    """
    options = config.option
    named = any(".py" in argument for argument in config.args)
    few = named or options.keyword or options.collectonly or getattr(options, "lf", False)
    if few or "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ:
        return 0 if few else None
    return min(len(os.sched_getaffinity(0)) + 1, 8)


@contextlib.contextmanager
def locked(path: Path, how: int) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, how)
        yield
    finally:
        os.close(descriptor)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """A quiet test has all workers' cores to itself. It queues at the door, or there would always be others inside.

    Outside of the test's own timeout, as this hook comes first.
    """
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return (yield)
    here = Path(__file__)
    with contextlib.ExitStack() as inside:
        with locked(here.parent, fcntl.LOCK_EX):
            quiet = item.get_closest_marker("quiet")
            inside.enter_context(locked(here, fcntl.LOCK_EX if quiet else fcntl.LOCK_SH))
        return (yield)


def pytest_runtest_setup() -> None:
    """An engine of the test before may have left torch with threads for all cores, which other workers are on. A server
    says where a process logs and how much, and many tests share one that goes on.
    """
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    logger = logging.getLogger("headway")
    logger.setLevel(logging.NOTSET)
    logger.propagate = True
    logger.handlers.clear()


COUNT_FROZEN = gc.get_freeze_count


def _import_share() -> None:
    """Compile this worker's share of the package.

    All workers of a fresh clone would compile all files at once. So each begins with some of its own, and finds the
    code of the others when it comes to theirs.
    """
    number, workers = int(os.environ["PYTEST_XDIST_WORKER"][2:]), int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    here, package = Path(__file__).parent, Path(headway.__file__).parent
    for source in sorted(package.rglob("*.py"))[number::workers]:
        compileall.compile_file(source, quiet=2)
    for test in sorted(here.rglob("test_*.py"))[number::workers]:
        with contextlib.suppress(Exception, pytest.skip.Exception):  # collection says what is wrong with it
            importlib.import_module(".".join(["tests", *test.relative_to(here).with_suffix("").parts]))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What 9,000 tests import stays, and each full garbage collection would look through it for a second."""
    gc.disable()
    try:
        if "PYTEST_XDIST_WORKER" in os.environ:
            _import_share()
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        gc.set_threshold(10_000, 20, 20)  # looking for garbage more often takes a twentieth of a simulation
        gc.get_freeze_count = lambda: 1  # it counts them one by one, in 40 ms; who asks wants to know if it is zero


@pytest.fixture(scope="module", autouse=True)
def frozen() -> Iterator[None]:
    """What the tests of a file import stays too; each benchmark and each `quantize` collects garbage before it runs."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture
def thawed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the test run as in a process that has not frozen any object."""
    gc.unfreeze()
    monkeypatch.setattr(gc, "get_freeze_count", COUNT_FROZEN)
    yield
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def small_engines() -> None:
    """Each of a thousand engines with random weights would draw a million numbers, in 15 ms. And one whose threads
    nobody has counted would have as many as there are cores, which spin for each other beside other workers.
    """
    if checkpoint := sys.modules.get("headway.models.checkpoint"):
        checkpoint.drawn_weights = functools.cache(checkpoint.drawn_weights)
    if prepare := sys.modules.get("headway.engine.prepare"):
        prepare.usable_threads = lambda: 1


def covering_rows(rows: list[Sequence[str]], size: int) -> set[int]:
    """Numbers of rows that have, together, each combination of `size` columns' values that any row has.

    The next is always the row with most combinations that are missing; of several, the one whose values have been taken
    least often.
    """
    of_rows = [set(itertools.combinations(enumerate(row), min(size, len(row)))) for row in rows]
    missing, taken, found, left = set().union(*of_rows), Counter[tuple[int, str]](), set[int](), [*range(len(rows))]
    while missing:
        best = max(left, key=lambda n: (len(of_rows[n] & missing), -sum(taken[each] for each in enumerate(rows[n]))))
        found.add(best)
        missing -= of_rows[best]
        taken.update(enumerate(rows[best]))
        left = [number for number in left if not missing.isdisjoint(of_rows[number])]
    return found


@pytest.hookimpl(tryfirst=True)  # before pytest looks at marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_tests = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_tests:
        import torch

        if not torch.cuda.is_available():
            for item in gpu_tests:
                item.add_marker(pytest.mark.skip(reason="no CUDA GPU"))
    crosses = defaultdict[tuple[Path, str, int], list[pytest.Function]](list)
    for item in items:
        mark = item.get_closest_marker("covering")
        if mark and not (item.get_closest_marker("slow") or item.get_closest_marker("gpu")):
            assert isinstance(item, pytest.Function)
            crosses[item.path, item.originalname, *mark.args].append(item)
    for (_, _, size), rows in crosses.items():
        kept = covering_rows([row.callspec._idlist for row in rows], size)
        for number, row in enumerate(rows):
            if number not in kept:
                row.add_marker(pytest.mark.slow)
