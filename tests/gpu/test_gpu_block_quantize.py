# SPDX-License-Identifier: Apache-2.0
"""NVFP4, MXFP4 and MXFP8: bit for bit what the references make, in every layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from block_calls import (
    LAYOUTS,
    QUANTIZE,
    Quantize,
    check_kv,
    global_scale,
    numbers,
    same_bits,
)

import precast
from precast import SfLayout
from precast.quantization import (
    fp4_quantize_reference,
    mxfp8_quantize_reference,
    nvfp4_kv_quantize_reference,
    nvfp4_quantize_reference,
)
from precast.testing import packed_slice, row_strided

BF16 = torch.bfloat16
LINEAR = SfLayout.layout_linear
every = pytest.mark.parametrize("op", QUANTIZE, ids=lambda op: op.name)
dtypes = pytest.mark.parametrize("dtype", [torch.float16, BF16], ids=["f16", "bf16"])
layouts = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)


@every
@dtypes
@layouts
@pytest.mark.parametrize("columns", [32, 64, 96, 160, 1024, 7168])
def test_sizes(
    op: Quantize, dtype: torch.dtype, layout: SfLayout, columns: int, generator: torch.Generator
) -> None:
    for rows in (1, 7, 8, 127, 128, 129, 300):
        x = numbers(rows, columns, dtype=dtype, generator=generator, spread=2.0)
        op.check(x, global_scale(x), layout)


@every
@layouts
@pytest.mark.parametrize("shape", [(0, 64), (4, 0), (3, 0, 64), (0, 0)])
def test_empty(op: Quantize, layout: SfLayout, shape: tuple[int, ...]) -> None:
    x = torch.empty(shape, dtype=BF16, device="cuda")
    q, scales = op.call(x, global_scale(x), layout)
    assert q.shape[:-1] == x.shape[:-1]
    assert q.numel() == 0
    assert scales.dtype == torch.uint8


@every
@dtypes
@layouts
@pytest.mark.parametrize(("gap", "offset"), [(8, 0), (1, 0), (0, 1), (24, 3), (2048, 8)])
def test_strided_rows(
    op: Quantize,
    dtype: torch.dtype,
    layout: SfLayout,
    gap: int,
    offset: int,
    generator: torch.Generator,
) -> None:
    for columns in (32, 416):
        x = numbers(130, columns, dtype=dtype, generator=generator, spread=2.0)
        g = global_scale(x)
        op.check(row_strided(x, gap, offset), g, layout)


@every
@layouts
def test_heads_of_a_packed_tensor(
    op: Quantize, layout: SfLayout, generator: torch.Generator
) -> None:
    x = packed_slice(37, (8, 2, 2), 1, 128, dtype=BF16, generator=generator)
    op.check(x, global_scale(x), layout)
    op.check(x.transpose(0, 1), global_scale(x), layout)


@every
@pytest.mark.parametrize("layout", [SfLayout.layout_128x4, LINEAR], ids=lambda v: v.name)
@dtypes
def test_every_16_bit_number(op: Quantize, dtype: torch.dtype, layout: SfLayout) -> None:
    """Beside itself in a block, and beside ones: infinity and NaN of either sign too."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32, device="cuda").to(torch.int16)
    x = bits.view(dtype)
    for g in (1.0, 300.0, 1e-3):
        scale = torch.tensor([g], device="cuda")
        op.check(x.view(-1, 512).contiguous(), scale, layout)
        op.check(x.view(-1, 1).expand(-1, 32).contiguous(), scale, layout)
        with_ones = torch.ones((2**16, 32), dtype=dtype, device="cuda")
        with_ones[:, 5] = x
        op.check(with_ones, scale, layout)


@pytest.mark.parametrize("g", [1e-30, 1e-3, 1.0, 2688.0, 1e6, 1e30, 3e38])
def test_global_scales_that_are_out_of_proportion(g: float, generator: torch.Generator) -> None:
    """The block scales round to zero, are subnormal, or saturate."""
    x = numbers(64, 256, dtype=BF16, generator=generator, spread=12.0)
    for op in QUANTIZE[:2]:
        op.check(x, torch.tensor([g], device="cuda"), LINEAR)


@layouts
def test_a_global_scale_of_each_row(layout: SfLayout, generator: torch.Generator) -> None:
    x = numbers(133, 160, dtype=BF16, generator=generator)
    g = 2688 / x.abs().amax(-1).float()
    for op in QUANTIZE[:2]:
        op.check(x, g, layout)
    one = numbers(1, 64, dtype=BF16, generator=generator)
    QUANTIZE[0].check(one, global_scale(one), layout)


