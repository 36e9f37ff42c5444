# SPDX-License-Identifier: Apache-2.0
"""No export of reference mode writes memory that another tensor of the call has, too."""

from __future__ import annotations

import pytest
import torch
from overlap_support import call_of, overlap_error, overlapping, pairs

from precast._op.dispatch import kernels

CASES = [
    pytest.param(name, pair, id="-".join((name, *pair)))
    for name, kernel in kernels().items()
    for pair in pairs(kernel)
]


@pytest.mark.filterwarnings("ignore:.* is deprecated:FutureWarning")
@pytest.mark.parametrize(("name", "pair"), CASES)
def test_a_written_tensor_in_the_memory_of_another(name, pair):
    kernel = kernels()[name]
    call = overlapping(call_of(kernel, pair), *pair)
    before = {key: _content(x).clone() for key, x in call.tensors.items()}
    with pytest.raises(ValueError, match=overlap_error(*pair)):
        kernel.reference(*call.values)
    for key, x in before.items():
        assert torch.equal(_content(call.tensors[key]), x), key


def _content(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)
