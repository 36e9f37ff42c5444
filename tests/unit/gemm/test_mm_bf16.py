# SPDX-License-Identifier: Apache-2.0
"""Products of bfloat16 matrices in reference mode: numbers, layouts, backends, errors, graphs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from precast import gemm
from precast._ops.gemm import _plain, mm_bf16
from precast.errors import BackendSupportedError
from precast.shim import look_up

pytestmark = pytest.mark.usefixtures("reference_mode")

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
#: Rows, columns and depth: odd columns, one row, no depth.
SHAPES = [(4, 256, 512), (37, 261, 40), (1, 1, 8), (3, 8, 0)]


def whole(generator: torch.Generator, *shape: int) -> torch.Tensor:
    """Small whole numbers, whose products and sums float32 holds exactly."""
    return torch.randint(-4, 5, shape, generator=generator).to(BF16)


def problem(rows: int, columns: int, depth: int, *batch: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows + columns + depth)
    return {
        "a": whole(generator, *batch, rows, depth),
        "b": whole(generator, *batch, columns, depth).mT,
        "bias": whole(generator, columns),
    }


def row_major(b: torch.Tensor) -> torch.Tensor:
    """The same weight with contiguous columns, in rows that are whole multiples of 16 bytes."""
    wide = torch.zeros(*b.shape[:-1], -(-b.shape[-1] // 8) * 8, dtype=b.dtype)
    wide[..., : b.shape[-1]] = b
    return wide


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_numbers(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    a, b, bias = problem(*shape).values()
    want = a.double() @ b.double()
    got = gemm.mm_bf16(a, b, out_dtype=dtype)
    assert got.dtype == dtype and torch.equal(got, want.to(dtype))
    out = torch.full_like(got, torch.nan)
    assert gemm.mm_bf16(a, b, bias, True, out, dtype) is out
    assert torch.equal(out, (want + bias.double()).to(dtype))
    reference = gemm.mm_bf16_reference(a, b, bias, dtype)
    assert torch.equal(reference, out)


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_batches(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    a, b, _ = problem(*shape, 3).values()
    want = (a.double() @ b.double()).to(dtype)
    got = gemm.bmm_bf16(a, b, out_dtype=dtype)
    assert got.dtype == dtype and torch.equal(got, want)
    out = torch.full_like(got, torch.nan)
    assert gemm.bmm_bf16(a, b, out, dtype) is out and torch.equal(out, want)
    assert torch.equal(gemm.bmm_bf16_reference(a, b, dtype), want)


def test_a_row_major_weight_and_a_shared_one() -> None:
    a, b, _ = problem(5, 40, 64).values()
    want = gemm.mm_bf16(a, b)
    assert torch.equal(gemm.mm_bf16(a, b.contiguous()), want)
    batches = gemm.bmm_bf16(a.expand(3, -1, -1), b.expand(3, -1, -1))
    assert torch.equal(batches, want.expand(3, -1, -1))


def test_strides() -> None:
    a, b, _ = problem(5, 40, 64).values()
    want = gemm.mm_bf16(a, b)
    wide = torch.zeros(5, 72, dtype=BF16)
    wide[:, :64] = a
    out = torch.full((5, 43), 7.0, dtype=BF16)
    gemm.mm_bf16(wide[:, :64], b, out=out[:, :40])
    assert torch.equal(out[:, :40], want) and (out[:, 40:] == 7).all()


def test_backends() -> None:
    a, b, _ = problem(2, 16, 16).values()
    want = gemm.mm_bf16(a, b)
    for name in ("mma", "cudnn", "cutlass", "tgv", "cublaslt", "tinygemm", "cutile", "cute-dsl"):
        assert gemm.mm_bf16.is_backend_supported(name, 90)
        assert torch.equal(gemm.mm_bf16(a, b, backend=name), want)
    assert torch.equal(gemm.mm_bf16(a, b, backend="auto"), want)
    assert torch.equal(gemm.bmm_bf16(a[None], b[None], backend="auto")[0], want)
    for cc in (80, 86, 89, 90, 100, 103, 120):
        assert gemm.mm_bf16.is_compute_capability_supported(cc)
        assert gemm.bmm_bf16.is_backend_supported("cake", cc)
    assert not gemm.mm_bf16.is_backend_supported("cake")
    with pytest.raises(BackendSupportedError, match="does not support backend 'cake'"):
        gemm.mm_bf16(a, b, backend="cake")


def strided(t: torch.Tensor, pad: int) -> torch.Tensor:
    wide = torch.zeros(t.shape[0], t.shape[1] + pad, dtype=t.dtype)
    return wide[:, : t.shape[1]]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"a": torch.zeros(4, 64)}, "a must be bfloat16, got float32"),
        ({"a": torch.zeros(4, 60, dtype=BF16)}, r"b must have shape \[60, n\]|b must have shape"),
        ({"a": torch.zeros(64, 4, dtype=BF16).T}, "a must have stride 1 in its last dimension"),
        ({"a": strided(torch.zeros(4, 64, dtype=BF16), 4)}, "a must have rows that start at mul"),
        ({"b": torch.zeros(64, 36, dtype=BF16)}, "b must have stride 1 in one of its last two di"),
        ({"b": strided(torch.zeros(36, 64, dtype=BF16), 4).T}, "b must have stride 1 in one of i"),
        ({"bias": torch.zeros(36)}, "bias must be bfloat16, got float32"),
        ({"bias": torch.zeros(35, dtype=BF16)}, r"bias must have shape \[36\], got \[35\]"),
        ({"out": torch.zeros(4, 35, dtype=BF16)}, r"out must have shape \[4, 36\], got \[4, 35\]"),
        ({"out": torch.zeros(36, 4, dtype=BF16).T}, "out must have stride 1 in its last dimens"),
        ({"out": torch.zeros(4, 36)}, "out must be torch.bfloat16, which is out_dtype, got"),
        ({"out_dtype": torch.int8}, "out_dtype must be one of bfloat16, float16, float32, got"),
    ],
)
def test_what_is_refused(change: dict[str, Any], words: str) -> None:
    out = torch.full((4, 36), -7.0, dtype=BF16)
    given = {**problem(4, 36, 64), "out": out, **change}
    with pytest.raises(ValueError, match=f"^mm_bf16: ({words})"):
        gemm.mm_bf16(**given)
    assert (out == -7).all()


def test_a_depth_that_is_no_multiple() -> None:
    a = problem(4, 36, 60)["a"]
    weight = torch.zeros(1, 60, 32, dtype=BF16)
    with pytest.raises(ValueError, match=r"^bmm_bf16: A must have a multiple of 8 columns, got"):
        gemm.bmm_bf16(a[None], weight)
    storage = torch.zeros(36, 64, dtype=BF16)
    with pytest.raises(ValueError, match=r"^mm_bf16: a must have a multiple of 8 columns, got"):
        gemm.mm_bf16(a, storage[:, :60].T)


def test_an_output_that_overlaps_is_refused() -> None:
    a, b, _ = problem(16, 16, 16).values()
    with pytest.raises(ValueError, match=r"^mm_bf16: out must not overlap a's memory"):
        gemm.mm_bf16(a, b, out=a)


@pytest.mark.parametrize("rows", [0, 4])
def test_nothing_to_do(rows: int) -> None:
    a, b = torch.zeros(rows, 16, dtype=BF16), torch.zeros(16, 0, dtype=BF16)
    assert gemm.mm_bf16(a, b).shape == (rows, 0)


def test_torch_compile_without_a_graph_break() -> None:
    a, b, bias = problem(5, 40, 64).values()
    want = gemm.mm_bf16(a, b, bias)
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda a, b, bias: gemm.mm_bf16(a, b, bias) + gemm.bmm_bf16(a[None], b[None])[0],
        fullgraph=True,
        backend="aot_eager",
    )
    assert torch.equal(compiled(a, b, bias), want + gemm.mm_bf16(a, b))


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_names_are_where_flashinfer_has_them(engine: str) -> None:
    for name in ("mm_bf16", "bmm_bf16"):
        for path in ("", "gemm"):
            assert look_up(path, name, engine) is getattr(gemm, name)


@pytest.mark.parametrize("backend", ["cudnn", "mma"])
@pytest.mark.parametrize("hopper", [False, True])
def test_which_kernels_run(backend: str, hopper: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those for Hopper take what TMA copies: rows that differ."""
    monkeypatch.setattr(_plain, "is_hopper", lambda device: hopper)
    both = mm_bf16._MM_BOTH
    wanted = both[1 if hopper and backend != "mma" else 0]
    a, b, _ = problem(6, 24, 64).values()
    batch = a.expand(3, -1, -1), b.expand(3, -1, -1)
    by_rows = row_major(b)
    for x, weight in (
        *((a, b), (a[:1], b), (a, b[:, :1]), batch, (a[:, ::1], b.mT.contiguous().mT)),
        *((a, by_rows), (a, by_rows[:, :8]), (batch[0], by_rows.expand(3, -1, -1))),
    ):
        assert _plain.chosen(both, x, weight, backend=backend) is wanted
    assert _plain.chosen(both, a, b.mT, True, backend) is wanted
    assert _plain.chosen(both, a, by_rows.mT, True, backend) is both[0]
    for x, weight in (
        (a, by_rows[:1].expand(64, -1)),
        (a, by_rows[:, ::2]),
        (a[:1].expand(6, -1), b),
        (a, b[:, :1].expand(-1, 24)),
        (a[:, :0], b[:0]),
        (a[0], b),
        (a, b[0]),
    ):
        assert _plain.chosen(both, x, weight, backend=backend) is both[0]
    assert _plain.chosen(both, a, b, True, backend) is both[0]


