# SPDX-License-Identifier: Apache-2.0
"""The MLA kernels for Hopper: what they promise, beyond the random cases of all MLA kernels."""

from __future__ import annotations

import itertools
import math
import os

import pytest
import torch
from mla_cases import Space, draw, expected, make, problem, run, wrapper_of
from mla_pages import E4M3, Batch

IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = pytest.mark.skipif(not IS_HOPPER, reason="needs compute capability 9.0")

#: The first number of a plan, ScheduleMode::stream_k_by_tiles.
BY_TILES = 2
BF16, F16 = torch.bfloat16, torch.float16
SHARDS, CASES = 10, 40
FIRST = int(os.environ.get("PRECAST_TEST_SEED") or int.from_bytes(os.urandom(3), "little"))
#: Those of profile core, and those that are compiled when they are called.
HEAD_DIMS = [
    (512, 64),
    (512, 0),
    *(pytest.param(dims, marks=pytest.mark.jit) for dims in ((256, 64), (256, 0))),
]
#: Blocks of 64 tokens: none, one that is not full, one, an odd and an even number of them.
LENGTHS = [1, 2, 0, 3, 1, 5, 2, 1, 4], [1, 0, 64, 63, 65, 129, 300, 577, 128]
#: One that is copied in each way: by boxes of 64, 32, 16, 8 and 4 tokens, and by threads.
PAGE_SIZES = 64, 128, 32, 96, 16, 48, 8, 24, 4, 12, 1, 2, 3, 7


def check(batch, got, is_causal, tolerance=1e-2):
    out, lse = got
    want, sums = batch.expected(is_causal)
    scale = max(1.0, want.abs().max().item())
    torch.testing.assert_close(out.double(), want, atol=tolerance * scale, rtol=tolerance)
    torch.testing.assert_close(lse.double(), sums, atol=2e-3, rtol=1e-3)


def call(batch, page_size, generator, is_causal=False):
    wrapper, arguments = batch.wrapper(page_size, generator, "fa3", is_causal)
    assert wrapper._plan.shape.sm90
    return wrapper.run(**arguments, return_lse=True)


@pytest.mark.parametrize("shard", range(SHARDS))
def test_random_cases(shard):
    first = (FIRST + shard) << 20
    print(f"PRECAST_TEST_SEED={FIRST}: seeds from {first} on")
    space = Space(head_dims=((512, 64), (512, 0)), most_kv=20_000)
    workspace = torch.full((256 << 20,), 0xFF, dtype=torch.uint8, device="cuda")
    drawn = (draw(seed, space) for seed in itertools.count(first))
    problems = []
    for case in itertools.islice((c for c in drawn if c.sm_scale > 0), CASES):
        batch = make(case, "cuda")
        wrapper = wrapper_of(case, batch, workspace, "fa3")
        assert wrapper._plan.shape.sm90
        text = problem(case, run(case, batch, wrapper), expected(case, batch))
        if text:
            problems.append(text)
    assert problems == []


