# SPDX-License-Identifier: Apache-2.0
"""Packed bits against numpy, of arrays and of segments, at any address."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from block_calls import Buffer, same_bits

import precast
from precast._op.dispatch import kernels

ORDERS = ("big", "little")
orders = pytest.mark.parametrize("order", ORDERS)


def bits(count: int, generator: torch.Generator, offset: int = 0) -> torch.Tensor:
    drawn = torch.rand(count + offset, device="cuda", generator=generator) < 0.5
    return drawn[offset:]


def packed(x: torch.Tensor, order: str) -> torch.Tensor:
    return torch.from_numpy(np.packbits(x.bool().cpu().numpy(), bitorder=order))


def packed_segments(x: torch.Tensor, bounds: list[int], order: str) -> torch.Tensor:
    parts = [packed(x[a:b], order) for a, b in itertools.pairwise(bounds)]
    return torch.cat([*parts, torch.empty(0, dtype=torch.uint8)])


@orders
@pytest.mark.parametrize(
    "count", [0, 1, 7, 8, 9, 15, 16, 17, 31, 4096, 8191, 8192, 8193, 100003, 1 << 20]
)
def test_counts(count: int, order: str, generator: torch.Generator) -> None:
    for offset in (0, 1, 3, 8, 13):
        x = bits(count, generator, offset)
        same_bits(precast.packbits(x, order), packed(x, order))
        out = Buffer((count + 7) // 8)
        kernels()["packbits"][(0,)](x, out.view, order == "little", True)
        same_bits(out.view, packed(x, order))
        out.check()


@orders
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32, torch.float16])
def test_any_value_but_zero_is_true(
    dtype: torch.dtype, order: str, generator: torch.Generator
) -> None:
    x = torch.randint(-2, 3, (1003,), device="cuda", generator=generator).to(dtype)
    every = torch.arange(256, device="cuda").to(torch.uint8)
    for values in (x, every, every.flip(0)[1:]):
        same_bits(precast.packbits(values, order), packed(values, order))


def test_an_output_at_an_odd_address(generator: torch.Generator) -> None:
    x = bits(4099, generator)
    memory = torch.zeros(600, dtype=torch.uint8, device="cuda")
    kernels()["packbits"][(0,)](x, memory[1:514], False, True)
    same_bits(memory[1:514], packed(x, "big"))
    assert not memory[514:].any()
    assert memory[0] == 0


def test_more_than_2_to_31_values(free_memory: None) -> None:
    count = (1 << 31) + 1029
    if torch.cuda.mem_get_info()[0] < 8 << 30:
        pytest.skip("needs 8 GiB of GPU memory")
    x = torch.zeros(count, dtype=torch.bool, device="cuda")
    x[-1029:] = torch.rand(1029, device="cuda") < 0.5
    x[:8] = True
    y = precast.packbits(x, "little")
    assert y.numel() == (count + 7) // 8
    assert y[0] == 255
    assert not y[1 : 1 << 28].any()
    same_bits(y[1 << 28 :], packed(x[1 << 31 :], "little"))


# -- segments -------------------------------------------------------------------------------------


def random_bounds(count: int, longest: int, generator: torch.Generator) -> list[int]:
    """Many empty segments among them."""
    lengths = torch.randint(-longest, longest + 1, (count,), device="cuda", generator=generator)
    return [0, *lengths.clamp(min=0).cumsum(0).tolist()]


@orders
@pytest.mark.parametrize("kind", [torch.int32, torch.int64], ids=["i32", "i64"])
@pytest.mark.parametrize(
    ("count", "longest"),
    [(1, 5), (1, 100000), (3, 17), (40, 9), (200, 4000), (3000, 3), (5000, 90)],
)
def test_segments(
    count: int, longest: int, kind: torch.dtype, order: str, generator: torch.Generator
) -> None:
    bounds = random_bounds(count, longest, generator)
    for offset in (0, 5):
        x = bits(bounds[-1] + 3, generator, offset)
        indptr = torch.tensor(bounds, dtype=kind, device="cuda")
        want = packed_segments(x, bounds, order)
        y, starts = precast.segment_packbits(x, indptr, order)
        same_bits(y, want)
        lengths = [(b - a + 7) // 8 for a, b in itertools.pairwise(bounds)]
        assert starts.dtype == torch.int32
        assert starts.tolist() == [0, *itertools.accumulate(lengths)]
        out = Buffer(len(want) + 77)
        given, again = precast.segment_packbits(x, indptr, order, out=out.view)
        assert given is out.view
        assert torch.equal(again, starts)
        same_bits(out.view[: len(want)], want)
        assert (out.view[len(want) :] == 0xA5).all(), "what is behind is left as it is"
        out.check()
        if len(want) > 1:
            short = Buffer(len(want) - 1)
            precast.segment_packbits(x, indptr, order, out=short.view)
            same_bits(short.view, want[:-1])
            short.check()


@pytest.mark.parametrize("offset", [0, 3])
@orders
@pytest.mark.parametrize(
    "lengths",
    [
        [12_000_003, 17, 0, 2049, 4096, 5000, 20_000_000, 9_999, 6_000_001, 0],
        [0, *(number * 7919 % 260_003 for number in range(300)), 3],
        [number * 911 % 14_009 for number in range(7000)],
    ],
    ids=["few", "hundreds", "thousands"],
)
def test_large_segments(
    lengths: list[int], order: str, offset: int, generator: torch.Generator
) -> None:
    """Whole spans of a warp, their halves, and ends: by warps of their own, or many in a span."""
    bounds = list(itertools.accumulate(lengths, initial=0))
    x = bits(bounds[-1], generator, offset)
    want = packed_segments(x, bounds, order)
    out = torch.full((len(want) + offset + 300,), 0xA5, dtype=torch.uint8, device="cuda")
    view = out[offset:]
    precast.segment_packbits(x, torch.tensor(bounds, device="cuda"), order, out=view)
    same_bits(view[: len(want)], want)
    assert (view[len(want) :] == 0xA5).all()
    assert (out[:offset] == 0xA5).all()
    view.fill_(0xA5)
    short = view[: len(want) - 1000]
    precast.segment_packbits(x, torch.tensor(bounds, device="cuda"), order, out=short)
    same_bits(short, want[:-1000])
    assert (view[len(want) - 1000 :] == 0xA5).all()


def test_segments_that_start_late(generator: torch.Generator) -> None:
    x = bits(100, generator)
    bounds = [11, 30, 30, 77]
    y, starts = precast.segment_packbits(x, torch.tensor(bounds, device="cuda"), "little")
    same_bits(y, packed_segments(x, bounds, "little"))
    assert starts.tolist() == [0, 3, 3, 9]


def test_no_segment_and_no_value() -> None:
    x = torch.zeros(0, dtype=torch.bool, device="cuda")
    y, starts = precast.segment_packbits(x, torch.tensor([0], device="cuda"))
    assert (y.numel(), starts.tolist()) == (0, [0])
    y, starts = precast.segment_packbits(x, torch.zeros(5, dtype=torch.int32, device="cuda"))
    assert (y.numel(), starts.tolist()) == (0, [0] * 5)


def test_a_wrong_indptr_reads_nothing_outside(generator: torch.Generator) -> None:
    """It is not legal; what comes out is of x, or zero."""
    x = torch.ones(64, dtype=torch.bool, device="cuda")
    out = torch.zeros(64, dtype=torch.uint8, device="cuda")
    precast.segment_packbits(x, torch.tensor([0, 200], device="cuda"), out=out)
    assert out[:8].tolist() == [255] * 8
    assert not out[8:].any()


def test_masks_of_an_engine(generator: torch.Generator) -> None:
    """Flattened qo_len x kv_len masks, as attention with a custom mask takes them."""
    lengths = [(1, 1001), (17, 333), (128, 4097), (5, 8)]
    masks = [torch.rand(q, kv, device="cuda", generator=generator) < 0.7 for q, kv in lengths]
    flat = torch.cat([mask.flatten() for mask in masks])
    sizes = torch.tensor([0, *(q * kv for q, kv in lengths)], dtype=torch.int32, device="cuda")
    y, starts = precast.segment_packbits(flat, sizes.cumsum(0).to(torch.int32), "little")
    for mask, start in zip(masks, starts.tolist()):
        flags = mask.flatten().cpu().numpy()
        got = np.unpackbits(y[start:].cpu().numpy(), count=len(flags), bitorder="little")
        assert (got == flags).all()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (lambda x, i: (x.view(2, 32), i), "segment_packbits: x must have 1 dimension"),
        (lambda x, i: (x[::2], i), "segment_packbits: x must be contiguous, got strides"),
        (lambda x, i: (x, i.float()), "indptr must be int32 or int64, got float32"),
        (lambda x, i: (x, i.cpu()), "indptr must be on cuda:0 as x, got cpu"),
        (lambda x, i: (x, i[:0]), r"indptr must have 1 to 2\^30 elements"),
        (lambda x, i: (x, i, "big", x.float()), "out must be uint8, got float32"),
        (lambda x, i: (x, i, "big", x.view(torch.uint8)), "out must not overlap x's memory"),
        (lambda x, i: (x, i, "middle"), "bitorder must be 'big' or 'little', got 'middle'"),
    ],
)
def test_invalid_arguments(arguments: Any, words: str) -> None:
    x = torch.ones(64, dtype=torch.bool, device="cuda")
    indptr = torch.tensor([0, 10, 64], device="cuda")
    with pytest.raises(ValueError, match=words):
        precast.segment_packbits(*arguments(x, indptr))


def test_graph_and_compile(generator: torch.Generator) -> None:
    indptr = torch.tensor([0, 100, 100, 2000, 4001], dtype=torch.int32, device="cuda")
    out = torch.zeros(600, dtype=torch.uint8, device="cuda")
    x = bits(4001, generator)

    def block(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (
            precast.packbits(x, "little"),
            *precast.segment_packbits(x, indptr, "little", out=out.zero_()),
        )

    want = [t.clone() for t in block(x)]
    torch._dynamo.reset()
    for got, theirs in zip(torch.compile(block, fullgraph=True)(x), want, strict=True):
        same_bits(got, theirs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = block(x)
    x.copy_(bits(4001, generator))
    graph.replay()
    got = [t.clone() for t in outputs]
    for mine, theirs in zip(got, block(x), strict=True):
        same_bits(mine, theirs)


def test_no_synchronisation_with_out(generator: torch.Generator) -> None:
    x, indptr = bits(4096, generator), torch.tensor([0, 50, 4096], device="cuda")
    want = packed_segments(x, indptr.tolist(), "big")
    out = torch.zeros(600, dtype=torch.uint8, device="cuda")
    precast.segment_packbits(x, indptr, out=out)
    out.zero_()
    torch.cuda.set_sync_debug_mode("error")
    try:
        precast.segment_packbits(x, indptr, out=out)
        whole = precast.packbits(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(out[: len(want)].cpu(), want)
    assert torch.equal(whole.cpu(), packed(x, "big"))


def test_early_start_sees_its_input_complete(generator: torch.Generator) -> None:
    x = bits(1 << 18, generator).to(torch.uint8)
    indptr = torch.tensor([0, 1000, 1 << 17, 1 << 18], dtype=torch.int32, device="cuda")
    want = packed_segments(x, indptr.tolist(), "big").cuda()
    source, out = x.clone(), torch.zeros_like(want)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(200):
        x.zero_()
        x.copy_(source)
        precast.segment_packbits(x, indptr, out=out)
        wrong += (out != want).sum()
    assert wrong.item() == 0


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a second CUDA device")
def test_second_device(generator: torch.Generator) -> None:
    x, indptr = bits(4001, generator), torch.tensor([0, 50, 4001], device="cuda")
    want = precast.segment_packbits(x, indptr)
    got = precast.segment_packbits(x.to("cuda:1"), indptr.to("cuda:1"))
    assert torch.cuda.current_device() == 0
    for mine, theirs in zip(got, want, strict=True):
        same_bits(mine.to("cuda:0"), theirs)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a second CUDA device")
@orders
def test_one_array_on_a_second_device(order: str, generator: torch.Generator) -> None:
    x = bits(4001, generator)
    got = precast.packbits(x.to("cuda:1"), order)
    assert torch.cuda.current_device() == 0
    assert got.device == torch.device("cuda:1")
    same_bits(got.cpu(), packed(x, order))


def test_segments_of_more_than_2_to_31_values(free_memory: None) -> None:
    """The last segment starts behind 2^31 and ends within a byte."""
    count, start = (1 << 31) + 5003, (1 << 31) + 11
    if torch.cuda.mem_get_info()[0] < 8 << 30:
        pytest.skip("needs 8 GiB of GPU memory")
    x = torch.zeros(count, dtype=torch.bool, device="cuda")
    x[-6000:] = torch.rand(6000, device="cuda") < 0.5
    bounds = [0, 5, start, count]
    y, starts = precast.segment_packbits(x, torch.tensor(bounds, device="cuda"))
    lengths = [(b - a + 7) // 8 for a, b in itertools.pairwise(bounds)]
    assert starts.tolist() == [0, *itertools.accumulate(lengths)]
    assert y.numel() == sum(lengths)
    same_bits(y[lengths[0] + lengths[1] :], packed(x[start:], "big"))
    assert not y[: 1 << 27].any()
    tail = 5 + (start - 5) // 8 * 8 - 4096  # From a byte of the second segment on.
    begin = lengths[0] + (tail - 5) // 8
    same_bits(y[begin : lengths[0] + lengths[1]], packed(x[tail:start], "big"))


def test_more_bytes_than_int32_counts_are_an_error(free_memory: None) -> None:
    if torch.cuda.mem_get_info()[0] < 18 << 30:
        pytest.skip("needs 18 GiB of GPU memory")
    x = torch.empty((1 << 34) + 1, dtype=torch.bool, device="cuda")
    indptr = torch.tensor([0, 8, x.numel()], device="cuda")
    out = torch.full((16,), 7, dtype=torch.uint8, device="cuda")
    for given in (None, out):
        with pytest.raises(ValueError, match=r"at most 2\^31 - 1 bytes, got 17179869185 values"):
            precast.segment_packbits(x, indptr, out=given)
    assert (out == 7).all()
