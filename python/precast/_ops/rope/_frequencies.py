# SPDX-License-Identifier: Apache-2.0
"""The exports of RoPE by computed frequencies: one declaration for all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from precast._base.torch import torch
from precast._op.declaration import Kind
from precast._op.export import Export
from precast._op.validation import check_indices
from precast._ops.rope._checks import check_computed, check_requests

_KINDS = {
    # By default, all columns of a head are rotated.
    "rotary_dim": Kind("int {name}", "(q.shape[-1] if {name} is None else {name})"),
}
_OPTIONS = "rotary_dim:rotary_dim interleave:bool rope_scale:float rope_theta:float"
_LLAMA31 = "low_freq_factor:float high_freq_factor:float old_context_len:int"


def frequency_exports(name: str, reference: Callable[..., Any]) -> tuple[Export, Export]:
    """The export of a function and of its form in place; the name says what they take."""
    where = "pos_ids:any" if name.endswith("_pos_ids") else "indptr:any offsets:any"
    options = f"{_OPTIONS} {_LLAMA31}" if "llama31" in name else _OPTIONS
    new = f"q:T k:T {where} {options} q_rope!:like(q) k_rope!:like(k)"
    in_place = f"q!:T k!:T {where} {options}"
    return tuple(  # type: ignore[return-value]
        Export("rope", export, declared, reference=reference, check=_check, kinds=_KINDS)
        for export, declared in ((name, new), (f"{name}_inplace", in_place))
    )


def _check(
    export: str,
    q: torch.Tensor,
    k: torch.Tensor,
    rotary_dim: int,
    rope_scale: float,
    rope_theta: float,
    pos_ids: torch.Tensor | None = None,
    indptr: torch.Tensor | None = None,
    offsets: torch.Tensor | None = None,
    low_freq_factor: float = 0.0,
    high_freq_factor: float = 1.0,
    old_context_len: int = 1,
) -> None:
    llama31 = low_freq_factor, high_freq_factor, old_context_len
    check_computed(export, q, k, rotary_dim, rope_scale, rope_theta, llama31)
    if pos_ids is not None:
        check_indices(export, "pos_ids", pos_ids, q.shape[0], q, "q")
    elif indptr is not None and offsets is not None:
        check_requests(export, indptr, offsets, q)