@pytest.mark.parametrize("head_dims", HEAD_DIMS, ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("kv_dtype", [BF16, E4M3], ids=str)
def test_page_sizes_do_not_change_a_bit(head_dims, is_causal, kv_dtype, generator):
    batch = Batch(*LENGTHS, generator, heads=40, head_dims=head_dims, kv_dtype=kv_dtype)
    out, lse = call(batch, 64, generator, is_causal)
    check(batch, (out, lse), is_causal)
    for page_size in PAGE_SIZES:
        again, again_lse = call(batch, page_size, generator, is_causal)
        assert torch.equal(again, out), page_size
        assert torch.equal(again_lse, lse), page_size


@pytest.mark.parametrize("heads", [1, 2, 6, 8, 12, 16, 20, 24, 32, 40, 64, 96, 120, 128])
@pytest.mark.parametrize("dtypes", [(F16, F16), (BF16, BF16), (BF16, E4M3)], ids=str)
def test_any_number_of_heads(heads, dtypes, generator):
    """A tile begins in the middle of a token, and its Q is copied in boxes of any height."""
    batch = Batch(*LENGTHS, generator, heads=heads, dtype=dtypes[0], kv_dtype=dtypes[1])
    check(batch, call(batch, 64, generator, is_causal=True), True)


@pytest.mark.parametrize("kv_dtype", [BF16, E4M3], ids=str)
@pytest.mark.parametrize("page_size", [64, 5])
@pytest.mark.parametrize("blocks", range(1, 12))
def test_each_number_of_blocks(blocks, page_size, kv_dtype, generator):
    """Of work tiles that follow one another in a CTA, too: there are many requests."""
    lens = [64 * blocks - i % 64 for i in range(400)]
    batch = Batch([1] * len(lens), lens, generator, heads=16, kv_dtype=kv_dtype)
    check(batch, call(batch, page_size, generator), False)


@pytest.mark.parametrize("kv_dtype", [BF16, E4M3], ids=str)
@pytest.mark.parametrize("heads", [16, 128])
def test_long_requests_are_split(heads, kv_dtype, generator):
    """The same result each time, whatever CTA combines the splits."""
    batch = Batch([1, 3], [30_000, 70], generator, heads=heads, kv_dtype=kv_dtype)
    wrapper, arguments = batch.wrapper(64, generator, "fa3", True)
    first = wrapper.run(**arguments, return_lse=True)
    check(batch, first, True, tolerance=5e-3)
    for _ in range(10):
        again = wrapper.run(**arguments, return_lse=True)
        assert torch.equal(again[0], first[0]) and torch.equal(again[1], first[1])


@pytest.mark.parametrize("count", [64, 40, 33, 20, 8])
@pytest.mark.parametrize("heads", [16, 40, 64])
def test_tiles_of_few_and_of_many_splits(heads, count, generator):
    """CTAs combine whole rows, groups of columns, or parts of such a group, by these numbers."""
    batch = Batch([1] * count, [1300] * count, generator, heads=heads)
    wrapper, arguments = batch.wrapper(64, generator, "fa3", False)
    first = wrapper.run(**arguments, return_lse=True)
    check(batch, first, False)
    for _ in range(3):
        again = wrapper.run(**arguments, return_lse=True)
        assert torch.equal(again[0], first[0]) and torch.equal(again[1], first[1])


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    ("heads", "q_lens"),
    [(128, [4] * 40), (128, [2] * 7), (64, [3] * 66), (96, [1] * 20), (40, [5] * 3), (128, [8])],
    ids=str,
)
def test_tiles_of_a_request_that_run_at_the_same_time(heads, q_lens, is_causal, generator):
    """Requests have equally many tiles, several each."""
    lens = [3000 - 53 * i % 2900 for i in range(len(q_lens))]
    batch = Batch(q_lens, lens, generator, heads=heads)
    wrapper, arguments = batch.wrapper(64, generator, "fa3", is_causal)
    assert wrapper._plan.int_workspace.view(torch.int32)[0].item() == BY_TILES
    first = wrapper.run(**arguments, return_lse=True)
    check(batch, first, is_causal)
    for _ in range(3):
        again = wrapper.run(**arguments, return_lse=True)
        assert torch.equal(again[0], first[0]) and torch.equal(again[1], first[1])


@pytest.mark.parametrize("heads", [64, 128, 192, 256])
@pytest.mark.parametrize("kv_lens", [[1], [64], [65], [300], [4096], [130, 0, 1]], ids=str)
def test_few_tiles_in_clusters(heads, kv_lens, generator):
    """Most CTAs have no work. Where TMA copies, even numbers of tiles of heads run in clusters."""
    batch = Batch([1] * len(kv_lens), kv_lens, generator, heads=heads)
    threads = call(batch, 3, generator)
    check(batch, threads, False)
    wrapper, arguments = batch.wrapper(64, generator, "fa3", False)
    arguments.update(out=torch.empty_like(threads[0]), lse=torch.empty_like(threads[1]))

    def run_all():
        for _ in range(3):  # the next one may start before the one before it has ended
            wrapper.run(**arguments, return_lse=True)

    def assert_same():
        assert torch.equal(arguments["out"], threads[0])
        assert torch.equal(arguments["lse"], threads[1])
        arguments["out"].fill_(math.nan)
        arguments["lse"].fill_(math.nan)

    run_all()
    assert_same()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run_all()
    graph.replay()
    assert_same()


