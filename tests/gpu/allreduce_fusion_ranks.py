# SPDX-License-Identifier: Apache-2.0
"""Run by test_gpu_allreduce_fusion.py under torchrun: each process is a rank.

Processes share GPUs if there are fewer of them: then kernels of different processes take turns, and
the parts that need NCCL are left out.

Ten thousand random calls, or as many as fit six minutes, then the last failed one again::

    export PYTHONPATH=python:tests
    torchrun --standalone --nproc-per-node 2 tests/gpu/allreduce_fusion_ranks.py \\
        --parts calls --calls 10000 --seconds 360 --seed 7
    torchrun ... --parts calls --dtypes float16 --first 4711 --calls 1 --seed 7
"""

from __future__ import annotations

import argparse
import collections
import os
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from allreduce_cases import Call, Case, draw, make_input, of_rank, same_bits
from ranks_support import run_rank, still_runs

from precast._ops.comm import create_workspace, peer_buffers
from precast.comm import (
    TorchDistBackend,
    allreduce_fusion,
    create_allreduce_fusion_workspace,
    trtllm_allreduce_fusion,
    trtllm_create_ipc_workspace_for_all_reduce_fusion,
    trtllm_destroy_ipc_workspace_for_all_reduce_fusion,
)
from precast.comm.allreduce import AllReduceFusionWorkspace

RANK = WORLD = 0  # set by start()


def gathered(x: torch.Tensor) -> list[torch.Tensor]:
    """A tensor of each rank."""
    # A copy: one column at another stride counts as contiguous, and has no bytes side by side.
    sent = x.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    parts = [torch.empty_like(sent) for _ in range(WORLD)]
    dist.all_gather(parts, sent)
    return [part.view(x.dtype).view(x.shape) for part in parts]


def make(dtype: torch.dtype, tokens: int = 128, **options: Any) -> AllReduceFusionWorkspace:
    """Make a workspace of all ranks."""
    return create_allreduce_fusion_workspace("auto", WORLD, RANK, tokens, 8192, dtype, **options)


def generators(seed: int) -> tuple[torch.Generator, torch.Generator]:
    """Random numbers of this rank, and the same of all ranks."""
    own, common = torch.Generator("cuda"), torch.Generator("cuda")
    own.manual_seed(seed * 8 + RANK)
    common.manual_seed(seed)
    return own, common


def cases(seed: int, numbers: range, dtype: torch.dtype, most: int) -> Iterator[tuple[int, Case]]:
    """Random calls, each from a seed of its own, so that one can be repeated alone."""
    for number in numbers:
        case = draw(random.Random(f"{seed} {number} {dtype}"), (dtype,), most)
        yield number, of_rank(case, RANK)


def check_call(case: Case, workspace: AllReduceFusionWorkspace, number: int) -> None:
    """Compare a call with the reference; all ranks have the same bits."""
    still_runs()
    own, common = generators(number)
    call = Call(case, make_input(case, own), common)
    inputs = gathered(call.input)
    call.run(workspace)
    wrong = call.check(inputs)
    assert not wrong, (RANK, number, case, wrong)
    for output in call.outputs:
        if output is not None:
            assert all(same_bits(output, other) for other in gathered(output)), (number, case)


def in_time(until: float) -> bool:
    """Whether the first rank still has time; all ranks get the same answer."""
    told = torch.tensor([time.monotonic() < until], device="cuda")
    dist.broadcast(told, 0)
    return bool(told)


def random_calls(
    workspace: AllReduceFusionWorkspace,
    dtype: torch.dtype,
    seed: int,
    numbers: range,
    until: float = float("inf"),
) -> collections.Counter[str]:
    """Random calls until the time is over; how many there were of each kind."""
    kinds: collections.Counter[str] = collections.Counter()
    for number, case in cases(seed, numbers, dtype, 1 << 20):
        if kinds["calls"] % 20 == 19 and not in_time(until):
            break
        check_call(case, workspace, number)
        kinds["calls"] += 1
        kinds[f"pattern {case.pattern}"] += 1
        kinds["more vectors a thread"] += case.cut[0] > 2
        kinds["unaligned"] += case.offset != 0
    return kinds


