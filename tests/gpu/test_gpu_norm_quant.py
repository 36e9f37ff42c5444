# SPDX-License-Identifier: Apache-2.0
"""The norms with fp8 output: exact rounding, saturation, scales, layouts, and errors."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from code_params import FP8
from op_case import same_bits

import precast
from precast.errors import DtypeRuntimeError, UnsupportedConfigError
from precast.testing import Guarded, assert_close, packed_slice, poison, random_tensor, row_strided

DEVICE = "cuda"
BF16, E4M3, E5M2 = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2
EPS = 1e-6
# Short rows, one and two vectors a thread, the loop; rows that no vector fits are below.
HIDDEN = (128, 256, 512, 1152, 4096, 7168, 8192, 16384, 16512)

halves = pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=["bf16", "f16"])
fp8 = pytest.mark.parametrize("out_dtype", FP8)


def draw(generator: torch.Generator, *shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return random_tensor(*shape, dtype=dtype, device=DEVICE, generator=generator)


def scale_of(value: float) -> torch.Tensor:
    return torch.full((1,), value, device=DEVICE)


def fp8_like(x: torch.Tensor, dtype: torch.dtype = E4M3) -> torch.Tensor:
    return poison(torch.empty(x.shape, dtype=dtype, device=x.device))


def rms(x: torch.Tensor, weight: torch.Tensor | None = None, eps: float = EPS) -> torch.Tensor:
    wide = x.double()
    y = wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt()
    return y if weight is None else y * weight.double()


def assert_rounded(got: torch.Tensor, exact: torch.Tensor, slack: float = 2.0**-18) -> None:
    """``got`` is ``exact``, which fp32 arithmetic may have moved by ``slack``, rounded to fp8."""
    limit = torch.finfo(got.dtype).max
    ends = [
        (exact * factor).clamp(-limit, limit).float().to(got.dtype).float()
        for factor in (1 - slack, 1 + slack)
    ]
    low, high = torch.minimum(*ends), torch.maximum(*ends)
    bad = (got.float() < low) | (got.float() > high) | got.isnan()
    assert not bad.any(), f"{int(bad.sum())} of {bad.numel()} are rounded wrongly"


# -- a given scale --------------------------------------------------------------------------------


@halves
@fp8
@pytest.mark.parametrize("hidden", [64, 1000, 4096, 8192, 16385])
def test_rounding_is_to_nearest_even_and_once(
    dtype: torch.dtype, out_dtype: torch.dtype, hidden: int, generator: torch.Generator
) -> None:
    for rows, scale in ((1, 0.0078125), (97, 0.03), (300, 3.0)):
        x, residual = (draw(generator, rows, hidden, dtype=dtype) for _ in range(2))
        weight, out = draw(generator, hidden, dtype=dtype), fp8_like(x, out_dtype)
        before = x.clone()
        precast.rmsnorm_quant(out, x, weight, scale_of(scale), EPS)
        assert_rounded(out, rms(x, weight) / scale)
        total = x.double() + residual.double()
        poison(out)
        precast.fused_add_rmsnorm_quant(out, x, residual, weight, scale_of(scale), EPS)
        assert_rounded(out, rms(total, weight) / scale)
        assert torch.equal(residual, total.to(dtype))
        assert torch.equal(x, before), "the input was changed"


@fp8
def test_layernorm_rounding(out_dtype: torch.dtype, generator: torch.Generator) -> None:
    for hidden in (64, 1000, 4096, 8192, 16385):
        x = draw(generator, 65, hidden)
        gamma, beta = (draw(generator, hidden, dtype=torch.float32) for _ in range(2))
        out = fp8_like(x, out_dtype)
        precast.layernorm_quant(out, x, gamma, beta, scale_of(0.02))
        wide = x.double()
        centred = wide - wide.mean(-1, keepdim=True)
        y = centred / (centred.square().mean(-1, keepdim=True) + EPS).sqrt()
        exact = (y * gamma.double() + beta.double()) / scale_of(0.02).double()
        # The bias may cancel: what is left of the sum is as uncertain as its larger part.
        uncertain = (exact.abs() < 0.05 * (y * gamma.double() / 0.02).abs()) | (exact.abs() < 0.5)
        assert_rounded(out[~uncertain], exact[~uncertain], slack=2.0**-14)
        assert_close(out, exact.clamp(-torch.finfo(out_dtype).max, torch.finfo(out_dtype).max))


@fp8
def test_saturation_and_nan(out_dtype: torch.dtype) -> None:
    limit = torch.finfo(out_dtype).max
    x = torch.ones(5, 256, dtype=BF16, device=DEVICE)
    x[1] *= -1
    x[2, 7] = float("nan")
    x[3, ::2] = 0
    weight, out = torch.ones(256, dtype=BF16, device=DEVICE), fp8_like(x, out_dtype)
    precast.rmsnorm_quant(out, x, weight, scale_of(1e-8))
    got = out.float()
    assert (got[0] == limit).all()
    assert (got[1] == -limit).all()
    assert got[2].isnan().all()
    assert (got[3, ::2] == 0).all()
    assert (got[3, 1::2] == limit).all()
    precast.rmsnorm_quant(out, x, weight, scale_of(1e12))
    assert (out[0].float() == 0).all()


@pytest.mark.parametrize("columns", [8, 1024, 20_000])
@pytest.mark.parametrize("scale", [0.0, 1e-37])
def test_layernorm_saturates_at_the_smallest_scales(scale: float, columns: int) -> None:
    """No product of infinity with what is 0: beta, or an element that is the mean."""
    x = torch.zeros(3, columns, dtype=BF16, device=DEVICE)
    x[:, :4] = torch.tensor([0.01, -0.01, 0.02, -0.02])
    gamma, beta = (f(columns, device=DEVICE) for f in (torch.ones, torch.zeros))
    out = fp8_like(x)
    precast.layernorm_quant(out, x, gamma, beta, scale_of(scale))
    assert (out[:, :4].float() == torch.tensor([448.0, -448.0, 448.0, -448.0], device=DEVICE)).all()
    assert (out[:, 4:].float() == 0).all()


def test_the_scale_is_read_on_the_gpu_at_every_replay(generator: torch.Generator) -> None:
    x, weight, scale = draw(generator, 65, 1024), draw(generator, 1024), scale_of(0.1)
    out = fp8_like(x)
    precast.rmsnorm_quant(out, x, weight, scale)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        precast.rmsnorm_quant(out, x, weight, scale)
    for value in (0.02, 0.5):
        scale.fill_(value)
        poison(out)
        graph.replay()
        assert_rounded(out, rms(x, weight) / scale.double())


def test_other_forms_of_the_scale(generator: torch.Generator) -> None:
    x, weight = draw(generator, 9, 512), draw(generator, 512)
    want, out = fp8_like(x), fp8_like(x)
    precast.rmsnorm_quant(want, x, weight, scale_of(0.25))
    precast.rmsnorm_quant(out, x, weight, scale_of(0.25)[0])
    assert same_bits(out, want)
    poison(out)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.warns(FutureWarning, match="scale as a float is deprecated") as seen:
            precast.rmsnorm_quant(out, x, weight, 0.25)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert seen[0].filename == __file__
    assert same_bits(out, want)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        precast.rmsnorm_quant(out, x, weight, scale_of(0.25))


def test_heads_of_a_packed_tensor(generator: torch.Generator) -> None:
    for head_dim in (64, 80, 128):
        x = packed_slice(
            21, (32, 8, 8), 1, head_dim, dtype=BF16, device=DEVICE, generator=generator
        )
        weight, guard = draw(generator, head_dim), Guarded(x.shape, E4M3, DEVICE, gap=8)
        precast.rmsnorm_quant(guard.view, x, weight, scale_of(0.02))
        assert_rounded(guard.view, rms(x, weight) / scale_of(0.02).double())
        guard.check()


# -- scales by groups -----------------------------------------------------------------------------


def requantized(
    normed: torch.Tensor, column_major: bool, ue8m0: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of a 16-bit tensor by the formula, bit for bit."""
    groups = normed.cpu().float().unflatten(-1, (normed.shape[-1] // 128, 128))
    scale = groups.abs().amax(-1).clamp(min=1e-10)
    scale = scale / torch.full_like(scale, 448.0)
    if ue8m0:
        scale = torch.exp2(torch.ceil(torch.log2(scale.double()))).float()
    codes = (groups * (1.0 / scale).unsqueeze(-1)).clamp(-448.0, 448.0).to(E4M3)
    scale = scale.reshape(-1, scale.shape[-1])
    return codes.reshape(normed.shape), (scale.T if column_major else scale)


def block_quant(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    *,
    column_major: bool = True,
    ue8m0: bool = False,
    normed: bool = True,
    **where: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Codes, logical scales and norm; nothing else is written."""
    rows, groups = x.shape[:-1].numel(), x.shape[-1] // 128
    shape = (groups, -(-rows // 4) * 4) if column_major else (rows, groups)
    out, scales = Guarded(x.shape, E4M3, DEVICE, **where), Guarded(shape, torch.float32, DEVICE)
    norm = Guarded(x.shape, x.dtype, DEVICE, **where)
    precast.fused_add_rmsnorm_fp8_block_quant(
        out.view,
        scales.view,
        norm.view if normed else None,
        x,
        residual,
        weight,
        EPS,
        column_major_scales=column_major,
        scale_ue8m0=ue8m0,
    )
    for guard in (out, scales, norm):
        guard.check("fused_add_rmsnorm_fp8_block_quant")
    if not normed:
        assert norm.view.isnan().all()
    if column_major:
        assert scales.view[:, rows:].isnan().all(), "the padding was written"
        return out.view, scales.view[:, :rows], norm.view if normed else None
    return out.view, scales.view, norm.view if normed else None


@halves
@pytest.mark.parametrize("hidden", HIDDEN)
def test_block_quant_is_the_norm_and_a_quantisation(
    dtype: torch.dtype, hidden: int, generator: torch.Generator
) -> None:
    for rows, column_major, ue8m0 in (
        (1, True, False),
        (6, False, False),
        (133, True, True),
        (4100, True, False),
    ):
        x, start = (draw(generator, rows, hidden, dtype=dtype) for _ in range(2))
        weight = draw(generator, hidden, dtype=dtype)
        residual, before = start.clone(), x.clone()
        codes, scales, normed = block_quant(
            x, residual, weight, column_major=column_major, ue8m0=ue8m0
        )
        assert normed is not None
        assert torch.equal(x, before), "the input was changed"
        wanted, added = x.clone(), start.clone()
        precast.fused_add_rmsnorm(wanted, added, weight, EPS)
        assert torch.equal(residual, added)
        assert torch.equal(normed, wanted), "not the norm of fused_add_rmsnorm"
        want_codes, want_scales = requantized(normed, column_major, ue8m0)
        assert torch.equal(scales.cpu(), want_scales)
        assert same_bits(codes.cpu(), want_codes)
        again = block_quant(x, start, weight, column_major=column_major, ue8m0=ue8m0, normed=False)
        assert same_bits(again[0], codes)
        assert torch.equal(again[1], scales)


@pytest.mark.parametrize("offset", [1, 4, 8])
def test_block_quant_of_strided_and_unaligned_rows(offset: int, generator: torch.Generator) -> None:
    for hidden in (128, 1024, 5120):
        x, residual = draw(generator, 37, hidden), draw(generator, 37, hidden)
        weight = draw(generator, hidden)
        total = x.double() + residual.double()
        x, residual = row_strided(x, gap=offset), row_strided(residual, gap=3, offset=offset)
        codes, scales, normed = block_quant(x, residual, weight, gap=offset, offset=offset)
        assert normed is not None
        assert_close(normed, rms(total, weight))
        assert torch.equal(residual, total.to(BF16))
        want_codes, want_scales = requantized(normed, True, False)
        assert torch.equal(scales.cpu(), want_scales)
        assert same_bits(codes.contiguous().cpu(), want_codes)


def test_block_quant_of_heads(generator: torch.Generator) -> None:
    x = packed_slice(21, (32, 8, 8), 1, 128, dtype=BF16, device=DEVICE, generator=generator)
    residual, weight = draw(generator, *x.shape), draw(generator, 128)
    total = x.double() + residual.double()
    codes, scales, normed = block_quant(x, residual, weight)
    assert normed is not None
    assert_close(normed, rms(total, weight))
    want_codes, want_scales = requantized(normed, True, False)
    assert torch.equal(scales.cpu(), want_scales)
    assert same_bits(codes.cpu(), want_codes)


def test_block_quant_of_zeros_and_nan(generator: torch.Generator) -> None:
    x, residual = draw(generator, 8, 256), draw(generator, 8, 256)
    x[0], residual[0] = 0, 0
    x[1, 3] = float("nan")
    weight = torch.ones(256, dtype=BF16, device=DEVICE)
    weight[128:] = 0
    codes, scales, _ = block_quant(x, residual, weight)
    least = torch.tensor(1e-10) / torch.tensor(448.0)
    assert (codes[0].float() == 0).all()
    assert (scales[:, 0].cpu() == least).all()
    assert (scales[1, 2:].cpu() == least).all()
    assert codes[1].isnan().all()
    assert scales[:, 1].isnan().all()
    assert not codes[2:].isnan().any()


def test_block_quant_over_its_own_input(generator: torch.Generator) -> None:
    x, residual, weight = draw(generator, 40, 512), draw(generator, 40, 512), draw(generator, 512)
    want = block_quant(x, residual.clone(), weight)
    out = fp8_like(x)
    scales = torch.empty(4, 40, device=DEVICE)
    precast.fused_add_rmsnorm_fp8_block_quant(out, scales, x, x, residual, weight, EPS)
    assert same_bits(out, want[0])
    assert torch.equal(scales, want[1])
    assert want[2] is not None
    assert torch.equal(x, want[2])


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.mem_get_info()[0] < 20 << 30,
    reason="needs 20 GiB of free GPU memory",
)
def test_more_than_2_to_31_elements(generator: torch.Generator, free_memory: None) -> None:
    hidden = 4096
    rows = 2**31 // hidden + 9
    x = torch.empty((rows, hidden), dtype=BF16, device="cuda").normal_(generator=generator)
    residual = torch.empty_like(x).normal_(generator=generator)
    weight, out = draw(generator, hidden), torch.empty(x.shape, dtype=E4M3, device="cuda")
    scales = torch.empty(hidden // 128, -(-rows // 4) * 4, device="cuda")
    sample = [0, 1, 2**30 // hidden, 2**31 // hidden - 1, 2**31 // hidden, rows - 1]
    precast.rmsnorm_quant(out, x, weight, scale_of(0.02))
    assert_rounded(out[sample], rms(x[sample], weight) / scale_of(0.02).double())
    total = x[sample].double() + residual[sample].double()
    precast.fused_add_rmsnorm_fp8_block_quant(out, scales, None, x, residual, weight)
    assert torch.equal(residual[sample], total.to(BF16))
    dequantized = out[sample].double().unflatten(-1, (-1, 128)) * scales.T[sample].unsqueeze(-1)
    error = (dequantized.flatten(-2) - rms(total, weight)).abs()
    largest = scales.T[sample].repeat_interleave(128, -1).double() * 448
    assert (error <= largest * 2.0**-4).all()


# -- errors ---------------------------------------------------------------------------------------


def check_error(
    function: Any, kind: type[Exception], words: str, *args: Any, **keywords: Any
) -> None:
    written = [a for a in args if isinstance(a, torch.Tensor)]
    before = [a.flatten().view(torch.uint8).clone() for a in written]
    with pytest.raises(kind, match=words):
        function(*args, **keywords)
    torch.cuda.synchronize()
    for tensor, bits in zip(written, before, strict=True):
        assert torch.equal(tensor.flatten().view(torch.uint8), bits), "an argument was written"


def test_invalid_arguments_of_quantised_norms(generator: torch.Generator) -> None:
    x, weight, scale = draw(generator, 6, 256), draw(generator, 256), scale_of(0.1)
    out = fp8_like(x)
    quant: Any = precast.rmsnorm_quant
    check_error(
        quant, ValueError, "scale must be float32, got bfloat16", out, x, weight, scale.to(BF16)
    )
    check_error(quant, ValueError, "scale must hold one number", out, x, weight, scale.repeat(2))
    check_error(quant, ValueError, "scale must be on cuda", out, x, weight, scale.cpu())
    check_error(quant, UnsupportedConfigError, "dtype_out", out.to(BF16), x, weight, scale)
    check_error(
        quant, TypeError, "out must be a torch.Tensor, got NoneType", None, x, weight, scale
    )
    inside = x.view(torch.uint8).view(E4M3)[:, :256]
    check_error(quant, ValueError, "out must not overlap input's memory", inside, x, weight, scale)
    fused: Any = precast.fused_add_rmsnorm_quant
    residual = x.clone()
    inside = residual.view(torch.uint8).view(E4M3)[:, 256:]
    words = "out must not overlap residual's memory"
    check_error(fused, ValueError, words, inside, x, residual, weight, scale)
    words = "residual must not overlap input's memory"
    check_error(fused, ValueError, words, out, x, x, weight, scale)
    ones = torch.ones(256, device=DEVICE)
    layer: Any = precast.layernorm_quant
    check_error(
        layer, DtypeRuntimeError, "gemma must be float32", out, x, ones.to(BF16), ones, scale
    )
    check_error(
        layer, DtypeRuntimeError, "input must be bfloat16", out, x.float(), ones, ones, scale
    )
    wide = draw(generator, 6, 512)[:, :256]
    check_error(layer, DtypeRuntimeError, "input must be contiguous", out, wide, ones, ones, scale)


def test_invalid_arguments_of_block_quant(generator: torch.Generator) -> None:
    x, residual, weight = draw(generator, 6, 256), draw(generator, 6, 256), draw(generator, 256)
    out, scales = fp8_like(x), torch.zeros(2, 8, device=DEVICE)
    op: Any = precast.fused_add_rmsnorm_fp8_block_quant

    def check(words: str, **changes: Any) -> None:
        made = {
            "out": out,
            "block_scale": scales,
            "normed_out": torch.zeros_like(x),
            "input": x,
            "residual": residual,
            "weight": weight,
        }
        arguments = {**made, **changes}
        check_error(op, ValueError, words, *[arguments.pop(name) for name in made], **arguments)

    words = r"block_scale must have shape \[2, 8\] with column_major_scales .*got \[6, 2\]"
    check(words, block_scale=torch.zeros(6, 2, device=DEVICE))
    words = r"block_scale must have shape \[6, 2\] with column_major_scales=False .*got \[2, 8\]"
    check(words, column_major_scales=False)
    check("block_scale must be float32", block_scale=scales.to(BF16))
    check("block_scale must be contiguous", block_scale=torch.zeros(8, 2, device=DEVICE).T)
    check("out must be float8_e4m3fn, got bfloat16", out=out.to(BF16))
    check("normed_out must not overlap residual's memory", normed_out=residual)
    narrow = [t[..., :192].contiguous() for t in (out, x, x.clone(), residual, weight)]
    check(
        "input's last dimension must be a multiple of 128, got 192",
        **dict(zip(("out", "normed_out", "input", "residual", "weight"), narrow, strict=True)),
    )
