# SPDX-License-Identifier: Apache-2.0
"""Products of FP8 matrices in reference mode: numbers, scales, groups, errors, graphs."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch

from precast import gemm
from precast._ops.gemm import _plain, scaled_mm
from precast.errors import BackendSupportedError
from precast.shim import look_up

pytestmark = pytest.mark.usefixtures("reference_mode")

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = [(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3)]
ROWS, COLUMNS, DEPTH = 5, 41, 64


def whole(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Small whole numbers, whose products and sums float32 holds exactly."""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(-4, 5, shape, generator=generator).float().to(dtype)


def powers(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return 2.0 ** torch.randint(-3, 4, shape, generator=generator).float()


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize("by_rows", [(False, False), (True, True), (True, False)], ids=str)
def test_scaled_mm(
    by_rows: tuple[bool, bool], dtypes: tuple[torch.dtype, torch.dtype], dtype: torch.dtype
) -> None:
    a, b = whole(dtypes[0], ROWS, DEPTH), whole(dtypes[1], COLUMNS, DEPTH).T
    scale_a = powers(ROWS, 1) if by_rows[0] else powers(1)
    scale_b = powers(1, COLUMNS) if by_rows[1] else powers()
    bias = whole(dtype, COLUMNS)
    want = a.double() @ b.double() * scale_a.double() * scale_b.double()
    got = gemm.scaled_mm(a, b, scale_a, scale_b, out_dtype=dtype)
    assert got.dtype == dtype and torch.equal(got, want.to(dtype))
    out = torch.full_like(got, torch.nan)
    assert gemm.scaled_mm(a, b, scale_a, scale_b, bias, out=out) is out
    assert torch.equal(out, (want + bias.double()).to(dtype))
    assert torch.equal(gemm.scaled_mm_reference(a, b, scale_a, scale_b, bias, dtype), out)


def test_scaled_mm_is_that_of_torch() -> None:
    a, b = whole(E4M3, 16, 64), whole(E4M3, 32, 64).T
    scales = torch.tensor(0.5), torch.tensor(0.25)
    want = torch._scaled_mm(a, b, *scales, out_dtype=BF16)
    assert torch.equal(gemm.scaled_mm(a, b, *scales), want)


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
def test_bmm(dtypes: tuple[torch.dtype, torch.dtype], dtype: torch.dtype) -> None:
    a, b = whole(dtypes[0], 3, ROWS, DEPTH), whole(dtypes[1], 3, COLUMNS, DEPTH).mT
    scales = torch.tensor([0.5]), torch.tensor(2.0)
    want = (a.double() @ b.double()).to(dtype)
    assert torch.equal(gemm.bmm_fp8(a, b, *scales, dtype), want)
    out = torch.full_like(want, torch.nan)
    assert gemm.bmm_fp8(a, b, *scales, dtype, out, "auto") is out and torch.equal(out, want)
    assert torch.equal(gemm.bmm_fp8_reference(a, b, *scales, dtype), want)


@pytest.mark.parametrize("alpha", [None, torch.tensor([0.25])], ids=str)
@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
def test_mm(dtypes: tuple[torch.dtype, torch.dtype], alpha: torch.Tensor | None) -> None:
    a, b = whole(dtypes[0], ROWS, DEPTH), whole(dtypes[1], COLUMNS, DEPTH)
    want = (a.double() @ b.double().T * (1.0 if alpha is None else 0.25)).to(BF16)
    assert torch.equal(gemm.mm_fp8(a, b, alpha), want)
    out = torch.full((ROWS, COLUMNS), torch.nan)
    assert gemm.mm_fp8(a, b, alpha, out=out, backend="cublas") is out
    assert torch.equal(out.to(BF16), want)
    assert torch.equal(gemm.mm_fp8_reference(a, b, alpha), want)


@pytest.mark.parametrize("alpha", [None, torch.tensor(0.25)], ids=str)
def test_groups(alpha: torch.Tensor | None) -> None:
    a, b = whole(E4M3, 30, DEPTH), whole(E5M2, 3, COLUMNS, DEPTH)
    starts = torch.tensor([2, 9, 9, 28], dtype=torch.int32)
    out = torch.full((30, COLUMNS), 7.0, dtype=F16)
    assert gemm.grouped_mm_fp8(a, b, starts, alpha, out) is out
    for group, (begin, end) in enumerate(pairwise(starts.tolist())):
        want = a[begin:end].double() @ b[group].double().T * (1.0 if alpha is None else 0.25)
        assert torch.equal(out[begin:end], want.to(F16))
    assert (out[:2] == 7).all() and (out[28:] == 7).all()
    reference = gemm.grouped_mm_fp8_reference(a, b, starts, alpha, F16)
    assert torch.equal(reference[2:28], out[2:28]) and not reference[:2].any()


def arguments(function: str) -> dict[str, Any]:
    a, b = whole(E4M3, ROWS, DEPTH), whole(E4M3, COLUMNS, DEPTH)
    out = torch.full((ROWS, COLUMNS), -7.0, dtype=BF16)
    one = torch.tensor(1.0)
    return {
        "scaled_mm": {"a": a, "b": b.T, "scale_a": one, "scale_b": one, "out": out},
        "bmm_fp8": {
            "A": a[None],
            "B": b.T[None],
            "A_scale": one,
            "B_scale": one,
            "dtype": BF16,
            "out": out[None],
        },
        "mm_fp8": {"a": a, "b": b, "alpha": one, "out": out},
        "grouped_mm_fp8": {
            "a": a,
            "b": b[None],
            "m_indptr": torch.tensor([0, ROWS], dtype=torch.int32),
            "alpha": one,
            "out": out,
        },
    }[function]


Change = Callable[[torch.Tensor], Any]


@pytest.mark.parametrize(
    ("function", "name", "change", "words"),
    [
        ("scaled_mm", "a", lambda x: x.float(), "a must be float8_e4m3fn or float8_e5m2, got"),
        ("scaled_mm", "a", lambda x: x[:, :48], r"b must have shape \[48, n\]|b must have shape"),
        ("scaled_mm", "b", lambda x: x.contiguous(), "b must be column-major, with stride 1 in"),
        ("scaled_mm", "scale_a", lambda x: torch.ones(1, ROWS), r"scale_a must be one number or"),
        ("scaled_mm", "scale_b", lambda x: torch.ones(COLUMNS, 1), "scale_b must be one number or"),
        ("scaled_mm", "scale_a", lambda x: x.half(), "scale_a must be float32, got float16"),
        ("scaled_mm", "bias", lambda x: torch.ones(COLUMNS), "bias must be bfloat16, got float32"),
        ("scaled_mm", "out_dtype", lambda x: E4M3, "out_dtype must be one of bfloat16, float16"),
        ("scaled_mm", "out_dtype", lambda x: F16, "out must be torch.float16, which is out_dtype"),
        ("bmm_fp8", "B", lambda x: x.contiguous(), "B must be column-major, with stride 1 in"),
        ("bmm_fp8", "A_scale", lambda x: torch.ones(2), "A_scale must "),
        ("bmm_fp8", "dtype", lambda x: F32, "dtype must be one of bfloat16, float16, got"),
        ("bmm_fp8", "dtype", lambda x: F16, "out must be torch.float16, which is dtype, got"),
        ("mm_fp8", "b", lambda x: x[None], r"b must be the weight as it is, \[n, k\], got one"),
        ("mm_fp8", "b", lambda x: x.T.contiguous().T, "b must have stride 1 in its last dimension"),
        ("mm_fp8", "alpha", lambda x: torch.ones(2), "alpha must "),
        ("grouped_mm_fp8", "m_indptr", lambda x: x.long(), "m_indptr must be int32, got int64"),
        ("grouped_mm_fp8", "backend", lambda x: "cake", "backend must be one of 'cudnn', 'mma'"),
        ("grouped_mm_fp8", "tactic", lambda x: -2, "tactic must be -1 or a tile below 4, got -2"),
    ],
)
def test_what_is_refused(function: str, name: str, change: Change, words: str) -> None:
    given = arguments(function)
    out = given["out"]
    given[name] = change(given.get(name))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=f"^{function}: ({words})"):
        getattr(gemm, function)(**given)
    assert (out == -7).all()


