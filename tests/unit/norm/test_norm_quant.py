# SPDX-License-Identifier: Apache-2.0
"""The references of the quantised and gated norms in float64, and the errors of both ways."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import precast
from precast import norm
from precast.errors import UnsupportedConfigError

BF16, E4M3, E5M2 = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2
EPS = 1e-5

pytestmark = pytest.mark.usefixtures("reference_mode")


def draw(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (3 * torch.randn(shape, generator=generator)).to(dtype)


def nearest(exact: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The number of an fp8 type next to each of ``exact``, by looking at all 256; ties to even."""
    codes = torch.arange(256).to(torch.uint8)
    numbers = codes.view(dtype).double()
    codes, numbers = codes[numbers.isfinite()], numbers[numbers.isfinite()]
    distance = (exact.unsqueeze(-1) - numbers).abs()
    # Of two as near, the even code; zeros of both signs are equal.
    best = (distance + 1e-12 * (codes % 2) * distance.amin(-1, keepdim=True)).argmin(-1)
    return numbers[best]


def exact_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.rms_norm(x.double(), x.shape[-1:], weight.double(), EPS)


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("scale", [0.01, 0.25, 1.0])
def test_quantised_norms_round_to_the_nearest(dtype: torch.dtype, scale: float) -> None:
    x, residual, weight = draw(5, 64), draw(5, 64, seed=1), draw(64, seed=2)
    out, number = torch.empty(5, 64, dtype=dtype), torch.tensor([scale])
    limit = torch.finfo(dtype).max

    def check(exact: torch.Tensor) -> None:
        exact = (exact / number.double()).clamp(-limit, limit)
        got = out.double()
        # fp32 arithmetic may move a number over a boundary that it lies on.
        moved = [nearest(exact * (1 + d), dtype) for d in (-1e-6, 0.0, 1e-6)]
        assert torch.stack([got == m for m in moved]).any(0).all()

    precast.rmsnorm_quant(out, x, weight, number, EPS)
    check(exact_norm(x, weight))
    total = x.double() + residual.double()
    precast.fused_add_rmsnorm_quant(out, x, residual, weight, number, EPS)
    check(exact_norm(total, weight))
    assert torch.equal(residual, total.to(BF16))
    gamma, beta = draw(64, dtype=torch.float32, seed=3), torch.zeros(64)
    precast.layernorm_quant(out, x, gamma, beta, number, EPS)
    check(torch.nn.functional.layer_norm(x.double(), (64,), gamma.double(), None, EPS))


def test_saturation_and_nan() -> None:
    x, weight = torch.ones(2, 8, dtype=BF16), torch.ones(8, dtype=BF16)
    x[1, 3] = float("nan")
    for dtype in (E4M3, E5M2):
        out = torch.empty(2, 8, dtype=dtype)
        precast.rmsnorm_quant(out, x, -weight, torch.tensor([1e-9]))
        assert (out[0].float() == -torch.finfo(dtype).max).all()
        assert out[1].isnan().all()


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
def test_layernorm_quant_raises_the_runtime_errors_of_flashinfer(dtype: torch.dtype) -> None:
    good = {"input": draw(3, 8), "gemma": torch.ones(8), "beta": torch.zeros(8)}
    good |= {"out": torch.zeros(3, 8).to(dtype), "scale": torch.tensor([0.5])}
    for name, wrong, words in (
        ("input", draw(8, 3).t(), r"input must be contiguous, got strides \[1, 3\]"),
        ("input", draw(3, 8, dtype=torch.float32), "input must be bfloat16 .* got torch.float32"),
        ("gemma", torch.ones(8, dtype=BF16), "gemma must be float32, got torch.bfloat16"),
        ("beta", torch.ones(8, dtype=BF16), "beta must be float32, got torch.bfloat16"),
        ("out", torch.zeros(8, 3).to(dtype).t(), r"out must be contiguous, got strides \[1, 3\]"),
        ("out", torch.zeros(3, 8).to(BF16), "out must be float8_e4m3fn or .* got bfloat16"),
        ("out", torch.zeros(3, 8).to(torch.int8), "out must be float8_e4m3fn or .* got int8"),
    ):
        call: dict[str, Any] = {**good, name: wrong}
        shown = call["out"].float().clone()
        for kind in (RuntimeError, ValueError):
            with pytest.raises(kind, match=f"layernorm_quant: {words}"):
                precast.layernorm_quant(**call)
        assert torch.equal(call["out"].float(), shown)
    precast.layernorm_quant(**good)
    assert good["out"].float().any()


