# SPDX-License-Identifier: Apache-2.0
"""Attention of garbage: lengths, plans and masks that are not those of the call.

The exports are called as an engine might call them, past what the wrappers check. Nothing outside
of the outputs may change, every call must end, and what is right of a batch must stay right.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from plan_calls import OPTIONS, launch, options_of, packed

from precast._ops.attention import kernels
from precast._ops.attention.plan import PlanShape, ScoreOptions

BF16, I32 = torch.bfloat16, torch.int32
DIM = 128
MOST = 2**31 - 1
GUARD = 64  # rows before and behind outputs


def indptr(*lengths: int) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to("cuda", I32)


class Call:
    """Ragged requests, with outputs between guards; all of them NaN before a run."""

    def __init__(
        self,
        generator: torch.Generator,
        q_lens: list[int],
        kv_lens: list[int],
        heads: int = 8,
        kv_heads: int = 2,
        dtype_kv: torch.dtype = BF16,
    ) -> None:
        self.q_lens, self.kv_lens, self.generator = q_lens, kv_lens, generator
        self.heads, self.kv_heads, self.dtype_kv = heads, kv_heads, dtype_kv
        self.q = self.random(sum(q_lens), heads).to(BF16)
        self.k, self.v = (self.random(sum(kv_lens), kv_heads).to(dtype_kv) for _ in range(2))
        rows = 2 * GUARD + len(self.q)
        self.outs = torch.full((rows, heads, DIM), math.nan, dtype=BF16, device="cuda")
        self.sums = torch.full((rows, heads), math.nan, device="cuda")
        self.inside = slice(GUARD, GUARD + len(self.q))
        self.given: dict[str, Any] = {
            "qo_indptr": indptr(*q_lens),
            "kv_indptr": indptr(*kv_lens),
            "int_workspace": torch.full((8 << 20,), 0xFF, dtype=torch.uint8, device="cuda"),
            "float_workspace": torch.full((32 << 20,), 0xFF, dtype=torch.uint8, device="cuda"),
        }

    def random(self, tokens: int, heads: int) -> torch.Tensor:
        return torch.randn(tokens, heads, DIM, device="cuda", generator=self.generator)

    def packed(self, fits: bool, **more: Any) -> torch.Tensor:
        """A block of these tensors and, by name, of what differs.

        ``plan_causal`` and ``plan_window_left`` are the plan's; the scores' options have them, too,
        if it ``fits``.
        """
        names = {"causal": "plan_causal", "window_left": "plan_window_left"}
        shape = PlanShape(
            batch_size=len(self.kv_lens),
            num_qo_heads=self.heads,
            num_kv_heads=self.kv_heads,
            head_dim_qk=DIM,
            head_dim_vo=DIM,
            kv_bytes=self.dtype_kv.itemsize,
            block_m=16,
        )
        numbers = {
            name: more.pop(names.get(name, name))
            for name in PlanShape._fields
            if names.get(name, name) in more
        }
        shape = shape._replace(**numbers)
        given = {name: more.pop(name) for name in ScoreOptions._fields if name in more}
        options = options_of(shape, **given) if fits else OPTIONS._replace(**given)
        return packed(shape, options, **{**self.given, **more})

    def plan(self, **more: Any) -> None:
        """Make the plan; a run says again what it is for."""
        ints = more.get("int_workspace", self.given["int_workspace"])
        launch(self.packed(fits=True, **more), ints)

    def run(
        self, out: Any = None, lse: Any = None, **more: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of the rows of out and lse; the guards are as they were."""
        self.outs.fill_(math.nan)
        self.sums.fill_(math.nan)
        out = self.outs[self.inside] if out is None else out
        lse = self.sums[self.inside] if lse is None else lse
        key = BF16, self.dtype_kv, DIM, DIM, torch.cuda.current_device()
        block, none = self.packed(fits=False, **more), (None, None)
        kernels.run_ragged[key](
            *(self.q, self.k, self.v, out, lse, None, block, 1.0, 1.0, *none, True)
        )
        torch.cuda.synchronize()
        for tensor in (self.outs, self.sums):
            outside = torch.cat([tensor[:GUARD], tensor[-GUARD:]])
            assert outside.isnan().all(), "written outside of the outputs"
        return self.outs[self.inside].clone(), self.sums[self.inside].clone()

    def check(self, out: torch.Tensor, lse: torch.Tensor, request: int) -> None:
        """A request's results are right."""
        rows = slice(sum(self.q_lens[:request]), sum(self.q_lens[: request + 1]))
        tokens = slice(sum(self.kv_lens[:request]), sum(self.kv_lens[: request + 1]))
        group = self.heads // self.kv_heads
        q = self.q[rows].float()
        k, v = (x[tokens].float().repeat_interleave(group, 1) for x in (self.k, self.v))
        scores = torch.einsum("nhd,mhd->hnm", q, k) * 0.1
        want = torch.einsum("hnm,mhd->nhd", scores.softmax(-1), v)
        sums = scores.logsumexp(-1).T * math.log2(math.e)
        torch.testing.assert_close(out[rows].float(), want, rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(lse[rows], sums, rtol=1e-3, atol=1e-3)


# -- plans of other calls -------------------------------------------------------------------------


@pytest.mark.parametrize("block_m", [16, 64])
@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 4), (32, 16), (16, 8), (16, 4), (64, 8)])
def test_a_plan_for_other_heads_is_not_followed(
    generator: torch.Generator, block_m: int, heads: int, kv_heads: int
) -> None:
    q_len = 1 if block_m == 16 else 50
    lengths = [q_len] * 4, [160, 160, 160, 9000]
    planned = Call(generator, *lengths, 32, 8)
    planned.plan(block_m=block_m)
    other = Call(generator, *lengths, heads, kv_heads)
    other.given = planned.given
    out, lse = other.run(block_m=block_m)
    assert out.isnan().all()
    assert lse.isnan().all()
    results = planned.run(block_m=block_m)
    for request in range(4):
        planned.check(*results, request)