@layouts
def test_an_inverse_global_scale(layout: SfLayout, generator: torch.Generator) -> None:
    x = numbers(40, 96, dtype=BF16, generator=generator)
    tiled, small = layout != LINEAR, layout == SfLayout.layout_8x4
    for g in (1 / global_scale(x), x.abs().amax(-1).float() / 2688):
        got = precast.fp4_quantize(x, g, 16, False, tiled, small, True)
        want = fp4_quantize_reference(x.cpu(), g.cpu(), 16, False, layout < 2, layout == 1, True)
        same_bits(got[0], want[0])
        same_bits(got[1], want[1])


# -- nvfp4_kv_quantize ----------------------------------------------------------------------------


@dtypes
@pytest.mark.parametrize("columns", [16, 32, 48, 64, 128, 160, 7168])
def test_key_values(dtype: torch.dtype, columns: int, generator: torch.Generator) -> None:
    for rows in (1, 7, 129, 300):
        x = numbers(rows, columns, dtype=dtype, generator=generator, spread=2.0)
        g = 1 / global_scale(x)
        check_kv(x, g)
        check_kv(row_strided(x, 8, 0), g)
        check_kv(row_strided(x, 3, 1), g[0])
    x = packed_slice(37, (8, 2, 2), 1, 128, dtype=dtype, generator=generator)
    check_kv(x, 1 / global_scale(x))
    check_kv(x.transpose(0, 1), 1 / global_scale(x))


@dtypes
def test_key_values_of_a_large_dense_input(dtype: torch.dtype, generator: torch.Generator) -> None:
    """Enough for several items a thread."""
    x = numbers(4101, 2048, dtype=dtype, generator=generator, spread=1.0)
    check_kv(x, 1 / global_scale(x))


@dtypes
@pytest.mark.parametrize("g", [1e-38, 1e-30, 1e-3, 1.0, 300.0, 1e30, 3e38])
def test_key_values_of_every_16_bit_number(dtype: torch.dtype, g: float) -> None:
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32, device="cuda").to(torch.int16)
    x, scale = bits.view(dtype), torch.tensor([g], device="cuda")
    check_kv(x.view(-1, 512), scale)
    with_ones = torch.ones((2**16, 16), dtype=dtype, device="cuda")
    with_ones[:, 5] = x
    check_kv(with_ones, scale)