def test_layernorm_takes_contiguous_tensors() -> None:
    x, one = draw(3, 8), torch.ones(8)
    out = torch.zeros(8, 3).to(BF16).t()
    with pytest.raises(RuntimeError, match=r"layernorm: input must be contiguous, got strides"):
        precast.layernorm(draw(8, 3).t(), one, one)
    with pytest.raises(RuntimeError, match=r"layernorm: out must be contiguous, got strides"):
        precast.layernorm(x, one, one, out=out)
    assert not out.any()


def test_a_float_scale_is_deprecated_where_it_is_called() -> None:
    x, residual, ones = draw(2, 8), draw(2, 8), torch.ones(8)
    weight, out = ones.to(BF16), torch.empty(2, 8, dtype=E4M3)
    calls: list[Any] = [
        lambda s: precast.rmsnorm_quant(out, x, weight, s),
        lambda s: precast.fused_add_rmsnorm_quant(out, x, residual.clone(), weight, s),
        lambda s: precast.layernorm_quant(out, x, ones, ones, s),
    ]
    for call in calls:
        with pytest.warns(FutureWarning, match="scale as a float is deprecated") as seen:
            call(0.5)
        assert [w.filename for w in seen] == [__file__]
        wanted = out.float()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            call(torch.tensor([0.5]))
            assert torch.equal(out.float(), wanted)
            call(torch.tensor(0.5))
        assert torch.equal(out.float(), wanted)
        for wrong in (True, "0.5", None):
            with pytest.raises(TypeError, match=r"scale must be a torch\.Tensor(, got b| or )"):
                call(wrong)
        with pytest.raises(ValueError, match=r"scale must hold one number, got shape \[2\]"):
            call(torch.ones(2))
        with pytest.raises(ValueError, match="scale must be float32, got float64"):
            call(torch.ones(1, dtype=torch.float64))


