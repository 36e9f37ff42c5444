# SPDX-License-Identifier: Apache-2.0
"""Draws as the GPU tests call them, beside the references, which run on the GPU, too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import precast

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
RANDOM = {"seed": 0x1234567890ABCDEF, "offset": 44}

Draw = Callable[..., Any]


def cells(sizes: Sequence[int], few: Sequence[int]) -> pytest.MarkDecorator:
    """All sizes of float32, and a few of the other element types."""
    found = [(size, DTYPES[0]) for size in sizes]
    found += [(size, dtype) for dtype in DTYPES[1:] for size in few]
    names = [f"{size}-{str(dtype).removeprefix('torch.')}" for size, dtype in found]
    return pytest.mark.parametrize(("size", "dtype"), found, ids=names)


#: Each function of probabilities, with parameters of every kind.
DRAWS: dict[str, Draw] = {
    "plain": precast.sampling_from_probs,
    "k1": lambda x, **more: precast.top_k_sampling_from_probs(x, 1, **more),
    "k50": lambda x, **more: precast.top_k_sampling_from_probs(x, 50, **more),
    "k2000": lambda x, **more: precast.top_k_sampling_from_probs(x, 2000, **more),
    "k_all": lambda x, **more: precast.top_k_sampling_from_probs(x, 1 << 30, **more),
    "p0": lambda x, **more: precast.top_p_sampling_from_probs(x, 0.0, **more),
    "p.3": lambda x, **more: precast.top_p_sampling_from_probs(x, 0.3, **more),
    "p.95": lambda x, **more: precast.top_p_sampling_from_probs(x, 0.95, **more),
    "p1": lambda x, **more: precast.top_p_sampling_from_probs(x, 1.0, **more),
    "m0": lambda x, **more: precast.min_p_sampling_from_probs(x, 0.0, **more),
    "m.2": lambda x, **more: precast.min_p_sampling_from_probs(x, 0.2, **more),
    "m1": lambda x, **more: precast.min_p_sampling_from_probs(x, 1.0, **more),
    "k40p.5": lambda x, **more: precast.top_k_top_p_sampling_from_probs(x, 40, 0.5, **more),
    "joint": lambda x, **more: precast.top_k_top_p_sampling_from_probs(
        x, 300, 0.5, filter_apply_order="joint", **more
    ),
}


def both(call: Callable[..., Any], *args: Any, **keywords: Any) -> tuple[Any, Any]:
    """What the kernel gives, and what the reference gives on the same device."""
    got = call(*args, **keywords)
    with precast.reference_mode():
        want = call(*args, **keywords)
    return got, want


def same_tokens(call: Callable[..., Any], *args: Any, **keywords: Any) -> None:
    """Tokens and validity are those of the reference, bit for bit."""
    got, want = both(call, *args, return_valid=True, **keywords)
    for mine, theirs in zip(got, want, strict=True):
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine, theirs), different(mine, theirs)


def share(mine: torch.Tensor, theirs: torch.Tensor) -> float:
    """How many tokens are the same."""
    return float((mine == theirs).double().mean()) if mine.numel() else 1.0


def different(mine: torch.Tensor, theirs: torch.Tensor) -> str:
    places = (mine != theirs).nonzero()[:5]
    found = [(at.tolist(), mine[tuple(at)].item(), theirs[tuple(at)].item()) for at in places]
    return f"{(mine != theirs).sum().item()} of {mine.numel()} differ: {found}"


def rows_of_all_kinds(
    size: int, dtype: torch.dtype, generator: torch.Generator, repeat: int = 2
) -> torch.Tensor:
    """Distributions that are flat, peaked, sorted, full of ties, sparse, tiny or no distribution.

    ``[16 * repeat, size]``.
    """
    device = generator.device
    made = []
    for _ in range(repeat):
        x = torch.rand(10, size, device=device, generator=generator)
        normal = torch.randn(6, size, device=device, generator=generator)
        x[0] = 1.0
        x[1] = (8 * normal[0]).softmax(0)
        x[2] = normal[1].softmax(0).sort().values
        x[3] = normal[2].softmax(0).sort(descending=True).values
        x[4] = (4 * x[4]).ceil() / 4
        x[5] = x[5].where(x[5] > 0.99, 0)
        x[5, size // 3] = 0.5
        x[6] = 0
        x[6, -1] = 1.0
        x[7] *= 1e-30
        x[8] = x[8].where(x[8] > 0.5, -x[8])
        x[9] = 1 / torch.arange(1, size + 1, device=device)
        odd = (2 * normal).softmax(1)
        odd[1] = 0
        odd[2, size // 2] = torch.nan
        odd[3, 0] = torch.inf
        odd[4] = -odd[4]
        odd[5, 0] = torch.nan
        made += [x, odd]
    return torch.cat(made).to(dtype)
