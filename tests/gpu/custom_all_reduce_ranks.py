# SPDX-License-Identifier: Apache-2.0
"""Run by test_gpu_custom_all_reduce.py under torchrun: each process is a rank.

Processes share GPUs if there are fewer of them: then kernels of different processes take turns.
Arguments: calls, and replays of a graph. With the argument ``lag``, rank 1 makes no call, and the
others must get an error after PRECAST_COMM_TIMEOUT. With ``fork``, the script is not run under
torchrun, but forks its two ranks after its imports.
"""

from __future__ import annotations

import faulthandler
import os
import random
import signal
import sys
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks_support import run_rank, still_runs

from precast.comm import (
    create_shared_buffer,
    free_shared_buffer,
    vllm_all_reduce,
    vllm_dispose,
    vllm_get_graph_buffer_ipc_meta,
    vllm_init_custom_ar,
    vllm_meta_size,
    vllm_register_buffer,
    vllm_register_graph_buffers,
)

BYTES = 4 << 20
RANK = WORLD = 0  # set by start()


def gathered(x: torch.Tensor) -> list[torch.Tensor]:
    """A tensor of each rank, on the host."""
    parts: list[torch.Tensor] = [torch.empty_like(x, device="cpu") for _ in range(WORLD)]
    dist.all_gather([part.view(torch.uint8) for part in parts], x.cpu().view(torch.uint8))
    return parts


def check(inputs: torch.Tensor, out: torch.Tensor, what: object) -> None:
    total = torch.zeros(inputs.shape)
    for part in gathered(inputs):
        total += part.float()
    for rank, result in enumerate(gathered(out)):
        assert torch.equal(result, total.to(inputs.dtype)), (what, RANK, "result of", rank)