@pytest.mark.parametrize("function", ["scaled_mm", "bmm_fp8", "mm_fp8", "grouped_mm_fp8"])
def test_two_operands_of_e5m2_are_refused(function: str) -> None:
    given = {
        name: value.view(E5M2) if isinstance(value, torch.Tensor) and value.dtype == E4M3 else value
        for name, value in arguments(function).items()
    }
    with pytest.raises(ValueError, match=f"^{function}: [aA] and [bB] must not both be float8_e5m"):
        getattr(gemm, function)(**given)


@pytest.mark.parametrize("function", ["scaled_mm", "bmm_fp8", "mm_fp8", "grouped_mm_fp8"])
def test_a_depth_that_is_no_multiple(function: str) -> None:
    given = arguments(function)
    for name, t in given.items():
        if name in ("a", "A"):
            given[name] = t[..., :56]
        if name in ("b", "B"):
            given[name] = t[..., :56] if t.stride(-1) == 1 else t[..., :56, :]
    with pytest.raises(ValueError, match=f"^{function}: [aA] must have a multiple of 16 columns"):
        getattr(gemm, function)(**given)
    assert (given["out"] == -7).all()


def test_backends() -> None:
    given = arguments("bmm_fp8")
    for name in ("cudnn", "cublas", "cutlass", "cute-dsl", "mma"):
        assert gemm.bmm_fp8.is_backend_supported(name, 90)
        gemm.bmm_fp8(**given, backend=name)
    for cc in (80, 89, 90, 100, 120):
        assert gemm.mm_fp8.is_compute_capability_supported(cc)
    with pytest.raises(BackendSupportedError, match="does not support backend 'cake'"):
        gemm.bmm_fp8(**given, backend="cake")


