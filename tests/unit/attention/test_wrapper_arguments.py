# SPDX-License-Identifier: Apache-2.0
"""Wrong arguments of the wrappers' methods: refused by name, and nothing has changed."""

from __future__ import annotations

import pytest
import torch
from attention_arguments import assert_wrong_arguments_are_named, outcome
from attention_composed_calls import CALLS

pytestmark = pytest.mark.filterwarnings("ignore:Passing `q_len_per_req`:DeprecationWarning")


@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_argument_is_named(name: str, reference_mode: None) -> None:
    assert_wrong_arguments_are_named(CALLS[name])


def test_a_product_of_scales_is_finite(reference_mode: None) -> None:
    call = CALLS["BatchDecodeWithPagedKVCacheWrapper.run"]()
    said = outcome(call.replaced("q_scale", 1e30).replaced("k_scale", 1e30))
    assert said is not None
    assert "sm_scale * q_scale * k_scale must be a finite number, got 1.25" in said


def test_a_forward_that_fails_leaves_the_options_of_the_plan(reference_mode: None) -> None:
    call = CALLS["BatchDecodeWithPagedKVCacheWrapper.forward"]()
    wrapper, q = call.wrapper, call.arguments["q"]
    wanted = wrapper.run(**call.arguments)
    for option in ({"sm_scale": 2.0, "q": q[:1]}, {"sm_scale": float("nan")}):
        with pytest.raises(ValueError, match=r"q must|q implies|q.shape|sm_scale"):
            wrapper.forward(**{**call.arguments, **option})
    assert torch.equal(wrapper.run(**call.arguments), wanted)