def random_calls(fa: int, buffers: list[int], count: int) -> None:
    shared = random.Random(count)  # the same on all ranks
    for call in range(count):
        still_runs()
        dtype = shared.choice((torch.bfloat16, torch.float16, torch.float32))
        most = BYTES // 16
        vectors = shared.choice((1, 2, 3, 1000, shared.randint(1, most), most))
        x = torch.randn(vectors * 16 // dtype.itemsize, device="cuda").to(dtype)
        out = torch.full_like(x, float("nan"))
        ctas = shared.choice((1, 8, 36))
        vllm_all_reduce(fa, x, out, buffers[RANK], BYTES, ctas)
        check(x, out, (call, dtype, vectors, ctas))


def graphs(fa: int, buffers: list[int], replays: int) -> None:
    """Inputs of a captured graph at other offsets on each rank; other calls between replays."""
    for width in (4096, 65536):
        pad = torch.empty(512 * (RANK + 1), device="cuda", dtype=torch.bfloat16)
        xs = [torch.zeros(2, width, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
        outs = [torch.empty_like(x) for x in xs]
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for x, out in zip(xs, outs, strict=True):
                vllm_all_reduce(fa, x, out, 0, 0, 16)
        own = vllm_get_graph_buffer_ipc_meta(fa)
        told: list[object] = [None] * WORLD
        dist.all_gather_object(told, own)
        vllm_register_graph_buffers(fa, [h for h, _ in told], [o for _, o in told])
        assert vllm_get_graph_buffer_ipc_meta(fa) == ([], [])
        for replay in range(replays):
            if replay % max(1, replays // 4) == 0:
                for x, out in zip(xs, outs, strict=True):
                    x.normal_()
                    out.fill_(float("nan"))
                torch.cuda.synchronize()
                dist.barrier()
                graph.replay()
                for x, out in zip(xs, outs, strict=True):
                    check(x, out, ("replay", replay))
                random_calls(fa, buffers, 1)
            else:
                graph.replay()
        torch.cuda.synchronize()
        del graph, pad


def compiled(fa: int, buffers: list[int]) -> None:
    """The call as an op of a graph of torch.compile, between others."""

    @torch.compile(fullgraph=True)
    def run(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        out = torch.empty_like(y)
        vllm_all_reduce(fa, y, out, buffers[RANK], BYTES, 8)
        return out + 1

    x = torch.randn(8, 256, device="cuda")
    got = run(x)
    total = torch.zeros(x.shape)
    for part in gathered(x * 2):
        total += part
    assert torch.equal(got.cpu(), total + 1)


def errors(fa: int, buffers: list[int]) -> None:
    """Every rank refuses the call, so that no rank waits."""
    x = torch.ones(64, device="cuda")
    out = torch.full_like(x, 7.0)
    for arguments, words in (
        ((fa, x, out, 0, 0, 8), "must be registered"),
        ((fa, x, out, buffers[RANK], 128, 8), "must fit reg_buffer's 128 bytes, got 256"),
        ((fa, x, out, buffers[RANK], BYTES, 0), "num_ctas must be 1 to 160, got 0"),
        ((fa, x[:63], out[:63], buffers[RANK], BYTES, 8), "multiple of 16 bytes"),
        ((fa, x, out.half(), buffers[RANK], BYTES, 8), "out must be float32, got float16"),
        ((fa, x, x, buffers[RANK], BYTES, 8), "overlap"),
        ((fa + 1000, x, out, buffers[RANK], BYTES, 8), "must be a handle"),
    ):
        with pytest.raises(ValueError, match=words):
            vllm_all_reduce(*arguments)
    assert (out == 7.0).all()


def lag() -> None:
    signals = create_shared_buffer(vllm_meta_size() + BYTES)
    buffers = create_shared_buffer(BYTES)
    fa = vllm_init_custom_ar(signals, torch.zeros(1024, device="cuda"), RANK, True)
    vllm_register_buffer(fa, buffers)
    random_calls(fa, buffers, 3)
    if RANK != 1:
        x = torch.ones(64, device="cuda")
        out = torch.empty_like(x)
        vllm_all_reduce(fa, x, out, buffers[RANK], BYTES, 8)
        with pytest.raises(RuntimeError):
            torch.cuda.synchronize()
        with pytest.raises(RuntimeError, match=r"waited longer .* for rank 1"):
            vllm_dispose(fa)
        print(f"rank {RANK} did not wait for ever", flush=True)
    dist.barrier()


def main() -> None:
    calls, replays = int(sys.argv[1]), int(sys.argv[2])
    size = vllm_meta_size() + BYTES
    # Two handles at once, whose buffers are freed in another order than they were made.
    signals, others = create_shared_buffer(size), create_shared_buffer(size)
    buffers = create_shared_buffer(BYTES)
    tables = [torch.zeros(1 << 16, dtype=torch.uint8, device="cuda") for _ in range(2)]
    fa = vllm_init_custom_ar(signals, tables[0], RANK, True)
    other = vllm_init_custom_ar(others, tables[1], RANK, True)
    for handle in (fa, other):
        vllm_register_buffer(handle, buffers)
    errors(fa, buffers)
    random_calls(fa, buffers, calls)
    if WORLD == 2:  # Each process compiles by itself, and what it compiles has no number of ranks.
        compiled(fa, buffers)
    random_calls(other, buffers, max(1, calls // 10))
    graphs(fa, buffers, replays)
    vllm_dispose(fa)
    free_shared_buffer(signals)
    graphs(other, buffers, replays)
    vllm_dispose(other)
    free_shared_buffer(buffers)
    free_shared_buffer(others)
    with pytest.raises(ValueError, match="must be a handle"):
        vllm_all_reduce(fa, torch.ones(8, device="cuda"), torch.ones(8, device="cuda"), 0, 0, 1)
    if RANK == 0:
        print(f"{WORLD} processes on {torch.cuda.device_count()} GPUs: {calls} calls", flush=True)


def forked() -> None:
    """Ranks that are forked after the imports: nothing before has created a CUDA context."""
    assert not torch.cuda.is_initialized()
    # Its thread does not exist in a child, which would wait for it.
    faulthandler.cancel_dump_traceback_later()
    store = Path(tempfile.mkdtemp()) / "store"
    children = []
    for rank in range(2):
        child = os.fork()
        if child == 0:
            os.environ.update(RANK=str(rank), WORLD_SIZE="2")
            run_rank(lambda: forked_rank(f"file://{store}"))
            os._exit(0)
        children.append(child)
    while children:
        child, status = os.wait()
        children.remove(child)
        if status:  # The other one waits for it.
            for other in children:
                os.kill(other, signal.SIGKILL)
        assert status == 0, f"a forked rank ended with status {status}"
    print("two forked ranks are done", flush=True)


def forked_rank(method: str) -> None:
    start(method)
    signals = create_shared_buffer(vllm_meta_size() + BYTES)
    buffers = create_shared_buffer(BYTES)
    fa = vllm_init_custom_ar(signals, torch.zeros(1024, device="cuda"), RANK, True)
    vllm_register_buffer(fa, buffers)
    random_calls(fa, buffers, 3)
    vllm_dispose(fa)
    free_shared_buffer(signals)
    free_shared_buffer(buffers)


def start(method: str) -> None:
    global RANK, WORLD
    RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(RANK % torch.cuda.device_count())
    torch.manual_seed(RANK)
    # Why gloo: it needs no GPU of its own for each process.
    dist.init_process_group("gloo", init_method=method, rank=RANK, world_size=WORLD)


def run() -> None:
    """What the first argument says."""
    if sys.argv[1] == "fork":
        forked()
        return
    start("env://")
    if sys.argv[1] == "lag":
        lag()
        sys.stdout.flush()
        os._exit(0)  # A context with an error cannot be torn down as others are.
    main()
    dist.destroy_process_group()


if __name__ == "__main__":
    run_rank(run)