def test_requests_of_different_numbers_of_tiles(generator):
    batch = Batch([4, 1] * 20, [2000] * 40, generator, heads=128)
    wrapper, arguments = batch.wrapper(64, generator, "fa3", True)
    assert wrapper._plan.int_workspace.view(torch.int32)[0].item() != BY_TILES
    check(batch, wrapper.run(**arguments, return_lse=True), True)


def test_requests_without_tokens_between_others(generator):
    """The producer finds the work tiles of such requests long before the consumers come to them."""
    lens = [2000 if i % 6 == 0 else i % 3 for i in range(600)]
    batch = Batch([2] * len(lens), lens, generator, heads=32)
    check(batch, call(batch, 16, generator), False)


@pytest.mark.parametrize("sign", [1, -1])
def test_maxima_that_grow_and_fall(sign, generator):
    """acc_o is rescaled in each block of each consumer, or never again after the first one."""
    batch = Batch([3], [64 * 9 + 5], generator, heads=16)
    steps = torch.linspace(0.05, 3.0, len(batch.rows), device="cuda").unsqueeze(-1)
    steps = steps if sign > 0 else steps.flip(0)
    batch.rows = (batch.rows.float() * steps).to(BF16)
    batch.query = (batch.query.float() * 2).to(BF16)
    check(batch, call(batch, 64, generator), False)


@pytest.mark.parametrize("kv_dtype", [BF16, E4M3], ids=str)
@pytest.mark.parametrize("blocks", range(1, 8))
def test_a_maximum_that_grows_with_each_block(blocks, kv_dtype, generator):
    """Sums of one consumer are rescaled by the maximum of the other, in the last pair, too."""
    batch = Batch([2], [64 * blocks], generator, heads=64, kv_dtype=kv_dtype)
    # The last tokens are the first block. Maxima of blocks are about 12 apart, in base 2.
    steps = torch.arange(blocks, 0, -1, device="cuda").repeat_interleave(64).unsqueeze(-1)
    batch.rows = (batch.rows.float() * steps).to(kv_dtype)
    batch.query = (batch.query.float() * 2).to(BF16)
    check(batch, call(batch, 64, generator), False)


@pytest.mark.parametrize("page_size", [64, 3])
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_scales_of_tokens(dtype, page_size, generator):
    batch = Batch(*LENGTHS, generator, dtype=dtype, kv_dtype=E4M3, has_scales=True)
    check(batch, call(batch, page_size, generator, is_causal=True), True)


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_queries_of_any_size_with_caches_of_e4m3(dtype, generator):
    """They are converted by rows, in which numbers of very different sizes stand side by side."""
    batch = Batch([3, 2], [700, 300], generator, heads=64, dtype=dtype, kv_dtype=E4M3)
    shape = batch.query.shape
    sizes = torch.randint(-12, 1, shape, device="cuda", generator=generator)
    rows = torch.randint(-3, 4, shape[:2], device="cuda", generator=generator)
    batch.query.mul_(torch.exp2(sizes + rows.unsqueeze(-1)).to(dtype))
    batch.query[1] = 0
    check(batch, call(batch, 64, generator, is_causal=True), True)


def test_a_cache_of_one_row_for_all_tokens(generator):
    """TMA cannot read strides of 0, so threads copy."""
    batch = Batch([1], [200], generator, heads=16)
    batch.rows = batch.rows[:1].expand(200, -1)
    wrapper, arguments = batch.wrapper(64, generator, "fa3", False)
    row = batch.rows[:1, None]
    arguments["ckv_cache"] = row[..., :512].expand(7, 64, -1)
    arguments["kpe_cache"] = row[..., 512:].expand(7, 64, -1)
    check(batch, wrapper.run(**arguments, return_lse=True), False)


def test_queries_whose_heads_are_outermost(generator):
    """As a batched product of heads leaves them, for which the strides of TMA must be right."""
    batch = Batch(*LENGTHS, generator, heads=24)
    batch.query = batch.query.transpose(0, 1).contiguous().transpose(0, 1)
    check(batch, call(batch, 64, generator, is_causal=True), True)
