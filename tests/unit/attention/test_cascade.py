# SPDX-License-Identifier: Apache-2.0
"""Merges of attention states in reference mode: against one softmax in float64; their errors."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

import precast
from precast.trace import make_inputs, registered

INF = math.inf
DTYPES = [torch.float16, torch.bfloat16, torch.float32]
ROUNDING = {torch.float16: 2**-11, torch.bfloat16: 2**-8, torch.float32: 2**-20}

pytestmark = pytest.mark.usefixtures("reference_mode")


def attention(scores: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of scores [tokens, heads, keys] and values [tokens, keys, heads, dim], in float64."""
    lse = torch.logsumexp(scores, -1) / math.log(2)
    weights = torch.softmax(scores, -1).nan_to_num()
    return torch.einsum("thk,tkhd->thd", weights, values), lse


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shift", [0.0, -5e5, 3e4])
def test_parts_of_the_keys_give_the_whole(dtype: torch.dtype, shift: float) -> None:
    generator = torch.Generator().manual_seed(3)
    tokens, heads, dim = 5, 3, 8
    bounds = [0, 4, 4, 9, 20]  # the second part has no keys
    scores = torch.randn(tokens, heads, 20, generator=generator, dtype=torch.float64) * 3 + shift
    values = torch.randn(tokens, 20, heads, dim, generator=generator, dtype=torch.float64)
    parts = [attention(scores[..., a:b], values[:, a:b]) for a, b in itertools.pairwise(bounds)]
    v = torch.stack([part[0] for part in parts], 1).to(dtype)
    s = torch.stack([part[1] for part in parts], 1).float()
    assert s[:, 1].eq(-INF).all()
    # What rounding the parts does: of logarithms around 7e5 an fp32 keeps four binary digits.
    slack = 2 * ROUNDING[dtype] * values.abs().max() + 2.0**-24 * s[s > -INF].abs().max() * 8
    want_v, want_s = attention(scores, values)
    merged = precast.merge_states(v, s)
    torch.testing.assert_close(merged[0].double(), want_v, rtol=0, atol=float(slack))
    torch.testing.assert_close(merged[1].double(), want_s, rtol=2e-7, atol=1e-5)
    assert merged[0].dtype == dtype
    assert merged[1].dtype == torch.float32
    one, sums = v[:, 0].clone(), s[:, 0].clone()
    pair = one, sums
    for i in range(1, 4):
        pair = precast.merge_state(*pair, v[:, i], s[:, i])
        assert precast.merge_state_in_place(one, sums, v[:, i], s[:, i]) is None
        assert torch.equal(pair[0], one)
        assert torch.equal(pair[1], sums)
    torch.testing.assert_close(one.double(), want_v, rtol=0, atol=3 * float(slack))
    torch.testing.assert_close(sums.double(), want_s, rtol=2e-7, atol=1e-5)


def test_states_without_keys() -> None:
    """They count as nothing, whatever they hold; of them alone comes 0 and -inf, never NaN."""
    v = torch.tensor([math.nan, 2.0]).view(1, 2, 1, 1)
    merged, sums = precast.merge_states(v, torch.tensor([[[-INF], [-5e5]]]))
    assert merged.flatten().tolist() == [2.0]
    assert sums.flatten().tolist() == [-5e5]
    nothing = torch.full((1, 1), -INF)
    for result in (
        precast.merge_states(v, torch.full((1, 2, 1), -INF)),
        precast.merge_states(v[:, :0], torch.empty(1, 0, 1)),
        precast.merge_state(v[:, 0], nothing, v[:, 1], nothing),
    ):
        assert result[0].tolist() == [[[0.0]]]
        assert result[1].tolist() == [[-INF]]
    merged, sums = precast.merge_state(v[:, 0], nothing, v[:, 1], torch.zeros(1, 1))
    assert (merged.item(), sums.item()) == (2.0, 0.0)
    # -1e30 is a logarithm like any other.
    small = torch.full((1, 1), -1e30)
    merged, sums = precast.merge_state(v[:, 1], small, 3 * v[:, 1], small)
    assert (merged.item(), sums.item()) == (4.0, pytest.approx(-1e30))


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8])
def test_mask(dtype: torch.dtype) -> None:
    v, s = torch.ones(4, 2, 3), torch.zeros(4, 2)
    before = v.clone(), s.clone()
    mask = torch.tensor([1, 0, 1, 0]).to(dtype)
    precast.merge_state_in_place(v, s, 3 * v, s.clone(), mask)
    assert v[:, 0, 0].tolist() == [2.0, 1.0, 2.0, 1.0]
    assert s[:, 1].tolist() == [1.0, 0.0, 1.0, 0.0]
    assert torch.equal(v[1], before[0][1])


