"""The benchmark without a server: arguments, what an engine is asked, and a whole sitting of the tiny shape."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import exports, machine, offline, sitting, start
from benchmarks.checkpoint import SHAPES, write_checkpoint
from benchmarks.engines import worker
from benchmarks.engines.interface import ISA, Settings
from benchmarks.engines.llama_cpp import LlamaCpp
from benchmarks.engines.openvino import _properties
from benchmarks.points import Point, decode, held, prefill
from benchmarks.processes import ROOT, Child, finish, running
from headway.models.config import ModelConfig
from headway.text.tokenizer import Tokenizer


class Scripted:
    """An engine whose steps take as long as the test says."""

    version = "scripted"

    def __init__(self, monkeypatch: pytest.MonkeyPatch, steps: list[tuple[float, list[int]]]) -> None:
        self.steps = list(steps)
        self.prompts: list[list[list[int]]] = []
        self.now = 0.0
        monkeypatch.setattr(worker.time, "perf_counter", lambda: self.now)

    def start(self, prompts: list[list[int]], new_tokens: int, schema: str = "") -> None:
        self.prompts.append(prompts)

    def step(self) -> list[int]:
        self.now, counts = self.steps.pop(0)
        return counts


def test_decode_counts_only_after_the_last_prompt_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Scripted(monkeypatch, [(1.0, [1, 0]), (2.0, [2, 1]), (2.5, [3, 2]), (4.0, [4, 4])])
    rates = worker.Measured(engine, 512).run(batch=2, prompt=10, new=4, seed=0)
    assert rates == {"decode": 5 / 2.0, "prefill": 20 / 2.0, "seconds": 4.0}


def test_prefill_alone_has_no_decode_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = worker.Measured(Scripted(monkeypatch, [(0.5, [1])]), 512).run(batch=1, prompt=512, new=1, seed=0)
    assert rates == {"decode": None, "prefill": 1024.0, "seconds": 0.5}


def test_an_engine_that_gives_other_numbers_of_tokens_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Scripted(monkeypatch, [(1.0, [1, 1]), (2.0, [5, 4])])
    with pytest.raises(RuntimeError, match=r"asked for 4 tokens of each of 2 prompts, got \[5, 4\]"):
        worker.Measured(engine, 512).run(batch=2, prompt=8, new=4, seed=0)


def test_held_prompts_go_on_where_they_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Scripted(
        monkeypatch,
        [(1.0, [1, 0]), (3.0, [2, 1]), (4.0, [3, 2]), (5.0, [4, 3]), (7.0, [5, 4]), (9.0, [6, 5])],
    )
    measured = worker.Measured(engine, 512)
    assert measured.hold(batch=2, prompt=8, new=99, seed=0) == {"seconds": 3.0}
    assert measured.advance(new=2) == {"decode": 4 / 2.0, "seconds": 2.0}
    assert measured.advance(new=2) == {"decode": 4 / 4.0, "seconds": 4.0}
    assert len(engine.prompts) == 1


def test_prompts_differ_within_a_batch_and_between_rounds_but_not_between_engines() -> None:
    first, again, other = (worker.random_prompts(512, 2, 16, seed) for seed in (1, 1, 2))
    assert first == again
    assert len({tuple(prompt) for prompt in first + other}) == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--peer", "vllm"], "'vllm' is not NAME=PYTHON"),
        (["--precisions", "q6_k"], "--precisions q6_k is a GGUF file, which llama.cpp makes; give --peer llama.cpp"),
        (["--peer", "vllm=/no/such/python"], "is not NAME=PYTHON"),
        (["--peer", f"unheard-of={sys.executable}"], "'unheard-of' is not a peer"),
        (["--peer", f"headway={sys.executable}"], "'headway' is not a peer"),
        (["--rounds", "0"], "--rounds is 0; it must be at least 1"),
        (["--points", "decode:0"], "'decode:0' is not decode:BATCH"),
        (["--points", "prefill:8"], "'8' is not BATCHxTOKENS"),
        (["--points", "speed:8"], "'speed:8' is not decode:BATCH or prefill:BATCHxTOKENS"),
        (["--contexts", "1x0"], "'1x0' is not BATCHxTOKENS"),
        (["--contexts", "1x40000"], "a sequence would have 40144 tokens, and qwen2.5-0.5b has room for 32768"),
        (["--new-tokens", "1"], "--new-tokens is 1; a decode rate needs at least 2"),
        (["--kv-cache-dtype", "fp8"], "invalid choice: 'fp8'"),
        (["--precisions", "int2"], "invalid choice: 'int2'"),
        (["--shapes", "gpt-5"], "invalid choice: 'gpt-5'"),
        (["--llama-simple", "/no/such/program"], "which is no program"),
        (["--points", "--rounds", "1"], "nothing to measure; give --points, --contexts or --start"),
        (["--no-headway"], "nothing to measure; name a --peer"),
        (["--old", "/nowhere"], "'/nowhere' is not a checkout of Headway"),
        (["--isa", "sse"], "invalid choice: 'sse'"),
        (["--isa", "avx2", "--peer", f"vllm={sys.executable}"], "--isa avx2 cannot restrict vllm"),
        (["--isa", "avx2", "--llama-simple", "/bin/true"], "--isa avx2 cannot check what --llama-simple was built for"),
    ],
)
def test_bad_arguments_are_refused_in_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        offline.parse(arguments)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert message in said and len(said.splitlines()) == 1


@pytest.mark.parametrize(
    "shape", [*[*SHAPES][:2], *(pytest.param(each, marks=pytest.mark.slow) for each in [*SHAPES][2:])]
)
def test_checkpoint_is_one_that_headway_reads(shape: str, tmp_path: Path) -> None:
    folder = write_checkpoint(shape, tmp_path)
    config = ModelConfig.from_folder(folder)
    assert config.shape.vocab == json.loads((folder / "config.json").read_text())["vocab_size"]
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.encode("one token a byte") == tokenizer.encode("one") + tokenizer.encode(" token a byte")
    assert len(tokenizer.encode("one token a byte")) == 16


def test_each_precision_has_its_engines() -> None:
    peers = [("openvino", "a"), ("llama.cpp", "b"), ("vllm", "c")]
    labels = {
        precision: [entry.label for entry in sitting.entries(precision, peers, headway=True, variants=False)]
        for precision in exports.PRECISIONS
    }
    assert labels == {
        "bf16": ["headway", "openvino", "llama.cpp", "vllm"],
        "int8": ["headway", "openvino", "llama.cpp"],
        "int4": ["headway", "openvino", "llama.cpp"],
    }
    packed = sitting.entries("awq", peers, headway=True, variants=False)
    assert [entry.label for entry in packed] == ["headway", "vllm"]
    same_file = sitting.entries("q4_k_m", peers, headway=True, variants=False)
    assert [(each.label, each.exporter) for each in same_file] == [("headway", "b"), ("llama.cpp", "b")]
    more = sitting.entries("int8", peers, headway=True, variants=True)
    assert [entry.label for entry in more if entry.variant] == [
        "headway, weights only",
        "headway, 8-bit KV cache",
        "openvino, 8-bit KV cache",
    ]
    assert [entry.kv_bits for entry in more] == [16, 16, 8, 16, 8, 16]


def test_an_8_bit_cache_is_every_engine_s(tmp_path: Path) -> None:
    peers = [("openvino", sys.executable), ("llama.cpp", "b"), ("vllm", "c")]
    found = sitting.entries("bf16", peers, headway=True, variants=True, kv_bits=8)
    assert [entry.label for entry in found] == ["headway", "openvino", "llama.cpp"]
    *_, text = sitting.worker_command(found[0], "tiny", "bf16", [decode(1, 8, 4)], 1, 1, tmp_path)
    assert json.loads(text)["kv_bits"] == 8


def test_settings_have_room_for_the_largest_point(tmp_path: Path) -> None:
    points = [decode(16, 128, 64), prefill(2, 512), held(3, 1000, 16)]
    entry = sitting.entries("bf16", [], headway=True, variants=False)[0]
    *_, name, text = sitting.worker_command(entry, "tiny", "bf16", points, 5, 2, tmp_path)
    settings = json.loads(text)
    assert name == "headway"
    assert (settings["longest"], settings["sequences"], settings["threads"]) == (1000 + 7 * 16, 16, 2)
    assert settings["vocabulary"] == 512 and settings["quantization"] == "none"
    assert (Path(settings["model"]) / "model.safetensors").exists()
    assert sitting.cache_bytes("qwen2.5-0.5b", [held(8, 16384, 16)], 3) == 8 * (16384 + 256) * 2 * 6144


def test_all_engines_are_restricted_and_the_result_says_so() -> None:
    arguments = offline.parse(["--isa", "avx2", "--peer", f"openvino={sys.executable}", "--old", str(ROOT)])
    found = offline._entries(arguments, "bf16", variants=False)
    assert [(entry.label, entry.isa) for entry in found] == [(n, "avx2") for n in ("headway", "openvino", "old")]
    assert offline._content(sitting.Sitting("tiny", "bf16", [], found))["entries"][1]["isa"] == "avx2"
    program = "import json, os; print(json.dumps(dict(os.environ)))"
    for entry in found:
        child = Child(entry.label, [sys.executable, "-c", program], variables=entry.variables)
        child.close()
        assert child.about["ONEDNN_MAX_CPU_ISA"] == "AVX2" and child.about["NUMBA_CPU_NAME"] == "x86-64-v3"


@pytest.mark.parametrize(
    ("built_for", "refused"), [("CPU : AVX2 = 1 | FMA = 1 | ", False), ("CPU : AVX2 = 1 | AVX512_BF16 = 1 | ", True)]
)
def test_a_llama_cpp_that_is_built_for_more_is_not_measured(
    built_for: str, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is built for AVX2 alone goes on to the model, which is not there."""
    library = SimpleNamespace(
        llama_backend_init=lambda: None,
        llama_print_system_info=built_for.encode,
        llama_model_default_params=lambda: None,
        llama_model_load_from_file=lambda *_: None,
    )
    monkeypatch.setitem(sys.modules, "llama_cpp", SimpleNamespace(llama_cpp=library, __version__="0"))
    monkeypatch.setenv(ISA, "avx2")
    with pytest.raises(RuntimeError, match="not built for AVX2 alone" if refused else "cannot read"):
        LlamaCpp(Settings("/no/such.gguf", "bf16", 1, 16, 1, 1 << 20))