def test_another_batch_or_window_is_not_followed(generator: torch.Generator) -> None:
    batch = Call(generator, [1, 1, 1], [300, 5000, 20])
    batch.plan()
    fewer = indptr(300, 5020)
    others: tuple[dict[str, Any], ...] = (
        {"kv_indptr": fewer, "qo_indptr": None, "batch_size": 2},
        {"plan_window_left": 64, "window_left": 64},
        {"plan_causal": True, "mask_mode": 1},
    )
    for given in others:
        assert batch.run(**given)[0].isnan().all(), given
    results = batch.run()
    for request in range(3):
        batch.check(*results, request)


def test_a_run_without_any_plan_does_nothing(generator: torch.Generator) -> None:
    batch = Call(generator, [1, 1], [300, 5000])
    for garbage in (0, 0xFF):
        batch.given["int_workspace"].fill_(garbage)
        assert batch.run()[0].isnan().all()


def test_no_partial_result_lies_behind_the_workspace(generator: torch.Generator) -> None:
    batch = Call(generator, [1, 1], [9000, 5000])
    batch.plan()
    floats = batch.given["float_workspace"]
    out, _ = batch.run(float_workspace=floats[: 1 << 16])
    assert out.isnan().all()
    assert (floats == 0xFF).all()
    results = batch.run()
    for request in range(2):
        batch.check(*results, request)


# -- lengths --------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_m", [16, 64])
def test_a_request_of_2_31_tokens_spoils_no_other(generator: torch.Generator, block_m: int) -> None:
    batch = Call(generator, [1, 1], [64, 64])
    batch.given["kv_indptr"] = torch.tensor([0, 64, MOST], dtype=I32, device="cuda")
    batch.plan(block_m=block_m)
    batch.check(*batch.run(block_m=block_m), 0)
    # Of such a length whole tiles take seconds, so these plans alone.
    batch.plan(block_m=block_m, disable_split_kv=True)
    batch.plan(block_m=block_m, fixed_split_size=1 << 20)
    torch.cuda.synchronize()


