# SPDX-License-Identifier: Apache-2.0
"""Run by test_gpu_custom_all_reduce.py: the ranks of a group are streams of one GPU.

One process addresses the memory of all ranks, so nothing is shared with another process; everything
else is as between GPUs. Arguments: cases for each number of ranks, and replays of each graph. With
``alone`` and a number of calls, one rank runs, for whose barriers all peers have arrived.
"""

from __future__ import annotations

import os
import random
import sys

# A module that is loaded lazily waits for the kernels that run, which wait for this one.
os.environ["CUDA_MODULE_LOADING"] = "EAGER"
os.environ.setdefault("PRECAST_COMM_TIMEOUT", "10")

import torch
from ranks_support import run_rank

from precast._ops.comm import handles
from precast.comm import (
    vllm_all_reduce,
    vllm_dispose,
    vllm_init_custom_ar,
    vllm_meta_size,
    vllm_register_buffer,
)
from precast.testing import Guarded

BYTES = 1 << 20
ONE_SHOT, TWO_SHOT = 1 << 62, 0
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def zeros(size: int) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.uint8, device="cuda")


class Ranks:
    """A group of simulated ranks."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.streams = [torch.cuda.Stream() for _ in range(world)]
        self.signals = [zeros(vllm_meta_size() + BYTES) for _ in range(world)]
        self.buffers = [zeros(BYTES) for _ in range(world)]
        self.tables = [zeros(64 * 64) for _ in range(world)]
        addresses = [signal.data_ptr() for signal in self.signals]
        self.handles = [
            vllm_init_custom_ar(addresses, table, rank, True)
            for rank, table in enumerate(self.tables)
        ]
        self.register(self.buffers)

    def register(self, buffers: list[torch.Tensor]) -> None:
        for handle in self.handles:
            vllm_register_buffer(handle, [buffer.data_ptr() for buffer in buffers])

    def set_strategy(self, one_shot_bytes: int) -> None:
        for handle in self.handles:
            handles.find("test", handle).block[4] = one_shot_bytes

    def run(
        self,
        inputs: list[torch.Tensor],
        outputs: list[torch.Tensor],
        ctas: int,
        copies: bool,
    ) -> None:
        torch.cuda.synchronize()
        order = random.sample(range(self.world), self.world)
        for rank in order:
            buffer = self.buffers[rank].data_ptr() if copies else 0
            with torch.cuda.stream(self.streams[rank]):
                vllm_all_reduce(
                    self.handles[rank], inputs[rank], outputs[rank], buffer, BYTES, ctas
                )
        torch.cuda.synchronize()

    def close(self) -> None:
        for handle in self.handles:
            vllm_dispose(handle)


def expected(inputs: list[torch.Tensor]) -> torch.Tensor:
    total = inputs[0].float()
    for tensor in inputs[1:]:
        total = total + tensor.float()
    return total.to(inputs[0].dtype)


def check(outputs: list[torch.Tensor], want: torch.Tensor, what: object) -> None:
    for rank, out in enumerate(outputs):
        assert torch.equal(out, want), (what, rank, (out != want).sum().item())


def random_calls(ranks: Ranks, cases: int) -> None:
    own = [zeros(BYTES) for _ in range(ranks.world)]
    ranks.register(own)
    for case in range(cases):
        dtype = random.choice(DTYPES)
        vector = 16 // dtype.itemsize
        most = BYTES // dtype.itemsize // vector
        count = vector * random.choice((1, 2, ranks.world - 1, 1023, random.randint(1, most), most))
        ranks.set_strategy(random.choice((ONE_SHOT, TWO_SHOT)))
        copies = bool(random.getrandbits(1))
        values = [torch.randn(count, device="cuda").to(dtype) for _ in range(ranks.world)]
        if not copies:  # The input is a registered buffer.
            values = [
                memory.view(dtype)[:count].copy_(x) for memory, x in zip(own, values, strict=True)
            ]
        guards = [Guarded((count,), dtype, "cuda", gap=0) for _ in range(ranks.world)]
        ctas = random.choice((1, 2, 7, 16))
        ranks.run(values, [guard.view for guard in guards], ctas, copies)
        what = (ranks.world, case, dtype, count, ctas, copies)
        check([guard.view for guard in guards], expected(values), what)
        for guard in guards:
            guard.check()


def replays(ranks: Ranks, count: int) -> None:
    """Graphs of registered and of copied inputs, replayed with other numbers each time."""
    size = 8192
    inputs = [[zeros(2 * size).bfloat16()[:size] for _ in ranks.streams] for _ in range(3)]
    outputs = [[torch.empty_like(x) for x in group] for group in inputs]
    graphs = []
    for rank, stream in enumerate(ranks.streams):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for step, (group, results) in enumerate(zip(inputs, outputs, strict=True)):
                buffer = ranks.buffers[rank].data_ptr() if step == 1 else 0
                vllm_all_reduce(
                    ranks.handles[rank], group[rank], results[rank], buffer, BYTES, 1 + 5 * step
                )
        graphs.append(graph)
    # In one process there is no IPC handle to open: the addresses are those of the other ranks.
    for handle in (handles.find("test", number) for number in ranks.handles):
        assert [address for _, address in handle.captured] == [
            inputs[step][handle.rank].data_ptr() for step in (0, 2)
        ]
        for step, (row, _) in zip((0, 2), handle.captured, strict=True):
            handle.fill_row(row, [x.data_ptr() for x in inputs[step]])
        handle.captured = []
    for replay in range(count):
        if replay % 50 == 0:
            for group in inputs:
                for x in group:
                    x.normal_()
            for group in outputs:
                for x in group:
                    x.fill_(float("nan"))
        torch.cuda.synchronize()
        for graph, stream in zip(graphs, ranks.streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        if replay % 50 == 0:
            torch.cuda.synchronize()
            for group, results in zip(inputs, outputs, strict=True):
                check(results, expected(group), (ranks.world, "replay", replay))
    torch.cuda.synchronize()


def alone(calls: int) -> None:
    """Kernels of one rank, which need no other kernel to run: what sanitizers can see."""
    ever = (1 << 31) - 1
    for world in (2, 4, 6, 8):
        ranks = Ranks(world)
        signals = ranks.signals[0].view(torch.int32)
        for call in range(calls // 4):
            dtype = random.choice(DTYPES)
            vector = 16 // dtype.itemsize
            count = vector * random.choice((1, world + 1, 1000, BYTES // 16))
            two_shot = bool(call & 1)
            copies = bool(call & 2)
            # The flags of all barriers, and none of the counts behind them.
            signals[: 160 * 8] = ever
            ranks.set_strategy(TWO_SHOT if two_shot else ONE_SHOT)
            for buffer, scratch in zip(ranks.buffers, ranks.signals, strict=True):
                buffer.view(dtype)[:count].normal_()
                scratch[vllm_meta_size() :].view(dtype).normal_()
            x = torch.randn(count, device="cuda").to(dtype)
            if not copies:
                x = ranks.buffers[0].view(dtype)[:count]
            guard = Guarded((count,), dtype, "cuda", gap=0)
            own = ranks.buffers[0].data_ptr() if copies else 0
            vllm_all_reduce(ranks.handles[0], x, guard.view, own, BYTES, 7)
            torch.cuda.synchronize()
            guard.check()
            inputs = [x, *(buffer.view(dtype)[:count] for buffer in ranks.buffers[1:])]
            part = count if not two_shot else -(-count // vector // world) * vector
            want = expected(inputs)
            if two_shot:  # Of the other parts, what is in the memory of the peers.
                for peer in range(1, world):
                    rest = want[peer * part : (peer + 1) * part]
                    rest.copy_(ranks.signals[peer][vllm_meta_size() :].view(dtype)[: len(rest)])
            assert torch.equal(guard.view, want), (world, dtype, count, two_shot, copies)
        ranks.close()
    print(f"alone: {calls} calls", flush=True)


def main() -> None:
    if sys.argv[1] == "alone":
        alone(int(sys.argv[2]))
        return
    cases, count = int(sys.argv[1]), int(sys.argv[2])
    seed = int(os.environ.get("PRECAST_TEST_SEED") or int.from_bytes(os.urandom(4), "little"))
    print(f"PRECAST_TEST_SEED={seed}", flush=True)
    random.seed(seed)
    torch.manual_seed(seed)
    for world in (2, 4, 6, 8):
        ranks = Ranks(world)
        random_calls(ranks, cases)
        ranks.set_strategy(ONE_SHOT if world == 4 else TWO_SHOT)
        replays(ranks, count)
        ranks.close()
        print(f"{world} ranks: {cases} calls, {count} replays", flush=True)


if __name__ == "__main__":
    run_rank(main, 280)
