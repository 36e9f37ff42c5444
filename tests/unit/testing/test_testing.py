# SPDX-License-Identifier: Apache-2.0
"""precast.testing without a GPU, and the cases of the gpu layer in reference mode."""

from __future__ import annotations

import importlib.util
import math
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import precast
from precast._op.dispatch import kernels
from precast.testing import (
    Guarded,
    Timing,
    assert_close,
    bench_cpu_time,
    environment,
    packed_slice,
    poison,
    random_tensor,
    rotation,
    row_strided,
    tolerance,
)
from precast.testing.timing import graph_turns

#: Activations, norms and scale; the others have tests of their own.
FAMILIES = ("activation", "norm")
ROWS = sorted(
    name
    for name, kernel in kernels().items()
    if kernel.op.startswith(FAMILIES) or kernel.op == "scale"
)

TESTS = Path(__file__).resolve().parents[2]


# -- statistics -----------------------------------------------------------------------------------


def test_timing_is_in_seconds_and_ordered() -> None:
    timing = Timing.of_milliseconds([5.0, 1.0, 2.0, 4.0, 3.0, 6.0])
    assert timing.median == pytest.approx(3.5e-3)
    assert timing.p20 == pytest.approx(2.0e-3)
    assert timing.p80 == pytest.approx(5.0e-3)
    assert timing.std == pytest.approx(math.sqrt(17.5 / 6) * 1e-3)
    assert timing.samples == 6
    assert timing.bandwidth(7_000_000) == pytest.approx(2.0)


def test_one_sample_and_none() -> None:
    assert Timing.of_milliseconds([2.0]) == Timing(2e-3, 2e-3, 2e-3, 0.0, 1)
    with pytest.raises(ValueError, match="samples is empty"):
        Timing.of_milliseconds([])


def test_cpu_time_counts_the_calls() -> None:
    calls: list[tuple[int, int]] = []
    waits: list[int] = []

    def call(a: int, b: int) -> None:
        calls.append((a, b))

    timing = bench_cpu_time(
        call, (1,), {"b": 2}, blocks=5, synchronize=lambda: waits.append(len(calls))
    )
    assert timing.samples == 5
    assert set(calls) == {(1, 2)}
    assert len(calls) == 6 * 200
    assert waits == [200 * n for n in range(7)]
    assert 0 < timing.median < 1e-4
    calls.clear()
    bench_cpu_time(call, (1, 2), blocks=2, calls=7, synchronize=lambda: None)
    assert len(calls) == 3 * 7


# -- rotation -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "cache", "copies"), [(1 << 20, 50 << 20, 100), (1 << 30, 50 << 20, 2), (0, 50, 1)]
)
def test_copies_exceed_the_cache_twice(call: int, cache: int, copies: int) -> None:
    assert rotation.copies_needed(call, cache) == copies
    assert call == 0 or copies * call >= 2 * cache


def test_graphs_are_long_against_their_launch() -> None:
    assert graph_turns(1e-6, 300) == 7
    assert graph_turns(1e-3, 2) == 1
    assert graph_turns(1.0, 2) == 1


def test_rotation_keeps_values_strides_and_aliases() -> None:
    x = row_strided(torch.randn(3, 5), gap=2, offset=1)
    calls = rotation.rotate((x, x, 2.0), {"out": torch.ones(2)}, copies=3)
    assert calls[0].args[0] is x
    seen = set()
    for call in calls:
        first, second, factor = call.args
        assert first is second
        assert factor == 2.0
        assert torch.equal(first, x)
        assert first.stride() == x.stride()
        assert first.data_ptr() % 16 == x.data_ptr() % 16
        seen |= {first.data_ptr(), call.kwargs["out"].data_ptr()}
    assert len(seen) == 6


def test_clone_of_an_empty_tensor() -> None:
    assert rotation.clone(torch.empty(0, 4)).shape == (0, 4)


def test_bytes_count_a_tensor_once() -> None:
    x = torch.empty(10, dtype=torch.bfloat16)
    assert rotation.tensor_bytes([x, x, torch.empty(3), 1.0]) == 20 + 12


# -- comparison -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_one_rounding_is_accepted_and_two_units_are_not(dtype: torch.dtype) -> None:
    exact = torch.randn(1000, dtype=torch.float64)
    rounded = exact.to(dtype)
    assert_close(rounded, exact)
    wrong = rounded.clone()
    wrong[[7, 500]] = (
        exact[[7, 500]] + 4 * tolerance(dtype).rtol * (1 + exact[[7, 500]].abs())
    ).to(dtype)
    with pytest.raises(AssertionError) as raised:
        assert_close(wrong, exact, name="y")
    message = str(raised.value)
    assert message.startswith("y: 2 of 1000 elements differ")
    assert "  [7]: got" in message
    assert "  [500]: got" in message


def test_only_the_first_mismatches_are_listed() -> None:
    with pytest.raises(AssertionError) as raised:
        assert_close(torch.zeros(4, 25), torch.ones(4, 25), show=3)
    assert str(raised.value).count("got 0, expected 1") == 3
    assert "  [0, 2]: got" in str(raised.value)


def test_nan_matches_nothing_and_infinity_itself() -> None:
    nan, inf = float("nan"), float("inf")
    assert_close(torch.tensor([inf, -inf]), torch.tensor([inf, -inf]))
    for got, want in ((nan, nan), (nan, 1.0), (1.0, nan), (inf, 1.0), (1.0, inf), (inf, -inf)):
        with pytest.raises(AssertionError, match="1 of 1 elements differ"):
            assert_close(torch.tensor([got]), torch.tensor([want]))


