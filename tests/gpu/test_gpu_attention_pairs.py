# SPDX-License-Identifier: Apache-2.0
"""Tiles with the rows of two KV heads, which large batches have where rows of keys are short.

A failure shows its case, whose ``seed`` makes it again.
"""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
import torch
from attention_calls import WORKSPACE_BYTES, call, expected, make, problem
from attention_cases import Case, Space, draw
from plan_layout import shape_word

import precast
from precast._base.device import get_device_sm_count

BF16, F16, E4M3 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
FIRST = int(os.environ.get("PRECAST_TEST_SEED") or int.from_bytes(os.urandom(3), "little"))
SHARDS, CASES = 8, 12
PAGE = 16


@pytest.fixture
def workspace() -> torch.Tensor:
    """May hold anything."""
    return torch.full((WORKSPACE_BYTES,), 0xFF, dtype=torch.uint8, device="cuda")


def fewest(kv_heads: int) -> int:
    """The requests whose pairs of heads are enough for seven of eight CTAs; an SM holds two."""
    ctas = 2 * get_device_sm_count(torch.device("cuda"))
    return -(-7 * ctas // (8 * (kv_heads // 2)))


def planned_heads(wrapper: Any) -> int:
    """The heads that the plan in a workspace counts, which are pairs where tiles have two."""
    return int(wrapper._int_workspace_buffer.view(torch.int32)[shape_word("heads")])


def wide(seed: int) -> Case:
    """A random decode of so many requests that heads may be paired."""
    r = random.Random(seed)
    dims = ((64, 64), (128, 128))
    for more in range(1000):
        case = draw(seed + more, Space(dtypes=(BF16, F16), head_dims=dims))
        if case.kind == "decode":
            break
    if case.head_dim_qk == 128 and r.random() < 0.7:
        case.kv_dtype, case.scales = E4M3, "float"
    case.num_kv_heads, case.group = r.choice(((8, 4), (8, 8), (8, 1), (4, 3), (8, 2), (6, 5)))
    count, each = fewest(case.num_kv_heads) + r.choice((0, 3, 60)), case.q_lens[0]
    top = r.choice((1, 70, 400))
    case.kv_lens = [max(r.randint(0, top), each if each > 1 else 0) for _ in range(count)]
    if r.random() < 0.3:
        case.kv_lens[r.randrange(count)] = 5000
    case.q_lens = [each] * count
    if r.random() < 0.8:
        case.disable_split_kv, case.fixed_split_size = False, None
    return case


@pytest.mark.parametrize("shard", range(SHARDS))
def test_random_decodes_of_many_requests(shard: int, workspace: torch.Tensor) -> None:
    problems = []
    for i in range(CASES):
        case = wide((FIRST + shard << 20) + 2000 * i)
        batch = make(case, "cuda")
        text = problem(case, call(case, batch, workspace), expected(case, batch))
        if text:
            problems.append(text)
    assert problems == []


def planned(count: int, kv_heads: int, workspace: torch.Tensor, **more: Any) -> Any:
    wrapper = precast.BatchDecodeWithPagedKVCacheWrapper(workspace)
    starts = torch.arange(count + 1, dtype=torch.int32, device="cuda")
    last = torch.full((count,), 7, dtype=torch.int32, device="cuda")
    options = {"q_data_type": BF16, "kv_data_type": E4M3, **more}
    wrapper.plan(starts, starts[:-1], last, 4 * kv_heads, kv_heads, 128, PAGE, **options)
    return wrapper


def test_which_plans_have_pairs(workspace: torch.Tensor) -> None:
    enough = fewest(8)
    assert planned_heads(planned(enough, 8, workspace)) == 4
    assert planned_heads(planned(enough - 1, 8, workspace)) == 8
    assert planned_heads(planned(fewest(2), 2, workspace)) == 1
    many = 2 * enough
    assert planned_heads(planned(many, 7, workspace)) == 7
    assert planned_heads(planned(many, 8, workspace, kv_data_type=BF16)) == 8
    assert planned_heads(planned(many, 8, workspace, logits_soft_cap=30.0)) == 8
    assert planned_heads(planned(many, 8, workspace, pos_encoding_mode="ALIBI")) == 8
    assert planned_heads(planned(many, 8, workspace, disable_split_kv=True)) == 8


def filled(count: int, kv_heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    q = torch.randn(count, 4 * kv_heads, 128, device="cuda").to(BF16)
    shape = count, 2, PAGE, kv_heads, 128
    return q, torch.randn(shape, device="cuda").to(E4M3)


def test_options_that_change_behind_a_plan(workspace: torch.Tensor) -> None:
    """Engines set a soft cap after the plan, which no kernel of pairs has."""
    count = fewest(8)
    q, cache = filled(count, 8)
    wrapper = planned(count, 8, workspace)
    assert planned_heads(wrapper) == 4
    plain = wrapper.run(q, cache)
    wrapper._logits_soft_cap = 2.0
    out = wrapper.run(q, cache)
    assert planned_heads(wrapper) == 8
    want = planned(count, 8, torch.empty_like(workspace), logits_soft_cap=2.0).run(q, cache)
    assert torch.equal(out, want)
    assert not torch.equal(out, plain)


@pytest.mark.parametrize("scale", [-0.3, 0.0])
def test_scales_that_are_not_positive(scale: float, workspace: torch.Tensor) -> None:
    count = fewest(8)
    q, cache = filled(count, 8)
    out = planned(count, 8, workspace, sm_scale=scale).run(q, cache)
    want = planned(count, 8, workspace, sm_scale=scale, disable_split_kv=True).run(q, cache)
    torch.testing.assert_close(out.float(), want.float(), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_decodes_without_a_plan(kv_layout: str, generator: torch.Generator) -> None:
    """CTAs that find their work themselves have pairs, too."""
    count, heads, pages = fewest(8) + 5, 8, 6
    lens = torch.randint(0, pages * PAGE + 1, (count,), device="cuda", generator=generator).int()
    table = torch.randperm(count * pages, device="cuda", generator=generator).int()
    shape = (count * pages, PAGE, heads, 128)
    k, v = (torch.randn(shape, device="cuda", generator=generator).to(E4M3) for _ in range(2))
    q = torch.randn(count, 4 * heads, 128, device="cuda", generator=generator).to(BF16)
    memory = torch.zeros(64 << 20, dtype=torch.uint8, device="cuda")
    caches = (k, v) if kv_layout == "NHD" else tuple(t.transpose(1, 2).contiguous() for t in (k, v))
    out = precast.xqa_batch_decode_with_kv_cache(
        q,
        caches,
        memory,
        table.view(count, pages),
        lens,
        pages * PAGE,
        bmm1_scale=0.1,
        kv_layout=kv_layout,
    )
    for i in range(count):
        keys, values = (
            t[table.view(count, pages)[i].long()].flatten(0, 1)[: int(lens[i])].double()
            for t in (k, v)
        )
        logits = torch.einsum("hd,nhd->hn", q[i].double(), keys.repeat_interleave(4, 1)) * 0.1
        want = torch.einsum("hn,nhd->hd", logits.softmax(-1), values.repeat_interleave(4, 1))
        torch.testing.assert_close(out[i].double(), want, rtol=2e-2, atol=2e-2)