def test_torch_compile_without_a_graph_break() -> None:
    names = "scaled_mm", "mm_fp8", "bmm_fp8"
    given = {name: arguments(name) for name in names}
    want = [getattr(gemm, name)(**given[name]).clone() for name in names]
    for arguments_of in given.values():
        del arguments_of["out"]
    torch._dynamo.reset()

    def call() -> list[torch.Tensor]:
        return [getattr(gemm, name)(**given[name]) + 0 for name in names]

    got = torch.compile(call, fullgraph=True, backend="aot_eager")()
    for x, y in zip(got, want, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_names_are_where_flashinfer_has_them(engine: str) -> None:
    for name in ("bmm_fp8", "mm_fp8"):
        for path in ("", "gemm"):
            assert look_up(path, name, engine) is getattr(gemm, name)
    assert look_up("grouped_mm", "grouped_mm_fp8", engine) is gemm.grouped_mm_fp8


@pytest.mark.parametrize("backend", ["cublas", "mma"])
@pytest.mark.parametrize("hopper", [False, True])
def test_which_kernels_run(backend: str, hopper: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those for Hopper take two operands of e4m3 that TMA can copy."""
    monkeypatch.setattr(_plain, "is_hopper", lambda device: hopper)
    given = arguments("scaled_mm")
    a, b = given["a"], given["b"]
    wants = hopper and backend != "mma"
    for both, operands, has_rows, name in (
        (scaled_mm._SCALED_MM_BOTH, (a, b), False, "scaled_mm"),
        (scaled_mm._BMM_BOTH, (a[None], b[None]), False, "bmm_fp8"),
        (scaled_mm._MM_BOTH, (a, b.T), True, "mm_fp8"),
        (scaled_mm._GROUPED_BOTH, (a, b.T[None]), True, "grouped_mm_fp8"),
    ):
        export = scaled_mm._chosen(both, *operands, has_rows, backend)
        assert export.op == ("scaled_gemm_sm90" if wants else "scaled_gemm")
        assert export.export == (f"{name}_sm90" if wants else name)
        assert export.function == name
    both = scaled_mm._SCALED_MM_BOTH
    for x, weight in (
        (a.float().to(E5M2), b),
        (a, b.float().T.to(E5M2).T),
        (a[:1].expand(ROWS, -1), b),
        (a, b[:, :1].expand(-1, COLUMNS)),
        (a[:, :0], b[:0]),
    ):
        assert scaled_mm._chosen(both, x, weight, backend=backend) is both[0]


def test_tactics_are_those_of_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = {name: arguments(name) for name in ("scaled_mm", "bmm_fp8", "mm_fp8", "grouped_mm_fp8")}
    want = {name: getattr(gemm, name)(**given).clone() for name, given in calls.items()}
    for name, given in calls.items():
        with pytest.raises(ValueError, match=rf"^{name}: tactic must be -1 or a tile below 4, got"):
            getattr(gemm, name)(**given, tactic=4)
    monkeypatch.setattr(_plain, "is_hopper", lambda device: True)
    words = "tactic must be -1 or a tile and cluster for this kind of tokens below 96"
    for name, given in calls.items():
        legal = _plain.UNSPLIT if name == "grouped_mm_fp8" else range(_plain.CHOICES)
        for tactic in range(_plain.CHOICES + 1):
            given["out"].fill_(-7)
            if tactic in legal:
                assert torch.equal(getattr(gemm, name)(**given, tactic=tactic), want[name])
                continue
            with pytest.raises(ValueError, match=f"^{name}: {words}, got {tactic}"):
                getattr(gemm, name)(**given, tactic=tactic)
            assert (given["out"] == -7).all()
