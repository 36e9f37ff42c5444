# SPDX-License-Identifier: Apache-2.0
"""The two exports that draw tokens, each under the names of the functions that call it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from precast._base.torch import torch
from precast._op.dispatch import Kernel
from precast._ops.sampling._arguments import (
    check_by_row,
    check_distributions,
    check_outputs,
    check_random,
    given,
)
from precast._ops.sampling._filters import weights_of_logits, weights_of_probs
from precast._ops.sampling._formula import chosen

_FILTERS = (
    "Tensor? top_k_arr, SymInt top_k, Tensor? top_p_arr, float top_p, Tensor? min_p_arr, "
    "float min_p, "
)
_REST = (
    "bool joint, Tensor? seed_arr, SymInt seed, Tensor? offset_arr, SymInt offset, Tensor(a!) out, "
    "Tensor(b!)? valid, bool enable_pdl) -> ()"
)
_PROBS = f"(Tensor probs, Tensor? indices, {_FILTERS}{_REST}"
_LOGITS = (
    f"(Tensor logits, Tensor? indices, {_FILTERS}"
    f"Tensor? temperature_arr, float temperature, {_REST}"
)


def _probs_into(
    probs: torch.Tensor,
    indices: torch.Tensor | None,
    top_k_arr: torch.Tensor | None,
    top_k: int,
    top_p_arr: torch.Tensor | None,
    top_p: float,
    min_p_arr: torch.Tensor | None,
    min_p: float,
    joint: bool,
    seed_arr: torch.Tensor | None,
    seed: int,
    offset_arr: torch.Tensor | None,
    offset: int,
    out: torch.Tensor,
    valid: torch.Tensor | None,
    enable_pdl: bool,
) -> None:
    export = "sampling_from_probs"
    check_distributions(export, "probs", probs)
    parameters = {"top_k": top_k_arr, "top_p": top_p_arr, "min_p": min_p_arr}
    check_by_row(export, probs, "probs", parameters)
    outputs = check_outputs(export, probs, "probs", indices, out, valid)
    check_random(export, probs, "probs", outputs, seed_arr, offset_arr)
    _write(
        chosen(
            weights_of_probs(probs),
            indices,
            given(top_k_arr, top_k),
            given(top_p_arr, top_p),
            given(min_p_arr, min_p),
            joint,
            given(seed_arr, seed),
            given(offset_arr, offset),
        ),
        out,
        valid,
    )


def _logits_into(
    logits: torch.Tensor,
    indices: torch.Tensor | None,
    top_k_arr: torch.Tensor | None,
    top_k: int,
    top_p_arr: torch.Tensor | None,
    top_p: float,
    min_p_arr: torch.Tensor | None,
    min_p: float,
    temperature_arr: torch.Tensor | None,
    temperature: float,
    joint: bool,
    seed_arr: torch.Tensor | None,
    seed: int,
    offset_arr: torch.Tensor | None,
    offset: int,
    out: torch.Tensor,
    valid: torch.Tensor | None,
    enable_pdl: bool,
) -> None:
    export = "sampling_from_logits"
    check_distributions(export, "logits", logits)
    parameters = {"top_k": top_k_arr, "top_p": top_p_arr, "min_p": min_p_arr}
    parameters["temperature"] = temperature_arr
    check_by_row(export, logits, "logits", parameters)
    outputs = check_outputs(export, logits, "logits", indices, out, valid)
    check_random(export, logits, "logits", outputs, seed_arr, offset_arr)
    _write(
        chosen(
            weights_of_logits(logits, given(temperature_arr, temperature)),
            indices,
            given(top_k_arr, top_k),
            given(top_p_arr, top_p),
            given(min_p_arr, min_p),
            joint,
            given(seed_arr, seed),
            given(offset_arr, offset),
        ),
        out,
        valid,
    )


def _write(
    results: tuple[torch.Tensor, torch.Tensor], out: torch.Tensor, valid: torch.Tensor | None
) -> None:
    out.copy_(results[0])
    if valid is not None:
        valid.copy_(results[1])


def draw_kernel(export: str, function: str, public: Callable[..., tuple[Any, ...]]) -> Kernel:
    """``sample_from_probs`` or ``sample_from_logits`` as ``function`` calls it.

    ``public`` makes the arguments of that function from the rows, the indices, top-k, top-p, min-p,
    the order of the filters, seed, offset and whether validity is asked for.
    """

    def arguments(
        x: Any, indices: Any, ka: Any, k: Any, pa: Any, p: Any, ma: Any, m: Any, *rest: Any
    ) -> tuple[Any, ...]:
        joint, seed_arr, seed, offset_arr, offset, _, valid, _ = rest[-8:]
        filters = given(ka, k), given(pa, p), given(ma, m)
        order = "joint" if joint is True else "top_k_first"
        random = given(seed_arr, seed), given(offset_arr, offset)
        return public(x, indices, *filters, order, *random, valid is not None)

    of_probs = export == "sample_from_probs"
    # The plainest function that calls an export has its name.
    plainest = function in ("sampling_from_probs", "sampling_from_logits")
    return Kernel(
        "sampling",
        export,
        schema=_PROBS if of_probs else _LOGITS,
        reference=_probs_into if of_probs else _logits_into,
        public=arguments,
        function=function,
        name=export if plainest else function,
    )
