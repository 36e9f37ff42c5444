# SPDX-License-Identifier: Apache-2.0
"""The MLP block of a decoder, spread over the GPUs of one host.

Each rank has a part of the intermediate columns, so that only one sum over ranks is needed::

    x -> gate and up projection (columns of this rank) -> silu_and_mul
      -> down projection (rows of this rank) -> all-reduce + residual + RMSNorm -> next x

The last step is one kernel, ``allreduce_fusion``. Its result is compared with the whole block in
fp32, and with that of the other ranks, which must have the same bits. With GPUs the block is
captured in a CUDA graph and timed beside NCCL and a separate norm.

Weights are random, in the shapes of a Llama of 8 billion parameters. Run it as ::

    python -m torch.distributed.run --nproc-per-node 2 examples/tensor_parallel_mlp.py

Without a GPU for each process, it runs in reference mode over gloo; pass smaller sizes then.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.nn.functional import linear, silu

import precast
from precast.comm import (
    AllReduceFusionPattern,
    AllReduceFusionWorkspace,
    allreduce_fusion,
    create_allreduce_fusion_workspace,
)

DTYPE = torch.bfloat16
EPS = 1e-5
#: bf16 keeps 8 bits, so each of the roundings between input and output costs about 0.2 %.
TOLERANCE = 1e-2
CALLS = 20  # in a graph


class Block(NamedTuple):
    """Weights of one MLP block; projections are ``[out_features, in_features]``."""

    gate: torch.Tensor  # [intermediate, hidden]
    up: torch.Tensor  # [intermediate, hidden]
    down: torch.Tensor  # [hidden, intermediate]
    next_norm: torch.Tensor  # [hidden], of the next layer's attention


class Shard(NamedTuple):
    """What one rank has of a block."""

    gate_up: torch.Tensor  # [2 * intermediate / world, hidden], gate first
    down: torch.Tensor  # [hidden, intermediate / world]
    next_norm: torch.Tensor  # [hidden]


def random_block(hidden: int, intermediate: int, generator: torch.Generator) -> Block:
    """The weights of all ranks, the same on each of them."""

    def weight(*shape: int) -> torch.Tensor:
        x = torch.randn(shape, generator=generator, device=generator.device)
        return (x * shape[-1] ** -0.5).to(DTYPE)

    gate, up = weight(intermediate, hidden), weight(intermediate, hidden)
    return Block(gate, up, weight(hidden, intermediate), 1 + weight(1, hidden)[0])


def shard_of(block: Block, rank: int, world: int) -> Shard:
    """Columns of gate and up, and the rows of down that they meet."""
    part = slice(rank * len(block.gate) // world, (rank + 1) * len(block.gate) // world)
    gate_up = torch.cat([block.gate[part], block.up[part]])
    return Shard(gate_up, block.down[:, part].contiguous(), block.next_norm)


def partial_mlp(shard: Shard, x: torch.Tensor) -> torch.Tensor:
    """What this rank adds to the sum, ``[tokens, hidden]``."""
    return linear(precast.silu_and_mul(linear(x, shard.gate_up)), shard.down)


def mlp_block(
    shard: Shard, x: torch.Tensor, residual: torch.Tensor, workspace: AllReduceFusionWorkspace
) -> torch.Tensor:
    """Run the block as an engine does: add to ``residual`` in place, return the next input."""
    return allreduce_fusion(
        partial_mlp(shard, x),
        workspace,
        AllReduceFusionPattern.kARResidualRMSNorm,
        launch_with_pdl=True,
        residual_in=residual,
        residual_out=residual,
        rms_gamma=shard.next_norm,
        rms_eps=EPS,
    )


def separate_mlp_block(shard: Shard, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """The same by NCCL and a norm of its own."""
    hidden = partial_mlp(shard, x)
    dist.all_reduce(hidden)
    precast.fused_add_rmsnorm(hidden, residual, shard.next_norm, EPS)
    return hidden


def exact_mlp_block(
    block: Block, x: torch.Tensor, residual: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The whole block in fp32, from the formulas: the next input and the residual."""
    gate, up, down, weight = (tensor.float() for tensor in block)
    total = residual.float() + linear(silu(linear(x.float(), gate)) * linear(x.float(), up), down)
    return total * torch.rsqrt(total.square().mean(-1, keepdim=True) + EPS) * weight, total


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.float() - want).norm() / want.norm())


def has_same_bits(x: torch.Tensor) -> bool:
    """Whether all ranks have the same."""
    parts: list[torch.Tensor] = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x)
    return all(torch.equal(x, part) for part in parts)


def microseconds(call: Callable[[], object]) -> float:
    """The time of a call inside of a graph, the longest of all ranks."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for _ in range(CALLS):
            call()
    times = []
    for _ in range(11):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        dist.barrier()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            graph.replay()  # Ranks that start at different times meet here.
            start.record()
            graph.replay()
            end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1000 / CALLS)
    longest = torch.tensor(sorted(times)[len(times) // 2], device="cuda")
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    del graph
    return float(longest)


def run(args: argparse.Namespace, device: torch.device) -> float:
    """Run the block; print what came out; return the error relative to fp32."""
    rank, world = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator(device).manual_seed(1)
    block = random_block(args.hidden, args.intermediate, generator)
    shard = shard_of(block, rank, world)
    x = torch.randn(args.tokens, args.hidden, generator=generator, device=device).to(DTYPE)
    residual = torch.randn(x.shape, generator=generator, device=device).to(DTYPE)
    workspace = create_allreduce_fusion_workspace(
        world_size=world,
        rank=rank,
        max_token_num=args.tokens,
        hidden_dim=args.hidden,
        dtype=DTYPE,
        group=dist.group.WORLD,
    )
    want, want_residual = exact_mlp_block(block, x, residual)
    added = residual.clone()
    got = mlp_block(shard, x, added, workspace)
    error = max(relative_error(got, want), relative_error(added, want_residual))
    if not (has_same_bits(got) and has_same_bits(added)):
        raise RuntimeError("ranks have different results")
    if rank == 0:
        print(
            f"{world} ranks, {args.tokens} tokens x {args.hidden}, {args.intermediate} "
            f"intermediate, {DTYPE} on {device.type}, all-reduce by {workspace.backend}; "
            f"all ranks have the same bits"
        )
    if device.type == "cuda":
        part = partial_mlp(shard, x)
        times = {
            "block": microseconds(lambda: mlp_block(shard, x, added, workspace)),
            "block with NCCL and a separate norm": microseconds(
                lambda: separate_mlp_block(shard, x, added)
            ),
            "its products alone": microseconds(lambda: part.copy_(partial_mlp(shard, x))),
        }
        for name, time in times.items() if rank == 0 else ():
            print(f"  {name:36} {time:8.1f} us")
    workspace.destroy()
    return error


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--intermediate", type=int, default=14336)
    args = parser.parse_args()
    local_rank, local_world = (int(os.environ[f"LOCAL_{name}"]) for name in ("RANK", "WORLD_SIZE"))
    if torch.cuda.device_count() >= local_world:
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
        error = run(args, device)
    else:
        dist.init_process_group("gloo")
        with precast.reference_mode():
            error = run(args, torch.device("cpu"))
    verdict = "ok" if error <= TOLERANCE else "TOO LARGE"
    if dist.get_rank() == 0:
        print(f"error relative to fp32: {error:.1e} (limit {TOLERANCE:.0e}): {verdict}")
    dist.destroy_process_group()
    return 0 if error <= TOLERANCE else 1


if __name__ == "__main__":
    raise SystemExit(main())
