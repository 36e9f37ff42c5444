# SPDX-License-Identifier: Apache-2.0
"""Run by test_gpu_allreduce_fusion.py: the ranks of a group are streams of one GPU.

One process addresses the buffers of all ranks, so nothing is shared with another process;
everything else is as between GPUs. Arguments: calls for each number of ranks and dtype, replays,
and if wanted a seed, dtypes and numbers of ranks, separated by commas.
"""

from __future__ import annotations

import os
import random
import sys

# A module that is loaded lazily waits for the kernels that run, which wait for this one.
os.environ["CUDA_MODULE_LOADING"] = "EAGER"
# Ranks must not share a queue of the GPU, in which one would wait for another.
os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "32"
os.environ.setdefault("PRECAST_COMM_TIMEOUT", "10")

import torch
from allreduce_cases import Call, Case, draw, make_input, of_rank, same_bits
from ranks_support import run_rank

from precast._ops.comm.peer_buffers import PeerBuffers
from precast._ops.comm.workspace import CONTROL_BYTES, TRTLLMAllReduceFusionWorkspace
from precast.comm import allreduce_fusion

CTAS_WORD = 10  # of the params block


class Ranks:
    """A group of simulated ranks; a grid takes at most ``ctas`` CTAs, so that all fit the GPU."""

    def __init__(self, world: int, dtype: torch.dtype, region: int = 4 << 20) -> None:
        self.world = world
        self.streams = [torch.cuda.Stream() for _ in range(world)]
        size = CONTROL_BYTES + 2 * region
        self.buffers = [
            torch.full((size,), 255, dtype=torch.uint8, device="cuda") for _ in range(world)
        ]
        for buffer in self.buffers:
            buffer[:CONTROL_BYTES] = 0
        addresses = [buffer.data_ptr() for buffer in self.buffers]
        self.workspaces = [
            TRTLLMAllReduceFusionWorkspace(
                world,
                rank,
                1 << 20,
                8192,
                dtype,
                None,
                PeerBuffers(addresses, self.buffers[rank], None, lambda: None),
            )
            for rank in range(world)
        ]

    def limit(self, ctas: int, checks: bool = True) -> None:
        """Limit the grids; compare the ranks' shapes or not."""
        for workspace in self.workspaces:
            workspace.block[CTAS_WORD] = ctas
            workspace.block[5] = int(checks)

    def run(self, calls: list[Call]) -> None:
        """Run a call of each rank."""
        torch.cuda.synchronize()
        for rank in random.sample(range(self.world), self.world):
            with torch.cuda.stream(self.streams[rank]):
                calls[rank].run(self.workspaces[rank])
        torch.cuda.synchronize()

    def assert_restored(self) -> None:
        """Every receive buffer is as it was."""
        for buffer in self.buffers:
            assert bool((buffer[CONTROL_BYTES:] == 255).all()), "a receive buffer was not restored"

    def close(self) -> None:
        """Free the workspaces, the last first."""
        for workspace in reversed(self.workspaces):
            workspace.destroy()


def calls_of(case: Case, world: int, seed: int) -> list[Call]:
    """The same call on each rank, with inputs of its own."""
    calls = []
    for rank in range(world):
        own, common = torch.Generator("cuda"), torch.Generator("cuda")
        own.manual_seed(seed * 8 + rank)
        common.manual_seed(seed)
        mine = of_rank(case, rank)
        calls.append(Call(mine, make_input(mine, own), common))
    return calls


def random_calls(ranks: Ranks, dtype: torch.dtype, count: int) -> None:
    """Random calls against the reference; all ranks have the same bits."""
    for number in range(count):
        case = draw(random, (dtype,))
        calls = calls_of(case, ranks.world, number)
        inputs = [call.input.clone() for call in calls]
        ctas = random.choice((1, 3, 8, 16))
        ranks.limit(ctas, random.random() < 0.5)
        ranks.run(calls)
        what = (ranks.world, number, ctas, case)
        wrong = calls[0].check(inputs)
        assert not wrong, (what, wrong)
        for call in calls[1:]:
            for a, b in zip(calls[0].outputs, call.outputs, strict=True):
                assert same_bits(a, b), (what, "ranks differ")
        ranks.assert_restored()


def graphs(ranks: Ranks, dtype: torch.dtype, replays: int) -> None:
    """A graph of several calls on all ranks, replayed with other calls in between."""
    ranks.limit(8, False)
    cases = [draw(random, (dtype,), 1 << 16)._replace(in_place=0, special="") for _ in range(5)]
    sets = [calls_of(case, ranks.world, 100 + i) for i, case in enumerate(cases)]
    torch.cuda.synchronize()
    captured = []
    for rank, stream in enumerate(ranks.streams):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for calls in sets:
                calls[rank].run(ranks.workspaces[rank])
        captured.append(graph)
    for replay in range(replays):
        for rank, graph in enumerate(captured):
            with torch.cuda.stream(ranks.streams[rank]):
                graph.replay()
        if replay % max(1, replays // 5) == 0:
            torch.cuda.synchronize()
            for calls in sets:
                assert not calls[0].check([call.input for call in calls]), (replay, calls[0].case)
                calls[0].outputs.sums.fill_(float("nan"))
            random_calls(ranks, dtype, 1)
            ranks.limit(8, False)
    torch.cuda.synchronize()
    for calls in sets:
        assert not calls[0].check([call.input for call in calls]), calls[0].case
    ranks.assert_restored()


def two_at_once(dtype: torch.dtype, count: int) -> None:
    """Two groups on the same GPU, launched in opposite orders."""
    groups = [Ranks(2, dtype) for _ in range(2)]
    x = torch.randn(64, 1024, device="cuda").to(dtype)
    for ranks in groups:
        ranks.limit(16, False)
    outs = [[torch.empty_like(x) for _ in range(2)] for _ in groups]
    torch.cuda.synchronize()
    for call in range(count):
        for rank in range(2):
            order = (0, 1) if (rank + call) % 2 else (1, 0)
            for which in order:
                ranks = groups[which]
                with torch.cuda.stream(ranks.streams[rank]):
                    allreduce_fusion(x, ranks.workspaces[rank], 0, output=outs[which][rank])
    torch.cuda.synchronize()
    for of_group in outs:
        for out in of_group:
            assert torch.equal(out, (x.float() * 2).to(dtype))
    for ranks in groups:
        ranks.close()


def main() -> None:
    """Run all."""
    count, replays = int(sys.argv[1]), int(sys.argv[2])
    seed = int(sys.argv[3]) if len(sys.argv) > 3 else 1
    names = sys.argv[4].split(",") if len(sys.argv) > 4 else ("bfloat16",)
    worlds = [int(world) for world in sys.argv[5].split(",")] if len(sys.argv) > 5 else (2, 4, 8)
    random.seed(seed)
    for name in names:
        dtype = getattr(torch, name)
        for world in worlds:
            ranks = Ranks(world, dtype)
            random_calls(ranks, dtype, count)
            if replays:
                graphs(ranks, dtype, replays)
            ranks.close()
            print(f"{world} ranks, {name}: {count} calls, {replays} replays", flush=True)
        if replays:
            two_at_once(dtype, replays)


if __name__ == "__main__":
    run_rank(main, 280)