@pytest.mark.parametrize("shape", [(0, 64), (4, 0), (3, 0, 64)])
def test_no_key_values(shape: tuple[int, ...]) -> None:
    x = torch.empty(shape, dtype=BF16, device="cuda")
    q, scales = precast.nvfp4_kv_quantize(x, torch.ones(1, device="cuda"))
    assert q.shape == (*shape[:-1], shape[-1] // 2)
    assert scales.shape == (*shape[:-1], shape[-1] // 16)


def test_key_values_in_frameworks(generator: torch.Generator) -> None:
    """Under torch.compile and in a CUDA graph, replayed with other numbers."""
    x = numbers(3, 5, 64, dtype=BF16, generator=generator)
    g = 1 / global_scale(x)

    def block(x: torch.Tensor, g: torch.Tensor) -> Any:
        q, scales = precast.nvfp4_kv_quantize(x * 2, g)
        return q + 1, scales + 1

    torch._dynamo.reset()
    for got, want in zip(torch.compile(block, fullgraph=True)(x, g), block(x, g), strict=True):
        same_bits(got, want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        q, scales = precast.nvfp4_kv_quantize(x, g)
    for _ in range(3):
        x.copy_(numbers(3, 5, 64, dtype=BF16, generator=generator))
        g.copy_(1 / global_scale(x))
        for result in (q, scales):
            result.fill_(0xA5)
        graph.replay()
        want = nvfp4_kv_quantize_reference(x.cpu(), g.cpu())
        same_bits(q, want[0])
        same_bits(scales, want[1])


@pytest.mark.parametrize(
    ("change", "g", "words"),
    [
        (lambda x: x[:, :-8], 1, "last dimension must be a multiple of 16"),
        (lambda x: x[0], 1, "at least 2 dimensions"),
        (lambda x: x[:, ::2].repeat(1, 2)[:, ::2], 1, "stride 1 in its last dimension"),
        (lambda x: x, 8, "global_scale must hold one number"),
        (lambda x: x.double(), 1, "dtype=torch.float64 is not supported"),
    ],
)
def test_invalid_key_values(change: Any, g: int, words: str) -> None:
    x = change(torch.ones((8, 128), dtype=BF16, device="cuda"))
    with pytest.raises(ValueError, match=words):
        precast.nvfp4_kv_quantize(x, torch.ones(g, device="cuda"))


def test_fp4_quantize_is_mxfp4_too(generator: torch.Generator) -> None:
    x = numbers(133, 160, dtype=BF16, generator=generator)
    for layout in LAYOUTS:
        tiled, small = layout != LINEAR, layout == SfLayout.layout_8x4
        want = precast.mxfp4_quantize(x, sfLayout=layout)
        got = precast.fp4_quantize(x, None, 32, True, tiled, small)
        same_bits(got[0], want[0])
        same_bits(got[1], want[1])
    q, scales = precast.fp4_quantize(x[:128].T, None, 32, True)
    want = precast.mxfp4_quantize(x[:128].T.T)
    same_bits(q.T, want[0])
    same_bits(scales.T, want[1])


def test_a_global_scale_of_another_dtype_or_device(generator: torch.Generator) -> None:
    x = numbers(5, 64, dtype=BF16, generator=generator)
    want = precast.nvfp4_quantize(x, torch.tensor([3.0], device="cuda"))
    for g in (torch.tensor([3.0]), torch.tensor([3.0], dtype=BF16, device="cuda")):
        got = precast.nvfp4_quantize(x, g)
        same_bits(got[0], want[0])
        same_bits(got[1], want[1])


@layouts
@pytest.mark.parametrize(("columns", "alignment"), [(96, 128), (32, 256), (64, 64), (160, 96)])
def test_mxfp8_pads_columns(
    layout: SfLayout, columns: int, alignment: int, generator: torch.Generator
) -> None:
    x = numbers(131, columns, dtype=BF16, generator=generator)
    for rows in (x, row_strided(x, gap=3)):
        got = precast.mxfp8_quantize(rows, alignment=alignment, sf_swizzle_layout=layout)
        want = mxfp8_quantize_reference(x.cpu(), True, alignment, layout)
        same_bits(got[0], want[0])
        same_bits(got[1], want[1])


# -- huge -----------------------------------------------------------------------------------------


@every
@pytest.mark.parametrize("layout", [SfLayout.layout_128x4, LINEAR], ids=lambda v: v.name)
def test_more_than_2_to_31_elements(op: Quantize, layout: SfLayout, free_memory: None) -> None:
    rows, columns = (1 << 16) + 131, 1 << 15
    if torch.cuda.mem_get_info()[0] < 16 << 30:
        pytest.skip("needs 16 GiB of GPU memory")
    x = torch.empty((rows, columns), dtype=BF16, device="cuda").normal_()
    g = torch.tensor([400.0], device="cuda")
    q, scales = op.call(x, g, layout)
    # Whole bands of tiles, so that they can be quantised alone: the first and the padded last.
    for first in (0, rows // 128 * 128):
        part = x[first : first + 128]
        want_q, want_scales = op.call(part, g, layout)
        same_bits(q[first : first + 128], want_q)
        start = first * columns // op.block
        same_bits(scales.flatten()[start : start + want_scales.numel()], want_scales.flatten())
    last = x[-1:].cpu()
    same_bits(q[-1:], op.reference(last, g.cpu(), 2)[0])


# -- errors ---------------------------------------------------------------------------------------


@every
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x: x[:, :-8], "last dimension must be a multiple of"),
        (lambda x: x[0], "at least 2 dimensions"),
        (lambda x: x.new_ones((3, 5, 6, 128))[:, :3:2, ::2], "at most two strides"),
        (lambda x: x[:, ::2].repeat(1, 2)[:, ::2], "stride 1 in its last dimension"),
        (lambda x: x.double(), "dtype=torch.float64 is not supported"),
    ],
)
def test_invalid_inputs(op: Quantize, change: Any, words: str) -> None:
    x = change(torch.ones((8, 128), dtype=BF16, device="cuda"))
    with pytest.raises(ValueError, match=words):
        op.call(x, torch.ones(1, device="cuda"), LINEAR)


def test_invalid_scales_and_layouts() -> None:
    x = torch.ones((8, 128), dtype=BF16, device="cuda")
    with pytest.raises(ValueError, match="a_global_sf must have 1 element, or 8, one a row"):
        precast.nvfp4_quantize(x, torch.ones(7, device="cuda"))
    with pytest.raises(ValueError, match="sfLayout must be 0 "):
        precast.nvfp4_quantize(x, torch.ones(1, device="cuda"), 3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="global_scale must be a tensor unless sf_use_ue8m0"):
        precast.fp4_quantize(x)
    with pytest.raises(ValueError, match="alignment must be a positive multiple of 32, got 40"):
        precast.mxfp8_quantize(x, alignment=40)
    # The next call works.
    same_bits(
        precast.nvfp4_quantize(x, torch.ones(1, device="cuda"))[0],
        nvfp4_quantize_reference(x.cpu(), torch.ones(1))[0],
    )


# -- what engines do ------------------------------------------------------------------------------


@every
@layouts
def test_graph_replays_with_new_data(
    op: Quantize, layout: SfLayout, generator: torch.Generator
) -> None:
    x = numbers(65, 1024, dtype=BF16, generator=generator)
    g = global_scale(x)
    op.call(x, g, layout)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        q, scales = op.call(x, g, layout)
    for _ in range(3):
        x.copy_(numbers(65, 1024, dtype=BF16, generator=generator))
        g.copy_(global_scale(x))
        q.view(torch.uint8).fill_(0xA5)
        scales.fill_(0xA5)
        graph.replay()
        want = op.reference(x.cpu(), g.cpu(), int(layout))
        same_bits(q, want[0])
        same_bits(scales, want[1])


@every
def test_torch_compile(op: Quantize, generator: torch.Generator) -> None:
    x = numbers(33, 512, dtype=BF16, generator=generator)
    g = global_scale(x)

    def block(x: torch.Tensor, g: torch.Tensor) -> Any:
        q, scales = op.call(x * 2, g, SfLayout.layout_128x4)
        return q, scales + 1

    torch._dynamo.reset()
    for got, want in zip(torch.compile(block, fullgraph=True)(x, g), block(x, g), strict=True):
        same_bits(got, want)
    dynamic = torch.compile(block, fullgraph=True, dynamic=True)
    for rows in (5, 64, 129):
        more = numbers(rows, 512, dtype=BF16, generator=generator)
        for got, want in zip(dynamic(more, g), block(more, g), strict=True):
            same_bits(got, want)


@every
def test_early_start_sees_its_input_complete(op: Quantize, generator: torch.Generator) -> None:
    """Behind a kernel that writes the input, with and without the early start, many times."""
    start = numbers(131, 4096, dtype=BF16, generator=generator, spread=1.0)
    x, g = torch.empty_like(start), global_scale(start)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    precast.scale(start, 1.0, out=x, enable_pdl=False)
    want = op.call(x, g, SfLayout.layout_128x4, enable_pdl=False)
    for _ in range(200):
        x.zero_()
        precast.scale(start, 1.0, out=x)
        got = op.call(x, g, SfLayout.layout_128x4, enable_pdl=True)
        for mine, theirs in zip(got, want, strict=True):
            wrong += (mine.view(torch.uint8) != theirs.view(torch.uint8)).sum()
    assert wrong.item() == 0


@every
def test_no_synchronisation(op: Quantize, generator: torch.Generator) -> None:
    x = numbers(64, 1024, dtype=BF16, generator=generator)
    g = global_scale(x)
    op.call(x, g, LINEAR)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(10):
            op.call(x, g, LINEAR)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    grown = torch.cuda.memory_stats()["allocation.all.allocated"] - before
    assert grown == 20, "an output and its scales for each call, and nothing else"


@every
def test_runs_on_the_current_stream(op: Quantize, generator: torch.Generator) -> None:
    x = numbers(512, 4096, dtype=BF16, generator=generator)
    fresh, g = x.clone(), global_scale(x)
    want = op.call(x, g, LINEAR)
    x.zero_()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        x.copy_(fresh)
        got = op.call(x, g, LINEAR)
        assert not stream.query(), "the call waited for the GPU"
    stream.synchronize()
    for mine, theirs in zip(got, want, strict=True):
        same_bits(mine, theirs)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a second CUDA device")
@every
def test_second_device(op: Quantize, generator: torch.Generator) -> None:
    x = numbers(65, 1024, dtype=BF16, generator=generator)
    g = global_scale(x)
    want = op.call(x, g, LINEAR)
    got = op.call(x.to("cuda:1"), g.to("cuda:1"), LINEAR)
    assert torch.cuda.current_device() == 0
    for mine, theirs in zip(got, want, strict=True):
        same_bits(mine.to("cuda:0"), theirs)
