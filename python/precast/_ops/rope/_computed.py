# SPDX-License-Identifier: Apache-2.0
"""Make the ops that compute frequencies: export, validation and trace of each."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from precast._base.torch import torch
from precast._op.declaration import Kind
from precast._op.decorators import CheckedOp
from precast._op.export import Export, launches
from precast._op.validation import check_indices, check_rank
from precast._ops.rope._checks import check_first, check_pair
from precast.api_logging import precast_api
from precast.trace import Const, Scalar, Tensor, TraceTemplate, Var

P = ParamSpec("P")
R = TypeVar("R")

#: What all functions in place say of the arguments that they overwrite.
IN_PLACE = """
Parameters
----------
q, k : torch.Tensor
    As the function into new tensors takes them; overwritten. They lie apart from each other in
    memory, such as slices of one packed projection. Columns behind ``rotary_dim`` are neither read
    nor written.
"""

_KINDS = {
    # By default, all columns of a head are rotated.
    "rotary_dim": Kind("int {name}", "(q.shape[-1] if {name} is None else {name})"),
}
# In the order of the exports; each has those that its public function has.
_DECLARED = (
    "pos_ids:any indptr:any offsets:any rotary_dim interleave:bool rope_scale:float "
    "rope_theta:float low_freq_factor:float high_freq_factor:float old_context_len:int"
)
_HEADS: dict[str, Var | Const] = {
    "num_tokens": Var("Tokens of all requests."),
    "num_q_heads": Const("qh", sample=4),
    "num_k_heads": Const("kh", sample=2),
    "head_dim": Const("d"),
}
_REQUESTS: dict[str, Var | Const] = {
    "num_requests": Var("Requests.", sample=3),
    "len_indptr": Var("Requests and one.", sample=4),
}
_Q, _K = (["num_tokens", f"num_{part}_heads", "head_dim"] for part in "qk")
_INPUTS: dict[str, Tensor | Scalar] = {
    "q": Tensor(_Q),
    "k": Tensor(_K),
    "pos_ids": Tensor(["num_tokens"], dtype="int32"),
    "indptr": Tensor(["len_indptr"], dtype="int32"),
    "offsets": Tensor(["num_requests"], dtype="int32"),
    "interleave": Scalar("bool"),
    "rope_scale": Scalar("float32"),
    "rope_theta": Scalar("float32"),
    "low_freq_factor": Scalar("float32"),
    "high_freq_factor": Scalar("float32"),
    "old_context_len": Scalar("int32"),
}


def computed_rope(
    reference: Callable[..., Any],
) -> Callable[[Callable[P, R]], CheckedOp[P, R]]:
    """Make a public op of a function without a body; its name and signature say what it takes."""

    def decorate(function: Callable[P, R]) -> CheckedOp[P, R]:
        name, arguments = function.__name__, list(inspect.signature(function).parameters)
        in_place = name.endswith("_inplace")
        declared = " ".join(
            word for word in _DECLARED.split() if word.partition(":")[0] in arguments
        )
        export = Export(
            "rope",
            name,
            f"q!:T k!:T {declared}"
            if in_place
            else f"q:T k:T {declared} q_rope!:like(q) k_rope!:like(k)",
            reference=reference,
            check=_check,
            kinds=_KINDS,
        )
        trace = _trace(name, arguments, reference, in_place)
        return precast_api(trace=trace)(launches(export)(function))

    return decorate


def _trace(
    name: str, arguments: list[str], reference: Callable[..., Any], in_place: bool
) -> TraceTemplate:
    where = "at given positions" if "pos_ids" in arguments else "of requests"
    how = "rotated in place" if in_place else "rotated"
    by = "Llama 3.1's" if "old_context_len" in arguments else "computed"
    return TraceTemplate(
        op_type="rope",
        name_prefix=name.removeprefix("apply_"),
        description=f"Queries and keys {where}, {how} by {by} frequencies.",
        axes=_HEADS if "pos_ids" in arguments else {**_HEADS, **_REQUESTS},
        inputs={key: _INPUTS[key] for key in arguments if key in _INPUTS},
        outputs={
            "q_rope": Tensor(_Q, dtype_from="q", param="q" if in_place else None),
            "k_rope": Tensor(_K, dtype_from="k", param="k" if in_place else None),
        },
        reference=reference,
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
    """Check what the declaration does not say, in the binding's words."""
    if old_context_len <= 0:
        raise ValueError(f"{export}: old_context_len must be positive, got {old_context_len}")
    check_first(export, "q", q)
    check_rank(export, "q", q, 3, 3)
    check_rank(export, "k", k, 3, 3)
    check_pair(export, ("q", "k"), q, k, rotary_dim)
    for name, value in (("rope_scale", rope_scale), ("rope_theta", rope_theta)):
        if not value > 0:
            raise ValueError(f"{export}: {name} must be positive, got {value:g}")
    if not high_freq_factor > low_freq_factor:
        raise ValueError(
            f"{export}: high_freq_factor must exceed low_freq_factor {low_freq_factor:g}, got "
            f"{high_freq_factor:g}"
        )
    if pos_ids is not None:
        check_indices(export, "pos_ids", pos_ids, q.shape[0], q, "q")
    if indptr is not None and offsets is not None:
        if indptr.dim() != 1 or indptr.shape[0] < 1:
            raise ValueError(
                f"{export}: indptr must have shape [requests + 1], got {[*indptr.shape]}"
            )
        check_indices(export, "indptr", indptr, indptr.shape[0], q, "q")
        check_indices(export, "offsets", offsets, indptr.shape[0] - 1, q, "q")
