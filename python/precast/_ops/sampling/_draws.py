# SPDX-License-Identifier: Apache-2.0
"""Make the functions that draw tokens, and the two exports that they call."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from precast._base.torch import torch
from precast._op.decorators import CheckedOp
from precast._op.docs import documented
from precast._op.export import Export, accepted, launches
from precast._op.validation import check_within
from precast._ops.sampling._arguments import (
    DERIVED,
    FILTERS,
    check_rows,
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
        has_order, has_valid = "filter_apply_order" in parameters, "return_valid" in parameters
        declared = [
            f"{x}:T=f32|f16|bf16[rows,vocab] indices?:i32|i64[outputs]",
            *(f"{key}:{key if key in parameters else f'no_{key}'}" for key in FILTERS),
            "temperature:no_temperature" if x == "logits" else "",
            f"filter_apply_order:{'order' if has_order else 'no_order'} random:own_random",
            "out!:i32|i64[outputs] valid!?:bool[outputs] enable_pdl:pdl_on",
        ]
        valid = f"_torch.empty(out.shape[0], dtype=_torch.bool, device={x}.device)"
        # The plainest function that calls an export has its name.
        plainest = f"sampling_from_{x}"
        export = Export(
            "sampling",
            f"sample_from_{x}",
            " ".join(declared),
            reference=_drawn,
            check=_check,
            new={
                "out": _tokens_of_probs if x == "probs" else _tokens_of_logits,
                "valid": f"{valid} if return_valid else None" if has_valid else "None",
            },
            derived={key: find for key, find in DERIVED.items() if key in parameters},
            kinds=kinds(name, x),
            function=name,
            error_name=plainest,
            torch_name=f"sample_from_{x}" if name == plainest else name,
        )
        documented(TOKENS_AND_VALID if has_valid else TOKENS, DRAW, ROWS)(function)
        documented(TOKENS)(reference)
        returns = ["(out, valid) if return_valid else out" if has_valid else "out"]
        op = launches(export, returns, explain_draw)(function)
        filters = [key for key in FILTERS if key in parameters]
        return precast_api(trace=draw_trace(name, x, filters, reference))(op)

    return decorate


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


def _check(export: str, indices: torch.Tensor | None, **given: Any) -> None:
    check_rows(export, **given)
    if indices is not None:
        name = "probs" if "probs" in given else "logits"
        shape = given[name].shape
        if len(indices) > 0 and shape[0] == 0:
            raise ValueError(
                f"{export}: {name} must have the rows that indices name, got shape {[*shape]}"
            )
        check_within(export, "indices", indices, shape[0], f"rows of {name}")


def _drawn(**given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    if "probs" in given:
        weights = weights_of_probs(given["probs"])
    else:
        weights = weights_of_logits(given["logits"], given["temperature"])
    return draw(weights, **accepted(draw, given))
