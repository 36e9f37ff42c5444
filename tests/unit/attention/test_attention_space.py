# SPDX-License-Identifier: Apache-2.0
"""What docstrings say of head dimensions and dtypes is what aot_configs/attention.toml declares."""

from __future__ import annotations

import inspect

import pytest

import precast
from precast._base.dtypes import DTYPE_WORDS
from precast._plan.installed import plan

SPACE = plan().config.op("attention").space
NAMES = {word: name.removeprefix("torch.") for name, word in DTYPE_WORDS.items()}
PAIRS = [(p["head_dim_qk"], p["head_dim_vo"]) for p in SPACE.points()]
EQUAL = list(dict.fromkeys(qk for qk, vo in PAIRS if qk == vo))
UNEQUAL = list(dict.fromkeys(pair for pair in PAIRS if pair[0] != pair[1]))

DECODE = (
    precast.single_decode_with_kv_cache,
    precast.BatchDecodeWithPagedKVCacheWrapper.plan,
)
PREFILL = (
    precast.single_prefill_with_kv_cache,
    precast.BatchPrefillWithPagedKVCacheWrapper.plan,
    precast.BatchPrefillWithRaggedKVCacheWrapper.plan,
)


def either(values) -> str:
    *most, last = map(str, values)
    return f"{', '.join(most)} or {last}"


@pytest.mark.parametrize("function", [*DECODE, *PREFILL], ids=lambda f: f.__qualname__)
def test_docstrings_list_what_is_declared(function):
    text = " ".join((inspect.getdoc(function) or "").split())
    assert either(EQUAL) in text
    for qk, vo in UNEQUAL:
        assert (f"{qk} and {vo}" in text) == (function in PREFILL)
    words = SPACE.values
    eight_bits = [NAMES[kv] for kv in words["dtype_kv"] if kv not in words["dtype_q"]]
    assert either(NAMES[q] for q in words["dtype_q"]) in text
    assert either(eight_bits) in text
