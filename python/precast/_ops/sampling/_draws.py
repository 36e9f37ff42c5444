# SPDX-License-Identifier: Apache-2.0
"""Make the functions that draw tokens, and the two exports that they call."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ParamSpec, TypeVar

from precast._base.torch import torch
from precast._op.decorators import CheckedOp
from precast._op.docs import documented
from precast._op.export import Export, launches
from precast._ops.sampling._arguments import (
    DERIVED,
    check_by_row,
    check_distributions,
    check_outputs,
    check_random,
    explain_draw,
    kinds,
    reject_nan,
)
from precast._ops.sampling._docs import DRAW, ROWS, TOKENS, TOKENS_AND_VALID
from precast._ops.sampling._formula import draw, weights_of_logits, weights_of_probs
from precast._ops.sampling._trace import draw_trace
from precast.api_logging import precast_api

P = ParamSpec("P")
R = TypeVar("R")

_FILTERS = ("top_k", "top_p", "min_p")


def draws(
    reference: Callable[..., torch.Tensor],
) -> Callable[[Callable[P, R]], CheckedOp[P, R]]:
    """Make an op of a function without a body, and complete its docstring and its reference's.

    Its first parameter, probs or logits, says which export draws; filters that are no parameters
    of it are off.
    """

    def decorate(function: Callable[P, R]) -> CheckedOp[P, R]:
        name, parameters = function.__name__, inspect.signature(function).parameters
        x = next(iter(parameters))
        filters = [key for key in _FILTERS if key in parameters]
        has_valid = "return_valid" in parameters
        documented(TOKENS_AND_VALID if has_valid else TOKENS, DRAW, ROWS)(function)
        documented(TOKENS)(reference)
        returns = ["(out, valid) if return_valid else out" if has_valid else "out"]
        op = launches(_export(name, x, filters, parameters), returns, explain_draw)(function)
        return precast_api(trace=draw_trace(name, x, filters, reference))(op)

    return decorate


def _export(function: str, x: str, filters: Sequence[str], parameters: Iterable[str]) -> Export:
    """Declare ``sample_from_probs`` or ``sample_from_logits`` as ``function`` calls it."""
    export = f"sample_from_{x}"
    declared = [f"{x}:T", "indices?:tensor"]
    declared += [f"{name}:{name if name in filters else f'no_{name}'}" for name in _FILTERS]
    declared += ["temperature:no_temperature"] * (x == "logits")
    has_order, has_valid = "filter_apply_order" in parameters, "return_valid" in parameters
    declared += [f"filter_apply_order:{'order' if has_order else 'no_order'}", "random:own_random"]
    declared += ["out!:tensor", "valid!?:tensor", "enable_pdl:pdl_on"]
    valid = f"_torch.empty(out.shape[0], dtype=_torch.bool, device={x}.device)"
    # The plainest function that calls an export has its name.
    plainest = function == f"sampling_from_{x}"
    return Export(
        "sampling",
        export,
        " ".join(declared),
        check=_check,
        write=_write,
        new={
            "out": _tokens_of_probs if x == "probs" else _tokens_of_logits,
            "valid": f"{valid} if return_valid else None" if has_valid else "None",
        },
        derived={name: find for name, find in DERIVED.items() if name in parameters},
        kinds=kinds(function, x),
        function=function,
        torch_name=export if plainest else function,
    )


def _tokens_of_probs(
    probs: torch.Tensor, indices: torch.Tensor | None, check_nan: bool
) -> torch.Tensor:
    """Allocate tokens, ``[outputs]``, after the check for NaN if it is wanted."""
    if check_nan:
        reject_nan(probs, "probs")
    if indices is None:
        return torch.empty(probs.shape[0], dtype=torch.int32, device=probs.device)
    return torch.empty(indices.shape[0], dtype=indices.dtype, device=probs.device)


def _tokens_of_logits(
    logits: torch.Tensor, indices: torch.Tensor | None, check_nan: bool
) -> torch.Tensor:
    """Do the same for logits."""
    if check_nan:
        reject_nan(logits, "logits")
    return _tokens_of_probs(logits, indices, False)


def _check(
    export: str,
    indices: torch.Tensor | None,
    random: tuple[Any, ...],
    out: torch.Tensor,
    valid: torch.Tensor | None,
    **given: Any,
) -> None:
    name = "probs" if "probs" in given else "logits"
    function, x = f"sampling_from_{name}", given[name]
    check_distributions(function, name, x)
    filters = (*_FILTERS, "temperature")
    check_by_row(function, x, name, {key: given[key] for key in filters if key in given})
    outputs = check_outputs(function, x, name, indices, out, valid)
    check_random(function, x, name, outputs, random[0], random[2])


def _write(
    indices: torch.Tensor | None,
    out: torch.Tensor,
    valid: torch.Tensor | None,
    **given: Any,
) -> None:
    if "probs" in given:
        weights = weights_of_probs(given["probs"])
    else:
        weights = weights_of_logits(given["logits"], given["temperature"])
    named = {name: given[name] for name in (*_FILTERS, "seed", "offset")}
    joint = given["filter_apply_order"] == "joint"
    tokens, is_valid = draw(weights, indices, joint=joint, **named)
    out.copy_(tokens)
    if valid is not None:
        valid.copy_(is_valid)
