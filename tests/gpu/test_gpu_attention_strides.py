# SPDX-License-Identifier: Apache-2.0
"""Attention and appends on a GPU where values have other strides than keys: the same bits."""

from __future__ import annotations

import pytest
import torch
from attention_strides import NAMES, results


@pytest.mark.parametrize("name", NAMES)
def test_strides_of_keys_and_values_are_their_own(name: str) -> None:
    want, *others = results(name, "cuda", torch.bfloat16)
    assert want.any()
    for other in others:
        assert torch.equal(other, want)