def test_shapes_must_agree_and_integers_exactly() -> None:
    with pytest.raises(AssertionError, match=r"shape \(2,\) != \(1, 2\)"):
        assert_close(torch.ones(2), torch.ones(1, 2))
    assert_close(torch.tensor([2**40]), torch.tensor([2**40]))
    with pytest.raises(AssertionError):
        assert_close(torch.tensor([2**40]), torch.tensor([2**40 + 1]))


def test_unknown_dtype_has_no_tolerance() -> None:
    with pytest.raises(ValueError, match=r"no tolerance is known for torch\.complex64; legal: "):
        tolerance(torch.complex64)


# -- inputs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_poison_is_nan_and_survives_no_write(dtype: torch.dtype) -> None:
    assert poison(torch.ones(9, dtype=dtype)).isnan().all()
    with pytest.raises(ValueError, match=r"float16, bfloat16 or float32, got torch\.int8"):
        poison(torch.ones(2, dtype=torch.int8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(5,), (3, 7), (2, 3, 8), (0, 4)])
def test_guard_sees_writes_outside_only(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    guarded = Guarded(shape, dtype, "cpu", gap=3, offset=1)
    assert guarded.view.shape == shape
    guarded.view.fill_(float("nan"))
    guarded.check()
    start = guarded.view.storage_offset()
    for outside in {start - 1, start + shape[-1] if 0 not in shape else start, -1}:
        spoiled = Guarded(shape, dtype, "cpu", gap=3, offset=1)
        spoiled.buffer[outside] = 1.0
        with pytest.raises(AssertionError, match="1 elements outside of the tensor were written"):
            spoiled.check()


def test_awkward_views() -> None:
    x = torch.randn(4, 6)
    view = row_strided(x, gap=3, offset=1)
    assert torch.equal(view, x)
    assert view.stride() == (9, 1)
    assert view.data_ptr() % 16 != 0
    heads = packed_slice(5, (4, 2, 2), 1, 16, dtype=torch.float32, device="cpu")
    assert heads.shape == (5, 2, 16)
    assert heads.stride() == (8 * 16, 16, 1)
    assert heads.storage_offset() == 4 * 16


def test_random_tensors_follow_the_generator() -> None:
    def draw(seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return random_tensor(
            64, 64, dtype=torch.bfloat16, device="cpu", generator=generator, scale=3.0
        )

    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(2))
    assert draw(1).float().std().item() == pytest.approx(3.0, rel=0.1)


# -- environment ----------------------------------------------------------------------------------


def test_commit_comes_from_argument_then_variable_then_git(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMMIT", "from-variable")
    assert environment("given", tmp_path)["commit"] == "given"
    assert environment(None, tmp_path)["commit"] == "from-variable"
    monkeypatch.delenv("COMMIT")
    assert environment(None, tmp_path)["commit"] == "unknown"


# -- the gpu layer's cases, run by the references -------------------------------------------------


def _load(path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A file of tests/gpu, whose folder is on sys.path only while it is imported."""
    monkeypatch.syspath_prepend(str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, path.stem, module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def gpu_cases(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return _load(TESTS / "gpu" / "gpu_cases.py", monkeypatch)


def test_every_other_operator_is_called_in_a_gpu_test() -> None:
    folder = Path(__file__).resolve().parents[2] / "gpu"
    texts = "".join(path.read_text() for path in folder.glob("*.py"))
    functions = {kernel.function for name, kernel in kernels().items() if name not in ROWS}
    for name in functions:  # by its name in precast, or imported from the module of its family
        assert re.search(rf"\b{name}\b", texts), name


def test_every_public_operator_has_a_case(gpu_cases: ModuleType) -> None:
    assert sorted(gpu_cases.CASES) == ROWS
    for name, case in gpu_cases.CASES.items():
        assert case.module == kernels()[name].op
        assert case.function is getattr(precast, name)


@pytest.mark.parametrize("name", ROWS)
def test_case_agrees_with_the_reference_and_can_fail(name: str, gpu_cases: ModuleType) -> None:
    case = gpu_cases.CASES[name]
    generator = torch.Generator().manual_seed(5)
    for word in case.dtypes:
        dtype = gpu_cases.DTYPES[word]
        args = case.arguments(case.input_shape(9, 64), dtype, generator, "cpu")
        want = case.expected(*args)
        with precast.reference_mode():
            copies = rotation.rotate(args, copies=2)[1].args
            case.check(copies)
            outputs = case.run(rotation.rotate(args, copies=2)[1].args)
        for position, (output, expected) in enumerate(zip(outputs, want, strict=True)):
            wrong = output.clone()
            if wrong.itemsize == 1:
                wrong[8, -1] = float("nan")
            else:
                wrong[8, -1] += 0.05
            with pytest.raises(AssertionError, match="1 of "):
                assert_close(wrong, expected, name=f"{name} {position}")


@pytest.mark.parametrize("name", ROWS)
def test_references_never_require_grad(name: str, gpu_cases: ModuleType) -> None:
    """As the kernels: a weight that is a parameter does not pull the result into autograd."""
    case = gpu_cases.CASES[name]
    generator = torch.Generator().manual_seed(6)
    args = case.arguments(case.input_shape(3, 32), torch.bfloat16, generator, "cpu")
    weights = [
        torch.nn.Parameter(a) if not case.is_written(i) and isinstance(a, torch.Tensor) else a
        for i, a in enumerate(args)
    ]
    with precast.reference_mode():
        assert not any(t.requires_grad for t in case.run(tuple(weights)))
