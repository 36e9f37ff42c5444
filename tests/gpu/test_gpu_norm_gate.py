# SPDX-License-Identifier: Apache-2.0
"""The norms with SiLU or under a gate: in place, without weight, in fp8, and errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_gpu_norm_quant import BF16, DEVICE, E4M3, assert_rounded, check_error, draw, fp8_like, rms

import precast
from precast.errors import UnsupportedConfigError
from precast.testing import Guarded, assert_close, packed_slice, row_strided

GATE_EPS = 1e-5


def gated(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
    return rms(x, weight, GATE_EPS) * torch.sigmoid(gate.double())


@pytest.mark.parametrize("hidden", [64, 128, 80, 1001, 4096, 16392])
def test_the_gate_works_in_place(hidden: int, generator: torch.Generator) -> None:
    for rows in (1, 33, 4097):
        x, gate = draw(generator, rows, hidden), draw(generator, rows, hidden)
        want, kept = gated(x, gate), gate.clone()
        assert precast.rmsnorm_sigmoid_gate(x, gate) is None
        assert_close(x, want)
        assert torch.equal(gate, kept)


@pytest.mark.parametrize("hidden", [32, 96, 128, 160, 320, 384, 640, 1024, 1280, 4096, 8192, 16384])
def test_many_rows_taken_two_at_a_time(hidden: int, generator: torch.Generator) -> None:
    """An odd number of them, enough for several rows and vectors a thread."""
    rows = max(4097, 2**22 // hidden + 1 | 1)
    x, weight = draw(generator, rows, hidden), draw(generator, hidden)
    want = rms(x, weight)
    norm = Guarded(x.shape, BF16, DEVICE)
    precast.rmsnorm(x, weight, GATE_EPS, norm.view)
    assert_close(norm.view, rms(x, weight, GATE_EPS))
    norm.check()
    silu = Guarded(x.shape, BF16, DEVICE)
    precast.fused_rmsnorm_silu(x, weight, 1e-6, silu.view)
    assert_close(silu.view, want * torch.sigmoid(want))
    silu.check()
    codes = Guarded(x.shape, E4M3, DEVICE)
    precast.rmsnorm_quant(codes.view, x, weight, torch.full((1,), 0.03, device=DEVICE), 1e-6)
    assert_rounded(codes.view, want / torch.tensor(0.03).double())
    codes.check()
    gamma, beta = (draw(generator, hidden, dtype=torch.float32) for _ in range(2))
    wide = x.double()
    exact = torch.nn.functional.layer_norm(wide, (hidden,), gamma.double(), beta.double(), 1e-6)
    assert_close(precast.layernorm(x, gamma, beta, 1e-6), exact)


def test_heads_inside_packed_tensors(generator: torch.Generator) -> None:
    for head_dim in (64, 128):
        x, gate = (
            packed_slice(
                35, (16, 4, 4), which, head_dim, dtype=BF16, device=DEVICE, generator=generator
            )
            for which in (0, 0)
        )
        weight = draw(generator, head_dim)
        want = gated(x, gate, weight)
        guard = Guarded(x.shape, BF16, DEVICE, gap=8)
        precast.rmsnorm_sigmoid_gate(x, gate, weight=weight, out=guard.view)
        assert_close(guard.view, want)
        guard.check()
        precast.rmsnorm_sigmoid_gate(x, gate, weight=weight)
        assert_close(x, want)


def test_unaligned_gate(generator: torch.Generator) -> None:
    x, gate = draw(generator, 35, 1000), row_strided(draw(generator, 35, 1000), gap=1, offset=3)
    want = gated(x, gate)
    precast.rmsnorm_sigmoid_gate(x, gate)
    assert_close(x, want)


def test_large_gates_saturate(generator: torch.Generator) -> None:
    x, gate = draw(generator, 4, 256), draw(generator, 4, 256)
    gate[0], gate[1] = 1000.0, -1000.0
    want = gated(x, gate)
    precast.rmsnorm_sigmoid_gate(x, gate)
    assert_close(x, want)
    assert (x[1] == 0).all()


def test_fp8_output(generator: torch.Generator) -> None:
    for hidden in (128, 1000, 4096):
        x, gate = draw(generator, 65, hidden), draw(generator, 65, hidden)
        weight, out = 40 * draw(generator, hidden), fp8_like(x)
        precast.rmsnorm_sigmoid_gate(x, gate, weight=weight, out=out)
        assert_rounded(out, gated(x, gate, weight), slack=2.0**-14)
        assert precast.fused_rmsnorm_silu(x, weight, out=out) is out
        exact = torch.nn.functional.silu(rms(x, weight))
        # Far below zero the exponential's own error counts.
        near = exact.abs() > 2.0**-6
        assert_rounded(out[near], exact[near], slack=2.0**-12)
        assert_close(out, exact.clamp(-448.0, 448.0))


def test_block_scale_without_nvfp4_is_an_error(generator: torch.Generator) -> None:
    x, weight = draw(generator, 9, 256), draw(generator, 256)
    scale = torch.zeros(9, 16, dtype=E4M3, device=DEVICE)
    for dtype in (x.dtype, E4M3):
        out = torch.zeros(9, 256, dtype=dtype, device=DEVICE)
        words = rf"block_scale must be None, as out is {str(dtype).removeprefix('torch.')}, which"
        with pytest.raises(ValueError, match=words):
            precast.fused_rmsnorm_silu(x, weight, out=out, block_scale=scale)
        assert not out.float().any()


def test_invalid_arguments(generator: torch.Generator) -> None:
    x, gate, weight = draw(generator, 6, 256), draw(generator, 6, 256), draw(generator, 256)
    silu: Any = precast.fused_rmsnorm_silu
    nvfp4 = torch.empty(6, 128, dtype=torch.uint8, device=DEVICE).view(torch.float4_e2m1fn_x2)
    with pytest.raises(UnsupportedConfigError, match="fused_rmsnorm_silu: NVFP4 output"):
        silu(x, weight, out=nvfp4)
    words = "out must be input itself or not overlap its memory"
    inside = x.view(torch.uint8).view(E4M3)[:, :256]
    check_error(silu, ValueError, words, x, weight, out=inside)
    op: Any = precast.rmsnorm_sigmoid_gate
    check_error(op, ValueError, "gate must have input's shape", x, gate[:, :128])
    check_error(op, ValueError, "gate must be bfloat16, got float16", x, gate.to(torch.float16))
    check_error(op, ValueError, "input must not overlap gate's memory", x, x)
    check_error(op, ValueError, "out must not overlap gate's memory", x, gate, out=gate)
    check_error(op, ValueError, r"weight must have shape \[256\]", x, gate, weight=weight[:128])


@pytest.mark.parametrize("rows", [1, 64, 131, 2048])
def test_a_chain_is_the_same_with_and_without_pdl(rows: int, generator: torch.Generator) -> None:
    """Each reads what the one before wrote; a missing wait shows as a rare difference."""
    hidden = 4096
    start, gate, weight = (draw(generator, *shape) for shape in ([rows, hidden],) * 2 + ([hidden],))
    x, y, residual = (torch.empty_like(start) for _ in range(3))
    codes, scale = fp8_like(start), torch.full((1,), 0.02, device=DEVICE)
    scales = torch.empty(hidden // 128, -(-rows // 4) * 4, device=DEVICE)

    def chain(pdl: bool) -> list[torch.Tensor]:
        x.copy_(start)
        residual.copy_(gate)
        for _ in range(3):
            precast.fused_rmsnorm_silu(x, weight, out=y, enable_pdl=pdl)
            precast.rmsnorm_sigmoid_gate(y, gate, weight=weight, enable_pdl=pdl)
            precast.fused_add_rmsnorm_fp8_block_quant(
                codes, scales, x, y, residual, weight, enable_pdl=pdl
            )
            precast.fused_add_rmsnorm_quant(codes, x, residual, weight, scale, enable_pdl=pdl)
            precast.rmsnorm(residual, weight, out=x, enable_pdl=pdl)
        results = (x, y, residual, codes.view(torch.uint8), scales[:, :rows])
        return [tensor.clone() for tensor in results]

    want = chain(False)
    assert all(tensor.isfinite().all() for tensor in want)
    same = [
        torch.stack([(a == b).all() for a, b in zip(chain(True), want, strict=True)])
        for _ in range(100)
    ]
    assert torch.stack(same).all(), "some rounds differ from the chain without PDL"
