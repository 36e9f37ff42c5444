# SPDX-License-Identifier: Apache-2.0
"""Run by test_comm_processes.py under torchrun with four processes, over gloo and without a GPU."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

import precast
from precast.comm import (
    TorchDistBackend,
    create_shared_buffer,
    free_shared_buffer,
    vllm_all_reduce,
    vllm_dispose,
    vllm_init_custom_ar,
    vllm_meta_size,
    vllm_register_buffer,
)

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
BYTES = 1 << 14


def groups() -> None:
    whole = TorchDistBackend()
    assert (whole.Get_rank(), whole.Get_size()) == (RANK, WORLD)
    assert whole.allgather({"rank": RANK}) == tuple({"rank": rank} for rank in range(WORLD))
    assert whole.bcast(f"from {RANK}", 2) == "from 2"
    with pytest.raises(ValueError, match="root must be 0 to 3, got 4"):
        whole.bcast(0, 4)
    # Odd ranks and even ranks, the even ones in reverse order.
    half = whole.Split(RANK % 2, -RANK if RANK % 2 == 0 else 0)
    order = {0: [2, 0], 1: [1, 3]}[RANK % 2]
    assert half.allgather(RANK) == tuple(order)
    assert (half.Get_rank(), half.Get_size()) == (order.index(RANK), 2)
    # A root is a rank of the group, not of the world.
    assert half.bcast(RANK, 1) == order[1]
    # A group of a group, and a group whose members were members of one before.
    assert half.Split(RANK, 0).allgather(RANK) == (RANK,)
    assert whole.Split(RANK % 2, -RANK if RANK % 2 == 0 else 0).allgather(RANK) == tuple(order)
    half.barrier()


def shared_buffers() -> None:
    pairs = TorchDistBackend().Split(RANK // 2, 0)._group
    buffers = create_shared_buffer(BYTES, pairs)
    assert len(buffers) == 2 and all(buffers)
    vllm_sum([*buffers], pairs)
    with pytest.raises(ValueError, match=r"size_in_bytes must be the same .*, got \[64, 80, "):
        create_shared_buffer(64 + 16 * RANK)
    with pytest.raises(ValueError, match="size_in_bytes must be at least 1, got 0"):
        create_shared_buffer(0)
    free_shared_buffer(buffers, pairs)
    with pytest.raises(RuntimeError, match="needs a CUDA device, and torch sees none"):
        free_shared_buffer(buffers, pairs)


def vllm_sum(buffers: list[int], group: object) -> None:
    """The all-reduce in reference mode, many times without a barrier between."""
    rank = dist.get_rank(group)
    signals = create_shared_buffer(vllm_meta_size() + BYTES, group)
    fa = vllm_init_custom_ar(signals, torch.empty(256, dtype=torch.uint8), rank, True)
    x = torch.ones(8)
    out = torch.full((8,), 7.0)
    with pytest.raises(ValueError, match="must be registered"):
        vllm_all_reduce(fa, x, out, buffers[rank], BYTES, 8)
    vllm_register_buffer(fa, buffers)
    for arguments, words in (
        ((fa, x, out, buffers[rank] + 16, BYTES, 8), "must be registered"),
        ((fa, x, out, buffers[rank] + 8, BYTES, 8), "must be a multiple of 16"),
        ((fa, x, out, buffers[rank], 16, 8), "must fit reg_buffer's 16 bytes, got 32"),
        ((fa, x, out, buffers[rank], BYTES, 161), "num_ctas must be 1 to 160, got 161"),
        ((fa, x[:7], out[:7], buffers[rank], BYTES, 8), "multiple of 16 bytes"),
        ((fa, x, out[:4], buffers[rank], BYTES, 8), "inp's 8 elements"),
        ((fa, x, out[::2].expand(2, 4).T, buffers[rank], BYTES, 8), "out must be contiguous"),
        ((fa, x, x, buffers[rank], BYTES, 8), "overlap"),
        ((0, x, out, buffers[rank], BYTES, 8), "fa must be a handle .*, got 0"),
    ):
        with pytest.raises(ValueError, match=words):
            vllm_all_reduce(*arguments)
    assert (out == 7.0).all()
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for step in range(20):
            generator = torch.Generator().manual_seed(step)
            inputs = [torch.randn(5, 16, generator=generator).to(dtype) for _ in buffers]
            result = torch.full_like(inputs[0], float("nan"))
            vllm_all_reduce(fa, inputs[rank], result, buffers[rank], BYTES, 36)
            want = (inputs[0].float() + inputs[1].float()).to(dtype)
            assert torch.equal(result, want), (dtype, step)
    empty = torch.empty(0)
    vllm_all_reduce(fa, empty, torch.empty(0), buffers[rank], BYTES, 36)
    vllm_dispose(fa)
    free_shared_buffer(signals, group)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    groups()
    with precast.reference_mode():
        shared_buffers()
    with pytest.raises(RuntimeError, match=r"process 0: memory .* needs a CUDA device"):
        create_shared_buffer(64)
    dist.destroy_process_group()
    print(f"rank {RANK} is done", flush=True)
