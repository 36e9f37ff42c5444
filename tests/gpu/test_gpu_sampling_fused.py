# SPDX-License-Identifier: Apache-2.0
"""``sample``, speculative sampling and pipes of processors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sampling_calls import DTYPES, RANDOM, both, different, share
from sampling_support import kept

import precast
from precast._ops.sampling.fused import unpacked
from precast.logits_processor import (
    LogitsPipe,
    MinP,
    Sample,
    Softmax,
    Temperature,
    TensorType,
    TopK,
    TopP,
)

INF = torch.inf
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=["f32", "f16", "bf16"])


def requests(
    rows: int, size: int, dtype: torch.dtype, generator: torch.Generator
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Logits, and all that requests may ask for, each for itself."""
    device, words = generator.device, (size + 31) // 32
    x = (3 * torch.randn(rows, size, device=device, generator=generator)).to(dtype)
    at = torch.arange(rows, device=device)

    def mask() -> torch.Tensor:
        bits = torch.randint(-(2**31), 2**31, (rows, words), device=device, generator=generator)
        return bits.to(torch.int32)

    counts = torch.randint(-3, 4, (rows, size), device=device, generator=generator)
    return x, {
        "temperature": (at % 4) * 0.5,
        "top_k": torch.tensor([0, 1, 50, 10**6, 400], device=device)[at % 5].int(),
        "top_p": torch.tensor([1.0, 0.9, 0.3], device=device)[at % 3],
        "min_p": torch.tensor([0.0, 0.05], device=device)[at % 2],
        "repetition_penalty": torch.tensor([1.0, 1.3, 0.8], device=device)[at % 3],
        "frequency_penalty": torch.tensor([0.0, 0.25, -0.5], device=device)[at % 3],
        "presence_penalty": torch.tensor([0.0, 0.5], device=device)[at % 2],
        "prompt_mask": mask() & mask(),
        "output_counts": counts.clamp(min=0).int(),
        "bitmask": mask() | mask(),
    }


def check(x: torch.Tensor, least: float = 0.96, **more: Any) -> None:
    """Tokens, log-probabilities, the likeliest tokens and validity are the reference's."""
    wanted = {"return_logprobs": True, "top_logprobs": 5, "return_valid": True}
    got, want = both(precast.sample, x, **{**wanted, **RANDOM, **more})
    same = got.tokens == want.tokens
    assert share(got.tokens, want.tokens) >= least
    assert torch.equal(got.valid, want.valid)
    close = {"rtol": 2e-5, "atol": 5e-5, "equal_nan": True}
    torch.testing.assert_close(got.logprobs[same], want.logprobs[same], **close)
    torch.testing.assert_close(got.top_logprobs, want.top_logprobs, **close)
    assert torch.equal(got.top_tokens, want.top_tokens)


@dtypes
@pytest.mark.parametrize(
    "size", [1, 2, 31, 32, 33, 1025, 5001, 32769, 128256, 262147, 1000000, 1 << 20]
)
def test_requests_of_every_kind(size: int, dtype: torch.dtype, generator: torch.Generator) -> None:
    x, parameters = requests(60 if size < 1 << 18 else 12, size, dtype, generator)
    least = 0.9 if len(x) < 60 else 0.96
    check(x, least, **parameters)
    check(x, least, **parameters, filter_apply_order="joint")
    check(x, least, **parameters, top_logprobs=32)
    check(x, least)
    check(x, least, temperature=0.8, top_k=20, top_p=0.9, min_p=0.02)
    for name in ("bitmask", "prompt_mask", "output_counts"):
        more = {name: parameters[name]}
        if name != "bitmask":
            more["repetition_penalty"] = 1.2
        if name == "output_counts":
            more["frequency_penalty"], more["presence_penalty"] = 0.1, 0.2
        check(x, least, **more)