def test_tactics_are_those_of_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, _ = problem(6, 24, 64).values()
    want = gemm.mm_bf16(a, b)
    assert torch.equal(gemm.mm_bf16(a, b, tactic=3), want)
    with pytest.raises(ValueError, match=r"^mm_bf16: tactic must be -1 or a tile below 4, got 4"):
        gemm.mm_bf16(a, b, tactic=4)
    starts = torch.tensor([0, 6], dtype=torch.int32)
    monkeypatch.setattr(_plain, "is_hopper", lambda device: True)
    for tactic in range(_plain.CHOICES):
        assert torch.equal(gemm.mm_bf16(a, b, tactic=tactic), want)
        if tactic in _plain.UNSPLIT:
            got = gemm.grouped_mm_bf16(a, b.T[None], starts, tactic=tactic)
            assert torch.equal(got, want)
    words = (
        f"tactic must be -1 or a tile and cluster for this kind of tokens below {_plain.CHOICES}"
    )
    for tactic in (-2, _plain.CHOICES):
        with pytest.raises(ValueError, match=f"^mm_bf16: {words}, got {tactic}"):
            gemm.mm_bf16(a, b, tactic=tactic)
    with pytest.raises(ValueError, match=f"^grouped_mm_bf16: {words}, got 3"):
        gemm.grouped_mm_bf16(a, b.T[None], starts, tactic=3)


@pytest.mark.parametrize("header", ["gemm16_choose.cuh", "scaled_choose.cuh"])
def test_tiles_of_the_kernels_for_hopper(header: str) -> None:
    folder = Path(__file__).resolve().parents[3] / "include" / "precast" / "gemm" / "sm90"
    tiles = (folder / header).read_text().partition("Tiles[] = {")[2]
    clusters = (folder / "choose.cuh").read_text().partition("kSm90Clusters[] = {")[2]
    kinds = re.findall(r"ClusterUse::(\w+), \d", clusters.partition("};")[0])
    assert len(kinds) == _plain.CLUSTERS
    assert len(re.findall(r"\{\d", tiles.partition("};")[0])) * len(kinds) == _plain.CHOICES
    assert (
        tuple(
            choice for choice in range(_plain.CHOICES) if kinds[choice % len(kinds)] != "splits_k"
        )
        == _plain.UNSPLIT
    )
