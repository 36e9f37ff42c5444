# SPDX-License-Identifier: Apache-2.0
"""The kernels of ``sm90_kit.cu``; run as a script, a wait that never ends, of a debug build."""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from precast._jit.ptxas_gate import STRICT
from precast.jit import JitSpec, gen_jit_spec

INVALID_VALUE = 1  # cudaErrorInvalidValue


def spec(name: str, exports: Sequence[str], flag: str) -> JitSpec:
    source = Path(__file__).with_name(f"{name}.cu")
    return gen_jit_spec(name, [source], exports=exports, extra_cuda_cflags=[flag], arch="9.0")


def kit_spec() -> JitSpec:
    return spec("sm90_kit", ["wgmma", "copy_box", "transpose", "pipeline"], STRICT)


def stuck_spec() -> JitSpec:
    return spec("sm90_stuck", ["stuck"], "-DPRECAST_DEBUG_BARRIERS")


@functools.cache
def kit(name: str) -> Callable[..., Any]:
    return kit_spec().build_and_load().get_function(name)


class Copied(NamedTuple):
    """What a TMA copy has made."""

    status: int  # of the tensor map; 0 is success
    box: torch.Tensor  # bytes [rows, 128], no longer swizzled
    map: list[int]  # its 64-bit words


def copy_box(
    tensor: torch.Tensor,
    box: Sequence[int],
    at: Sequence[int],
    strides: Sequence[int] | None = None,
) -> Copied:
    """Copy one box; dimensions are outermost first, and the last one is contiguous.

    The map has the tensor's strides, or others that PyTorch does not have.
    """
    size = tensor.element_size()
    dims = [*zip(tensor.shape, strides or tensor.stride(), box)][::-1]
    layout = torch.tensor([[count, stride * size, edge] for count, stride, edge in dims])
    out = torch.full((math.prod(box) * size,), 0xEE, dtype=torch.uint8, device="cuda")
    words = torch.zeros(16, dtype=torch.int64)
    first = tensor.as_strided((1,), (1,))
    status = kit("copy_box")(first, layout, torch.tensor(list(at)[::-1]), words, out)
    return Copied(status, unswizzled(out), words.tolist())


def unswizzled(memory: torch.Tensor) -> torch.Tensor:
    """The rows of 128 bytes that lie in shared memory with the 128-byte swizzle."""
    chunks = memory.view(-1, 8, 16)
    rows = torch.arange(len(chunks), device=memory.device)[:, None]
    columns = torch.arange(8, device=memory.device)[None]
    return chunks[rows, columns ^ rows % 8].view(-1, 128)


def expected_box(tensor: torch.Tensor, box: Sequence[int], at: Sequence[int]) -> torch.Tensor:
    """What a copy must write: zeros where there is no tensor."""
    out = torch.zeros(*box, dtype=tensor.dtype, device=tensor.device)
    spans = [(max(0, -a), min(edge, n - a)) for n, edge, a in zip(tensor.shape, box, at)]
    if all(begin < end for begin, end in spans):
        source = tuple(slice(a + begin, a + end) for a, (begin, end) in zip(at, spans))
        out[tuple(slice(*span) for span in spans)] = tensor[source]
    return out.view(torch.uint8).view(-1, 128)


def main() -> None:
    torch.zeros(1, device="cuda")
    stuck_spec().build_and_load().get_function("stuck")()
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        print(f"stopped: {error}")
    ctypes.CDLL(None).fflush(None)  # what the kernel printed


if __name__ == "__main__":
    main()
