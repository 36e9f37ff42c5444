# SPDX-License-Identifier: Apache-2.0
"""Keys and values with unequal strides give what contiguous ones give."""

from __future__ import annotations

import pytest
import torch
from attention_strides import NAMES, results


@pytest.mark.parametrize("name", NAMES)
def test_strides_of_keys_and_values_are_their_own(name: str, reference_mode: None) -> None:
    want, *others = results(name, "cpu", torch.float32)
    assert want.any()
    for other in others:
        torch.testing.assert_close(other, want)
