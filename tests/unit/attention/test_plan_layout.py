# SPDX-License-Identifier: Apache-2.0
"""What tests read of a plan's layout agrees with what the headers assert of it."""

from __future__ import annotations

import pytest
from plan_layout import constant, fields, read, shape_word, size_of


@pytest.mark.parametrize(
    ("struct", "size"),
    [
        ("PlanHeader", "kHeaderInts"),
        ("PlannedRequest", "kRequestInts"),
        ("CtaStart", "kStartInts"),
        ("WorkTileEntry", "kEntryInts"),
    ],
)
def test_a_struct_is_as_large_as_its_header_asserts(struct: str, size: str) -> None:
    assert size_of(struct) == constant(size)


def test_fields_are_found_by_name() -> None:
    assert fields("PlannedRequest")["kv_len"] == range(4, 5)
    assert fields("PlanHeader")["total_cost"] == range(10, 12)
    assert len(fields("PlanHeader")["shape"]) == size_of("PackedShape")
    assert shape_word("batch") == fields("PlanHeader")["shape"].start
    assert read(range(100, 110), "WorkTileEntry", 4) == {
        "planned_idx": 104,
        "m_block": 105,
        "split_idx": 106,
        "first_partial": 107,
    }


def test_what_the_headers_do_not_have_is_named() -> None:
    with pytest.raises(AssertionError, match="no constant kNothing"):
        constant("kNothing")
    with pytest.raises(AssertionError, match="no struct Nothing"):
        fields("Nothing")
