"""Which way products take is measured once, kept, and never one that changes what a token gets in a batch."""

from __future__ import annotations

import json
import pickle
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from headway.kernels.cpu import choice as cpu_choice
from headway.kernels.cpu.arithmetic import INT8, WIDENED
from headway.kernels.cpu.choice import TOKENS, VARIABLE, Choice, Rates, choice_for, fastest, measured, ways_of
from headway.kernels.cpu.kernels import CpuKernels
from headway.kernels.cpu.linear import PackedLinear
from headway.kernels.cpu.memory import LargePages
from headway.kernels.cpu.simd import BFLOAT16
from headway.kernels.cpu.team import Team
from headway.kernels.weights import Weight
from tests.kernels import operations
from tests.kernels.steps import random
from tests.kernels.test_cpu_linear import ROUNDING, relative_error

needs_two_ways = pytest.mark.skipif(
    not cpu_choice.HAS_BF16, reason="without vdpbf16ps, bfloat16 has one way on vectors"
)


def rates(**of_each: tuple[float, ...]) -> Rates:
    return {name: dict(zip(TOKENS, each, strict=True)) for name, each in of_each.items()}


@pytest.fixture
def prescribed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    def prescribe(content: object) -> Path:
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.json"
        path.write_text(json.dumps(content))
        monkeypatch.setenv(VARIABLE, str(path))
        return path

    return prescribe


@needs_two_ways
@pytest.mark.parametrize(
    ("vdpbf16ps", "widened", "chosen"),
    [
        ((10, 60, 60, 60), (11, 84, 84, 84), "widened"),
        ((100, 400, 400, 400), (90, 200, 200, 200), "vdpbf16ps"),
        ((10, 60, 60, 60), (10, 62, 62, 62), "vdpbf16ps"),  # within the noise
    ],
)
def test_the_fastest_instruction_is_taken(
    vdpbf16ps: tuple[float, ...], widened: tuple[float, ...], chosen: str
) -> None:
    of_each = rates(vdpbf16ps=vdpbf16ps, widened=widened)
    assert fastest("bfloat16", False, of_each) == fastest("attention", False, of_each) == chosen


@pytest.mark.parametrize(
    ("vectors", "tiles", "chosen"),
    [
        ((20, 100, 100, 100), (30, 200, 400, 800), "tiles from 1"),
        ((60, 100, 100, 100), (30, 200, 400, 800), f"tiles from {TOKENS[1]}"),
        ((60, 300, 300, 300), (30, 200, 200, 200), "vectors"),
    ],
)
def test_whole_numbers_take_tiles_from_where_they_win(
    vectors: tuple[float, ...], tiles: tuple[float, ...], chosen: str
) -> None:
    assert fastest("int8", True, rates(vectors=vectors, tiles=tiles)) == chosen


def test_sums_of_floats_have_one_way_for_any_number_of_tokens() -> None:
    """Else a token's result would depend on how many others there are."""
    for tiles in (False, True):
        for product in ("bfloat16", "attention"):
            assert {way.least_on_tiles for way in ways_of(product, tiles).values()} <= {0, 1}


