# SPDX-License-Identifier: Apache-2.0
"""All-reduce between GPUs of one host, alone and fused, beside NCCL, torch and FlashInfer.

Every figure is the median time of a call in a CUDA graph of 20 calls, of the slowest rank; a replay
before aligns the ranks. Calls rotate over tensors that together exceed the L2 cache, where
the messages are large enough. torch's symmetric memory reduces tensors that lie in it already; all
others take tensors of the caching allocator.

The links bound large messages: with two GPUs each byte of a message crosses them once in each
direction, with more 2 (world - 1) / world times. "link" is that bound at the rate of copies of 256
MB to a peer in both directions at once.

    python benchmarks/bench_allreduce.py --world 2 4 --json allreduce.json
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import precast
from precast.comm import AllReduceFusionPattern as Pattern
from precast.comm import allreduce_fusion, create_allreduce_fusion_workspace
from precast.testing import environment, report

HERE = Path(__file__).resolve()
CALLS, REPLAYS = 20, 15
KIB = (8, 64, 256, 512, 1024, 2048, 8192, 32768)
FUSED = ((1, 8192), (8, 8192), (32, 8192), (64, 8192), (8, 4096), (128, 4096), (2048, 8192))
POOL = 192 << 20  # bytes of inputs that calls rotate over
EPS = 1e-6

Call = Callable[[int], Any]


def time_in_graph(call: Call, captured: Callable[[], None] = lambda: None) -> float:
    """Microseconds of a call; the slowest rank's. ``captured`` runs after the capture."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for i in range(CALLS):
            call(i)
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for i in range(CALLS):
            call(i)
    captured()
    found = []
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            graph.replay()
            begin.record()
            graph.replay()
            end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end) * 1e3 / CALLS)
    slowest = torch.tensor(statistics.median(found), device="cuda")
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


def times(calls: dict[str, Call]) -> dict[str, float]:
    """The microseconds of each; those that fail on any rank are left out."""
    found = {}
    for name, call in calls.items():
        try:
            call(0)
            torch.cuda.synchronize()
            failed, why = 0, ""
        except Exception as problem:  # A library may raise any exception.
            failed, why = 1, f"{type(problem).__name__}: {problem}".splitlines()[0]
        flag = torch.tensor(failed, device="cuda")
        dist.all_reduce(flag)
        if int(flag):
            print(f"without {name}: {why}", file=sys.stderr, flush=True)
            continue
        found[name] = time_in_graph(call)
    return found


def link_rate() -> float:
    """GB/s of copies to the next GPU, while another one copies to this one."""
    size = 256 << 20
    import torch.distributed._symmetric_memory as symmetric_memory

    target = symmetric_memory.empty(size, dtype=torch.uint8, device="cuda")
    handle = symmetric_memory.rendezvous(target, dist.group.WORLD.group_name)
    peer = (dist.get_rank() + 1) % dist.get_world_size()
    theirs = handle.get_buffer(peer, (size,), torch.uint8)
    source = torch.zeros(size, dtype=torch.uint8, device="cuda")
    return size / time_in_graph(lambda _: theirs.copy_(source)) * 1e-3


