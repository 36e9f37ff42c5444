# SPDX-License-Identifier: Apache-2.0
"""All-reduce of registered buffers, beside FlashInfer's of the same interface and NCCL.

"in place" reads inputs where they are, as graphs of engines do; "copied" copies them to a
registered buffer first, as engines do outside of graphs. Times are taken as by bench_allreduce.py.

    python benchmarks/bench_custom_all_reduce.py --world 2 4 --json custom_all_reduce.json
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from bench_allreduce import KIB, main, rotated, time_in_graph

import precast.comm

CTAS = 36
BYTES = max(KIB) << 10


class Reducer:
    """The handle of one library."""

    def __init__(self, library: ModuleType) -> None:
        self.library = library
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        signals = library.create_shared_buffer(library.vllm_meta_size() + BYTES)
        self.buffers = library.create_shared_buffer(BYTES)
        table = torch.zeros(8 << 20, dtype=torch.uint8, device="cuda")
        self.fa = library.vllm_init_custom_ar(signals, table, self.rank, True)
        library.vllm_register_buffer(self.fa, self.buffers)

    def time(self, xs: list[torch.Tensor], outs: list[torch.Tensor], copies: bool) -> float:
        """Microseconds of a call in a graph."""
        reduce, own = self.library.vllm_all_reduce, self.buffers[self.rank]

        def call(i: int) -> None:
            # What is not captured needs a registered buffer.
            copied = copies or not torch.cuda.is_current_stream_capturing()
            k = i % len(xs)
            reduce(self.fa, xs[k], outs[k], own if copied else 0, BYTES if copied else 0, CTAS)

        return time_in_graph(call, self.register)

    def register(self) -> None:
        handles, offsets = self.library.vllm_get_graph_buffer_ipc_meta(self.fa)
        told: list[Any] = [None] * self.world
        dist.all_gather_object(told, ([*handles], [*offsets]))
        self.library.vllm_register_graph_buffers(
            self.fa, [h for h, _ in told], [o for _, o in told]
        )


def flashinfer() -> dict[str, Reducer]:
    """FlashInfer's, if it is installed."""
    try:
        import flashinfer as package
        import flashinfer.comm as library

        return {} if getattr(package, "__precast__", None) else {"flashinfer": Reducer(library)}
    except Exception as problem:  # A library may raise any exception.
        why = f"{type(problem).__name__}: {problem}".splitlines()[0]
        print(f"without flashinfer: {why}", file=sys.stderr, flush=True)
        return {}


def time_of_nccl(xs: list[torch.Tensor]) -> float:
    return time_in_graph(lambda i: dist.all_reduce(xs[i % len(xs)]))


def rows() -> Iterator[tuple[str, dict[str, float]]]:
    reducers = {"precast": Reducer(precast.comm), **flashinfer()}
    for kib in KIB:
        xs = rotated((kib * 512,))
        outs = [torch.empty_like(x) for x in xs]
        for name, copies in (("in place", False), ("copied", True)):
            found = {key: reducer.time(xs, outs, copies) for key, reducer in reducers.items()}
            found["nccl"] = time_of_nccl(xs)
            yield f"{dist.get_world_size()} GPUs, registered, {name}, {kib} KiB", found


def work(path: Path) -> None:
    """Measure as one rank; the first one writes the records."""
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=torch.device("cuda", rank))
    records = []
    for name, found in rows():
        figures = {f"{key} us": float(f"{value:.4g}") for key, value in found.items()}
        records.append({"name": name, "figures": figures})
        if rank == 0:
            print(name, figures, file=sys.stderr, flush=True)
    if rank == 0:
        path.write_text(json.dumps(records), encoding="utf-8")
    torch.cuda.synchronize()
    dist.barrier()
    os._exit(0)  # Handles of two libraries map each other's memory; the driver takes it all back.


if __name__ == "__main__":
    main(script=Path(__file__).resolve(), measure=work, description=__doc__)
