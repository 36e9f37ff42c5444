# SPDX-License-Identifier: Apache-2.0
"""``sample`` in reference mode, by plain Python: penalties, masks, log-probabilities, errors."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import precast
from precast._op.dispatch import Kernel
from precast._ops.sampling.fused import _SAMPLE, _SAMPLE_TOKENS

RANDOM = {"seed": 3, "offset": 4}
INF = math.inf

pytestmark = pytest.mark.usefixtures("reference_mode")


def packed(rows: list[list[int]], size: int) -> torch.Tensor:
    """The mask of these tokens, as grammar engines pack it."""
    words = torch.zeros(len(rows), -(-size // 32), dtype=torch.int64)
    for row, tokens in enumerate(rows):
        for token in tokens:
            words[row, token // 32] |= 1 << token % 32
    return words.to(torch.int32)


def counts(rows: list[dict[int, int]], size: int) -> torch.Tensor:
    made = torch.zeros(len(rows), size, dtype=torch.int32)
    for row, tokens in enumerate(rows):
        for token, count in tokens.items():
            made[row, token] = count
    return made


def logprobs_of(logits: list[float], temperature: float = 1.0) -> list[float]:
    top = max(logits)
    total = sum(math.exp((x - top) / temperature) for x in logits)
    return [(x - top) / temperature - math.log(total) for x in logits]


def test_penalties_in_their_order() -> None:
    x = torch.tensor([[2.0, -2.0, 1.0, 0.5, 3.0]])
    prompt, output = packed([[0, 1]], 5), counts([{1: 2, 2: 3}], 5)
    out = precast.sample(
        x,
        repetition_penalty=1.25,
        frequency_penalty=0.5,
        presence_penalty=0.25,
        prompt_mask=prompt,
        output_counts=output,
        top_logprobs=5,
        **RANDOM,
    )
    lowered = [2 / 1.25, -2 * 1.25 - 1.0 - 0.25, 1 / 1.25 - 1.5 - 0.25, 0.5, 3.0]
    wanted = logprobs_of(lowered)
    assert out.top_tokens is not None
    assert out.top_logprobs is not None
    assert out.top_tokens.tolist() == [[4, 0, 3, 2, 1]]
    found = dict(zip(out.top_tokens[0].tolist(), out.top_logprobs[0].tolist()))
    assert [found[token] for token in range(5)] == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize("size", [1, 31, 32, 33, 100, 3000])
def test_only_allowed_tokens(size: int) -> None:
    tokens = sorted({0, size // 2, size - 1})
    rows = 500
    mask = packed([tokens], size).expand(rows, -1)
    x = torch.zeros(rows, size)
    drawn = precast.sample(x, bitmask=mask, **RANDOM).tokens
    assert drawn.unique().tolist() == tokens
    greedy = precast.sample(x, 0.0, bitmask=mask, **RANDOM).tokens
    assert greedy.unique().tolist() == tokens[:1]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0, 0.0])
def test_log_probabilities_are_those_before_the_filters(temperature: float) -> None:
    x = torch.randn(20, 30, generator=torch.Generator().manual_seed(1))
    out = precast.sample(
        x, temperature, top_k=3, top_p=0.5, return_logprobs=True, top_logprobs=30, **RANDOM
    )
    assert out.logprobs is not None
    assert out.top_tokens is not None
    assert out.top_logprobs is not None
    exact = (x.double() / (temperature or 1)).log_softmax(1)
    at = out.tokens[:, None].long()
    torch.testing.assert_close(out.logprobs.double(), exact.gather(1, at)[:, 0], rtol=0, atol=1e-5)
    order = exact.sort(dim=1, descending=True)
    assert torch.equal(out.top_tokens.long(), order.indices)
    torch.testing.assert_close(out.top_logprobs.double(), order.values, rtol=0, atol=1e-5)
    assert (order.indices[:, :3] == at).any(dim=1).all()
    if temperature == 0:
        assert torch.equal(at[:, 0], x.argmax(1))


def test_equal_logits_come_by_their_number_and_missing_ones_as_minus_one() -> None:
    x = torch.tensor([[1.0, -INF, 1.0, 0.0], [-INF] * 4, [0.0, math.nan, 0.0, 0.0]])
    out = precast.sample(x, 0.0, top_logprobs=4, return_logprobs=True, return_valid=True)
    assert out.top_tokens is not None
    assert out.top_logprobs is not None
    assert out.logprobs is not None
    assert out.valid is not None
    assert out.tokens.tolist() == [0, 0, 0]
    assert out.valid.tolist() == [True, False, False]
    assert out.top_tokens.tolist() == [[0, 2, 3, -1], [-1] * 4, [-1] * 4]
    assert out.top_logprobs[0, 3] == -INF
    assert (out.top_logprobs[1:] == -INF).all()
    assert out.logprobs.isnan().tolist() == [False, True, True]


def test_greedy_distinguishes_neighbouring_numbers() -> None:
    x = torch.tensor([[0.25, 0.25 + 2**-25, 0.25 + 2**-25], [3.0, 2.0, 3.0]])
    assert precast.sample(x, 0.0).tokens.tolist() == [1, 0]


def test_what_is_not_asked_for_is_none() -> None:
    out = precast.sample(torch.zeros(2, 5))
    assert out.tokens.dtype == torch.int32
    assert out[1:] == (None, None, None, None)
    assert precast.sample(torch.zeros(0, 5), return_valid=True).valid.shape == (0,)


#: What asks for more than tokens, and what does not.
MORE: dict[str, dict[str, Any]] = {
    "prompt_mask": {"prompt_mask": torch.zeros(4, 1, dtype=torch.int32)},
    "output_counts": {"output_counts": torch.zeros(4, 5, dtype=torch.int32)},
    "bitmask": {"bitmask": torch.full((4, 1), 31, dtype=torch.int32)},
    "return_logprobs": {"return_logprobs": True},
    "top_logprobs": {"top_logprobs": 1},
}
PLAIN: dict[str, dict[str, Any]] = {
    "nothing": {},
    "filters": {"temperature": 0.7, "top_k": 3, "top_p": 0.9, "min_p": 0.1},
    "by_row": {"temperature": torch.arange(4) * 0.5, "top_k": torch.arange(4).int()},
    "greedy": {"temperature": 0.0},
    "joint": {"top_k": 2, "top_p": 0.5, "filter_apply_order": "joint"},
    "no_penalty": {"repetition_penalty": 1, "frequency_penalty": 0.0, "presence_penalty": 0},
    "valid": {"return_valid": True},
    "seeds": {"seed": torch.arange(4), "offset": torch.arange(4)},
}


@pytest.mark.parametrize("name", [*MORE, *PLAIN])
def test_tokens_alone_are_drawn_by_the_smaller_kernel(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(1))
    called: list[str] = []
    for kernel in (_SAMPLE, _SAMPLE_TOKENS):

        def call(*args: Any, kernel: Kernel = kernel, run: Any = kernel.reference) -> None:
            called.append(f"{kernel.op}.{kernel.export}")
            run(*args)

        monkeypatch.setattr(kernel, "reference", call)
    given = {**RANDOM, **(MORE | PLAIN)[name]}
    out = precast.sample(x, **given)
    assert called == ["sampling.sample_tokens" if name in PLAIN else "sampling_fused.sample"]
    all_allowed = {**given, "bitmask": torch.full((4, 1), 31, dtype=torch.int32)}
    again = precast.sample(x, **all_allowed)
    assert called[1:] == ["sampling_fused.sample"]
    assert torch.equal(out.tokens, again.tokens)
    assert (out.valid is None) == ("return_valid" not in given)


def test_each_row_has_its_own_parameters() -> None:
    rows, size = 12, 40
    x = torch.randn(rows, size, generator=torch.Generator().manual_seed(2))
    at = torch.arange(rows)
    parameters: dict[str, Any] = {
        "temperature": (at % 3) * 0.5,
        "top_k": (at % 4).int() * 3,
        "top_p": 1.0 - (at % 2) * 0.5,
        "min_p": (at % 2) * 0.1,
        "repetition_penalty": 1.0 + (at % 3) * 0.2,
        "frequency_penalty": (at % 2) * 0.3,
        "presence_penalty": (at % 3) * 0.1,
        "output_counts": torch.randint(0, 3, (rows, size), dtype=torch.int32),
        "prompt_mask": packed([[row, row + 1] for row in range(rows)], size),
        "bitmask": packed([list(range(row, size)) for row in range(rows)], size),
    }
    seeds = at + 100
    random = {"seed": seeds, "offset": seeds}
    together = precast.sample(x, **parameters, **random, return_logprobs=True)
    for row in range(rows):
        one = {
            name: value[row].item() if value.dim() == 1 else value[row : row + 1]
            for name, value in parameters.items()
        }
        own = {name: value[row : row + 1] for name, value in random.items()}
        alone = precast.sample(x[row : row + 1], **one, **own, return_logprobs=True)
        assert alone.tokens[0] == together.tokens[row]
        assert alone.logprobs[0] == together.logprobs[row]


MASK, COUNTS = torch.zeros(4, 4, dtype=torch.int32), torch.zeros(4, 100, dtype=torch.int32)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"bitmask": MASK[:, :3]}, r"bitmask must have shape \[4, 4\], got \[4, 3\]"),
        ({"bitmask": MASK.long()}, "bitmask must be int32, got int64"),
        ({"prompt_mask": MASK[:3]}, r"prompt_mask must have shape \[4, 4\], got \[3, 4\]"),
        ({"output_counts": COUNTS[:, :99]}, r"output_counts must have shape \[4, 100\]"),
        ({"frequency_penalty": 0.5}, "frequency_penalty needs output_counts"),
        ({"presence_penalty": COUNTS[:, 0].float()}, "presence_penalty needs output_counts"),
        ({"repetition_penalty": 1.5}, "repetition_penalty needs prompt_mask or output_counts"),
        ({"top_logprobs": 33}, "top_logprobs must be from 0 to 32, got 33"),
        ({"top_logprobs": -1}, "top_logprobs must be from 0 to 32, got -1"),
        ({"filter_apply_order": "first"}, "Invalid filter_apply_order: 'first'"),
        ({"min_p": torch.ones(3)}, "batch size mismatch: min_p must have shape"),
    ],
)
def test_what_is_rejected(more: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        precast.sample(torch.zeros(4, 100), **more)
