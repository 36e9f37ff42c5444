# SPDX-License-Identifier: Apache-2.0
"""``torch.compile`` of MLA: one graph, the numbers of the call without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from mla_calls import CALLS, FP8_CALLS, FUNCTIONS

pytestmark = pytest.mark.usefixtures("reference_mode")

RUNS = {"BatchMLAPagedAttentionWrapper.run": CALLS["BatchMLAPagedAttentionWrapper.run"]}


def check(call: Callable[..., Any], given: dict[str, Any]) -> None:
    """Outputs of the caller are written alike, too."""
    torch._dynamo.reset()
    names = [name for name, value in given.items() if isinstance(value, torch.Tensor)]
    rest = {name: value for name, value in given.items() if name not in names}

    def fresh() -> list[torch.Tensor]:
        return [given[name].clone() for name in names]

    def function(*tensors: torch.Tensor) -> Any:
        return call(**dict(zip(names, tensors)), **rest)

    eager, traced = fresh(), fresh()
    want = function(*eager)
    got = torch.compile(function, fullgraph=True, backend="aot_eager")(*traced)
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    for name, a, b in zip(names, eager, traced):
        if name != "workspace_buffer":
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), name


@pytest.mark.parametrize("name", {**RUNS, **FP8_CALLS})
@pytest.mark.parametrize("has_outputs", [False, True])
def test_runs(name: str, has_outputs: bool) -> None:
    call = {**RUNS, **FP8_CALLS}[name]()
    given = call.arguments
    if not has_outputs:
        given = {key: value for key, value in given.items() if key not in ("out", "lse")}
    check(call.function, given)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("has_outputs", [False, True])
def test_functions(name: str, has_outputs: bool) -> None:
    call = CALLS[name]()
    given = call.arguments
    if not has_outputs:
        given = {key: value for key, value in given.items() if key not in ("out", "lse")}
    check(call.function, given)