@pytest.mark.parametrize("block_m", [16, 64])
def test_queries_that_are_not_there_are_not_written(
    generator: torch.Generator, block_m: int
) -> None:
    batch = Call(generator, [5, 3], [64, 100])
    for first in (-5, -MOST, MOST):
        batch.given["qo_indptr"] = torch.tensor([first, 5, 8], dtype=I32, device="cuda")
        batch.plan(block_m=block_m)
        out, lse = batch.run(block_m=block_m)
        assert out[:5].isnan().all()
        batch.check(out, lse, 1)
    far = 0x38000000
    eight = Call(generator, [5], [64], heads=16)
    eight.given["qo_indptr"] = torch.tensor([far, far + 5], dtype=I32, device="cuda")
    eight.plan(block_m=block_m)
    assert eight.run(block_m=block_m)[0].isnan().all()


def test_more_tiles_than_a_word_counts_are_no_plan(generator: torch.Generator) -> None:
    batch = Call(generator, [1] * 65, [64] * 65, heads=2)
    starts = [0, MOST] * 32 + [0, 16]
    batch.given["qo_indptr"] = torch.tensor(starts, dtype=I32, device="cuda")
    batch.plan()
    torch.cuda.synchronize()
    assert batch.run()[0].isnan().all()


# -- masks and windows ----------------------------------------------------------------------------


@pytest.mark.parametrize("block_m", [16, 64])
def test_bits_behind_a_mask_hide(generator: torch.Generator, block_m: int) -> None:
    batch = Call(generator, [20], [100])
    batch.plan(block_m=block_m)
    options: dict[str, Any] = {"block_m": block_m, "mask_mode": 2, "mask_indptr": indptr(250)}
    ones = torch.full((250,), 0xFF, dtype=torch.uint8, device="cuda")
    for size in (0, 1, 77, 249):
        short = ones.clone()
        short[size:] = 0
        want = batch.run(packed_mask=short, **options)
        for x, y in zip(batch.run(packed_mask=ones[:size], **options), want):
            assert torch.equal(x, y)
    options["mask_indptr"] = torch.zeros(2, dtype=I32, device="cuda")
    batch.check(*batch.run(packed_mask=ones, **options), 0)
    for start in (-1000, -(2**31), 250, MOST):
        options["mask_indptr"] = torch.full((2,), start, dtype=I32, device="cuda")
        out, lse = batch.run(packed_mask=ones, **options)
        assert (out == 0).all()
        assert (lse == -math.inf).all()


@pytest.mark.parametrize("block_m", [16, 64])
@pytest.mark.parametrize("cap", [0.0, 50.0])
@pytest.mark.parametrize("q_len", [100, 300])
def test_the_widest_window_hides_nothing(
    generator: torch.Generator, block_m: int, cap: float, q_len: int
) -> None:
    batch = Call(generator, [q_len], [200])
    options: dict[str, Any] = {"block_m": block_m, "logits_soft_cap": cap}
    batch.plan(block_m=block_m)
    want = batch.run(**options)
    for window in (MOST, MOST - 1, MOST - 250):
        for x, y in zip(batch.run(window_left=window, **options), want):
            assert torch.equal(x, y), window


