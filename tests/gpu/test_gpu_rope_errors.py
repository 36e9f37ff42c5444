# SPDX-License-Identifier: Apache-2.0
"""Bad arguments of RoPE: the error names what is wrong, and nothing is launched or written."""

from __future__ import annotations

import re

import pytest
import torch
from rope_calls import BY_IDS, CACHED, CASES, IDS, Change, bits, good, tensors_of
from rope_case import DEVICE

import precast


@pytest.mark.parametrize(("name", "change", "words"), CASES, ids=IDS)
def test_bad_arguments(name: str, change: Change, words: str) -> None:
    call = good(name, DEVICE)
    getattr(precast, name)(**call)  # What it takes.
    call |= change(call)
    before = [bits(x) for x in tensors_of(call)]
    with pytest.raises(ValueError, match=f"^{re.escape(f'{name}: {words}')}"):
        getattr(precast, name)(**call)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    for x, old in zip(tensors_of(call), before, strict=True):
        assert torch.equal(bits(x), old), "an argument was written"


@pytest.mark.parametrize("name", CACHED + BY_IDS)
def test_strides_that_no_kernel_takes(name: str) -> None:
    call = good(name, DEVICE)
    word = "query" if name in CACHED else "q"
    x = call[word]
    transposed = x.transpose(0, -1).contiguous().transpose(0, -1)
    with pytest.raises(ValueError, match=f"^{name}: {word} must have stride 1 in its last"):
        getattr(precast, name)(**{**call, word: transposed})


@pytest.mark.parametrize("name", [n for n in CACHED + BY_IDS if n.endswith("_inplace")])
def test_outputs_that_hold_an_element_twice(name: str) -> None:
    call = good(name, DEVICE)
    word = "query" if name in CACHED else "q"
    x = call[word]
    words = f"^{name}: {word} must not be expanded"
    with pytest.raises(ValueError, match=words):
        getattr(precast, name)(**{**call, word: x[:1].expand_as(x)})
    twice = x.as_strided(x.shape, (8, *x.stride()[1:]))
    with pytest.raises(ValueError, match=f"^{name}: {word} must not hold an element twice"):
        getattr(precast, name)(**{**call, word: twice})


def test_keys_inside_the_queries(generator: torch.Generator) -> None:
    """Overlap in a packed tensor is rejected, neighbours are not, with one key head, too."""
    qkv = torch.zeros(5, 8, 64, dtype=torch.bfloat16, device=DEVICE)
    ids = torch.arange(5, device=DEVICE)
    for q, k in ((qkv[:, :4], qkv[:, 3:5]), (qkv[:, :4], qkv[:, 3:4]), (qkv[:, :1], qkv[:, :1])):
        with pytest.raises(ValueError, match="k must not overlap q's memory"):
            precast.apply_rope_pos_ids_inplace(q, k, ids)
    for q, k in ((qkv[:, :4], qkv[:, 4:6]), (qkv[:, :4], qkv[:, 4:5]), (qkv[:, 1:2], qkv[:, :1])):
        precast.apply_rope_pos_ids_inplace(q, k, ids)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs two kinds of devices")
@pytest.mark.parametrize("name", sorted({name for name, _, _ in CASES}))
def test_devices(name: str) -> None:
    call = good(name, DEVICE)
    tensors = [key for key, value in call.items() if isinstance(value, torch.Tensor)]
    for key in tensors:
        wrong = {**call, key: call[key].cpu()}
        with pytest.raises(ValueError, match=rf"{name}: \w+ must be (on c|a CUDA tensor)"):
            getattr(precast, name)(**wrong)