def test_openvino_computes_as_on_a_processor_of_the_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings("/model", "bf16", 1, 16, 1, 1 << 20)
    monkeypatch.setenv(ISA, "avx2")
    assert _properties(settings)["INFERENCE_PRECISION_HINT"] == "f32"
    monkeypatch.delenv(ISA)
    assert _properties(settings)["INFERENCE_PRECISION_HINT"] == "bf16"


def test_a_point_that_does_not_fit_is_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sitting, "_available_bytes", lambda: 10**9)
    entry = sitting.entries("bf16", [], headway=True, variants=False)
    point = held(8, 16384, 16)
    found = sitting.Sitting("qwen2.5-0.5b", "bf16", [point], entry)
    sitting.sit_held(found, 3, 1, tmp_path, lambda: None)
    assert found.left_out[point.label] == "as 1 engines need 3 GB at once and 1 GB are free"
    assert not found.rates


@pytest.mark.slow
def test_a_whole_sitting(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def at_once(sat: sitting.Sitting, points: list[Point], peaks: Child, number: int) -> None:
        for point in points if number else []:
            sat.peaks.setdefault(point.label, []).append({"read": 1e9, "bf16": 1e9, "int8": 1e9})

    monkeypatch.setattr(sitting, "_measure_peaks", at_once)
    output = tmp_path / "results" / "tiny.json"
    chosen = "--shapes tiny --precisions bf16 --points decode:1 decode:3 prefill:2x32 --contexts 2x64 --start"
    sizes = "--kv-cache-dtype int8 --prompt-len 9 --new-tokens 5 --context-tokens 4 --rounds 2 --threads 1"
    offline.main([*chosen.split(), *sizes.split(), "--folder", str(tmp_path), "--output", str(output)])
    report = json.loads(output.read_text())
    measured = report["sittings"][0]["rates"]
    assert list(measured) == ["decode, batch 1", "decode, batch 3", "prefill, 2 x 32", "decode, batch 2 at 64 tokens"]
    assert all(len(rates["headway"]) == 2 and min(rates["headway"]) > 0 for rates in measured.values())
    assert len(report["starts"]["tiny"]["bf16"]["seconds"]["headway"]) == 2
    assert len(report["sittings"][0]["summary"]) == 4
    said = capsys.readouterr().out
    assert said.count("| headway |") == 4 + 1 and "tiny, bf16, 8-bit KV cache" in said
    assert not list(tmp_path.rglob("*.partial"))


_SCRIPTED = """
import json, sys
if sys.argv[1] == "0": sys.exit("no such instruction")
print(json.dumps({"version": "1", "start_seconds": 0}), flush=True)
for count, line in enumerate(sys.stdin, 1):
    if count > int(sys.argv[1]): sys.exit("the tiles are not configured")
    print(json.dumps({"decode": 10.0 * count, "prefill": 5.0, "seconds": 1.0}), flush=True)
"""


@pytest.fixture
def scripted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How many requests each engine answers before it dies; 99 where nothing is said."""
    lives: dict[str, int] = {}

    def command(entry: sitting.Entry, *_: object) -> list[str]:
        return [sys.executable, "-c", _SCRIPTED, str(lives.get(entry.label, 99))]

    def run(name: str, asked: list[str], root: Path = ROOT, *_: object) -> AbstractContextManager[Child]:
        measures = name == "the machine"  # which it would import torch for
        return running(name, [sys.executable, "-c", _SCRIPTED, "99"] if measures else asked, root)

    def peaks(sat: sitting.Sitting, points: list[Point], peaks: Child, number: int) -> None:
        for point in points if number else []:
            sat.peaks.setdefault(point.label, []).append({"read": 1e9, "bf16": 1e9, "int8": 1e9})

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(sitting, "running", run)
    monkeypatch.setattr(sitting, "worker_command", command)
    monkeypatch.setattr(start, "worker_command", command)
    monkeypatch.setattr(sitting, "_measure_peaks", peaks)
    monkeypatch.setattr(sitting, "undisturbed", lambda measure: (measure(), 0.0))
    return lives


def _scripted_sitting(output: Path, *more: str) -> str:
    """What it says when it ends."""
    peers = [flag for name in ("openvino", "llama.cpp") for flag in ("--peer", f"{name}={sys.executable}")]
    sizes = "--shapes tiny --precisions bf16 --rounds 3 --threads 1 --prompt-len 8 --new-tokens 4"
    with pytest.raises(SystemExit) as ended:
        offline.main([*peers, *sizes.split(), *more, "--output", str(output)])
    return str(ended.value)


def test_a_peer_that_dies_takes_nothing_of_the_others_along(
    tmp_path: Path, scripted: dict[str, int], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    saved: list[list[int]] = []

    def noted(report: dict[str, Any], output: Path) -> None:
        machine.save(report, output)
        (sat,) = report["sittings"]
        saved.append([len(values) for values in sat["rates"]["decode, batch 1"].values()])

    monkeypatch.setattr(offline, "save", noted)
    scripted["llama.cpp"] = 5  # the warm-up, round 1, and half of round 2
    output = tmp_path / "result.json"
    said = _scripted_sitting(output, "--points", "decode:1", "prefill:1x8")
    assert saved == [[1, 1, 1], [2, 2, 2], [3, 3, 2], [3, 3, 2]], "after each round, and at the end"
    (sat,) = json.loads(output.read_text())["sittings"]
    assert [len(values) for values in sat["rates"]["prefill, 1 x 8"].values()] == [3, 3, 1]
    assert sat["died"]["llama.cpp"].startswith("llama.cpp ended with exit code 1; its log (")
    assert "tiny, bf16: llama.cpp ended with exit code 1" in said and "the tiles are not configured" in said
    shown = capsys.readouterr().out
    assert "Without all rounds: llama.cpp ended with exit code 1" in shown
    assert shown.count("| llama.cpp |") == 2 and shown.count("| openvino |") == 2
    assert len(list(tmp_path.glob("llama.cpp-*.log"))) == 1 and not list(tmp_path.glob("openvino-*.log"))


def test_a_peer_that_cannot_start_is_left_out(
    tmp_path: Path, scripted: dict[str, int], capsys: pytest.CaptureFixture[str]
) -> None:
    scripted["openvino"] = 0
    output = tmp_path / "result.json"
    said = _scripted_sitting(output, "--points", "decode:1", "--contexts", "1x16", "--start")
    assert said.count("openvino ended with exit code 1") == 2 and "no such instruction" in said
    report = json.loads(output.read_text())
    counts = [{name: len(each) for name, each in rates.items()} for rates in report["sittings"][0]["rates"].values()]
    assert counts == [{"headway": 3, "openvino": 0, "llama.cpp": 3}] * 2
    assert {name: len(each) for name, each in report["starts"]["tiny"]["bf16"]["seconds"].items()} == counts[0]
    assert list(report["starts"]["tiny"]["bf16"]["died"]) == ["openvino"]
    assert "| openvino |" not in capsys.readouterr().out


def test_another_checkout_is_a_row_that_runs_its_own_modules(
    tmp_path: Path, scripted: dict[str, int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old = tmp_path / "before"
    (old / "benchmarks" / "engines").mkdir(parents=True)
    (old / "benchmarks" / "engines" / "worker.py").write_text(_SCRIPTED.replace("10.0 * count", "8.0 * count"))

    def command(entry: sitting.Entry, *_: object) -> list[str]:
        return [sys.executable, *(["benchmarks/engines/worker.py"] if entry.root else ["-c", _SCRIPTED]), "99"]

    monkeypatch.setattr(sitting, "worker_command", command)
    output = tmp_path / "result.json"
    sizes = "--shapes tiny --precisions bf16 --rounds 3 --threads 1 --prompt-len 8 --new-tokens 4 --points decode:1"
    offline.main([*sizes.split(), "--old", str(old), "--output", str(output)])
    (sat,) = json.loads(output.read_text())["sittings"]
    assert sat["rates"] == {"decode, batch 1": {"headway": [20.0, 30.0, 40.0], "old": [16.0, 24.0, 32.0]}}
    assert "| 1.25 old |" in capsys.readouterr().out
    assert str(old) not in output.read_text()


def test_headway_may_die_too(tmp_path: Path, scripted: dict[str, int], capsys: pytest.CaptureFixture[str]) -> None:
    scripted.update({"headway": 2, "openvino": 0, "llama.cpp": 3})
    output = tmp_path / "result.json"
    said = _scripted_sitting(output, "--points", "decode:1")
    assert all(f"{name} ended with exit code 1" in said for name in ("headway", "openvino", "llama.cpp"))
    (sat,) = json.loads(output.read_text())["sittings"]
    assert sat["rates"] == {"decode, batch 1": {"headway": [20.0], "openvino": [], "llama.cpp": [20.0, 30.0]}}
    assert "| 1.00 llama.cpp |" in capsys.readouterr().out, "the round that both have"


def test_an_engine_that_cannot_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    entry = sitting.entries("bf16", [], headway=True, variants=False)[0]
    command = sitting.worker_command(entry, "tiny", "bf16", [decode(1, 8, 4)], 1, 1, tmp_path)
    (tmp_path / "tiny" / "config.json").unlink()
    with pytest.raises(SystemExit, match=r"(?s)headway ended with exit code 1;.*config.json"):
        Child("headway", command)


def test_a_conversion_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(SystemExit, match=r"(?s)convert ended with exit code 3;.*no such layer"):
        finish("convert", [sys.executable, "-c", "import sys; print('no such layer'); sys.exit(3)"])
    finish("convert", [sys.executable, "-c", "print('fine')"])
    assert len(list(tmp_path.glob("convert-*.log"))) == 1, "only the failure's log is kept"


def test_a_child_is_stopped_but_while_it_is_asked_and_ends_with_its_parent(tmp_path: Path) -> None:
    program = (
        "import json, os, sys\n"
        "print(json.dumps({'version': '1', 'start_seconds': 0, 'pid': os.getpid()}), flush=True)\n"
        "for line in sys.stdin: print(line, end='', flush=True)\n"
    )
    child = Child("echo", [sys.executable, "-c", program])
    pid = child.about["pid"]
    assert child.ask({"twice": 2}) == {"twice": 2}
    deadline = time.monotonic() + 5
    while Path(f"/proc/{pid}/stat").read_text().split()[2] != "T" and time.monotonic() < deadline:
        time.sleep(0.01)
    assert Path(f"/proc/{pid}/stat").read_text().split()[2] == "T"
    child.close()
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.slow
def test_an_interrupted_sitting_ends_its_engines(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.offline", "--shapes", "tiny", "--precisions", "bf16", "--threads", "1"]
    command += ["--folder", str(tmp_path), "--output", str(tmp_path / "result.json")]
    process = subprocess.Popen(
        command, cwd=ROOT, stderr=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(tmp_path)}
    )
    assert process.stderr is not None
    for line in process.stderr:
        if "headway" in line and "ready" in line:
            break
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 143
    workers = [path for path in Path("/proc").glob("[0-9]*/cmdline") if _mentions(path, str(tmp_path))]
    assert workers == []
    assert not (tmp_path / "result.json").exists()


def _mentions(cmdline: Path, text: str) -> bool:
    try:
        return text in cmdline.read_text(errors="replace")
    except OSError:
        return False
