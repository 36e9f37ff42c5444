# SPDX-License-Identifier: Apache-2.0
"""Sizes of the workspaces of attention, which the host computes without a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from build_support import CI_MODULES, Built, spec_of

from precast._ops.attention.plan import PlanShape, ScoreOptions, new_block
from precast._runtime.library import get_function, load_library

MODULES = [name for name in CI_MODULES if "attention_plan" in name]
SLOT = 4 * 16 * (128 + 2)  # bytes: a tile of 16 rows of 128 values, a maximum and a denominator


def sizes(built: Built, file_name: str, kv_lens: list[int], **options: Any) -> list[int]:
    """Of a batch of one query a request, in pages of 16; 32 and 8 heads of 128; 132 SMs."""
    spec = spec_of(built, file_name)
    function = get_function(load_library(built.library(spec), spec.cuda_major), "workspace_size")
    indptr = torch.tensor([0, *(-(-n // 16) for n in kv_lens)]).cumsum(0).int()
    lengths = torch.tensor(kv_lens, dtype=torch.int32)
    out = torch.full((3,), -1)
    shape = PlanShape(
        batch_size=len(kv_lens),
        q_len_per_req=1,
        page_size=16,
        num_qo_heads=32,
        num_kv_heads=8,
        head_dim_qk=128,
        head_dim_vo=128,
        kv_bytes=2,
        block_m=16,
    )
    shape = shape._replace(**{n: options.pop(n) for n in PlanShape._fields if n in options})
    arguments = {
        "qo_indptr": None,
        "kv_indptr": indptr,
        "kv_last_page_len": None,
        "kv_len": lengths,
        "sizes": out,
        "block": new_block(shape),
        "sm_count": 132,
        **options,
    }
    function(*arguments.values())
    return out.tolist()


@pytest.mark.parametrize("file_name", MODULES)
def test_sizes(built: Built, file_name: str) -> None:
    floats, ints, plan = sizes(built, file_name, [1000] * 8)
    per_sm, rest = divmod(floats, 2 * 132 * SLOT)
    assert per_sm in (1, 2)
    assert rest == 0
    assert 0 < plan < ints < 1 << 20
    assert sizes(built, file_name, [1000] * 8, sm_count=66)[0] * 2 == floats
    # Parts of 256 tokens: four of each request and head. Of a whole tile there are none.
    assert sizes(built, file_name, [1000] * 8, fixed_split_size=16)[0] == 8 * 8 * 4 * SLOT
    assert sizes(built, file_name, [1000, 256], fixed_split_size=16)[0] == 8 * 4 * SLOT
    assert sizes(built, file_name, [1000] * 8, disable_split_kv=True)[0] == 0
    assert sizes(built, file_name, [])[2] > 0


@pytest.mark.parametrize("file_name", MODULES)
def test_errors(built: Built, file_name: str) -> None:
    for words, options in (
        ("query heads must be a multiple of KV heads, got 30 and 8", {"num_qo_heads": 30}),
        ("there is no kernel of tiles of 16 rows for head_dim_qk 72", {"head_dim_qk": 72}),
        ("kv_indptr must have shape [4], got [3]", {"batch_size": 3}),
        ("kv_indptr must be int32, got int64", {"kv_indptr": torch.zeros(3, dtype=torch.int64)}),
        ("pages need kv_last_page_len or kv_len", {"kv_len": None}),
        ("sizes must have shape [3], got [2]", {"sizes": torch.zeros(2, dtype=torch.int64)}),
        ("sm_count must be positive, got 0", {"sm_count": 0}),
        ("block must have shape [1024], got [64]", {"block": new_block(PlanShape())[:64]}),
        ("block must be uint8, got int8", {"block": new_block(PlanShape()).view(torch.int8)}),
    ):
        with pytest.raises(ValueError) as caught:
            sizes(built, file_name, [5, 5], **options)
        assert f"workspace_size: {words}" in str(caught.value)


#: More would not fit into 32 bits where it is computed.
LARGEST = {
    "batch_size": (1 << 24) - 1,
    "num_qo_heads": 1 << 16,
    "num_kv_heads": 1 << 16,
    "kv_bytes": 2,
    **dict.fromkeys(
        ("rows", "q_len_per_req", "page_size", "head_dim_qk", "head_dim_vo", "block_m"), 2**31 - 1
    ),
}


@pytest.mark.parametrize("file_name", MODULES)
@pytest.mark.parametrize("name", LARGEST)
def test_sizes_out_of_range(built: Built, file_name: str, name: str) -> None:
    """A negative batch divided by zero, and what is beyond 32 bits was cut off and accepted."""
    good = sizes(built, file_name, [5, 5])
    for value in (-(2**62), -2, LARGEST[name] + 1, 2**32 + 1, 2**32 + 16, 2**62):
        with pytest.raises(ValueError) as caught:
            sizes(built, file_name, [5, 5], **{name: value})
        assert f"workspace_size: {name} must be " in str(caught.value)
        assert str(caught.value).endswith(f" to {LARGEST[name]}, got {value}")
    assert sizes(built, file_name, [5, 5]) == good


@pytest.mark.parametrize("file_name", MODULES)
@pytest.mark.parametrize("shape", [{"batch_size": -1}, {"page_size": 0, "batch_size": -1}])
def test_no_shape_ends_the_process(built: Built, file_name: str, shape: dict[str, int]) -> None:
    empty = torch.zeros(0, dtype=torch.int32)
    with pytest.raises(ValueError, match="batch_size must be 0 to"):
        sizes(built, file_name, [], kv_indptr=empty, kv_len=empty, **shape)


@pytest.mark.parametrize("file_name", [name for name in CI_MODULES if "attention" in name])
def test_calls_of_cpu_tensors_are_rejected(built: Built, file_name: str) -> None:
    """Which errors of a plan and a run need no GPU; a block stays as it is."""
    spec = spec_of(built, file_name)
    module = load_library(built.library(spec), spec.cuda_major)
    q, ints = torch.zeros(2, 4, 64), torch.zeros(64, dtype=torch.uint8)
    options = ScoreOptions(False, 0, -1, 0, 0, 0.0, 1.0, 1.0, 1e4)
    block, none = new_block(PlanShape(2, 2, 1, 8, 4, 2, 64, 64, 2, 16), options), [None] * 5
    options_of_run = (q, None, None, block, 1.0, 1.0, None, None, True)
    calls = {
        "run_paged_nvfp4": (q, q, None, q, None, *options_of_run),
        "pack_plan": (ints[:3].int(), None, None, None, None, ints, ints, *none, block),
        "plan": (ints, block, *none, True),
        "run_paged": (q, q, None, q, None, None, block, 1.0, 1.0, None, None, True),
        "run_ragged": (q, q, q, q, None, None, block, 1.0, 1.0, None, None, True),
    }
    calls |= {f"{name}_sm90": calls[name] for name in ("run_paged", "run_ragged")}
    before = block.clone()
    for export in set(spec.exports) & set(calls):
        with pytest.raises(ValueError, match=f"{export}: .* must be a CUDA tensor, got cpu"):
            get_function(module, export)(*calls[export])
    assert torch.equal(block, before)