def graphs(
    workspace: AllReduceFusionWorkspace, dtype: torch.dtype, seed: int, replays: int
) -> None:
    """A graph of several calls, replayed with other calls and another capture in between."""
    for part in range(2):
        calls, inputs = [], []
        for number, case in cases(seed, range(1000 * part, 1000 * part + 4), dtype, 1 << 16):
            own, common = generators(number)
            case = case._replace(in_place=0, special="")
            calls.append(Call(case, make_input(case, own), common))
            inputs.append(gathered(calls[-1].input))
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for call in calls:
                call.run(workspace)
        for replay in range(replays):
            graph.replay()
            if replay % max(1, replays // 4) == 0:
                still_runs()
                for call, given in zip(calls, inputs, strict=True):
                    wrong = call.check(given)
                    assert not wrong, (RANK, part, replay, call.case, wrong)
                    call.outputs.sums.fill_(float("nan"))
                random_calls(workspace, dtype, seed + 1, range(replay, replay + 1))
        torch.cuda.synchronize()


def two_at_once(pair: list[AllReduceFusionWorkspace], dtype: torch.dtype, count: int) -> None:
    """Two workspaces on two streams, in another order on each rank; each takes half of the GPU."""
    x = torch.randn(512, 8192, device="cuda", generator=generators(5)[1]).to(dtype)
    outs = [torch.empty_like(x) for _ in pair]
    streams = [torch.cuda.Stream() for _ in pair]
    torch.cuda.synchronize()
    for call in range(count):
        for which in (0, 1) if (RANK + call) % 2 else (1, 0):
            with torch.cuda.stream(streams[which]):
                allreduce_fusion(x, pair[which], 0, output=outs[which])
    torch.cuda.synchronize()
    for out in outs:
        assert torch.equal(out, (x.float() * WORLD).to(dtype))


def errors(workspace: AllReduceFusionWorkspace) -> None:
    """Every rank refuses the call, so that no rank waits; outputs are untouched."""
    x = torch.ones(4, 256, device="cuda", dtype=torch.bfloat16)
    out = torch.full_like(x, 7.0)
    norm = {"residual_in": x.clone(), "rms_gamma": x[0].clone()}
    codes = torch.zeros(4, 256, device="cuda", dtype=torch.float8_e4m3fn)
    for arguments, words in (
        ({"pattern": 3}, "pattern must be 0"),
        ({"pattern": 6}, "pattern must be 0"),
        ({"pattern": 0, "output": out[:2]}, "must have input's shape"),
        ({"pattern": 0, "output": out.half()}, "output must be bfloat16, got float16"),
        ({"pattern": 0, "output": out.cpu()}, "output must be on cuda"),
        ({"pattern": 0, "output": out.new_empty(256, 4).T}, "output must be contiguous"),
        ({"pattern": 1}, "residual_in must be a tensor"),
        ({"pattern": 1, **norm, "rms_gamma": x[0, :8]}, r"rms_gamma must have shape \[256\]"),
        ({"pattern": 1, **norm, "rms_eps": -1.0}, "rms_eps must be"),
        ({"pattern": 1, **norm, "norm_out": out, "residual_out": out}, "overlap"),
        ({"pattern": 1, **norm, "norm_out": x.view(-1)[1:].new_empty(3)}, "norm_out must have"),
        ({"pattern": 2, **norm}, "quant_out must be a tensor"),
        ({"pattern": 2, **norm, "quant_out": codes}, "scale_factor must be a tensor"),
        ({"pattern": 8, **norm, "quant_out": codes, "scale_out": out}, "block_quant_group_size"),
        (
            {
                "pattern": 8,
                **norm,
                "quant_out": codes,
                "scale_out": out,
                "block_quant_group_size": 128,
            },
            "scale_out must be int32",
        ),
        ({"pattern": 10, **norm, "quant_out": codes, "scale_out": out}, "scale_out must be float"),
    ):
        with pytest.raises(ValueError, match=words):
            allreduce_fusion(x, workspace, **arguments)
    with pytest.raises(TypeError, match="workspace must be an AllReduceFusionWorkspace, got int"):
        allreduce_fusion(x, 3, 0)  # type: ignore[call-overload]
    torch.cuda.synchronize()
    assert (out == 7.0).all()
    assert not codes.view(torch.uint8).any()


def compiled(workspace: AllReduceFusionWorkspace) -> None:
    """torch.compile without a graph break."""

    def block(x: torch.Tensor, residual: torch.Tensor, gamma: torch.Tensor) -> torch.Tensor:
        y = allreduce_fusion(
            x * 2, workspace, 1, residual_in=residual, residual_out=residual, rms_gamma=gamma
        )
        return y + 1

    x = torch.randn(8, 1024, device="cuda").bfloat16()
    gamma = torch.ones(1024, device="cuda", dtype=torch.bfloat16)
    wanted = block(x, torch.zeros_like(x), gamma)
    got = torch.compile(block, fullgraph=True)(x, torch.zeros_like(x), gamma)
    assert torch.equal(got, wanted)


def legacy() -> None:
    """The older functions."""
    handles, tensor, metadata = trtllm_create_ipc_workspace_for_all_reduce_fusion(
        RANK, WORLD, 64, 1024, create_metadata=True
    )
    assert len(handles[0]) == WORLD
    assert metadata["tp_size"] == WORLD
    x = torch.full((4 * 1024,), RANK + 1.0, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(x)
    # From residual_in to layout_code there is nothing.
    arguments: list[Any] = [x, WORLD, RANK, 4, 1024, tensor, True, True, True, 0, None, out]
    arguments += [None] * 9
    trtllm_allreduce_fusion(*arguments, metadata=metadata)
    assert (out == WORLD * (WORLD + 1) / 2).all()
    trtllm_destroy_ipc_workspace_for_all_reduce_fusion(handles)
    with pytest.raises(ValueError, match="workspace_ptrs must be the tensor of a workspace"):
        trtllm_allreduce_fusion(*arguments)


def group_in_its_place(seed: int) -> None:
    """NCCL and separate kernels, where peer access is refused."""
    allowed = peer_buffers._refused_peer
    peer_buffers._refused_peer = lambda device, uuids: "no peer access" if RANK == 0 else None
    fallback = make(torch.bfloat16)
    peer_buffers._refused_peer = allowed
    assert fallback.backend == "nccl"
    for number, case in cases(seed, range(40), torch.bfloat16, 1 << 16):
        case = case._replace(special="", in_place=number % 3)
        own, common = generators(number)
        # Small whole numbers, whose sums are exact in any order: NCCL's is not ours.
        whole = make_input(case, own)
        whole.copy_((whole.float() * 4).nan_to_num(0.0).round().clamp(-8, 8))
        call = Call(case, whole, common)
        inputs = gathered(call.input)
        call.run(fallback)
        assert not call.check(inputs), (case, call.check(inputs))
    errors(fallback)
    fallback.destroy()


def half_groups() -> None:
    """Groups that are not the world: the ranks of each half are numbered 0 and 1."""
    if WORLD != 4:
        return
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    half = halves[RANK // 2]
    own = create_allreduce_fusion_workspace(
        "trtllm", 2, RANK % 2, 64, 1024, torch.bfloat16, group=half
    )
    x = torch.full((8, 1024), RANK + 1.0, device="cuda", dtype=torch.bfloat16)
    got = allreduce_fusion(x, own, 0)
    assert (got == (3.0 if RANK < 2 else 7.0)).all()
    with pytest.raises(ValueError, match="must be those of group, 2 and"):
        create_allreduce_fusion_workspace("trtllm", 4, RANK, 64, 1024, torch.bfloat16, group=half)
    own.destroy()


def on_a_workspace(run: Callable[[AllReduceFusionWorkspace], None]) -> None:
    """Run with a workspace, which is refused afterwards."""
    one = make(torch.bfloat16, group=dist.group.WORLD)
    run(one)
    one.destroy()
    with pytest.raises(ValueError, match="must not be destroyed"):
        allreduce_fusion(torch.ones(8, device="cuda"), one, 0)


def calls_and_graphs(options: argparse.Namespace) -> str:
    """Random calls and replays on two workspaces; a summary."""
    kinds: collections.Counter[str] = collections.Counter()
    numbers = range(options.first, options.first + options.calls)
    started = time.monotonic()
    for index, name in enumerate(options.dtypes):
        dtype = getattr(torch, name)
        # Two workspaces at once, which each rank frees in another order.
        pair = [make(dtype), make(dtype, 16, comm_backend=TorchDistBackend())]
        assert [one.backend for one in pair] == ["trtllm", "trtllm"]
        for which, one in enumerate(pair):
            if "calls" in options.parts:
                share = (2 * index + which + 1) / (2 * len(options.dtypes))
                until = started + options.seconds * share
                kinds += random_calls(one, dtype, options.seed, numbers[which::2], until)
            if "graphs" in options.parts:
                graphs(one, dtype, options.seed, options.replays)
        if "graphs" in options.parts:
            two_at_once(pair, dtype, min(50, options.replays))
        for one in pair[:: 1 if RANK % 2 else -1]:
            one.destroy()
            one.destroy()
    seconds = time.monotonic() - started
    counts = ", ".join(f"{kind}: {count}" for kind, count in sorted(kinds.items()))
    return f"{options.replays} replays, seed {options.seed}, {seconds:.0f} s; {counts}"


def missing(*_: object) -> Any:
    """Fail in the place of torch's symmetric memory."""
    raise RuntimeError("no symmetric memory")


def share_gpus() -> None:
    """Let kernels run that precast leaves to NCCL, because it takes long until they have turns."""
    create_workspace.obstacle = lambda *_: None
    peer_buffers._symmetric = missing


PARTS = ("calls", "graphs", "errors", "compiled", "legacy", "groups", "fallback")
SHARING_PARTS = ("calls", "graphs", "errors", "legacy")


def main() -> None:
    """Run the parts that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=60, help="random calls of each dtype")
    parser.add_argument("--first", type=int, default=0, help="number of the first call")
    parser.add_argument("--seconds", type=float, default=1e9, help="the calls take at most")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--replays", type=int, default=200, help="of each captured graph")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float16"])
    parts = SHARING_PARTS if torch.cuda.device_count() < WORLD else PARTS
    parser.add_argument("--parts", nargs="+", default=parts, choices=parts)
    parser.add_argument("--ipc", action="store_true", help="without symmetric memory")
    options = parser.parse_args()
    if options.ipc:
        peer_buffers._symmetric = missing
    summary = ""
    if {"calls", "graphs"} & {*options.parts}:
        summary = calls_and_graphs(options)
    rest: dict[str, Callable[[], None]] = {
        "errors": lambda: on_a_workspace(errors),
        "compiled": lambda: on_a_workspace(compiled),
        "legacy": legacy,
        "groups": half_groups,
        "fallback": lambda: group_in_its_place(options.seed),
    }
    for part, run in rest.items():
        if part in options.parts:
            still_runs()
            run()
    if RANK == 0:
        print(f"{WORLD} processes: {', '.join(options.parts)}; {summary}", flush=True)


def start() -> None:
    """Join the group, and run."""
    global RANK, WORLD
    RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    gpus = torch.cuda.device_count()
    torch.cuda.set_device(RANK % gpus)
    torch.manual_seed(RANK)
    if gpus < WORLD:
        share_gpus()
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("nccl", device_id=torch.device("cuda", RANK))
    main()
    dist.destroy_process_group()


if __name__ == "__main__":
    run_rank(start)
