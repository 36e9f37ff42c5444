# SPDX-License-Identifier: Apache-2.0
"""Programmatic dependent launch: a kernel that starts early must still see its inputs complete.

Chains of operators, each reading what the one before wrote, with and without the early start: the
results must be the same bits. A missing wait shows as a rare difference, hence many rounds.
"""

from __future__ import annotations

import pytest
import torch

import precast
from precast.testing import random_tensor

ROUNDS = 200
DTYPE = torch.bfloat16


class Chain:
    """The buffers of a small decoder-like block, and the block."""

    def __init__(self, rows: int, hidden: int, generator: torch.Generator) -> None:
        def make(*shape: int) -> torch.Tensor:
            return random_tensor(*shape, dtype=DTYPE, generator=generator)

        self.start = make(rows, hidden)
        self.start_residual = make(rows, hidden)
        self.weights = [make(hidden) for _ in range(4)]
        self.gamma, self.beta = make(hidden).float(), make(hidden).float()
        self.x, self.residual = torch.empty_like(self.start), torch.empty_like(self.start)
        self.y = torch.empty_like(self.start)
        self.wide = torch.empty((rows, 2 * hidden), dtype=DTYPE, device="cuda")

    def __call__(self, pdl: bool, torch_between: bool) -> None:
        """Writes ``x``, ``y`` and ``residual``; each operator reads its predecessor's output."""
        w = self.weights
        x, y, residual, wide = self.x, self.y, self.residual, self.wide
        x.copy_(self.start)
        residual.copy_(self.start_residual)
        for _ in range(3):
            precast.rmsnorm(x, w[0], out=y, enable_pdl=pdl)
            precast.rmsnorm(y, w[1], out=x, enable_pdl=pdl)
            precast.fused_add_rmsnorm(x, residual, w[2], enable_pdl=pdl)
            if torch_between:
                x.mul_(1.5)
            precast.gemma_rmsnorm(x, w[3], out=x, enable_pdl=pdl)
            precast.gemma_fused_add_rmsnorm(x, residual, w[0], enable_pdl=pdl)
            precast.scale(x, 0.5, out=wide[:, : x.shape[1]], enable_pdl=pdl)
            precast.scale(residual, 0.25, out=wide[:, x.shape[1] :], enable_pdl=pdl)
            if torch_between:
                wide.add_(0.125)
            precast.silu_and_mul(wide, out=y, enable_pdl=pdl)
            precast.gelu_tanh_and_mul(wide, out=x, enable_pdl=pdl)
            precast.fused_add_rmsnorm(y, x, w[1], enable_pdl=pdl)

    def result(self) -> tuple[torch.Tensor, ...]:
        return self.x.clone(), self.y.clone(), self.residual.clone(), self.wide.clone()


@pytest.mark.parametrize("torch_between", [False, True], ids=["alone", "after_torch"])
@pytest.mark.parametrize("in_graph", [False, True], ids=["stream", "graph"])
@pytest.mark.parametrize(
    ("rows", "hidden"), [(1, 256), (7, 4096), (64, 4096), (16, 7168), (131, 1000), (2048, 4096)]
)
def test_chain_is_the_same_with_and_without_pdl(
    rows: int, hidden: int, in_graph: bool, torch_between: bool, generator: torch.Generator
) -> None:
    chain = Chain(rows, hidden, generator)
    chain(False, torch_between)
    want = chain.result()
    assert all(torch.isfinite(t).all() for t in want)
    graph = torch.cuda.CUDAGraph()
    if in_graph:
        chain(True, torch_between)
        with torch.cuda.graph(graph):
            chain(True, torch_between)
    results = []
    for _ in range(ROUNDS):
        if in_graph:
            graph.replay()
        else:
            chain(True, torch_between)
        # Compared on the device, without waiting: the next round starts right behind this one.
        results.append(
            torch.stack([(a == b).all() for a, b in zip(chain.result(), want, strict=True)])
        )
    differing = (~torch.stack(results)).any(dim=1).sum().item()
    assert differing == 0, f"{differing} of {ROUNDS} rounds differ from the chain without PDL"


@pytest.mark.parametrize("rows", [1, 64])
def test_a_following_torch_kernel_sees_the_output(rows: int, generator: torch.Generator) -> None:
    x = random_tensor(rows, 4096, dtype=DTYPE, generator=generator)
    weight = random_tensor(4096, dtype=DTYPE, generator=generator)
    want = precast.rmsnorm(x, weight, enable_pdl=False) + 1
    out = torch.empty_like(x)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(ROUNDS):
        out.fill_(float("nan"))
        precast.rmsnorm(x, weight, out=out, enable_pdl=True)
        wrong += (out + 1 != want).sum()
    assert wrong.item() == 0
