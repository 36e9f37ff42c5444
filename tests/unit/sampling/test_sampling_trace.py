# SPDX-License-Identifier: Apache-2.0
"""Definitions of calls that mix numbers with rows, masks, seeds and orders: as they were called."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from trace_support import definition_model, run_of

import precast
from precast._ops.sampling._trace import form_of, name_of
from precast.trace import check_template, registered
from precast.trace.registry import find

ROWS, SIZE = 6, 70
AT = torch.arange(ROWS)
HEAT, K = 0.5 + AT / 4, (AT % 3 + 2).int()
P, SHARE = 0.3 + AT / 10, AT / 20
COUNTS = (torch.arange(ROWS * SIZE) % 3).int().view(ROWS, SIZE)
MASK = (torch.arange(ROWS * 3) * 0x5BD1E995).int().view(ROWS, 3)
RANDOM = {"seed": 3, "offset": 4}
SEEDS = {"seed": AT + 7, "offset": torch.tensor([8])}
JOINT = {"filter_apply_order": "joint"}

pytestmark = pytest.mark.usefixtures("reference_mode")


def logits() -> torch.Tensor:
    return 3 * torch.randn(ROWS, SIZE, generator=torch.Generator().manual_seed(0))


#: Each call with the name of its definition, less the size and the dtype of the logits.
CALLS: list[tuple[dict[str, Any], str]] = [
    ({"temperature": HEAT, **RANDOM}, "sample_temperature_by_row"),
    ({"temperature": HEAT, "top_k": 5, "top_p": 0.5, **RANDOM}, "sample_temperature_by_row"),
    ({"top_k": K, "top_p": 0.5, "min_p": 0.02, **RANDOM}, "sample_top_k_by_row"),
    ({"temperature": HEAT, "min_p": SHARE, **RANDOM}, "sample_temperature_min_p_by_row"),
    ({"top_k": 3, "top_p": 0.4, **JOINT, **RANDOM}, "sample_joint"),
    ({"temperature": HEAT, "top_k": 3, "top_p": P, **JOINT, **RANDOM}, "sample_temperature_top_p_"),
    ({"bitmask": MASK, **RANDOM}, "sample_bitmask"),
    ({"bitmask": MASK, "temperature": HEAT, **JOINT, **SEEDS}, "sample_temperature_by_row_bitmask"),
    ({"prompt_mask": MASK, "repetition_penalty": 1.5, **RANDOM}, "sample_prompt_mask"),
    ({"output_counts": COUNTS, "frequency_penalty": 0.4, **RANDOM}, "sample_output_counts"),
    (
        {"output_counts": COUNTS, "presence_penalty": P, "top_k": K, **RANDOM},
        "sample_top_k_presence_by_row_output_counts",
    ),
    (
        {"output_counts": COUNTS, "prompt_mask": MASK, "repetition_penalty": HEAT, **SEEDS},
        "sample_repetition_by_row_prompt_mask_output_counts_seeds",
    ),
    (SEEDS, "sample_seeds"),
]


@pytest.mark.parametrize(("call", "name"), CALLS)
def test_the_definition_of_a_mixed_call(call: dict[str, Any], name: str) -> None:
    x = logits()
    definition = precast.fi_trace(precast.sample, x, **call)
    assert definition["name"].startswith(name)
    assert ("_joint_" in definition["name"]) == ("filter_apply_order" in call)
    for argument, value in call.items():
        if argument != "filter_apply_order":
            shape = definition["inputs"][argument]["shape"]
            assert (shape is not None) == isinstance(value, torch.Tensor), argument
    assert (
        not definition["inputs"].keys()
        - {"logits", *call, *RANDOM}
        - {
            *("temperature", "top_k", "top_p", "min_p"),
            *("repetition_penalty", "frequency_penalty", "presence_penalty"),
        }
    )
    template = find(precast.sample).choose(call)
    assert check_template(precast.sample, template) == []
    assert (precast.sample, template) in registered()
    definition_model().Definition.model_validate(definition, strict=False)


@pytest.mark.parametrize(("call", "name"), CALLS)
def test_what_a_definition_holds_gives_the_tokens_of_the_call(
    call: dict[str, Any], name: str
) -> None:
    x = logits()
    definition = precast.fi_trace(precast.sample, x, **call)
    defaults = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    penalties = {"repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0}
    given = {"logits": x, **defaults, **penalties, **call}
    tokens = run_of(definition)(*(given[name] for name in definition["inputs"]))
    assert torch.equal(tokens, precast.sample(x, **call).tokens)


def test_joint_filters_and_others_are_two_definitions() -> None:
    """Their tokens differ: the order is part of what a definition holds."""
    x = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log().expand(200, -1)
    filters = {"top_k": 2, "top_p": 0.55}
    found = []
    for more in ({}, JOINT):
        definition = precast.fi_trace(precast.sample, x, **filters, **more, **RANDOM)
        tokens = run_of(definition)(x, 1.0, 2, 0.55, 0.0, 3, 4)
        assert torch.equal(tokens, precast.sample(x, **filters, **more, **RANDOM).tokens)
        found.append((definition["name"], tuple(tokens.unique().tolist())))
    assert [tokens for _, tokens in found] == [(0,), (0, 1)]
    assert found[0][0] != found[1][0]


def test_no_two_forms_of_a_call_have_one_name() -> None:
    names = set()
    count = 0
    numbers = {"temperature": HEAT, "top_k": K, "top_p": P, "min_p": SHARE}
    penalties = {"repetition_penalty": HEAT, "presence_penalty": P}
    masks = {"prompt_mask": MASK, "bitmask": MASK}
    parts = [numbers, penalties, masks, {"joint": JOINT, "seeds": SEEDS}]
    pairs = [pair for part in parts for pair in part.items()]
    for chosen in itertools.product([False, True], repeat=len(pairs)):
        call: dict[str, Any] = {"output_counts": COUNTS}
        for (name, value), there in zip(pairs, chosen):
            if there:
                call.update(value if isinstance(value, dict) else {name: value})
        names.add(name_of("sample", form_of("sample", **call)))
        count += 1
    assert len(names) == count == 1024


@pytest.mark.parametrize("indices", [None, torch.tensor([5, 0, 2, 2, 1, 3])])
def test_seeds_that_are_tensors_are_inputs_of_draws(indices: torch.Tensor | None) -> None:
    probs = logits().softmax(1)
    more = {} if indices is None else {"indices": indices}
    call = precast.top_k_top_p_sampling_from_probs
    definition = precast.fi_trace(call, probs, K, 0.5, **more, **SEEDS)
    assert definition["inputs"]["seed"]["shape"] == ["num_seeds"]
    assert definition["inputs"]["offset"]["shape"] == ["num_offsets"]
    assert definition["name"].startswith("top_k_top_p_sampling_from_probs_top_k_by_row")
    given = {"probs": probs, "top_k": K, "top_p": 0.5, **more, **SEEDS}
    tokens = run_of(definition)(*(given[name] for name in definition["inputs"]))
    assert torch.equal(tokens, call(probs, K, 0.5, **more, **SEEDS))
