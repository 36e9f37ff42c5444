# SPDX-License-Identifier: Apache-2.0
"""One scale for a whole tensor: each of the ways in which its largest number is found."""

from __future__ import annotations

import pytest
import torch

import precast
from precast.testing import random_tensor, row_strided

BF16 = torch.bfloat16
E4M3 = torch.float8_e4m3fn
# Elements around the sizes where the launch changes (8192, 327680 and 5242880 on an H200), and
# where rounds of a grid come out even.
LIMITS = (8192, 262_144, 327_680, 524_288, 5_242_880, 15_138_816, 58_720_256)


def _workspace() -> torch.Tensor:
    return torch.full((512,), float("nan"), device="cuda")


def _scale(x: torch.Tensor) -> torch.Tensor:
    """The scale of the formula, the quotient rounded once.

    Why not ``most / 448.0``: on a GPU torch multiplies by the reciprocal of a number, which rounds
    twice and gives another scale for 71 of the 128 significands of bf16. A quotient of two tensors
    is one division.
    """
    most = x.abs().amax().float().clamp(min=1e-10)
    return most / torch.full_like(most, 448.0)


def _check(x: torch.Tensor, what: str) -> None:
    """The bits of the formula, in PyTorch on the same device: large tensors take long on a CPU."""
    codes, scale = precast.per_tensor_quant_fp8(x, workspace=_workspace())
    want = _scale(x)
    assert torch.equal(scale, want.reshape(1)), f"{what}: scale"
    encoded = (x.float() * want.reciprocal()).clamp(-448.0, 448.0).to(E4M3)
    assert torch.equal(codes.view(torch.uint8), encoded.view(torch.uint8)), f"{what}: codes"


@pytest.mark.parametrize("exponent", [-20, 0, 2, 9])
def test_the_scale_is_rounded_once(exponent: int) -> None:
    """For every significand; wanted are quotients of the CPU in fp64, which are exact enough."""
    maxima = (1.0 + torch.arange(128, dtype=torch.float64) / 128) * 2.0**exponent
    x = torch.zeros(128, 64, dtype=BF16, device="cuda")
    x[:, 5] = -maxima.to(BF16).cuda()
    scales = torch.cat([precast.per_tensor_quant_fp8(row)[1] for row in x])
    wanted = (maxima / 448.0).float()
    assert torch.equal(scales.cpu(), wanted)
    assert torch.equal(torch.stack([_scale(row) for row in x]).cpu(), wanted), "this file's formula"


@pytest.mark.parametrize("elements", [limit + more for limit in LIMITS for more in (-8, 0, 8, 3)])
def test_every_way(elements: int, generator: torch.Generator) -> None:
    x = random_tensor(elements, dtype=BF16, generator=generator)
    for place in {0, elements // 2, elements - 1}:
        y = x.clone()
        y[place] = -1000.0
        _check(y, f"{elements} {place}")


# One CTA, clusters, two kernels twice, CTAs that stay; what is not aligned has two kernels instead.
@pytest.mark.parametrize("rows", [3, 60, 500, 4200, 6000])
@pytest.mark.parametrize(("gap", "offset"), [(8, 0), (1, 0), (0, 1), (24, 8)])
def test_strided_in_every_way(rows: int, gap: int, offset: int, generator: torch.Generator) -> None:
    """Anything around the rows is poison."""
    values = random_tensor(rows, 1024, dtype=BF16, generator=generator)
    x = row_strided(values, gap, offset)
    _check(x, f"{rows} {gap} {offset}")
    for row, column in ((0, 0), (rows // 2, 517), (rows - 1, 1023)):
        x.copy_(values)
        x[row, column] = -5.15625
        _check(x, f"{rows} {gap} {offset}: {row} {column}")


def test_nothing_else_is_written(generator: torch.Generator) -> None:
    for elements in (896, 100_000, 458_752, 1_000_000, 20_000_000):
        x = random_tensor(elements, dtype=BF16, generator=generator)
        memory = torch.full((elements + 512,), 0xA5, dtype=torch.uint8, device="cuda")
        precast.per_tensor_quant_fp8(x, out=memory[256:-256].view(E4M3))
        assert (memory[:256] == 0xA5).all() and (memory[-256:] == 0xA5).all(), elements


@pytest.mark.parametrize("graphs", [False, True])
def test_two_streams_at_once(graphs: bool, generator: torch.Generator) -> None:
    """Grids that wait for their own CTAs, beside others that do."""
    sizes = [64 * 7168, 200 * 7168, 1024 * 7168, 3000 * 7168]
    streams = [torch.cuda.Stream() for _ in range(2)]
    inputs = [[random_tensor(n, dtype=BF16, generator=generator) for n in sizes] for _ in streams]
    wanted = [[precast.per_tensor_quant_fp8(x) for x in xs] for xs in inputs]
    found = [
        [(torch.empty_like(codes), torch.empty_like(scale)) for codes, scale in pairs]
        for pairs in wanted
    ]
    workspaces = [_workspace() for _ in streams]

    def run(index: int) -> None:
        for x, (codes, scale) in zip(inputs[index], found[index], strict=True):
            precast.per_tensor_quant_fp8(x, out=codes, out_scale=scale, workspace=workspaces[index])

    runs = [lambda index=index: run(index) for index in range(len(streams))]
    torch.cuda.synchronize()
    if graphs:
        captured = [torch.cuda.CUDAGraph() for _ in streams]
        for graph, stream, call in zip(captured, streams, runs, strict=True):
            with torch.cuda.graph(graph, stream=stream):
                for _ in range(3):
                    call()
        runs = [graph.replay for graph in captured]
    for _ in range(20):
        for pairs in found:
            for codes, scale in pairs:
                codes.view(torch.uint8).fill_(0)
                scale.fill_(-1.0)
        torch.cuda.synchronize()
        for _ in range(5):
            for stream, call in zip(streams, runs, strict=True):
                with torch.cuda.stream(stream):
                    call()
        torch.cuda.synchronize()
        for pairs, right in zip(found, wanted, strict=True):
            for (codes, scale), (codes_wanted, scale_wanted) in zip(pairs, right, strict=True):
                assert torch.equal(codes.view(torch.uint8), codes_wanted.view(torch.uint8))
                assert torch.equal(scale, scale_wanted)


@pytest.mark.parametrize("rows", [1, 16, 64, 200, 1024, 3000])
def test_a_chain_reads_what_was_written_before(rows: int, generator: torch.Generator) -> None:
    """With launches that overlap: the input is written just before, the workspace shared."""
    start = random_tensor(rows, 7168, dtype=BF16, generator=generator)
    x = torch.empty_like(start)
    codes = torch.empty_like(start, dtype=E4M3)
    scale, workspace = torch.empty(1, device="cuda"), _workspace()

    def chain(pdl: bool) -> torch.Tensor:
        precast.scale(start, 1.0, out=x, enable_pdl=pdl)
        for factor in (3.0, 0.11, 7.0):
            precast.scale(x, factor, out=x, enable_pdl=pdl)
            precast.per_tensor_quant_fp8(
                x, out=codes, out_scale=scale, workspace=workspace, enable_pdl=pdl
            )
            precast.dequantize_fp8(codes, scale.view(1, 1), out=x, enable_pdl=pdl)
        return x.clone()

    want = chain(False)
    assert want.isfinite().all() and want.any()
    same = torch.stack([(chain(True) == want).all() for _ in range(30)])
    assert same.all(), f"{int((~same).sum())} of 30 rounds differ from those without PDL"
