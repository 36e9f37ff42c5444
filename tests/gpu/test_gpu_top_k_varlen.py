# SPDX-License-Identifier: Apache-2.0
"""Top-k of the rows of requests on the GPU: what the reference chooses, at any length and size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from block_calls import Buffer

import precast
from precast.topk import top_k_varlen_reference

DEVICE = "cuda"
DTYPES = (torch.float32, torch.float16, torch.bfloat16)

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=["f32", "f16", "bf16"])


def draw(
    requests: int, next_n: int, size: int, dtype: torch.dtype, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = torch.randn(requests * next_n, size, device=DEVICE, generator=generator).to(dtype)
    lens = torch.randint(-2, size + 9, (requests,), device=DEVICE, generator=generator).int()
    lens[: min(requests, 5)] = torch.tensor([0, 1, size, 2**31 - 1, -(2**31)])[:requests].int()
    return logits, lens


@dtypes
@pytest.mark.parametrize(("requests", "next_n"), [(1, 1), (7, 1), (64, 2), (9, 5), (300, 1)])
@pytest.mark.parametrize(("size", "k"), [(64, 100), (4097, 512), (32000, 2048), (131072, 2048)])
def test_positions_and_values(
    size: int,
    k: int,
    requests: int,
    next_n: int,
    dtype: torch.dtype,
    generator: torch.Generator,
) -> None:
    logits, lens = draw(requests, next_n, size, dtype, generator)
    for ratio in (1, 4):
        numbers = (k, None, ratio, next_n)
        indices = Buffer(len(logits), k, dtype=torch.int32)
        values = Buffer(len(logits), k, dtype=dtype)
        want = top_k_varlen_reference(logits, lens, k, ratio, next_n, True)
        precast.top_k_varlen(
            *(logits, lens, *numbers, True, indices.view, values.view), deterministic=True
        )
        assert torch.equal(indices.view, want[0])
        assert torch.equal(values.view, want[1])
        for buffer in (indices, values):
            buffer.check()
        found, scores = precast.top_k_varlen(logits, lens, *numbers, True)
        at = found.long()
        own = logits.gather(1, at.clamp(min=0)).where(at >= 0, 0)
        assert torch.equal(own, scores)
        assert torch.equal((at >= 0).sum(1), (want[0] >= 0).sum(1))
        # Which of equal scores are chosen is open without `deterministic`.
        assert torch.equal(own.float().sort(dim=1).values, want[1].float().sort(dim=1).values)
        alone, none = precast.top_k_varlen(logits, lens, *numbers, deterministic=True)
        assert none is None and torch.equal(alone, want[0])


@pytest.mark.parametrize("offset", [0, 1, 3])
def test_rows_at_any_address(offset: int, generator: torch.Generator) -> None:
    logits, lens = draw(17, 2, 5000, torch.bfloat16, generator)
    want = top_k_varlen_reference(logits, lens, 64, 1, 2)
    wide = torch.zeros(34, 5010, dtype=torch.bfloat16, device=DEVICE)
    rows = wide[:, offset : offset + 5000].copy_(logits)
    got, _ = precast.top_k_varlen(rows, lens, 64, next_n=2, deterministic=True)
    assert torch.equal(got, want)


def test_special_numbers(generator: torch.Generator) -> None:
    logits, lens = draw(12, 1, 3000, torch.float32, generator)
    logits[:, ::7], logits[:, 1::7], logits[:, 2::7] = torch.nan, -torch.inf, -0.0
    for k in (50, 2000):
        want, _ = top_k_varlen_reference(logits, lens, k, return_values=True)
        got, values = precast.top_k_varlen(logits, lens, k, return_values=True, deterministic=True)
        assert torch.equal(got, want)
        own = logits.gather(1, got.long().clamp(min=0)).where(got >= 0, 0)
        assert torch.equal(values.nan_to_num(9e9), own.nan_to_num(9e9))


def test_nothing_to_do() -> None:
    lens = torch.zeros(0, dtype=torch.int32, device=DEVICE)
    assert precast.top_k_varlen(torch.empty(0, 9, device=DEVICE), lens, 3)[0].shape == (0, 3)
    none = torch.empty(2, 0, device=DEVICE)
    lens = torch.tensor([0, 5], dtype=torch.int32, device=DEVICE)
    indices, values = precast.top_k_varlen(none, lens, 3, return_values=True)
    assert (indices == -1).all() and (values == 0).all()


def test_lengths_of_a_replay(generator: torch.Generator) -> None:
    logits, lens = draw(33, 2, 20000, torch.float32, generator)

    def run() -> tuple[torch.Tensor, Any]:
        return precast.top_k_varlen(
            logits, lens, 512, next_n=2, return_values=True, deterministic=True
        )

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()
    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True)
    for _ in range(3):
        lens.copy_(lens.roll(1))
        want = top_k_varlen_reference(logits, lens, 512, 1, 2, True)
        for tensor in results:
            tensor.fill_(7)
        graph.replay()
        assert all(map(torch.equal, results, want))
        assert all(map(torch.equal, compiled(), want))


def test_errors_leave_outputs_alone(generator: torch.Generator) -> None:
    logits, lens = draw(6, 1, 400, torch.float32, generator)
    indices, values = Buffer(6, 8, dtype=torch.int32), Buffer(6, 8, dtype=torch.float32)
    good = {
        "logits": logits,
        "seq_lens": lens,
        "top_k": 8,
        "return_values": True,
        "out_indices": indices.view,
        "out_values": values.view,
    }
    function: Any = precast.top_k_varlen
    for change, words in (
        ({"logits": logits.cpu()}, "logits must be a CUDA tensor"),
        ({"logits": logits.T.contiguous().T}, "logits must have stride 1 in its last dimension"),
        ({"seq_lens": lens.long()}, "seq_lens must be int32, got int64"),
        ({"seq_lens": lens[1:]}, "logits must have next_n = 1 rows for each of the 5 numbers"),
        ({"next_n": 0}, "next_n must be from 1 to 2147483647, got 0"),
        ({"top_k": 7}, r"out_indices must have shape \[6, 7\], got \[6, 8\]"),
        ({"out_values": values.view.half()}, "out_values must be float32, got float16"),
        ({"out_values": indices.view.view(torch.float32)}, "out_values must not overlap out_ind"),
        ({"out_indices": logits[:, :8].view(torch.int32)}, "out_indices must be contiguous"),
    ):
        with pytest.raises(ValueError, match=f"top_k_varlen: {words}"):
            function(**{**good, **change})
    assert all((buffer.bytes == 0xA5).all() for buffer in (indices, values))
