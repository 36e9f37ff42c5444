# SPDX-License-Identifier: Apache-2.0
"""Draws and rows in reference mode: what is kept, special rows, sizes, arguments, torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from sampling_support import distribution, kept

import precast
from precast import sampling

KINDS = ["flat", "random", "peaked", "zipf", "ties", "sparse", "one"]
FILTERS: list[dict[str, Any]] = [
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 10**6},
    {"top_p": 0.0},
    {"top_p": 0.3},
    {"top_p": 0.999},
    {"top_p": 1.0},
    {"min_p": 0.0},
    {"min_p": 0.25},
    {"min_p": 1.0},
    {"top_k": 9, "top_p": 0.5},
    {"top_k": 9, "top_p": 0.5, "joint": True},
    {"top_k": 100, "top_p": 0.0},
]
RANDOM = {"seed": 3, "offset": 4}

Draw = Callable[..., torch.Tensor]

pytestmark = pytest.mark.usefixtures("reference_mode")


def function_of(filters: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    names = [name for name in ("top_k", "top_p", "min_p") if name in filters]
    given = {name: filters[name] for name in names}
    if filters.get("joint"):
        given["filter_apply_order"] = "joint"
    return "_".join([*names, "sampling_from_probs"]), given


ALL_DRAWS: dict[str, Draw] = {
    "sampling_from_probs": lambda x, **more: precast.sampling_from_probs(x, **more),
    "top_k": lambda x, **more: precast.top_k_sampling_from_probs(x, 5, **more),
    "top_p": lambda x, **more: precast.top_p_sampling_from_probs(x, 0.6, **more),
    "min_p": lambda x, **more: precast.min_p_sampling_from_probs(x, 0.1, **more),
    "top_k_top_p": lambda x, **more: precast.top_k_top_p_sampling_from_probs(x, 5, 0.6, **more),
}
every_draw = pytest.mark.parametrize("draw", ALL_DRAWS.values(), ids=ALL_DRAWS)


# -- what may be drawn ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_no_token_outside_the_exact_set_and_all_inside(kind: str, filters: dict[str, Any]) -> None:
    weights = distribution(kind, 60, seed=1)
    name, given = function_of(filters)
    rows = weights.expand(1, -1)
    indices = torch.zeros(1 << 15, dtype=torch.int32)
    tokens = getattr(precast, name)(rows, **given, indices=indices, **RANDOM)
    inside = kept(weights, **filters)
    counts = torch.bincount(tokens.long(), minlength=60)
    assert not counts[~inside].any()
    likely = inside & (weights > 0.002 * weights[inside].sum())
    assert counts[likely].all()


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_logits_give_the_tokens_of_their_softmax(filters: dict[str, Any]) -> None:
    logits = 2 * torch.randn(500, 700, generator=torch.Generator().manual_seed(6))
    probs = precast.softmax(logits)
    name, given = function_of(filters)
    by_probs = getattr(precast, name)(probs, **given, **RANDOM)
    by_sample = precast.sample(logits, **given, **RANDOM).tokens
    assert (by_probs == by_sample).double().mean() >= 0.99
    if name.startswith("top_k_top_p"):
        given["top_k"], given["top_p"] = filters["top_k"], filters["top_p"]
        by_logits = precast.top_k_top_p_sampling_from_logits(logits, **given, **RANDOM)
        assert torch.equal(by_logits, by_sample)
    if filters == {"top_p": 1.0}:
        assert torch.equal(precast.sampling_from_logits(logits, **RANDOM), by_sample)


def test_ties_at_the_threshold_are_all_kept() -> None:
    probs = torch.tensor([[0.1, 0.2, 0.2, 0.2, 0.3]])
    many = torch.zeros(4096, dtype=torch.int32)
    by_k = precast.top_k_sampling_from_probs(probs, 2, indices=many, **RANDOM)
    by_p = precast.top_p_sampling_from_probs(probs, 0.4, indices=many, **RANDOM)
    assert by_k.unique().tolist() == by_p.unique().tolist() == [1, 2, 3, 4]
    equal = torch.full((1, 50), 0.02)
    assert len(precast.top_k_sampling_from_probs(equal, 1, indices=many, **RANDOM).unique()) == 50


def test_top_k_first_counts_the_mass_of_what_top_k_keeps() -> None:
    probs = torch.tensor([[0.4, 0.3, 0.2, 0.1]])
    many = torch.zeros(4096, dtype=torch.int32)
    draw = precast.top_k_top_p_sampling_from_probs
    first = draw(probs, 2, 0.55, indices=many, **RANDOM)
    joint = draw(probs, 2, 0.55, indices=many, filter_apply_order="joint", **RANDOM)
    assert (first.unique().tolist(), joint.unique().tolist()) == ([0], [0, 1])


@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.9, 0.95])
@pytest.mark.parametrize("kind", KINDS)
def test_the_nucleus_is_the_smallest_that_suffices(kind: str, top_p: float) -> None:
    weights = distribution(kind, 4000)[None]
    renormed = precast.top_p_renorm_probs(weights, top_p)
    inside = weights.double()[renormed > 0]
    assert inside.sum() >= top_p - 1e-4
    assert inside[inside > inside.min()].sum() < top_p
    assert abs(float(renormed.double().sum()) - 1) < 1e-5


# -- special rows and sizes -----------------------------------------------------------------------


@every_draw
def test_rows_that_are_no_distributions(draw: Draw) -> None:
    good = torch.tensor([0.0, 0.0, 1.0])
    rows = torch.stack([good, good * 0, good, good, -good, good])
    rows[2, 0], rows[3, 1] = torch.nan, torch.inf
    tokens, valid = draw(rows, return_valid=True, **RANDOM)
    assert valid.tolist() == [True, False, False, False, False, True]
    assert valid.dtype == torch.bool
    assert tokens.tolist() == [2, 0, 0, 0, 0, 2]
    with pytest.raises(ValueError, match=r"Input probs contains NaN\."):
        draw(rows, check_nan=True, **RANDOM)
    draw(rows[:2], check_nan=True, **RANDOM)


def test_logits_that_are_infinite_or_nan() -> None:
    rows = torch.tensor(
        [[-torch.inf, 1.0, -torch.inf], [-torch.inf] * 3, [0.0, torch.nan, 0.0], [-1e38, 3e38, 0]]
    )
    for call in (precast.sampling_from_logits, precast.top_k_top_p_sampling_from_logits):
        more = () if call is precast.sampling_from_logits else (2, 0.9)
        assert call(rows, *more, **RANDOM).tolist() == [1, 0, 0, 1]
        with pytest.raises(ValueError, match=r"Input logits contains NaN\."):
            call(rows, *more, check_nan=True)
    probs = precast.softmax(rows)
    assert probs[0].tolist() == [0, 1, 0]
    assert probs[1:3].isnan().all()


@pytest.mark.parametrize("size", [1, 2, 3, 127, 1023, 1024, 1025, 32768, 32769, 1 << 20])
def test_any_vocabulary(size: int) -> None:
    rows = torch.zeros(3, size)
    places = [0, size // 2, size - 1]
    rows[range(3), places] = 0.5
    for draw in ALL_DRAWS.values():
        assert draw(rows, **RANDOM).tolist() == places
    assert precast.sampling_from_logits(rows.log(), **RANDOM).tolist() == places
    spread = precast.sampling_from_probs(
        torch.ones(1, size), indices=torch.zeros(200).int(), seed=1, offset=0
    )
    assert 0 <= spread.min() <= spread.max() < size
    assert size < 3 or len(spread.unique()) > min(size, 100) / 2


@every_draw
def test_no_rows(draw: Draw) -> None:
    tokens, valid = draw(torch.empty(0, 10), return_valid=True)
    assert tokens.shape == valid.shape == (0,)
    nothing = torch.empty(0, dtype=torch.int64)
    assert draw(torch.ones(2, 10), indices=nothing).dtype == torch.int64
    assert precast.softmax(torch.empty(0, 10)).shape == (0, 10)


@every_draw
def test_a_token_does_not_depend_on_the_rows_around_it(draw: Draw) -> None:
    x = torch.rand(16, 3000, generator=torch.Generator().manual_seed(4))
    tokens = draw(x, **RANDOM)
    other = torch.rand(16, 3000, generator=torch.Generator().manual_seed(5))
    other[7] = x[7]
    assert draw(other, **RANDOM)[7] == tokens[7]
    assert torch.equal(draw(x[:8], **RANDOM), tokens[:8])
    strided = torch.zeros(16, 3500)[:, 200:3200]
    strided.copy_(x)
    assert torch.equal(draw(strided, **RANDOM), tokens)
    assert torch.equal(draw(x, **RANDOM), tokens)


# -- arguments ------------------------------------------------------------------------------------


@every_draw
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_indices_choose_rows_and_the_result_has_their_dtype(draw: Draw, dtype: torch.dtype) -> None:
    x = torch.eye(5)
    indices = torch.tensor([4, 0, 0, 3, 1, 4, 2], dtype=dtype)
    tokens = draw(x, indices=indices)
    assert tokens.dtype == dtype
    assert torch.equal(tokens, indices)
    assert draw(x).dtype == torch.int32


def test_parameters_by_row() -> None:
    x = distribution("zipf", 100).expand(64, -1)
    rows = torch.arange(64)
    k, p, m = rows % 5 + 1, rows % 4 / 4, (rows % 3 + 1) / 4
    draws = {
        "top_k_sampling_from_probs": ("top_k", k),
        "top_p_sampling_from_probs": ("top_p", p),
        "min_p_sampling_from_probs": ("min_p", m),
    }
    for name, (filter_name, values) in draws.items():
        tokens = getattr(precast, name)(x, values, **RANDOM)
        for row, (token, value) in enumerate(zip(tokens.tolist(), values.tolist())):
            assert kept(x[row], **{filter_name: value})[token]
        alone = getattr(precast, name)(x, values[2].item(), **RANDOM)
        same = values == values[2]
        assert torch.equal(tokens[same], alone[same])
    both = precast.top_k_top_p_sampling_from_probs(x, k, p, **RANDOM)
    assert all(kept(x[i], int(k[i]), float(p[i]))[both[i]] for i in range(64))
    renormed = precast.top_k_renorm_probs(x, k)
    assert torch.equal((renormed > 0).sum(1), k)
    indexed = precast.top_k_sampling_from_probs(x[:2], k[:2], indices=torch.ones(9).int(), **RANDOM)
    assert set(indexed.tolist()) <= {int(i) for i in x[1].topk(2).indices}


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (torch.ones(3), r"Sampling parameter tensor batch size mismatch: .* must have shape \[2\]"),
        (torch.ones(2, 2), "Expected a 1D tensor or scalar, got a 2D tensor"),
        (torch.ones(2, 1), "Expected a 1D tensor or scalar, got a 2D tensor"),
        (
            torch.ones(()),
            r"Expected a 1D tensor of shape \(batch_size,\) or scalar, got a 0-dimensional tensor",
        ),
    ],
)
def test_parameters_of_another_shape_are_rejected(bad: torch.Tensor, words: str) -> None:
    x = torch.ones(2, 10)
    calls: list[Callable[[], Any]] = [
        lambda: precast.top_k_sampling_from_probs(x, bad.int()),
        lambda: precast.top_p_sampling_from_probs(x, bad),
        lambda: precast.min_p_sampling_from_probs(x, bad),
        lambda: precast.top_k_top_p_sampling_from_logits(x, 2, bad),
        lambda: precast.top_k_renorm_probs(x, bad.int()),
        lambda: precast.top_p_renorm_probs(x, bad),
        lambda: precast.top_k_mask_logits(x, bad.int()),
        lambda: precast.softmax(x, bad),
        lambda: precast.sample(x, bad),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=words):
            call()


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (torch.ones(4), r"probs must have 2 dimensions, got shape \[4\]"),
        (torch.ones(()), r"probs must have 2 dimensions, got shape \[\]"),
        (torch.ones(2, 3, 4), r"probs must have 2 dimensions, got shape \[2, 3, 4\]"),
        (torch.ones(2, 0), r"probs must have 1 to 1048576 columns, got shape \[2, 0\]"),
        (torch.ones(1, 1).expand(1, (1 << 20) + 1), "probs must have 1 to 1048576 columns"),
        (torch.ones(2, 3).double(), "probs must be float32 or float16 or bfloat16, got float64"),
        (torch.ones(2, 3).int(), "probs must be float32 or float16 or bfloat16, got int32"),
    ],
)
@every_draw
def test_wrong_distributions_are_rejected(draw: Draw, x: torch.Tensor, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        draw(x, **RANDOM)


def test_what_is_no_tensor_is_a_type_error() -> None:
    x: Any = [[0.5, 0.5]]
    with pytest.raises(TypeError, match=r"sampling_from_probs: probs must be a torch\.Tensor"):
        precast.sampling_from_probs(x)
    with pytest.raises(TypeError, match=r"indices must be a torch\.Tensor, got list"):
        precast.sampling_from_probs(torch.ones(1, 2), indices=x)
    with pytest.raises(TypeError, match=r"softmax: logits must be a torch\.Tensor"):
        precast.softmax(x)
    with pytest.raises(
        TypeError, match=r"softmax: temperature must be a torch\.Tensor or a number"
    ):
        precast.softmax(torch.ones(1, 2), True)
    with pytest.raises(TypeError, match=r"top_k_renorm_probs: probs must be a torch\.Tensor"):
        precast.top_k_renorm_probs(x, 1)


def test_an_unknown_order_is_rejected() -> None:
    x = torch.ones(1, 4)
    for call in (
        precast.top_k_top_p_sampling_from_probs,
        precast.top_k_top_p_sampling_from_logits,
    ):
        with pytest.raises(ValueError, match="Invalid filter_apply_order: 'top_p_first'"):
            call(x, 2, 0.5, filter_apply_order="top_p_first")


# -- rows that stay rows --------------------------------------------------------------------------

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("temperature", [None, 0.7, torch.tensor([0.5, 1.0, 2.0])])
def test_softmax(temperature: Any, dtype: torch.dtype) -> None:
    x = (4 * torch.randn(3, 5000, generator=torch.Generator().manual_seed(0))).to(dtype)
    scale = 1.0 if temperature is None else temperature
    scale = scale[:, None].double() if isinstance(scale, torch.Tensor) else scale
    out = precast.softmax(x, temperature)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.double(), (x.double() / scale).softmax(1), rtol=3e-6, atol=1e-9)
    assert precast.softmax(x, 0.0).max(dim=1).values.tolist() == [
        1 / n for n in (x == x.amax(1, keepdim=True)).sum(1).tolist()
    ]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "filters", [{"top_k": 40}, {"top_p": 0.8}, {"top_k": 10**6}, {"top_p": 1.0}]
)
def test_renormalised_rows(filters: dict[str, Any], dtype: torch.dtype) -> None:
    ((name, value),) = filters.items()
    x = torch.stack([distribution(kind, 3000) for kind in KINDS]).to(dtype)
    out = getattr(precast, f"{name}_renorm_probs")(x, value)
    assert out.dtype == dtype
    for row, result in zip(x, out):
        inside = kept(row.float(), **filters)
        exact = row.double().where(inside, 0)
        exact /= exact.sum()
        torch.testing.assert_close(result.double(), exact, rtol=TOLERANCE[dtype], atol=1e-7)
        assert not result[~inside].any()
    assert sampling.top_k_renorm_prob is sampling.top_k_renorm_probs
    assert sampling.top_p_renorm_prob is sampling.top_p_renorm_probs


def test_rows_without_mass_stay_empty() -> None:
    x = torch.zeros(2, 10)
    x[1, 3] = torch.nan
    for out in (precast.top_k_renorm_probs(x, 3), precast.top_p_renorm_probs(x, 0.5)):
        assert not out[0].any()
        assert out[1].isnan().any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_masked_logits(dtype: torch.dtype) -> None:
    x = torch.randn(4, 3000, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[2] = 1.0
    x[3, :2990] = -torch.inf
    out = precast.top_k_mask_logits(x, torch.tensor([1, 3000, 5, 20]))
    finite = (out > -torch.inf).sum(1)
    assert finite.tolist() == [int((x[0] == x[0].max()).sum()), 3000, 3000, 10]
    there = out > -torch.inf
    assert torch.equal(out[there], x[there])
    assert out.dtype == dtype


# -- torch.compile --------------------------------------------------------------------------------


def test_compiled_draws_have_the_same_tokens_and_fresh_ones_without_a_seed() -> None:
    x = torch.rand(40, 900, generator=torch.Generator().manual_seed(0))

    @torch.compile(fullgraph=True, backend="aot_eager")
    def draw(x: torch.Tensor, p: torch.Tensor) -> tuple[torch.Tensor, ...]:
        probs = precast.top_k_renorm_probs(precast.softmax(x, 0.5), 300)
        tokens, valid = precast.top_p_sampling_from_probs(
            probs, p, return_valid=True, seed=3, offset=4
        )
        out = precast.sample(
            x, 0.7, top_k=20, return_logprobs=True, top_logprobs=2, seed=1, offset=0
        )
        free = precast.sampling_from_logits(x)
        values, indices = precast.top_k(x, 5, sorted=True)
        return tokens, valid, out.tokens, out.logprobs, out.top_tokens, free, values, indices

    p = torch.full((40,), 0.5)
    compiled, again = draw(x, p), draw(x, p)
    for name, mine, plain in zip(range(8), compiled, draw.__wrapped__(x, p)):
        assert mine.dtype == plain.dtype
        assert name == 5 or torch.equal(mine, plain), name
    assert not torch.equal(compiled[5], again[5])


def test_other_numbers_compile_nothing_anew() -> None:
    """The second number of a kind makes a graph for all that follow."""
    x = torch.rand(4, 100, generator=torch.Generator().manual_seed(0))
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    def draw(x: torch.Tensor, k: int, seed: int, offset: int) -> tuple[torch.Tensor, ...]:
        random = {"seed": seed, "offset": offset}
        tokens = precast.top_k_sampling_from_probs(x, k, **random)
        return tokens, precast.sample(x, top_k=k, **random).tokens, precast.top_k_mask_logits(x, k)

    torch._dynamo.reset()
    compiled = torch.compile(draw, fullgraph=True, backend=backend)
    for i in range(5):
        numbers = 5 + i, 10 + 3 * i, 4 * i + 8
        for mine, plain in zip(compiled(x, *numbers), draw(x, *numbers)):
            assert torch.equal(mine, plain)
    assert len(graphs) <= 2


# -- speculative sampling -------------------------------------------------------------------------


def test_a_draft_like_the_target_stands_and_another_does_not() -> None:
    batch, count, size = 5, 4, 50
    generator = torch.Generator().manual_seed(0)
    target = torch.rand(batch, count + 1, size, generator=generator).softmax(-1)
    ids = torch.randint(0, size, (batch, count), generator=generator, dtype=torch.int32)
    counters = torch.tensor([10, 20, 30, 40, 50], dtype=torch.int32)
    accepted, emitted = counters.clone(), counters.clone()
    call = precast.chain_speculative_sampling
    tokens, a, e = call(target[:, :count].clone(), ids, target, accepted, emitted)
    assert (a is accepted, e is emitted) == (True, True)
    assert torch.equal(accepted, counters + count)
    assert torch.equal(emitted, counters + count)
    assert torch.equal(tokens[:, :count], ids)
    assert (tokens[:, count] >= 0).all()
    never = torch.zeros_like(target).index_fill(2, torch.tensor([0]), 1.0)
    draft = torch.zeros(batch, count, size).index_fill(2, torch.tensor([7]), 1.0)
    tokens, a, e = call(draft, torch.full((batch, count), 7), never)
    assert tokens.tolist() == [[0] + [-1] * count] * batch
    assert not a.any()
    assert not e.any()
    assert (tokens.dtype, a.dtype) == (torch.int64, torch.int32)


def test_later_tokens_count_as_accepted_by_themselves() -> None:
    draft = torch.tensor([[[0.5, 0.5], [0.5, 0.5], [0.5, 0.5]]])
    target = torch.tensor([[[1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [0.0, 1.0]]])
    ids = torch.tensor([[0, 0, 0]])  # stands, does not, would
    tokens, accepted, emitted = precast.chain_speculative_sampling(draft, ids, target)
    assert tokens.tolist() == [[0, 1, -1, -1]]
    assert (accepted.tolist(), emitted.tolist()) == ([2], [1])
    outside = torch.tensor([[0, 9, -1]])
    assert precast.chain_speculative_sampling(draft, outside, target)[0].tolist() == [
        [0, 1, -1, -1]
    ]


def test_a_draft_of_no_tokens_and_a_batch_of_none() -> None:
    target = torch.tensor([[[0.0, 1.0]]])
    call = precast.chain_speculative_sampling
    tokens, _, _ = call(torch.empty(1, 0, 2), torch.empty(1, 0, dtype=torch.int32), target)
    assert tokens.tolist() == [[1]]
    tokens, accepted, _ = call(
        torch.empty(0, 3, 2), torch.empty(0, 3, dtype=torch.int32), torch.empty(0, 4, 2)
    )
    assert (tokens.shape, accepted.shape) == ((0, 4), (0,))


def test_drafts_that_do_not_fit_are_rejected() -> None:
    draft, target = torch.ones(2, 3, 4), torch.ones(2, 4, 4)
    ids = torch.zeros(2, 3, dtype=torch.int32)
    call = precast.chain_speculative_sampling
    for args, words in (
        ((draft, ids, target[:, :3]), r"target_probs must have shape \[2, 4, 4\]"),
        ((draft, ids[:1], target), r"draft_token_ids must have shape \[2, 3\]"),
        ((draft, ids[0], target), "draft_token_ids must have 2 dimensions"),
        ((draft, ids.float(), target), "draft_token_ids must be int32 or int64"),
        ((draft, ids, target.half()), "target_probs must be float32, got float16"),
        ((draft, ids, target, torch.ones(2)), "maybe_output_accepted_token_num must be int32"),
        (
            (draft, ids, target, None, torch.ones(3).int()),
            r"maybe_output_emitted_draft_token_num must have shape \[2\]",
        ),
    ):
        with pytest.raises(ValueError, match=words):
            call(*args)
