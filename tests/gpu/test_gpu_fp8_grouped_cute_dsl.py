# SPDX-License-Identifier: Apache-2.0
"""The grouped product of e4m3 in CuTe DSL: exact, beside its twin in CUDA, and in graphs.

Problems are those of the tests of the twin: every sum is exact in float32.
"""

from __future__ import annotations

import random
import subprocess
import sys
from typing import Any

import pytest
import test_gpu_fp8_grouped as grouped
import torch
from moe_backends import usable
from test_gpu_fp8_grouped import COUNTS, E4M3, SIZES, Problem, by_start

import precast
from precast._ops.gemm._fp8 import CUTE_CHOICES, scaled_product
from precast.errors import UnsupportedConfigError
from precast.gemm import group_gemm_fp8_nt_groupwise
from precast.testing import Guarded

pytestmark = grouped.pytestmark
BF16 = torch.bfloat16
CHOICES = [-1, *range(CUTE_CHOICES)]


@pytest.fixture(autouse=True)
def backend() -> str:
    a, b = (torch.zeros(*n, 128, device="cuda").to(E4M3) for n in ((1,), (1, 8)))
    scales = torch.ones(1, 1, device="cuda"), torch.ones(1, 1, 1, device="cuda")
    starts = torch.tensor([0, 1], device="cuda").int()

    class Hopper:
        @staticmethod
        def is_backend_supported(backend: str, capability: int) -> bool:
            return capability == 90

    return usable(
        Hopper,
        "cute_dsl",
        lambda: group_gemm_fp8_nt_groupwise(a, b, *scales, starts, backend="cute_dsl"),
    )


def check(problem: Problem, **state: Any) -> None:
    grouped.check(by_start, problem, {"dtype": BF16, "backend": "cute_dsl", **state})


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_products_are_exact_beside_padding_of_nan(
    counts: list[int], sizes: tuple[int, int], choice: int, generator: torch.Generator
) -> None:
    for dtype in (BF16, torch.float16):
        check(Problem(counts, sizes, generator), choice=choice, dtype=dtype)


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("counts", [[0, 1, 127, 128, 129, 0, 300], [20] * 70, [900]], ids=str)
def test_several_tiles_a_cta(counts: list[int], choice: int, generator: torch.Generator) -> None:
    """The ring of stages goes on from one tile to the next, at any stage."""
    for sizes in ((264, 4240), (2056, 272), (4096, 912)):
        check(Problem(counts, sizes, generator), choice=choice)


def test_random_groups(generator: torch.Generator) -> None:
    numbers = random.Random(generator.initial_seed())
    for _ in range(100):
        counts = [numbers.choice([0, 1, 17, 128, 200]) for _ in range(numbers.randint(1, 40))]
        sizes = 8 * numbers.randint(1, 60), 16 * numbers.randint(1, 60)
        counts = counts if sum(counts) else [1, *counts]
        check(Problem(counts, sizes, generator), choice=numbers.choice(CHOICES))


def test_a_graph_is_replayed_with_other_groups(generator: torch.Generator) -> None:
    for choice in CHOICES:
        state: dict[str, Any] = {"graph": None, "rows": 1024, "dtype": BF16, "choice": choice}
        state["backend"] = "cute_dsl"
        for counts in ([100, 0, 200], [0, 333, 1], [1, 1, 1], [0, 0, 500]):
            grouped.check(by_start, Problem(counts, (264, 400), generator), state)