def rotated(shape: tuple[int, ...]) -> list[torch.Tensor]:
    count = max(1, min(CALLS, POOL // (torch.Size(shape).numel() * 2)))
    return [torch.randn(shape, device="cuda").bfloat16() for _ in range(count)]


@functools.cache
def flashinfer_workspace() -> tuple[Any, Any]:
    """FlashInfer's module and a workspace of its own; None if it is not installed."""
    try:
        import flashinfer
        import flashinfer.comm as other

        if getattr(flashinfer, "__precast__", None):
            return None, None
        workspace = other.create_allreduce_fusion_workspace(
            backend="trtllm",
            world_size=dist.get_world_size(),
            rank=dist.get_rank(),
            max_token_num=2048,
            hidden_dim=8192,
            dtype=torch.bfloat16,
        )
    except Exception as problem:  # A library may raise any exception.
        why = f"{type(problem).__name__}: {problem}".splitlines()[0]
        print(f"without flashinfer: {why}", file=sys.stderr, flush=True)
        return None, None
    return other, workspace


def flashinfer_calls(
    xs: list[torch.Tensor], ys: list[torch.Tensor], rs: list[torch.Tensor], weight: Any
) -> dict[str, Call]:
    """FlashInfer's kernels, if they are installed; without a weight the all-reduce alone."""
    other, workspace = flashinfer_workspace()
    if other is None:
        return {}

    def call(i: int) -> None:
        k = i % len(xs)
        given = {"pattern": 0, "output": ys[k]}
        if weight is not None:
            given = {"pattern": 1, "residual_in": rs[k], "residual_out": rs[k], "norm_out": ys[k]}
            given |= {"rms_gamma": weight, "rms_eps": EPS}
        other.allreduce_fusion(
            input=xs[k],
            workspace=workspace,
            launch_with_pdl=True,
            trigger_completion_at_end=False,
            fp32_acc=True,
            **given,
        )

    return {"flashinfer": call}


def plain_rows(workspace: Any, world: int, rate: float) -> Iterator[tuple[str, dict[str, float]]]:
    """The all-reduce alone."""
    import torch.distributed._symmetric_memory as symmetric_memory

    group = dist.group.WORLD.group_name

    def calls_of(kib: int) -> dict[str, Call]:
        hidden = 4096 if kib < 64 else 8192
        xs = rotated((kib * 512 // hidden, hidden))
        ys = [torch.empty_like(x) for x in xs]
        shared = symmetric_memory.empty(kib * 512, dtype=torch.bfloat16, device="cuda")
        symmetric_memory.rendezvous(shared, group)
        shared.zero_()
        return {
            "precast": lambda i: allreduce_fusion(
                xs[i % len(xs)], workspace, 0, True, False, output=ys[i % len(xs)]
            ),
            "nccl": lambda i: dist.all_reduce(xs[i % len(xs)]),
            "torch_one_shot": lambda i: torch.ops.symm_mem.one_shot_all_reduce(
                shared, "sum", group
            ),
            "torch_two_shot": lambda i: torch.ops.symm_mem.two_shot_all_reduce_(
                shared, "sum", group
            ),
            **flashinfer_calls(xs, ys, [], None),
        }

    for kib in KIB:
        found = times(calls_of(kib))
        found["link"] = 2 * (world - 1) / world * kib * 1024 / rate * 1e-3
        yield f"{world} GPUs, all-reduce, {kib} KiB", found


def fused_rows(workspace: Any, world: int) -> Iterator[tuple[str, dict[str, float]]]:
    """With the residual and the norm, and the same by separate kernels."""

    def calls_of(shape: tuple[int, int]) -> dict[str, Call]:
        xs = rotated(shape)
        ys, rs = [torch.empty_like(x) for x in xs], [torch.zeros_like(x) for x in xs]
        weight = torch.ones(shape[1], device="cuda", dtype=torch.bfloat16)

        def fused(i: int) -> None:
            k = i % len(xs)
            allreduce_fusion(
                xs[k],
                workspace,
                Pattern.kARResidualRMSNorm,
                True,
                False,
                residual_in=rs[k],
                residual_out=rs[k],
                norm_out=ys[k],
                rms_gamma=weight,
                rms_eps=EPS,
            )

        def plain(i: int) -> None:
            k = i % len(xs)
            allreduce_fusion(xs[k], workspace, 0, True, False, output=ys[k])

        def separate(i: int) -> None:
            k = i % len(xs)
            plain(k)
            precast.fused_add_rmsnorm(ys[k], rs[k], weight, EPS)

        def nccl(i: int) -> None:
            k = i % len(xs)
            dist.all_reduce(xs[k])
            precast.fused_add_rmsnorm(xs[k], rs[k], weight, EPS)

        return {
            "precast": fused,
            "all_reduce_alone": plain,
            "precast_separate": separate,
            "nccl_and_norm": nccl,
            **flashinfer_calls(xs, ys, rs, weight),
        }

    for shape in FUSED:
        found = times(calls_of(shape))
        yield f"{world} GPUs, + add + RMSNorm, {list(shape)}", found


def work(path: Path) -> None:
    """Measure as one rank; the first one writes the records."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    workspace = create_allreduce_fusion_workspace(
        "auto", world, rank, 2048, 8192, torch.bfloat16, group=dist.group.WORLD
    )
    assert workspace.backend == "trtllm"
    rate = link_rate()
    records = []
    if rank == 0:
        print(f"{world} GPUs: copies to a peer {rate:.0f} GB/s", flush=True)
    for rows in (plain_rows(workspace, world, rate), fused_rows(workspace, world)):
        for name, found in rows:
            figures = {f"{key} us": float(f"{value:.4g}") for key, value in found.items()}
            records.append({"name": name, "figures": figures})
            if rank == 0:
                print(name, figures, file=sys.stderr, flush=True)
    if rank == 0:
        path.write_text(json.dumps(records), encoding="utf-8")
    workspace.destroy()
    dist.destroy_process_group()


def launch(world: int, script: Path) -> list[dict[str, Any]]:
    """Run ``world`` ranks of a script, and return the records."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "records.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(world), str(script), "--worker", str(path)]
        subprocess.run(command, check=True)
        found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    return found


def main(
    argv: Sequence[str] | None = None,
    script: Path = HERE,
    measure: Callable[[Path], None] = work,
    description: str | None = __doc__,
) -> None:
    """Run the benchmark of a script for each number of GPUs."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--world", type=int, nargs="+", help="numbers of GPUs (default: 2, 4, 8)")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--csv", type=Path, help="write the table to this file")
    parser.add_argument("--commit", help="the commit measured (default: $COMMIT, then git)")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.worker:
        measure(options.worker)
        return
    gpus = torch.cuda.device_count()
    worlds = options.world or [world for world in (2, 4, 8) if world <= gpus]
    if not worlds or max(worlds) > gpus:
        sys.exit(f"error: an all-reduce needs two GPUs or more; torch sees {gpus}")
    here = environment(options.commit, HERE.parent)
    report.print_circumstances(here)
    records = [record for world in worlds for record in launch(world, script)]
    table = report.figure_table(records)
    report.print_table(table)
    if options.json:
        report.write_json(options.json, report.document(here, records))
    if options.csv:
        report.write_csv(options.csv, table, here)


if __name__ == "__main__":
    main()
