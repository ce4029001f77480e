"""What is done beside the import of torch, and what is compiled when an engine says that it is ready."""

from __future__ import annotations

import contextlib
import gc
import json
import mmap
import os
import shutil
import subprocess
import sys
from unittest import mock

import pytest

from headway.bundled import STORY
from headway.engine import start
from headway.engine.build import LoadedEngine
from headway.engine.config import EngineConfig
from headway.engine.messages import AddRequest
from headway.engine.start import packed_bytes, start_engine, uncollected
from headway.kernels.cpu import compile as cpu_compile
from headway.models.config import ModelConfig
from headway.policy.step.sampling_params import SamplingParams

BUILT = ["import", "prepare", "choose_kernels", "storage_read", "convert", "layout", "kv_allocation", "warm_up"]


def bundled(**settings: object) -> EngineConfig:
    return EngineConfig(str(STORY), device="cpu", num_threads=2, kv_cache_memory=1 << 24, **settings)


def run(engine: LoadedEngine, name: str, prompt: int, temperature: float) -> list[int]:
    """The tokens of one request."""
    params = SamplingParams(temperature=temperature, max_tokens=4, ignore_eos=True)
    engine.core.add(AddRequest(name, list(range(1, prompt + 1)), params, eos_token_ids=[]))
    tokens: list[int] = []
    while engine.core.has_work:
        tokens += [token for output in engine.core.step().outputs for token in output.token_ids]
    return tokens


def run_without_code(engine: LoadedEngine) -> None:
    """Steps of all sizes, which must not compile or load anything."""

    def refuse(*_: object) -> None:
        raise AssertionError("compiled or loaded after the start")

    with mock.patch.object(cpu_compile, "read", refuse):
        for number, (prompt, temperature) in enumerate([(1, 0.0), (16, 0.0), (65, 1.0), (100, 0.0), (130, 1.0)]):
            assert len(run(engine, str(number), prompt, temperature)) == 4


def _printed(code: str) -> str:
    """What a process of its own prints."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert ran.returncode == 0, ran.stderr[-2000:]
    return ran.stdout.strip()


def test_the_import_is_the_first_stage() -> None:
    heard: list[tuple[str, int]] = []
    engine = start_engine(bundled(), lambda stage, ns: heard.append((stage, ns)))
    stages = [(stage, ns) for stage, ns in heard if not stage.startswith("compiling CPU kernels")]
    assert [stage for stage, _ in stages] == BUILT
    assert engine.ready.startup_ns == dict(stages)
    assert len(run(engine, "a", 5, 0.0)) == 4


def test_memory_is_taken_in_advance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces are so small that even the bundled model is worth it; what the model says does not depend on that."""
    expected = run(start_engine(bundled()), "a", 20, 0.0)
    monkeypatch.setattr(start, "_PIECE", 1 << 16)
    memory, _ = start._prepare(bundled())
    assert memory is not None
    assert len(memory) == packed_bytes(bundled(), ModelConfig.from_folder(STORY))
    assert run(start_engine(bundled()), "a", 20, 0.0) == expected


NEW = """
import os
import sys
from headway.engine.libraries import begin_import
begin_import()
from headway.bundled import STORY
from headway.engine.config import EngineConfig
from headway.engine.process import start_engine
from headway.kernels.cpu import compile as cpu_compile
config = EngineConfig(str(STORY), device="cpu", num_threads=2, kv_cache_memory=1 << 24, enable_prefix_caching=False)
engine = start_engine(config)
others = "numba scipy yaml transformers fastapi pydantic rich typer jinja2 tokenizers uvicorn".split()
unused = sys.modules["torch._meta_registrations"]
assert "activate_meta" not in vars(unused) or os.path.exists("/dev/nvidiactl"), "only torch's compiler uses it"
from torch._meta_registrations import activate_meta
assert "activate_meta" in vars(sys.modules["torch._meta_registrations"])
print([each for each in others if each in sys.modules])
from tests.engine.test_start import run_without_code
run_without_code(engine)
"""


