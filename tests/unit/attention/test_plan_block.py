# SPDX-License-Identifier: Apache-2.0
"""What Python and C++ both say of a plan: the structs of its params block, and the enums."""

from __future__ import annotations

import re
import typing
from pathlib import Path

import pytest
import torch

from precast._ops.attention.enums import MaskMode, PosEncodingMode
from precast._ops.attention.plan import (
    BLOCK_BYTES,
    PlanShape,
    ScoreOptions,
    new_block,
    plan_of,
    read_block,
)

ROOT = Path(__file__).parents[3]
BLOCK = (ROOT / "csrc" / "attention" / "plan_block.h").read_text()
PARAMS = (ROOT / "include" / "precast" / "attention" / "params.cuh").read_text()
TYPES = {"int": "int64_t", "bool": "int64_t", "float": "double"}


@pytest.mark.parametrize("fields", [PlanShape, ScoreOptions])
def test_structs_have_the_fields_of_the_header(fields: type) -> None:
    (body,) = re.findall(rf"struct {fields.__name__} {{(.*?)}};", BLOCK, re.DOTALL)
    declared = re.findall(r"^\s+(\w+) (\w+);", body, re.MULTILINE)
    hints = typing.get_type_hints(fields)
    assert declared == [(TYPES[hints[name].__name__], name) for name in fields._fields]


def test_blocks_have_the_size_of_the_header() -> None:
    (size,) = re.findall(r"kBlockBytes = (\d+);", BLOCK)
    assert int(size) == BLOCK_BYTES


@pytest.mark.parametrize(
    ("enum", "name"), [(MaskMode, "AttentionMask"), (PosEncodingMode, "PositionEncoding")]
)
def test_enums_have_the_order_of_the_header(enum: type, name: str) -> None:
    (body,) = re.findall(rf"enum class {name} : int {{(.*?)}};", PARAMS)
    known = {"none": ("NON_CAUSAL", "NONE"), "multi_item": ("MULTIITEMSCORING",)}
    known["rope"] = ("ROPE_LLAMA",)
    words = [word.strip() for word in body.split(",")]
    assert len(words) == len(enum)
    for word, member in zip(words, sorted(enum)):
        assert member.name in known.get(word, (word.upper(),))


def test_numbers_come_back() -> None:
    shape = PlanShape(3, -1, 0, 16, 32, 8, 192, 128, 1, 64, True, 2**40, 4, False)
    options = ScoreOptions(True, MaskMode.CAUSAL, 5, PosEncodingMode.ALIBI, 7, 30.0, 0.1, 8.0, 1e6)
    block = new_block(shape, options)
    assert block.device.type == "cpu"
    assert block.shape == (BLOCK_BYTES,)
    assert read_block(block) == (shape, options)
    assert not block[-8:].any()


def test_what_is_no_number_is_rejected_by_name() -> None:
    with pytest.raises(TypeError, match=r"numbers of 64 bits: .* window_left=2.5"):
        new_block(PlanShape(window_left=2.5))
    with pytest.raises(TypeError, match="fixed_split_size=9223372036854775808"):
        new_block(PlanShape(fixed_split_size=2**63))


def test_a_block_without_its_plan_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"run_paged: block must be of a plan that is alive. Fix"):
        plan_of("run_paged", torch.zeros(BLOCK_BYTES, dtype=torch.uint8))