# -- NaN ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_m", [16, 64])
@pytest.mark.parametrize("dtype_kv", [BF16, torch.float8_e4m3fn])
@pytest.mark.parametrize("kv_len", [40, 9000])
def test_nan_remains_nan(
    generator: torch.Generator, block_m: int, dtype_kv: torch.dtype, kv_len: int
) -> None:
    batch = Call(generator, [3], [kv_len], dtype_kv=dtype_kv)
    batch.plan(block_m=block_m)
    batch.q[1, 5, 17] = math.nan
    out, lse = batch.run(block_m=block_m)
    assert out[1, 5].isnan().all()
    assert lse[1, 5].isnan()
    batch.q[1, 5, 17] = 0.0
    right = batch.run(block_m=block_m)
    batch.check(*right, 0)
    out[1, 5], lse[1, 5] = right[0][1, 5], right[1][1, 5]
    assert torch.equal(out, right[0])
    assert torch.equal(lse, right[1])
    if dtype_kv == BF16:
        batch.k[kv_len // 2, 1, 3] = math.nan
        out, lse = batch.run(block_m=block_m)
        assert out[:, 4:].isnan().all()
        assert lse[:, 4:].isnan().all()
        assert torch.equal(out[:, :4], right[0][:, :4])


# -- what is rejected -----------------------------------------------------------------------------


def test_tensors_that_overlap_are_rejected(generator: torch.Generator) -> None:
    batch = Call(generator, [8, 8], [64, 64])
    batch.plan()
    ints, floats = batch.given["int_workspace"], batch.given["float_workspace"]
    count = batch.q.numel()

    def lse_over(tensor: torch.Tensor) -> torch.Tensor:
        bits = tensor.view(-1)[: 4 * 16 * 8 // tensor.element_size()]
        return bits.view(torch.float32).view(16, 8)

    def out_over(workspace: torch.Tensor) -> torch.Tensor:
        return workspace[: 2 * count].view(BF16).view(batch.q.shape)

    before = batch.outs.clone()
    for given, message in (
        ({"out": batch.q}, "out must not overlap q's memory"),
        ({"out": out_over(floats)}, "out must not overlap float_workspace's memory"),
        ({"out": out_over(ints)}, "out must not overlap int_workspace's memory"),
        ({"lse": lse_over(batch.q)}, "lse must not overlap q's memory"),
        ({"lse": lse_over(batch.k)}, "lse must not overlap k's memory"),
        ({"lse": lse_over(batch.v)}, "lse must not overlap v's memory"),
        ({"lse": lse_over(batch.outs[batch.inside])}, "lse must not overlap out's memory"),
        ({"lse": lse_over(floats)}, "lse must not overlap float_workspace's memory"),
        ({"lse": lse_over(ints)}, "lse must not overlap int_workspace's memory"),
        ({"float_workspace": ints}, "float_workspace must not overlap int_workspace's memory"),
    ):
        with pytest.raises(ValueError, match=message):
            batch.run(**given)
    with pytest.raises(ValueError, match="float_workspace must not overlap int_workspace's memory"):
        batch.plan(float_workspace=ints[16:])
    assert torch.equal(before.view(torch.int16), batch.outs.view(torch.int16))


@pytest.mark.parametrize(
    ("planned", "run", "message"),
    [
        ({"plan_causal": True}, {"plan_causal": True}, "mask_mode must be causal"),
        ({"plan_window_left": 9}, {"plan_window_left": 9}, "window_left must be 0 to 9"),
        ({"plan_window_left": 9}, {"plan_window_left": 9, "window_left": 10}, "the wider window"),
        ({}, {"pos_encoding": 1, "rope_scale": 0.0}, "rope_scale and rope_theta must be positive"),
        ({}, {"pos_encoding": 1, "rope_theta": -1.0}, "rope_scale and rope_theta must be positive"),
        ({}, {"qo_indptr": torch.zeros(3, dtype=torch.int64)}, "qo_indptr"),
    ],
)
def test_a_run_that_its_plan_does_not_cover_is_rejected(
    generator: torch.Generator, planned: dict[str, Any], run: dict[str, Any], message: str
) -> None:
    batch = Call(generator, [8, 8], [64, 64])
    batch.plan(**planned)
    with pytest.raises(ValueError, match=message):
        batch.run(**{name: _on_device(value) for name, value in run.items()})
    assert batch.outs.isnan().all()


def _on_device(value: Any) -> Any:
    return value.cuda() if isinstance(value, torch.Tensor) else value
