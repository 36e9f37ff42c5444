# SPDX-License-Identifier: Apache-2.0
"""Make the ops that rotate a pair of queries and keys: the export and the trace of each."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from precast._op.declaration import Kind
from precast._op.decorators import CheckedOp, reference_of
from precast._op.export import Export, launches
from precast._ops.rope._checks import check_computed
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

Raises
------
ValueError
    As the function into new tensors; also if what is overwritten shares memory.
"""

_KINDS = {
    # By default, all columns of a head are rotated.
    "rotary_dim": Kind("int {name}", "(q.shape[-1] if {name} is None else {name})"),
}
#: The two tensors that are rotated: the new output for each, its axes, and what is declared of it.
_PAIR = {
    "q": ("q_rope", ["num_tokens", "num_q_heads", "head_dim"], "T[tokens,q_heads,q_dim]"),
    "k": ("k_rope", ["num_tokens", "num_k_heads", "head_dim"], "T[k_tokens,k_heads,k_dim]"),
    "query": ("query_out", ["num_tokens", "q_size"], "T[*q_rows(1-2),q_columns]"),
    "key": ("key_out", ["num_tokens", "k_size"], "T[*k_rows(1-2),k_columns]"),
}
#: How exports get the other arguments, and what traces say of them.
_OTHERS: dict[str, tuple[str, Tensor | Scalar | None]] = {
    "pos_ids": ("i32|i64[tokens]", Tensor(["num_tokens"], dtype="int32")),
    "positions": ("any", Tensor(["num_tokens"], dtype="int64")),
    "indptr": ("any", Tensor(["len_indptr"], dtype="int32")),
    "offsets": ("any", Tensor(["num_requests"], dtype="int32")),
    "cos_sin_cache": ("any", Tensor(["max_position", "rotary_dim"], dtype="float32")),
    "head_size": ("int", Scalar("int32")),
    "is_neox": ("bool", Scalar("bool")),
    "rotary_dim": ("rotary_dim", None),
    "interleave": ("bool", Scalar("bool")),
    "rope_scale": ("float", Scalar("float32")),
    "rope_theta": ("float", Scalar("float32")),
    "low_freq_factor": ("float", Scalar("float32")),
    "high_freq_factor": ("float", Scalar("float32")),
    "old_context_len": ("int", Scalar("int32")),
}
_TOKENS = {"num_tokens": Var("Tokens of all requests.")}
_HEADS: dict[str, Var | Const] = {
    **_TOKENS,
    "num_q_heads": Const("qh", sample=4),
    "num_k_heads": Const("kh", sample=2),
    "head_dim": Const("d"),
}
_REQUESTS: dict[str, Var | Const] = {
    "num_requests": Var("Requests.", sample=3),
    "len_indptr": Var("Requests and one.", sample=4),
}
_CACHED: dict[str, Var | Const] = {
    **_TOKENS,
    "q_size": Const("q", "Query heads times head_size.", sample=256),
    "k_size": Const("k", "Key heads times head_size.", sample=128),
    "head_size": Const("d", param="head_size", sample=64),
    "max_position": Var("Rows of the cache."),
    "rotary_dim": Const("r", sample=48),
}


def rotates(
    description: str, check: Callable[..., None] = check_computed
) -> Callable[[Callable[P, R]], CheckedOp[P, R]]:
    """Make a public op of a function without a body; its name and signature say what it takes.

    Its reference is the function of its name. ``description`` is that of the trace, with ``{}`` for
    the word that says what is done.
    """

    def decorate(function: Callable[P, R]) -> CheckedOp[P, R]:
        name, arguments = function.__name__, [*inspect.signature(function).parameters]
        reference, in_place = reference_of(function), name.endswith("_inplace")
        words, new = [], []
        inputs: dict[str, Tensor | Scalar] = {}
        outputs = {}
        for key in arguments:
            if key in _PAIR:
                output, axes, declared = _PAIR[key]
                words.append(f"{key}{'!' * in_place}:{declared}")
                new.append(f"{output}!:like({key})")
                inputs[key] = Tensor(axes)
                outputs[output] = Tensor(axes, dtype_from=key, param=key if in_place else None)
            else:
                kind, spec = _OTHERS[key]
                words.append(f"{key}:{kind}")
                if spec is not None:
                    inputs[key] = spec
        declaration = " ".join(words if in_place else words + new)
        export = Export("rope", name, declaration, reference=reference, check=check, kinds=_KINDS)
        is_cached = "cos_sin_cache" in arguments
        trace = TraceTemplate(
            op_type="rope",
            name_prefix=name.removeprefix("apply_"),
            description=description.format("rotated in place" if in_place else "rotated"),
            axes=_CACHED if is_cached else _HEADS | (_REQUESTS if "indptr" in arguments else {}),
            inputs=inputs,
            outputs=outputs,
            reference=reference,
            constraints=[f"{axis} % head_size == 0" for axis in ("q_size", "k_size")]
            if is_cached
            else [],
        )
        return precast_api(trace=trace)(launches(export)(function))

    return decorate
