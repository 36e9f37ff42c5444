# SPDX-License-Identifier: Apache-2.0
"""The two exports that draw tokens, each under the names of the functions that call it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from precast._base.torch import torch
from precast._op.export import Export
from precast._ops.sampling._arguments import (
    DERIVED,
    check_by_row,
    check_distributions,
    check_outputs,
    check_random,
    kinds,
    order_of,
)
from precast._ops.sampling._filters import weights_of_logits, weights_of_probs
from precast._ops.sampling._formula import chosen

_FILTERS = ("top_k", "top_p", "min_p")


def draw_export(function: str, filters: Sequence[str] = ()) -> Export:
    """``sample_from_probs`` or ``sample_from_logits`` as ``function`` calls it.

    ``filters`` are the arguments of the function that filter; those that it lacks are constants.
    One with top-k and top-p also has their order.
    """
    x = "logits" if "logits" in function else "probs"
    export = f"sample_from_{x}"
    declared = [f"{x}:T", "indices?:tensor"]
    declared += [f"{name}:{name if name in filters else f'no_{name}'}" for name in _FILTERS]
    declared += ["temperature:no_temperature"] * (x == "logits")
    has_order = {"top_k", "top_p"} <= {*filters}
    declared += ["joint:bool" if has_order else "joint:not_joint", "random:random"]
    declared += ["out!:tensor", "valid!?:tensor", "enable_pdl:pdl_on"]
    derived: dict[str, Callable[..., Any]] = dict(DERIVED)
    if has_order:
        derived["filter_apply_order"] = order_of
    if x == "probs":
        derived["return_valid"] = lambda valid: valid is not None
    # The plainest function that calls an export has its name.
    plainest = function == f"sampling_from_{x}"
    return Export(
        "sampling",
        export,
        " ".join(declared),
        check=_check,
        write=_write,
        derived=derived,
        kinds=kinds(function, x),
        function=function,
        torch_name=export if plainest else function,
    )


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
    filters = (given[name] for name in (*_FILTERS, "joint", "seed", "offset"))
    tokens, is_valid = chosen(weights, indices, *filters)
    out.copy_(tokens)
    if valid is not None:
        valid.copy_(is_valid)
