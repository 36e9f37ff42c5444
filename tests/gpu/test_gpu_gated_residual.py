# SPDX-License-Identifier: Apache-2.0
"""The gated norms on the GPU against float64: sizes, strides, in place, graphs, errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import precast
from precast.testing import Guarded, assert_close, row_strided

DEVICE = "cuda"
BF16, F32 = torch.bfloat16, torch.float32
HIDDEN = [1, 7, 8, 64, 1000, 1001, 4096, 8192, 8200, 16384, 20000, 32771]

#: The ci profile has bf16 alone.
dtypes = pytest.mark.parametrize(
    "dtype", [BF16, pytest.param(torch.float16, marks=pytest.mark.jit)], ids=["bf16", "f16"]
)


def call(
    rows: int, hidden: int, generator: torch.Generator, dtype: torch.dtype = BF16
) -> dict[str, Any]:
    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=DEVICE, generator=generator)

    return {
        "branch": randn(rows, hidden).to(dtype),
        "residual": randn(rows, hidden),
        "next_weight": randn(hidden).to(dtype),
        "alpha": randn(hidden),
        "beta": randn(hidden),
    }


def rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def exact(
    given: dict[str, Any], weight: torch.Tensor | None, center: float = 0.5
) -> tuple[torch.Tensor, torch.Tensor]:
    x = given["branch"].double()
    if weight is not None:
        x = x * (weight.double() + center)
    alpha = given["alpha"]
    alpha = alpha.double() if isinstance(alpha, torch.Tensor) else alpha
    out = alpha * given["residual"].double() + given["beta"].double() * rms(x, 1e-5)
    return out, rms(out, 1e-6) * (given["next_weight"].double() + 1.0)


def both(given: dict[str, Any], weight: torch.Tensor | None, **options: Any) -> Any:
    return precast.gated_residual_next_rmsnorm(
        **given,
        post_eps=1e-5,
        next_gain_center=1.0,
        post_weight=weight,
        post_gain_center=0.5,
        **options,
    )


def one(given: dict[str, Any], weight: torch.Tensor | None, **options: Any) -> torch.Tensor:
    names = ("branch", "residual", "alpha", "beta")
    tensors = {name: given[name] for name in names}
    return precast.gated_residual_rmsnorm(
        **tensors, weight=weight, eps=1e-5, gain_center=0.5, **options
    )


@dtypes
@pytest.mark.parametrize("hidden", HIDDEN)
@pytest.mark.parametrize("weighted", [False, True])
def test_numbers(
    weighted: bool, hidden: int, dtype: torch.dtype, generator: torch.Generator
) -> None:
    for rows in (1, 3, 133):
        given = call(rows, hidden, generator, dtype)
        weight = given["next_weight"].flip(0) if weighted else None
        want = exact(given, weight)
        stream, after = Guarded((rows, hidden), F32, DEVICE), Guarded((rows, hidden), dtype, DEVICE)
        got = both(given, weight, residual_out=stream.view, ffn_input=after.view)
        assert got[0] is stream.view and got[1] is after.view
        assert_close(got[0], want[0])
        assert_close(got[1], want[1])
        for guard in (stream, after):
            guard.check()
        alone = Guarded((rows, hidden), F32, DEVICE)
        one(given, weight, out=alone.view)
        assert_close(alone.view, want[0])
        alone.check()
        assert torch.equal(one(given, weight), alone.view)


@pytest.mark.parametrize("hidden", [1000, 8192, 20000])
def test_in_place_and_a_number(hidden: int, generator: torch.Generator) -> None:
    given = call(65, hidden, generator)
    given["alpha"] = 0.75
    want = both(given, None)
    assert_close(want[0], exact(given, None)[0])
    gate = torch.full((hidden,), 0.75, device=DEVICE)
    assert torch.equal(both({**given, "alpha": gate}, None)[0], want[0])
    got = both(given, None, residual_out=given["residual"], ffn_input=given["branch"])
    assert got[0] is given["residual"]
    assert all(map(torch.equal, got, want))


@pytest.mark.parametrize("gap", [1, 8])
@pytest.mark.parametrize("offset", [0, 3])
def test_rows_at_any_address(offset: int, gap: int, generator: torch.Generator) -> None:
    given = call(35, 1000, generator)
    weight = given["next_weight"].flip(0)
    want = exact(given, weight)
    for name in ("branch", "residual"):
        given[name] = row_strided(given[name], gap=gap, offset=offset)
    got = both(given, weight)
    assert_close(got[0], want[0])
    assert_close(got[1], want[1])
    memory = torch.empty(1001, device=DEVICE)[1:]
    given["beta"] = memory.copy_(given["beta"])
    assert torch.equal(both(given, weight)[0], got[0])


def test_no_rows(generator: torch.Generator) -> None:
    given = call(0, 64, generator)
    assert both(given, None)[1].shape == one(given, None).shape == (0, 64)


def test_what_is_supported(generator: torch.Generator) -> None:
    given = call(5, 100, generator)
    assert precast.norm.supports_gated_residual_next_rmsnorm(**given)
    assert precast.norm.supports_gated_residual_next_rmsnorm(**{**given, "alpha": 1})
    on_cpu = {name: tensor.cpu() for name, tensor in given.items()}
    assert not precast.norm.supports_gated_residual_next_rmsnorm(**on_cpu)


def test_errors_leave_outputs_alone(generator: torch.Generator) -> None:
    given = call(5, 64, generator)
    outputs = {
        "residual_out": torch.full((5, 64), 7.0, device=DEVICE),
        "ffn_input": torch.full((5, 64), 7.0, dtype=BF16, device=DEVICE),
    }
    branch, residual = given["branch"], given["residual"]
    for change, words in (
        ({"branch": branch.cpu()}, "branch must be a CUDA tensor"),
        ({"branch": branch.T.contiguous().T}, "branch must have stride 1 in its last dimension"),
        ({"residual": residual[1:]}, "residual must have branch's shape"),
        ({"alpha": given["alpha"][1:]}, r"alpha must have shape \[64\], got \[63\]"),
        ({"beta": given["beta"].double()}, "beta must be float32, got float64"),
        ({"next_weight": given["beta"]}, "next_weight must be bfloat16, got float32"),
        ({"post_weight": branch[0, ::2]}, r"post_weight must have shape \[64\], got \[32\]"),
        ({"post_eps": -1.0}, "post_eps must be a finite number of at least 0, got -1"),
        ({"alpha": float("nan")}, "alpha must be a number, not NaN"),
        ({"ffn_input": outputs["ffn_input"][1:]}, "ffn_input must have branch's shape"),
        ({"residual_out": residual[:1].expand(5, 64)}, "residual_out must not be expanded"),
    ):
        with pytest.raises(ValueError, match=f"gated_residual_next_rmsnorm: {words}"):
            precast.gated_residual_next_rmsnorm(**{**given, **outputs, **change})
    assert all((output == 7).all() for output in outputs.values())


def test_graph_and_compile(generator: torch.Generator) -> None:
    given = call(67, 4096, generator)
    weight = given["next_weight"].flip(0)

    def run() -> tuple[torch.Tensor, ...]:
        return (*both(given, weight), one(given, None))

    want = run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()
    for tensor in results:
        tensor.fill_(7.0)
    graph.replay()
    assert all(map(torch.equal, results, want))
    torch._dynamo.reset()
    assert all(map(torch.equal, torch.compile(run, fullgraph=True)(), want))


def test_a_chain_is_the_same_with_and_without_pdl(generator: torch.Generator) -> None:
    """Each reads what the one before wrote; a missing wait shows as a rare difference."""
    start = call(131, 8192, generator)

    def chain(pdl: bool) -> torch.Tensor:
        stream, branch = start["residual"].clone(), start["branch"].clone()
        given = {**start, "branch": branch, "residual": stream}
        for _ in range(4):
            both(given, None, residual_out=stream, ffn_input=branch, enable_pdl=pdl)
        return branch

    want = chain(False)
    assert want.isfinite().all()
    assert all(torch.equal(chain(True), want) for _ in range(50))
