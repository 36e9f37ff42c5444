# SPDX-License-Identifier: Apache-2.0
"""Engines make torch ops of public functions by ``torch.library.infer_schema``."""

from __future__ import annotations

import inspect

import pytest
from torch.library import infer_schema

import precast

FUNCTIONS = [name for name in precast.__all__ if hasattr(getattr(precast, name), "fi_trace")]


def test_a_function_of_tensors_and_numbers_has_a_schema():
    function = precast.apply_rope_with_cos_sin_cache_inplace
    schema = infer_schema(function, mutates_args=["query", "key"])
    assert schema.startswith("(Tensor positions, Tensor(a1!) query, Tensor(a2!) key, SymInt head_")
    assert schema.endswith("-> ()")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_annotation_can_be_read(name):
    """A schema has no union of a tensor and a number, which is then what the error says."""
    function = getattr(precast, name)
    assert inspect.isfunction(function)
    try:
        assert infer_schema(function, mutates_args=[]).startswith("(Tensor")
    except ValueError as error:
        assert "has unsupported type" in str(error), error
