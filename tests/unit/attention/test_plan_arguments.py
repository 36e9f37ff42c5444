# SPDX-License-Identifier: Apache-2.0
"""Wrong options of plan(): each is refused by its name, or taken; nothing else is raised."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

import precast

#: What no option of a plan is.
WRONG = (object(), [1.0], 1j, b"x", 2**70, (), {})
#: What some options are, and others are not.
DOUBTFUL = ("x", -5, 1.5, float("nan"), None)

ONE, BOUNDS = torch.ones(1, dtype=torch.int32), torch.arange(2, dtype=torch.int32)
HEADS = {"num_qo_heads": 2, "num_kv_heads": 1, "q_data_type": "float32"}
CALLS: dict[type[Any], dict[str, Any]] = {
    precast.BatchDecodeWithPagedKVCacheWrapper: {
        "indptr": BOUNDS,
        "indices": ONE - 1,
        "last_page_len": ONE,
        "head_dim": 64,
        "page_size": 1,
    },
    precast.BatchPrefillWithPagedKVCacheWrapper: {
        "qo_indptr": BOUNDS,
        "paged_kv_indptr": BOUNDS,
        "paged_kv_indices": ONE - 1,
        "paged_kv_last_page_len": ONE,
        "head_dim_qk": 64,
        "page_size": 1,
    },
    precast.BatchPrefillWithRaggedKVCacheWrapper: {
        "qo_indptr": BOUNDS,
        "kv_indptr": BOUNDS,
        "head_dim_qk": 64,
    },
}


def plan_of(wrapper: type[Any]) -> Callable[..., None]:
    return wrapper(torch.zeros(1 << 20, dtype=torch.uint8)).plan  # type: ignore[no-any-return]


@pytest.mark.parametrize("wrapper", CALLS)
def test_a_wrong_option_is_named(wrapper: type[Any], reference_mode: None) -> None:
    sound = {**CALLS[wrapper], **HEADS}
    plan_of(wrapper)(**sound)
    parameters = inspect.signature(wrapper.plan).parameters.values()
    names = [p.name for p in parameters if p.kind is not p.VAR_POSITIONAL][1:]
    assert len(names) > 20
    for name in names:
        for value in (*WRONG, *DOUBTFUL):
            # Two dtypes may be left out, and what is false is left out, too.
            if value in ((), {}) and name.endswith("data_type"):
                continue
            plan = plan_of(wrapper)
            try:
                plan(**{**sound, name: value})
            except (TypeError, ValueError, NotImplementedError) as error:
                assert name in str(error), (name, value, error)
            else:
                assert value in DOUBTFUL, (name, value)
