# SPDX-License-Identifier: Apache-2.0
"""Run by test_peer_comm.py under torchrun: the same call by precast and by FlashInfer.

The argument is ``vllm`` for the all-reduce of registered buffers, ``fusion`` for the fused one. If
FlashInfer cannot do it here, a line that begins with ``skip:`` says why.
"""

from __future__ import annotations

import ctypes
import os
import sys
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from ranks_support import run_rank

import precast.comm as ours
from precast.testing import assert_close

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
BYTES = 4 << 20
HIDDEN, TOKENS = 4096, 64
BF16 = torch.bfloat16


class Reducer:
    """The all-reduce of registered buffers, of one of the libraries.

    FlashInfer's handle has the address of ``rank_data`` alone, from which its kernels read the
    addresses of the buffers: without a reference the memory belongs to the next tensor, and kernels
    read from any address. Its shared buffers hold what was there before.
    """

    def __init__(self, library: ModuleType) -> None:
        self.library = library
        size = library.vllm_meta_size() + BYTES
        self.signals = library.create_shared_buffer(size)
        self.buffers = library.create_shared_buffer(BYTES)
        ours.CudaRTLibrary().cudaMemset(ctypes.c_void_p(self.signals[RANK]), 0, size)
        torch.cuda.synchronize()
        dist.barrier()  # all signals are zeros
        self.rank_data = torch.zeros(1 << 16, dtype=torch.uint8, device="cuda")
        self.fa = library.vllm_init_custom_ar(self.signals, self.rank_data, RANK, True)
        library.vllm_register_buffer(self.fa, self.buffers)

    def __call__(self, x: torch.Tensor, ctas: int) -> torch.Tensor:
        out = torch.full_like(x, float("nan"))
        self.library.vllm_all_reduce(self.fa, x, out, self.buffers[RANK], BYTES, ctas)
        return out

    def close(self) -> None:
        torch.cuda.synchronize()
        self.library.vllm_dispose(self.fa)
        self.library.free_shared_buffer(self.signals)
        self.library.free_shared_buffer(self.buffers)


def vllm(theirs: ModuleType) -> None:
    """Equal bits: both add in fp32, in the order of ranks."""
    mine, other = Reducer(ours), Reducer(theirs)
    for dtype in (BF16, torch.float16, torch.float32):
        for vectors in (1, 7, 1000, 65536, BYTES // 16):
            x = torch.randn(vectors * 16 // dtype.itemsize, device="cuda").to(dtype)
            for ctas in (1, 36):
                got, want = mine(x, ctas), other(x, ctas)
                assert torch.equal(got, want), (dtype, vectors, ctas)
    mine.close()
    other.close()


def fusion(theirs: ModuleType) -> None:
    """FlashInfer adds the residual to a sum that it has not rounded."""
    sizes: dict[str, Any] = {
        "world_size": WORLD,
        "rank": RANK,
        "max_token_num": TOKENS,
        "hidden_dim": HIDDEN,
        "dtype": BF16,
        "group": dist.group.WORLD,
    }
    mine = ours.create_allreduce_fusion_workspace(**sizes)
    other = theirs.create_allreduce_fusion_workspace(backend="trtllm", **sizes)
    assert mine.backend == other.backend == "trtllm"
    patterns = theirs.AllReduceFusionPattern
    residual = torch.randn(TOKENS, HIDDEN, device="cuda", generator=shared()).to(BF16)
    weight = torch.randn(HIDDEN, device="cuda", generator=shared()).to(BF16)
    scale = torch.tensor([0.05], device="cuda")
    for tokens in (1, 7, TOKENS):
        x = torch.randn(tokens, HIDDEN, device="cuda").to(BF16)
        for one_shot in (True, False):
            if tokens < WORLD and not one_shot:
                continue
            plain, found = [], []
            for library, workspace in ((ours, mine), (theirs, other)):
                common = {"workspace": workspace, "use_oneshot": one_shot, "fp32_acc": True}
                out = torch.full_like(x, float("nan"))
                library.allreduce_fusion(input=x, pattern=patterns.kAllReduce, output=out, **common)
                plain.append(out)
                names = ("residual_out", "norm_out")
                outputs = {name: torch.full_like(x, float("nan")) for name in names}
                quant = torch.zeros(x.shape, dtype=torch.float8_e4m3fn, device="cuda")
                library.allreduce_fusion(
                    input=x,
                    pattern=patterns.kARResidualRMSNormOutFP8Quant,
                    residual_in=residual[:tokens],
                    rms_gamma=weight,
                    rms_eps=1e-5,
                    scale_factor=scale,
                    quant_out=quant,
                    **outputs,
                    **common,
                )
                found.append((*outputs.values(), quant))
            assert torch.equal(*plain), (tokens, one_shot)
            for own, their in zip(found[0][:2], found[1][:2], strict=True):
                assert_close(own, their.double())
            codes, other_codes = (result[2].float() for result in found)
            assert (codes - other_codes).abs().le(codes.abs() / 4 + 2**-8).all()
            assert (codes == other_codes).float().mean() > 0.95
    mine.destroy()
    other.destroy()


def shared() -> torch.Generator:
    """The same numbers on all ranks."""
    return torch.Generator("cuda").manual_seed(7)


def main(what: str) -> None:
    try:
        import flashinfer.comm as theirs

        check = {"vllm": vllm, "fusion": fusion}[what]
        check(theirs)
    except (FileNotFoundError, RuntimeError) as error:
        said = str(error).lower()
        if not any(word in said for word in ("ninja", "nvcc", "jit compilation is disabled")):
            raise
        print(f"skip: FlashInfer cannot compile here: {str(error)[-200:]!r}", flush=True)
    else:
        print(f"rank {RANK}: same results", flush=True)


def start() -> None:
    torch.cuda.set_device(RANK)
    torch.manual_seed(RANK)
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=torch.device("cuda", RANK))
    main(sys.argv[1])
    torch.cuda.synchronize()
    dist.destroy_process_group()


if __name__ == "__main__":
    run_rank(start, 500)  # FlashInfer may compile its modules
