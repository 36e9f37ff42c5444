# SPDX-License-Identifier: Apache-2.0
"""The sample that ci/sanitize.sh runs under compute-sanitizer: every operator, few small calls.

Each tensor is an allocation of its own there, so that the first byte past it counts as outside.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from code_params import E5M2_PARAM
from sanitize_calls import PAIRS, calls, copied, expected, shifted

from precast.trace import TraceTemplate

templates = pytest.mark.parametrize(
    ("function", "template"),
    [
        pytest.param(
            function,
            template,
            id=template.name_prefix,
            marks=E5M2_PARAM.marks if template.name_prefix.endswith("e5m2") else (),
        )
        for function, template in PAIRS
    ],
)


@templates
def test_a_call_stays_inside_its_tensors(
    function: Callable[..., Any], template: TraceTemplate
) -> None:
    for words, call in calls(function, template):
        want = expected(function, template, call)
        there = copied(call, template, "cuda")
        if want is None:
            assert words != "small"
            with pytest.raises(ValueError, match=function.__name__):
                function(**there)
            continue
        got = template.results(there, function(**there))
        torch.cuda.synchronize()
        assert [(t.shape, t.dtype) for t in got] == [(t.shape, t.dtype) for t in want], words


@templates
def test_a_call_on_addresses_without_alignment(
    function: Callable[..., Any], template: TraceTemplate
) -> None:
    """It stays inside its tensors, or says that it needs the alignment."""
    for _, call in calls(function, template):
        if expected(function, template, call) is None:
            continue
        there = shifted(call, template, "cuda")
        try:
            function(**there)
        except ValueError as error:
            assert "multiple of" in str(error) or "aligned" in str(error)
        torch.cuda.synchronize()