def draw(counts: list[int], columns: int, depth: int, generator: torch.Generator) -> list[Any]:
    """Operands with random codes and scales, those of a mixture of experts."""
    groups, tokens, blocks = len(counts), sum(counts), depth // 128

    def codes(*shape: int) -> torch.Tensor:
        return (64 * torch.randn(shape, device="cuda", generator=generator)).to(E4M3)

    def scales(*shape: int) -> torch.Tensor:
        return torch.rand(shape, device="cuda", generator=generator) / 512 + 2**-10

    starts = torch.tensor([0, *counts], device="cuda").cumsum(0).int()
    a, b = codes(tokens, depth), codes(groups, columns, depth)
    return [a, b, scales(blocks, tokens), scales(groups, blocks, columns // 128), starts]


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("sizes", [(4096, 7168), (7168, 2048)], ids=str)
def test_beside_the_twin_and_float32(
    sizes: tuple[int, int], choice: int, generator: torch.Generator
) -> None:
    """Groups of 64 to 512 tokens of DeepSeek-V3's experts."""
    counts = [64, 128, 192, 256, 320, 384, 448, 512]
    given = draw(counts, *sizes, generator)
    a, b, a_scale, b_scale, starts = given
    got = group_gemm_fp8_nt_groupwise(*given, backend="cute_dsl", choice=choice)
    twin = group_gemm_fp8_nt_groupwise(*given)
    for group in (0, 3, 7):
        rows = slice(*starts[group : group + 2].tolist())
        want = scaled_product(a[rows], b[group], a_scale[:, rows].T, b_scale[group].T, 1)
        mine, its = got[rows].float(), twin[rows].float()
        cosine = torch.nn.functional.cosine_similarity(mine.flatten(), want.flatten(), dim=0)
        assert cosine > 0.99999, cosine
        # Tensor cores add the products of a block with about 14 bits, so errors are relative to
        # the length of a row.
        size = want.square().mean().sqrt()
        for other in (want, its):
            assert (mine - other).abs().max() <= 2**-7 * other.abs().max() + 2**-6 * size
    for _ in range(10):
        again = group_gemm_fp8_nt_groupwise(*given, backend="cute_dsl", choice=choice)
        assert torch.equal(again, got), "not deterministic"


@pytest.mark.parametrize("choice", CHOICES)
def test_strides(choice: int, generator: torch.Generator) -> None:
    """Slices of operands, scales in rows, an output with gaps between its rows."""
    counts, (columns, depth) = [3, 130, 0, 65], (264, 400)
    problem = Problem(counts, (columns, depth), generator)
    a = torch.full((198, depth + 48), 0x7F, dtype=torch.uint8, device="cuda").view(E4M3)
    a.view(torch.uint8)[:, 16 : 16 + depth] = problem.a.view(torch.uint8)
    b = torch.full((4, columns + 3, depth + 16), 0x7F, dtype=torch.uint8, device="cuda").view(E4M3)
    b.view(torch.uint8)[:, :columns, :depth] = problem.b.view(torch.uint8)
    wide = torch.full((198, 9), torch.nan, device="cuda")
    wide[:, ::2][:, :4] = problem.a_scale
    out = Guarded((198, columns), BF16, "cuda", gap=16, offset=8)
    starts = torch.tensor([0, *counts], device="cuda").cumsum(0).int()
    given = a[:, 16 : 16 + depth], b[:, :columns, :depth], wide[:, ::2][:, :4], problem.b_scale
    group_gemm_fp8_nt_groupwise(
        *(*given, starts), (1, 128, 128), "K", out=out.view, backend="cute_dsl", choice=choice
    )
    assert torch.equal(out.view, problem.want.to(BF16))
    out.check()


def test_starts_that_are_none_do_not_fault(generator: torch.Generator) -> None:
    """Numbers outside of the tokens, and groups that end before they begin."""
    problem = Problem([40, 60, 50], (136, 272), generator)
    scales = problem.a_scale.T.contiguous(), problem.b_scale.mT.contiguous()
    starts = torch.tensor([-100, 40, 30, 1000], device="cuda").int()
    out = torch.full((150, 136), -7.0, dtype=BF16, device="cuda")
    group_gemm_fp8_nt_groupwise(problem.a, problem.b, *scales, starts, out=out, backend="cute_dsl")
    assert torch.equal(out[:30], problem.want[:30].to(BF16))
    assert torch.equal(out[100:], problem.want[100:].to(BF16))


def test_nothing_to_do(generator: torch.Generator) -> None:
    problem = Problem([5, 6], (136, 272), generator)
    scales = problem.a_scale.T.contiguous(), problem.b_scale.mT.contiguous()
    out = torch.full((11, 136), -7.0, dtype=BF16, device="cuda")
    starts = torch.zeros(3, device="cuda").int()
    group_gemm_fp8_nt_groupwise(problem.a, problem.b, *scales, starts, out=out, backend="cute_dsl")
    assert (out == -7).all()
    empty = group_gemm_fp8_nt_groupwise(
        problem.a[:0], problem.b, scales[0][:, :0], scales[1], starts, backend="cute_dsl"
    )
    assert empty.shape == (0, 136)


def test_errors_leave_the_output_alone(generator: torch.Generator) -> None:
    problem = Problem([5, 6], (136, 272), generator)
    out = torch.full((11, 136), -7.0, dtype=BF16, device="cuda")
    good = {
        "a": problem.a,
        "b": problem.b,
        "a_scale": problem.a_scale.T.contiguous(),
        "b_scale": problem.b_scale.mT.contiguous(),
        "m_indptr": torch.tensor([0, 5, 11], device="cuda").int(),
        "out": out,
    }
    words = {"a_scale": good["a_scale"].int()[:1], "b_scale": good["b_scale"].int()[:, :1]}
    for change, message in (
        ({"a": problem.a.cpu()}, "a must be a CUDA tensor"),
        ({"choice": CUTE_CHOICES}, "choice must be -1 or 0 for clusters of one CTA or 1 for"),
        (words, "a_scale must be float32 with backend='cute_dsl'"),
        ({"m_indptr": good["m_indptr"][1:]}, r"m_indptr must have shape \[3\], got \[2\]"),
        ({"b": problem.b[:, :132], "out": out[:, :132]}, "b must have a multiple of 8 rows"),
        ({"out": out[1:]}, r"out must have shape \[11, 136\], got \[10, 136\]"),
        ({"out": problem.a.view(BF16)}, "out must have shape"),
    ):
        with pytest.raises(ValueError, match=f"group_gemm_fp8_nt_groupwise: {message}"):
            group_gemm_fp8_nt_groupwise(**{**good, **change}, backend="cute_dsl")
    with pytest.raises(UnsupportedConfigError):
        group_gemm_fp8_nt_groupwise(**{**good, "out": out.float()}, backend="cute_dsl")
    assert (out == -7).all()


def test_first_call_is_captured() -> None:
    program = (
        "import torch, precast\n"
        "a = torch.ones(3, 256, device='cuda').to(torch.float8_e4m3fn)\n"
        "b = torch.ones(2, 264, 256, device='cuda').to(torch.float8_e4m3fn)\n"
        "scales = torch.ones(2, 3, device='cuda'), torch.ones(2, 2, 3, device='cuda')\n"
        "starts = torch.tensor([0, 1, 3], device='cuda').int()\n"
        "torch.cuda.synchronize()\n"
        "graph = torch.cuda.CUDAGraph()\n"
        "with torch.cuda.graph(graph):\n"
        "    out = precast.gemm.group_gemm_fp8_nt_groupwise(\n"
        "        a, b, *scales, starts, backend='cute_dsl')\n"
        "out.zero_()\n"
        "graph.replay()\n"
        "assert (out == 256).all()\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_compile(generator: torch.Generator) -> None:
    torch._dynamo.reset()
    call = torch.compile(group_gemm_fp8_nt_groupwise, fullgraph=True)
    for counts in ([64, 3], [0, 130]):
        given = draw(counts, 256, 384, generator)
        want = group_gemm_fp8_nt_groupwise(*given, backend="cute_dsl")
        assert torch.equal(call(*given, backend="cute_dsl"), want)


@pytest.mark.parametrize("choice", CHOICES)
def test_a_chain_waits_for_what_is_written_before(choice: int, generator: torch.Generator) -> None:
    given = draw([300, 200, 400], 512, 1024, generator)
    source = given[2].clone()
    wants = []
    for factor in (1.0, -1.0, 0.5):
        given[2].copy_(source * factor)
        wants.append(group_gemm_fp8_nt_groupwise(*given, backend="cute_dsl", choice=choice))
    torch.cuda.synchronize()
    for _ in range(20):
        outs = []
        for factor in (1.0, -1.0, 0.5):
            precast.scale(source.flatten(), factor, out=given[2].flatten(), enable_pdl=True)
            outs.append(group_gemm_fp8_nt_groupwise(*given, backend="cute_dsl", choice=choice))
        assert all(torch.equal(out, want) for out, want in zip(outs, wants, strict=True))


def test_offsets_beyond_32_bits(free_memory: None) -> None:
    """Of the output, and of the weights."""
    tokens, columns, groups = 2**16 + 8, 2**15 + 16, 520
    if torch.cuda.mem_get_info()[0] < 24 * 2**30:
        pytest.skip("needs 24 GiB of GPU memory")
    a = torch.zeros(tokens, 128, dtype=torch.uint8, device="cuda").view(E4M3)
    b = torch.zeros(groups, columns, 256, dtype=torch.uint8, device="cuda").view(E4M3)[..., :128]
    starts = torch.full((groups + 1,), 8, device="cuda").int()
    starts[0], starts[-1] = 0, tokens
    a[-1, -1] = b[-1, -1, -1] = b[-1, 0, -1] = b[0, 3, 0] = a[7, 0] = 2.0
    scales = torch.ones(1, tokens, device="cuda"), torch.ones(groups, 1, 257, device="cuda")
    out = group_gemm_fp8_nt_groupwise(a, b, *scales, starts, backend="cute_dsl")
    assert out[-1, -1] == 4 and out[-1, 0] == 4 and out[7, 3] == 4
    assert out.count_nonzero() == 3