def test_logarithms_of_another_dtype_are_converted() -> None:
    v, s = torch.ones(1, 1, 1), torch.zeros(1, 1, dtype=torch.float16)
    merged, sums = precast.merge_state(v, s, 2 * v, s)
    assert (merged.item(), sums.item(), sums.dtype) == (1.5, 1.0, torch.float32)
    precast.merge_state_in_place(v, s, 2 * v, s)
    assert (v.item(), s.item()) == (1.5, 0.0), "a copy of s was changed, as the docstring says"
    merged, sums = precast.merge_states(v[:, None], s.double()[:, None])
    assert (merged.item(), sums.dtype) == (1.5, torch.float32)


def test_outputs_are_like_the_first_state() -> None:
    """Heads before tokens in memory stay so."""
    v = torch.ones(3, 4, 8).transpose(0, 1)
    merged, _ = precast.merge_state(v, torch.zeros(4, 3), v, torch.zeros(4, 3))
    assert merged.stride() == v.stride()


def fails(function: Any, args: tuple[Any, ...], words: str) -> None:
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    before = [t.clone() for t in tensors]
    with pytest.raises(ValueError) as caught:
        function(*args)
    assert str(caught.value).startswith(f"{function.__name__}: {words}"), caught.value
    for tensor, old in zip(tensors, before):
        assert torch.equal(tensor, old)


def test_errors_of_pairs() -> None:
    v, s = torch.ones(4, 3, 8), torch.zeros(4, 3)
    for function, a, b in (
        (precast.merge_state, ("v_a", "s_a"), ("v_b", "s_b")),
        (precast.merge_state_in_place, ("v", "s"), ("v_other", "s_other")),
    ):
        other = 2 * v
        for bad, words in (
            ((v.int(), s, other, s), f"{a[0]} must be float"),
            ((v[0], s, other, s), f"{a[0]} must have 3 dimensions, got shape [3, 8]"),
            ((v, s[:3], other, s), f"{a[1]} must have the shape of {a[0]} less its last"),
            ((v, s, other.half(), s), f"{b[0]} must be float32, got float16"),
            ((v, s, other[:2], s[:2]), f"{b[0]} must have {a[0]}'s shape [4, 3, 8], got [2, 3, 8]"),
            ((v, s, other, s[:, :2]), f"{b[1]} must have the shape of {b[0]} less its last"),
        ):
            fails(function, bad, words)
        with pytest.raises(TypeError, match=rf"{b[1]} must be a torch\.Tensor, got float"):
            function(v, s, other, 0.0)


def test_errors_in_place() -> None:
    function = precast.merge_state_in_place
    v, s, other, sums = (
        torch.ones(4, 3, 8),
        torch.zeros(4, 3),
        torch.ones(4, 3, 8),
        torch.ones(4, 3),
    )
    fails(function, (v, s, other, sums, torch.ones(3, dtype=torch.bool)), "mask must have shape")
    fails(function, (v, s, other, sums, torch.ones(4)), "mask must be bool or uint8, got float32")
    buffer = torch.ones(5, 3, 8)
    fails(function, (buffer[1:], s, buffer[:-1], sums), "v must be v_other itself or not overlap")
    fails(function, (v[:1].expand(4, 3, 8), s, other, sums), "v must not hold an element twice")
    fails(function, (v, s[:1].expand(4, 3), other, sums), "s must not hold an element twice")
    fails(function, (v, v.view(4, 24)[:, :3], other, sums), "v must not overlap s's memory")
    with pytest.raises(TypeError, match=r"mask must be a torch\.Tensor, got list"):
        function(v, s, other, sums, [True] * 4)  # type: ignore[arg-type]


def test_errors_of_states() -> None:
    v, s = torch.ones(4, 2, 3, 8), torch.zeros(4, 2, 3)
    function = precast.merge_states
    fails(function, (v[0], s), "v must have 4 dimensions, got shape [2, 3, 8]")
    fails(function, (v, s[:, 0]), "s must have the shape of v less its last dimension")
    fails(function, (v.double(), s), "v must be float16, bfloat16 or float32, got float64")
    with pytest.raises(TypeError, match=r"s must be a torch\.Tensor, got NoneType"):
        function(v, None)  # type: ignore[arg-type]


CALLS = [
    (function, template)
    for function, template in registered()
    if function.__name__.startswith("merge_state")
]


@pytest.mark.parametrize(
    ("function", "template"), CALLS, ids=[template.name_prefix for _, template in CALLS]
)
def test_torch_compile_without_a_graph_break(function: Any, template: Any) -> None:
    calls = [make_inputs(function, template, seed=4) for _ in range(2)]

    def model(call: dict[str, Any]) -> Any:
        return function(**call)

    want = template.results(calls[0], model(calls[0]))
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    got = template.results(calls[1], compiled(calls[1]))
    for mine, theirs in zip(got, want, strict=True):
        assert torch.equal(mine, theirs)