def test_what_was_measured_is_kept_and_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where two ask at the same time."""
    asked = []

    def slow(product: str, tiles: bool) -> Rates:
        asked.append(product)
        time.sleep(0.05)
        return rates(vectors=(60, 100, 100, 100), tiles=(30, 200, 400, 800))

    monkeypatch.setattr(cpu_choice, "measured", slow)
    path = tmp_path / "cpu.ways.json"
    choices = [Choice(True, path) for _ in range(4)]
    threads = [threading.Thread(target=choice.name, args=("int8",)) for choice in choices]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert asked == ["int8"]
    assert {choice.way(INT8).least_on_tiles for choice in choices} == {TOKENS[1]}
    assert json.loads(path.read_text())["ways"] == {"int8": f"tiles from {TOKENS[1]}"}
    assert [each.name for each in tmp_path.iterdir() if "lock" not in each.name] == ["cpu.ways.json"]


@pytest.mark.parametrize(
    "content", ["", "{}", '{"ways": {"int8": "by hand"}, "gflops": {}}', '{"ways": [], "gflops": 1}']
)
def test_a_damaged_file_is_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str) -> None:
    monkeypatch.setattr(cpu_choice, "measured", lambda *_: rates(vectors=(9, 9, 9, 9), tiles=(1, 1, 1, 1)))
    path = tmp_path / "cpu.ways.json"
    path.write_text(content)
    assert Choice(True, path).name("int8") == "vectors"
    assert json.loads(path.read_text())["ways"] == {"int8": "vectors"}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"ways": {"int7": "vectors"}}, "'int7'; products are bfloat16, attention, int8, int4, int8-weight-only, "),
        ({"ways": {"int8": "by hand"}}, "'by hand' for int8; this processor has vectors"),
        ({"ways": ["int8"]}, "has no object `ways`"),
        (["int8"], "has no object `ways`"),
    ],
)
def test_a_file_that_says_what_there_is_not_is_refused(prescribed, content: object, says: str) -> None:  # type: ignore[no-untyped-def]
    prescribed(content)
    with pytest.raises(ValueError, match="json") as caught:
        CpuKernels(tiles=False)
    assert says in str(caught.value)


def test_a_missing_file_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "/no/such/file")
    with pytest.raises(ValueError, match="HEADWAY_CPU_KERNELS is /no/such/file, which cannot be read: No such file"):
        choice_for()


def test_default_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "default")
    monkeypatch.setattr(cpu_choice, "measured", lambda *_: pytest.fail("it was measured"))
    assert CpuKernels(tiles=False).choose(torch.bfloat16, "int8") in ("", "bfloat16 vdpbf16ps, attention vdpbf16ps")
    assert choice_for(True).name("bfloat16") == "tiles"


@pytest.mark.slow  # compiles the jobs of each
@needs_two_ways
def test_both_ways_of_bfloat16_are_right_and_give_a_token_the_same_in_a_batch(prescribed) -> None:  # type: ignore[no-untyped-def]
    """Both use the same packed weights, because a process may read weights that were packed for the other way."""
    weight, x = random(0, torch.bfloat16, 70, 1030), random(2, torch.bfloat16, 25, 1030)
    expected, packed, codes = F.linear(x.double(), weight.double()), [], set()
    for way, kind in (("vdpbf16ps", BFLOAT16), ("widened", WIDENED)):
        prescribed({"ways": {"bfloat16": way, "attention": way}})
        choice = choice_for(False)
        linear = PackedLinear([(Weight(weight.clone()), None)], Team(), LargePages(), choice=choice)
        assert choice.way(BFLOAT16) == (kind, 0)
        alone = torch.cat([linear(x[i : i + 1]) for i in range(len(x))])
        for tokens in (2, 5, 6, 7, 13, 25):
            assert torch.equal(linear(x[:tokens]), alone[:tokens])
        assert relative_error(alone, expected) < ROUNDING[torch.bfloat16]
        assert torch.equal(linear.rows(torch.arange(70)), weight)
        packed.append(linear._packed)
        codes.add(linear._code)
        operations.check_attention(
            CpuKernels(tiles=False), "cpu", torch.bfloat16, [1, 40, 7], [700, 40, 150], 6, 2, 32, 16, None
        )
    assert torch.equal(*packed) and len(codes) == 2


@needs_two_ways
def test_packed_weights_take_the_way_of_the_process_that_reads_them(prescribed) -> None:  # type: ignore[no-untyped-def]
    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: object) -> str | None:
            return next((name for name, part in parts.items() if part is obj), None)

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, pid: str) -> object:
            return parts[pid]

    kernels, weight, x = CpuKernels(tiles=False), random(0, torch.bfloat16, 70, 64), random(1, torch.bfloat16, 13, 64)
    linear = kernels.linear(Weight(weight.clone()), None)
    parts, path = kernels.named, prescribed({"ways": {"bfloat16": "vdpbf16ps"}})
    with path.open("wb") as file:
        Pickler(file).dump(linear)
    pickled, codes = path.read_bytes(), set()
    for way in ("vdpbf16ps", "widened"):
        prescribed({"ways": {"bfloat16": way}})
        parts = CpuKernels(tiles=False).named
        path.write_bytes(pickled)
        with path.open("rb") as file:
            read = Unpickler(file).load()
        codes.add(read._code)
        alone = torch.cat([read(x[i : i + 1]) for i in range(len(x))])
        assert torch.equal(read(x), alone)
        assert relative_error(alone, F.linear(x.double(), weight.double())) < ROUNDING[torch.bfloat16]
    assert len(codes) == 2


@needs_two_ways
def test_rates_are_plausible() -> None:
    found = measured("bfloat16", False)
    assert list(found) == ["vdpbf16ps", "widened"]
    assert all(0.05 < rate < 5000 for each in found.values() for rate in each.values())