def test_a_further_start_imports_little_and_compiles_nothing() -> None:
    """Not even Numba, which takes longer than loading what Numba has compiled; nothing that only the API process or a
    client needs. Nor is anything compiled or loaded after the warm-up: in this process others have run steps before.
    """
    if _printed(NEW) != "[]":  # this process is the first one
        assert _printed(NEW) == "[]"


def test_the_libraries_of_torch_are_loaded_without_importing_it_while_other_threads_run() -> None:
    code = """
import sys
from headway.engine.libraries import load_libraries

thread = load_libraries()
turns = 0
while thread.is_alive():
    turns += 1
assert turns > 1000
assert "torch" not in sys.modules and "headway.engine.process" not in sys.modules
print("libtorch_cpu" in open("/proc/self/maps").read())
"""
    assert _printed(code) == "True"
    _printed("from headway.engine.libraries import load_libraries; load_libraries()")  # ends at once, without a crash


def test_an_engine_process_leaves_ctrl_c_to_the_server_before_it_imports_anything() -> None:
    code = """
import signal
import headway.engine.libraries as libraries
from headway.engine.__main__ import run

libraries.begin_import = lambda: exit(print(signal.getsignal(signal.SIGINT) is signal.SIG_IGN))
run()
"""
    assert _printed(code) == "True"


def test_taking_memory_leaves_what_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "_PIECE", 1 << 16)
    mapping = mmap.mmap(-1, 1 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapping[:] = bytes(range(256)) * (1 << 12)
    start._populate(mapping)
    assert mapping[:] == bytes(range(256)) * (1 << 12)


def test_no_memory_for_what_only_the_config_claims(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "_PIECE", 1 << 16)
    shutil.copytree(STORY, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"intermediate_size": 16 * config["intermediate_size"]}))
    asked = EngineConfig(str(tmp_path), device="cpu", weight_cache=False)
    assert start._prepare(asked) == (None, None)
    asked.load_format = "dummy"  # which has no files to go by
    assert start._prepare(asked)[0] is not None


def test_no_memory_for_a_model_that_is_not_there(tmp_path) -> None:
    config = EngineConfig(str(tmp_path / "nowhere"), device="cpu")
    assert start._prepare(config) == (None, None)
    with pytest.raises(ValueError, match="nowhere"):
        start_engine(config)


@pytest.mark.parametrize(("quantization", "bytes_each"), [("none", 4.0), ("int8", 1.0), ("int4", 0.53)])
@pytest.mark.parametrize("family", ["qwen2", "qwen2_tied"])
def test_packed_bytes_are_those_of_the_matrices(tmp_path, family: str, quantization: str, bytes_each: float) -> None:
    from tests.models import tiny  # transformers, which a process that is new need not import

    model = tiny.save(family, tmp_path)
    matrices = {id(m.weight): m.weight.numel() for m in model.modules() if m.__class__.__name__ == "Linear"}
    config = EngineConfig(str(tmp_path), dtype="float32", quantization=quantization)
    assert packed_bytes(config, ModelConfig.from_folder(tmp_path)) == int(bytes_each * sum(matrices.values()))


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_is_collected_again_afterwards(enabled: bool) -> None:
    try:
        (gc.enable if enabled else gc.disable)()
        with contextlib.suppress(LookupError), uncollected():
            assert not gc.isenabled()
            raise LookupError
        assert gc.isenabled() == enabled
    finally:
        gc.enable()


@pytest.mark.usefixtures("thawed")
def test_what_is_new_is_not_looked_through_afterwards() -> None:
    with uncollected():
        kept = [[] for _ in range(10_000)]
    assert not any(each is kept for each in gc.get_objects(0))
    assert any(each is kept for each in gc.get_objects(2))


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_nothing_is_compiled_after_the_warm_up(quantization: str) -> None:
    run_without_code(start_engine(bundled(quantization=quantization, enable_prefix_caching=False)))