@dtypes
@pytest.mark.parametrize("rows", [1, 9, 70, 300])
@pytest.mark.parametrize("size", [1, 33, 4099, 32000, 128256, 600000])
def test_tokens_alone_are_those_of_the_larger_kernel(
    size: int, rows: int, dtype: torch.dtype, generator: torch.Generator
) -> None:
    """Bit for bit, whichever kernel draws: with a mask that forbids nothing, with logarithms."""
    if rows * size > 1 << 26:
        pytest.skip("more of the same")
    x, given = requests(rows, size, dtype, generator)
    x[0, : size // 2] = x[0].max()  # equal ones, of which greedy takes the first
    x[rows // 2, size // 2] = INF if rows % 2 else torch.nan
    x[rows // 3] = -INF
    filters = {name: given[name] for name in ("temperature", "top_k", "top_p", "min_p")}
    seeds = torch.arange(rows, device="cuda")
    all_allowed = {"bitmask": torch.full_like(given["bitmask"], -1)}
    calls: list[dict[str, Any]] = [
        RANDOM,
        {"temperature": 0.0, **RANDOM},
        {"temperature": 0.6, "top_k": 50, "top_p": 0.9, **RANDOM},
        {"temperature": 1.7, "top_k": 400, "min_p": 0.01, **RANDOM},
        {"top_p": 0.8, **RANDOM},
        {"min_p": 0.1, **RANDOM},
        {**filters, **RANDOM},
        {**filters, "filter_apply_order": "joint", "seed": seeds, "offset": seeds * 4},
    ]
    for call in calls:
        tokens, *_, valid = precast.sample(x, **call, return_valid=True)
        for more in (all_allowed, {"return_logprobs": True}, {"top_logprobs": 2}):
            again = precast.sample(x, **call, **more, return_valid=True)
            assert torch.equal(tokens, again.tokens), (call, more, different(tokens, again.tokens))
            assert torch.equal(valid, again.valid), (call, more)


@pytest.mark.parametrize("size", [1, 2, 33, 1023, 1024, 32000, 151936, 262144])
def test_parameters_at_the_ends_of_their_ranges(size: int, generator: torch.Generator) -> None:
    x, _ = requests(60, size, torch.float32, generator)
    x[0] = 1.5
    x[1, : size - 1] = -INF
    ends: list[dict[str, Any]] = [
        *({"top_k": k} for k in (-1, 0, 1, size - 1, size, size + 1, 2**31 - 1)),
        *({"top_p": p} for p in (-1.0, 0.0, 1.0, 2.0)),
        *({"min_p": m} for m in (-1.0, 0.0, 1.0, 2.0)),
        {"temperature": 1e-30},
        {"temperature": 1e30},
        {"top_k": size, "top_p": 1.0, "min_p": 0.0},
        {"top_k": 1, "top_p": 0.0, "min_p": 1.0},
    ]
    for given in ends:
        check(x, **given)
        assert precast.sample(x, **given).tokens[1] == size - 1, given
    for likeliest in ({"top_k": 1}, {"top_p": 0.0}, {"min_p": 1.0}):
        tokens = precast.sample(x, **likeliest).tokens.long()
        assert torch.equal(x.gather(1, tokens[:, None])[:, 0], x.amax(1)), likeliest


def test_no_rows() -> None:
    out = precast.sample(
        torch.empty(0, 1000, device="cuda"),
        bitmask=torch.empty(0, 32, device="cuda", dtype=torch.int32),
        return_logprobs=True,
        top_logprobs=4,
        return_valid=True,
    )
    assert [tuple(part.shape) for part in out] == [(0,), (0,), (0, 4), (0, 4), (0,)]


def test_rows_that_have_no_token_left(generator: torch.Generator) -> None:
    x, _ = requests(8, 3000, torch.float32, generator)
    x[1, 5], x[2, 7] = torch.nan, INF
    x[3] = -INF
    allowed = torch.full((8, 94), -1, dtype=torch.int32, device="cuda")
    allowed[4] = 0
    allowed[5] = 0
    allowed[5, 93] = 1 << 7  # token 2983
    for temperature in (1.0, 0.0):
        out = precast.sample(
            x,
            temperature,
            bitmask=allowed,
            return_logprobs=True,
            top_logprobs=2,
            return_valid=True,
        )
        bad = [1, 2, 3, 4]
        assert out.valid.tolist() == [i not in bad for i in range(8)]
        assert not out.tokens[bad].any()
        assert out.logprobs[bad].isnan().all()
        assert (out.top_tokens[bad] == -1).all()
        assert out.tokens[5] == 2983
        assert abs(float(out.logprobs[5])) < 1e-6
        assert out.top_tokens[5].tolist() == [2983, -1]
        assert out.top_logprobs[5, 1] == -INF
        check(x, temperature=temperature, bitmask=allowed)


@pytest.mark.parametrize("size", [31, 3001, 128256])
def test_greedy_distinguishes_neighbouring_floats(size: int, generator: torch.Generator) -> None:
    """Their weights may round to the same number."""
    x = torch.full((40, size), 1.0, device=generator.device).nextafter(torch.zeros(1).cuda())
    at = torch.randint(0, size, (40, 2), device=x.device, generator=generator)
    x.scatter_(1, at, 1.0)
    for top in (0, 3):
        got = precast.sample(x, temperature=0.0, top_logprobs=top)
        assert torch.equal(got.tokens.long(), at.min(dim=1).values)


@dtypes
def test_greedy_takes_the_first_of_the_largest(
    dtype: torch.dtype, generator: torch.Generator
) -> None:
    for size in (1, 40, 1025, 40000, 262145):
        x = torch.randint(0, 9, (50, size), device="cuda", generator=generator).to(dtype)
        want = (x == x.amax(1, keepdim=True)).int().argmax(1)
        for more in ({}, {"top_k": 3}, {"top_p": 0.0}, {"min_p": 1.0}):
            assert torch.equal(precast.sample(x, 0.0, **more).tokens.long(), want), (size, more)


def test_equal_logits_are_ordered_by_token(generator: torch.Generator) -> None:
    for size in (3, 33, 1024, 40000, 262145):
        flat = torch.full((3, size), 2.0, device="cuda")
        out = precast.sample(flat, top_logprobs=32, return_logprobs=True)
        want = [*range(min(32, size)), *[-1] * (32 - size)]
        assert out.top_tokens.tolist() == [want] * 3
        few = torch.randint(0, 3, (20, size), device="cuda", generator=generator).float()
        check(few, top_logprobs=32)
        check(few, top_logprobs=1)


def test_a_mask_is_a_promise(generator: torch.Generator) -> None:
    """No token that is not allowed, in many draws; each that is allowed comes."""
    size, rows = 70, 1 << 14
    allowed = torch.randint(-(2**31), 2**31, (1, 3), device="cuda", generator=generator).int()
    inside = unpacked(allowed, size)[0]
    x = torch.randn(1, size, device="cuda", generator=generator).expand(rows, -1)
    tokens = precast.sample(x, bitmask=allowed.expand(rows, -1).contiguous()).tokens
    counts = torch.bincount(tokens, minlength=size)
    assert not counts[~inside].any()
    assert counts[inside & (x[0] > -0.5)].all()


def test_what_is_rejected(generator: torch.Generator) -> None:
    x, parameters = requests(4, 100, torch.float32, generator)
    mask, counts = parameters["bitmask"], parameters["output_counts"]
    for more, words in (
        ({"bitmask": mask[:, :3]}, r"bitmask must have shape \[4, 4\], got \[4, 3\]"),
        ({"bitmask": mask.long()}, "bitmask must be int32, got int64"),
        ({"bitmask": mask.cpu()}, "bitmask must be on cuda:0 as logits, got cpu"),
        ({"prompt_mask": mask[:3]}, r"prompt_mask must have shape \[4, 4\], got \[3, 4\]"),
        ({"output_counts": counts[:, :99]}, r"output_counts must have shape \[4, 100\]"),
        ({"output_counts": counts.float()}, "output_counts must be int32, got float32"),
        ({"frequency_penalty": 0.5}, "frequency_penalty needs output_counts"),
        ({"top_logprobs": 33}, "top_logprobs must be from 0 to 32, got 33"),
        ({"min_p": torch.ones(3, device="cuda")}, "batch size mismatch: min_p must"),
    ):
        with pytest.raises(ValueError, match=words):
            precast.sample(x, **more)


def test_batches_do_not_matter(generator: torch.Generator) -> None:
    for size in (5000, 128256):
        x, parameters = requests(150, size, torch.bfloat16, generator)
        seeds = torch.arange(150, device="cuda") + 5
        own = {"seed": seeds, "offset": seeds * 4}
        more = {"return_logprobs": True, "top_logprobs": 3}
        want = precast.sample(x, **parameters, **own, **more)
        for take in (slice(0, 16), slice(7, 8), slice(50, 150)):
            part = {name: value[take] for name, value in {**parameters, **own}.items()}
            got = precast.sample(x[take], **part, **more)
            for mine, theirs in zip(got[:4], want[:4], strict=True):
                torch.testing.assert_close(mine, theirs[take], rtol=0, atol=0, equal_nan=True)


# -- speculative sampling -------------------------------------------------------------------------


@dtypes
@pytest.mark.parametrize("size", [1, 30, 1025, 32768, 33001, 128256])
@pytest.mark.parametrize("count", [0, 1, 5])
def test_speculative_sampling(
    count: int, size: int, dtype: torch.dtype, generator: torch.Generator
) -> None:
    for batch in (0, 1, 40):
        shape = (batch, count + 1, size)
        target = (2 * torch.randn(shape, device="cuda", generator=generator)).softmax(-1)
        other = (2 * torch.randn(shape, device="cuda", generator=generator)).softmax(-1)
        draft = (0.3 * other + 0.7 * target)[:, :count].contiguous().to(dtype)
        target = target.to(dtype)
        flat = draft.float().view(-1, size)
        ids = precast.sampling_from_probs(flat) if len(flat) else flat.new_empty(0)
        ids = ids.view(batch, count).to(torch.int64 if size % 2 else torch.int32)
        if batch == 40 and count == 5:
            ids[3, 1], ids[4, 0] = -1, size
            target[5] = 0
            draft[6] = target[6, :count]
        counters = torch.arange(batch, dtype=torch.int32, device="cuda")

        def call(draft: Any, ids: Any, target: Any, start: Any) -> tuple[torch.Tensor, ...]:
            accepted, emitted = start.clone(), start.clone() * 2
            return precast.chain_speculative_sampling(
                draft, ids, target, accepted, emitted, **RANDOM
            )

        got, want = both(call, draft, ids, target, counters)
        for mine, theirs in zip(got, want, strict=True):
            assert mine.dtype == theirs.dtype
            assert torch.equal(mine, theirs)
        if batch == 40:
            wide = torch.full((40, count + 3, size + 8), torch.nan, device="cuda", dtype=dtype)
            rows = wide[:, : count + 1, :size]
            rows.copy_(target)
            for mine, theirs in zip(call(draft, ids, rows, counters), want, strict=True):
                assert torch.equal(mine, theirs)


def test_drafts_that_do_not_fit_are_rejected() -> None:
    draft, target = torch.ones(2, 3, 4, device="cuda"), torch.ones(2, 4, 4, device="cuda")
    ids = torch.zeros(2, 3, dtype=torch.int32, device="cuda")
    call = precast.chain_speculative_sampling
    for args in (
        (draft, ids, target[:, :3]),
        (draft, ids[:1], target),
        (draft, ids[0], target),
        (draft, ids.float(), target),
        (draft, ids, target.half()),
        (draft, ids.cpu(), target),
        (draft, ids, target, ids[:, 0].float()),
        (draft, ids, target, None, ids[0]),
    ):
        with pytest.raises(ValueError, match="chain_speculative_sampling: "):
            call(*args)


# -- pipes of processors --------------------------------------------------------------------------

PIPES: list[tuple[list[Any], dict[str, Any]]] = [
    ([Temperature(), Softmax(), Sample()], {"temperature": 0.7}),
    ([Softmax(), TopK(), Sample()], {"top_k": 20}),
    ([Temperature(), Softmax(), TopP(), Sample()], {"temperature": 1.5, "top_p": 0.6}),
    ([Softmax(), MinP(), Sample()], {"min_p": 0.1}),
    ([Softmax(), TopK(), TopP(), Sample()], {"top_k": 40, "top_p": 0.8}),
    (
        [Temperature(), Softmax(), TopK(joint_topk_topp=True), TopP(), Sample()],
        {"temperature": 0.9, "top_k": 40, "top_p": 0.8},
    ),
    ([TopK(), Softmax(), TopP(), Sample()], {"top_k": 25, "top_p": 0.5}),
    ([TopK(joint_topk_topp=True), Softmax(), TopP(), Sample()], {"top_k": 25, "top_p": 0.5}),
    ([Softmax(), TopP(), TopK(), Sample()], {"top_k": 25, "top_p": 0.5}),
    ([Temperature(), Softmax(), TopK(), TopP()], {"temperature": 0.8, "top_k": 30, "top_p": 0.9}),
]


@pytest.mark.parametrize(("processors", "parameters"), PIPES, ids=lambda value: str(value)[:60])
def test_a_pipe_that_is_fused_does_what_its_steps_do(
    processors: list[Any], parameters: dict[str, Any], generator: torch.Generator
) -> None:
    x = 2 * torch.randn(500, 3000, device="cuda", generator=generator)
    kind = TensorType.LOGITS
    pipe = LogitsPipe(processors, input_type=kind)
    steps = LogitsPipe(processors, compile=False, input_type=kind)
    assert len(pipe.compiled_ops or ()) < len(steps.ops)
    draws = isinstance(processors[-1], Sample)
    random = RANDOM if draws else {}
    got = pipe(x, **parameters, **random)
    if not draws:
        torch.testing.assert_close(got, steps(x, **parameters), rtol=1e-5, atol=1e-8)
    elif "top_p" not in parameters:  # The same draw, from masses that round otherwise.
        assert share(got, steps(x, **parameters, **random)) >= 0.98
    elif isinstance(processors[-3], TopK) and processors[-3].params["joint_topk_topp"]:
        weights = (x / parameters["temperature"]).softmax(1).cpu()
        sets = [kept(row, parameters["top_k"], parameters["top_p"], joint=True) for row in weights]
        inside = torch.stack(sets).gather(1, got.cpu()[:, None].long())
        assert inside.double().mean() >= 0.99
    else:
        rows = LogitsPipe(processors[:-1], compile=False, input_type=kind)(x, **parameters)
        assert (rows.gather(1, got[:, None].long()) > 0).double().mean() >= 0.99
    by_row = {name: torch.full((500,), value, device="cuda") for name, value in parameters.items()}
    assert torch.equal(pipe(x, **by_row, **random), got)