@pytest.mark.parametrize("column_major", [True, False])
@pytest.mark.parametrize("ue8m0", [True, False])
@pytest.mark.parametrize("rows", [1, 4, 7])
def test_block_quant(rows: int, column_major: bool, ue8m0: bool) -> None:
    x, residual, weight = draw(rows, 384), draw(rows, 384, seed=1), draw(384, seed=2)
    total = x.double() + residual.double()
    out, normed = torch.empty(rows, 384, dtype=E4M3), torch.empty_like(x)
    padded = -(-rows // 4) * 4
    scales = torch.full((3, padded) if column_major else (rows, 3), -7.0)
    precast.fused_add_rmsnorm_fp8_block_quant(
        out,
        scales,
        normed,
        x,
        residual,
        weight,
        EPS,
        column_major_scales=column_major,
        scale_ue8m0=ue8m0,
    )
    assert torch.equal(residual, total.to(BF16))
    torch.testing.assert_close(normed.double(), exact_norm(total, weight), rtol=2**-8, atol=1e-6)
    logical = scales.T[:rows] if column_major else scales
    if column_major:
        assert (scales[:, rows:] == -7.0).all()
    amax = normed.float().unflatten(-1, (3, 128)).abs().amax(-1)
    if ue8m0:
        assert torch.equal(logical, torch.exp2(torch.ceil(torch.log2(amax.double() / 448))).float())
    else:
        torch.testing.assert_close(logical, amax / 448, rtol=2**-23, atol=0)
        # The largest number of a group gets the largest code.
        assert (out.float().unflatten(-1, (3, 128)).abs().amax(-1) == 448).all()
    exact = normed.double().unflatten(-1, (3, 128)) / logical.double().unsqueeze(-1)
    moved = [nearest((exact * (1 + d)).flatten(-2), E4M3) for d in (-1e-6, 0.0, 1e-6)]
    assert torch.stack([out.double() == m for m in moved]).any(0).all()


def test_block_quant_of_zeros_and_powers_of_two() -> None:
    x = torch.zeros(4, 128, dtype=BF16)
    scales, out = torch.zeros(1, 4), torch.empty(4, 128, dtype=E4M3)
    weight = torch.ones(128, dtype=BF16)
    call = precast.fused_add_rmsnorm_fp8_block_quant
    call(out, scales, None, x, x.clone(), weight)
    assert torch.equal(scales, torch.full((1, 4), 1e-10) / torch.full((1, 4), 448.0))
    assert not out.float().any()
    # A scale that is a power of two already stays: the norm of constant rows is their sign.
    rows = torch.full((4, 128), 2.0, dtype=BF16)
    call(out, scales, None, rows, rows.clone(), 448 * weight, 0.0, None, True, True)
    assert (scales == 1.0).all()
    assert (out.float() == 448).all()
    rows[0, 0] = float("nan")
    call(out, scales, None, rows, rows.clone(), weight, 0.0, None, True, True)
    assert scales[0, 0].isnan()
    assert not scales[0, 1:].isnan().any()


def test_the_layout_of_column_major_scales() -> None:
    """Element (row, group) lies at group * padded + row, as TMA loads it."""
    x = draw(6, 256)
    scales, rows = torch.zeros(2, 8), torch.zeros(6, 2)
    out, weight = torch.empty(6, 256, dtype=E4M3), draw(256, seed=1)
    call = precast.fused_add_rmsnorm_fp8_block_quant
    call(out, scales, None, x, x.clone(), weight)
    call(out, rows, None, x, x.clone(), weight, column_major_scales=False)
    flat = scales.flatten()
    assert all(flat[g * 8 + r] == rows[r, g] for r in range(6) for g in range(2))


@pytest.mark.parametrize("hidden", [64, 129])
def test_gate_and_silu(hidden: int) -> None:
    x, gate, weight = draw(5, hidden), draw(5, hidden, seed=1), draw(hidden, seed=2)
    one = torch.ones(hidden)
    opened = torch.sigmoid(gate.double())
    for given, factor in ((None, one), (weight, weight)):
        want = exact_norm(x, factor) * opened
        got = torch.empty_like(x)
        assert precast.rmsnorm_sigmoid_gate(x, gate, EPS, weight=given, out=got) is None
        torch.testing.assert_close(got.double(), want, rtol=2**-8, atol=1e-6)
        again = x.clone()
        precast.rmsnorm_sigmoid_gate(again, gate, EPS, weight=given)
        assert torch.equal(again, got)
    want = torch.nn.functional.silu(exact_norm(x, weight))
    got = precast.fused_rmsnorm_silu(x, weight, EPS)
    assert got.dtype == BF16
    torch.testing.assert_close(got.double(), want, rtol=2**-8, atol=1e-6)
    codes = precast.fused_rmsnorm_silu(x, 40 * weight, EPS, out=torch.empty(5, hidden, dtype=E4M3))
    want = torch.nn.functional.silu(exact_norm(x, 40 * weight)).clamp(-448, 448)
    torch.testing.assert_close(codes.double(), want, rtol=2**-4, atol=2**-10)
    assert norm.fused_rmsnorm_silu_reference(x, weight).dtype == BF16


def test_the_error_of_nvfp4_output_names_it() -> None:
    x, weight = draw(2, 32), draw(32)
    out = torch.empty(2, 16, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    words = "fused_rmsnorm_silu: NVFP4 output .* is not implemented; legal: .*Fix: quantise"
    with pytest.raises(UnsupportedConfigError, match=words):
        precast.fused_rmsnorm_silu(x, weight, out=out)


def test_block_scale_without_nvfp4_is_an_error() -> None:
    x, weight, scale = draw(2, 32), draw(32), torch.zeros(2, 2, dtype=E4M3)
    for dtype in (BF16, E4M3):
        out = torch.zeros(2, 32, dtype=dtype)
        words = rf"^fused_rmsnorm_silu: block_scale must be None, as out is {str(dtype)[6:]}, which"
        with pytest.raises(ValueError, match=words):
            precast.fused_rmsnorm_silu(x, weight, out=out, block_scale=scale)
        assert not out.float().any()


def test_outputs_of_types_without_modules() -> None:
    x, weight, scale = draw(2, 32), draw(32), torch.tensor([1.0])
    words = "out must be float8_e4m3fn or float8_e5m2, got bfloat16"
    with pytest.raises(ValueError, match=words):
        precast.rmsnorm_quant(torch.empty_like(x), x, weight, scale)
    with pytest.raises(UnsupportedConfigError, match=r"out must be float16 or .*, got float8_e5m2"):
        precast.fused_rmsnorm_silu(x, weight, out=torch.empty(2, 32, dtype=E5M2))
    with pytest.raises(UnsupportedConfigError, match=r"out must be float16 or .*, got float8_e5m2"):
        precast.rmsnorm_sigmoid_gate(x, x.clone(), out=torch.empty(2, 32, dtype=E5M2))


def test_memory_of_other_types_that_overlaps() -> None:
    x, weight, scale = draw(4, 32), draw(32), torch.tensor([1.0])
    inside = x.view(torch.uint8).view(E4M3)
    with pytest.raises(ValueError, match="out must not overlap input's memory"):
        precast.rmsnorm_quant(inside[:, :32], x, weight, scale)
    with pytest.raises(ValueError, match="out must be input itself or not overlap its memory"):
        precast.fused_rmsnorm_silu(x, weight, out=inside[:, 32:])
    residual = x.clone()
    inside = residual.view(torch.uint8).view(E4M3)[:, ::2]
    with pytest.raises(ValueError, match="out must not overlap residual's memory"):
        precast.fused_add_rmsnorm_quant(inside, x, residual, weight, scale)
    with pytest.raises(ValueError, match="input must not overlap gate's memory"):
        precast.rmsnorm_sigmoid_gate(x, x)
