# SPDX-License-Identifier: Apache-2.0
"""What the wrappers of decode refuse."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from precast._base.torch import torch

if TYPE_CHECKING:
    from precast._ops.attention.decode._plan import DecodePlan

#: Options of ``plan()`` that once followed ``page_size`` by position, in their order.
POSITIONAL = (
    "pos_encoding_mode",
    "window_left",
    "logits_soft_cap",
    "q_data_type",
    "kv_data_type",
    "o_data_type",
    "data_type",
    "sm_scale",
    "rope_scale",
    "rope_theta",
    "non_blocking",
    "block_tables",
    "seq_lens",
    "fixed_split_size",
    "disable_split_kv",
    "q_len_per_req",
)
_KEYWORDS = ("window_right", "is_causal")


def merge_positional(
    plan: Any, name: str, positional: tuple[Any, ...], given: Mapping[str, Any]
) -> dict[str, Any]:
    """All options of a call that has some by position; ``given`` are its keywords."""
    if len(positional) > len(POSITIONAL):
        raise TypeError(
            f"{name}.plan() accepts at most {len(POSITIONAL)} deprecated optional positional "
            f"arguments after page_size; got {len(positional)}"
        )
    defaults = inspect.signature(plan).parameters
    options = {
        option: given[option]
        for option in (*POSITIONAL, *_KEYWORDS)
        if given[option] is not defaults[option].default
    }
    for option, value in zip(POSITIONAL, positional):
        if option in options:
            raise TypeError(f"{name}.plan() got multiple values for argument {option!r}")
        options[option] = value
    warnings.warn(
        f"Passing optional arguments to {name}.plan() positionally is deprecated; pass them as "
        f"keyword arguments instead",
        DeprecationWarning,
        stacklevel=4,
    )
    return options


def check_unserved(
    name: str, window_right: int, is_causal: bool | None, q_len_per_req: int
) -> None:
    """Options that only have one value here."""
    if window_right != 0:
        raise NotImplementedError(
            f"{name}.plan: window_right must be 0, got {window_right}: a query sees nothing behind "
            f"itself"
        )
    if is_causal is not None and is_causal != (q_len_per_req > 1):
        raise NotImplementedError(
            f"{name}.plan: is_causal must be None or {q_len_per_req > 1} for "
            f"q_len_per_req={q_len_per_req}, got {is_causal}"
        )


def check_plan(
    wrapper: DecodePlan,
    batch_size: int,
    indices: torch.Tensor,
    fixed_split_size: int | None,
    q_len_per_req: int,
) -> None:
    """Options that ask for tensor cores, and what CUDA graphs hold fast."""
    w: Any = wrapper
    if q_len_per_req < 1:
        raise ValueError(f"{w._name}: q_len_per_req must be >= 1, got {q_len_per_req}")
    if q_len_per_req > 1 and not w._use_tensor_cores:
        raise ValueError(
            f"{w._name}: q_len_per_req > 1 requires tensor-core decode (use_tensor_cores=True)"
        )
    if fixed_split_size is not None and not w._use_tensor_cores:
        raise ValueError(
            f"{w._name}: fixed_split_size is only supported by tensor core decode "
            f"(use_tensor_cores=True)"
        )
    if not w._use_cuda_graph:
        return
    frozen = w._q_len_per_req
    if frozen is not None and frozen != q_len_per_req:
        raise ValueError(
            f"{w._name}: q_len_per_req is part of the frozen cudagraph shape: this wrapper was "
            f"planned with {frozen}, got {q_len_per_req}. Fix: a wrapper for each q_len_per_req"
        )
    check_graph(w, batch_size, indices)


def check_graph(w: Any, batch_size: int, indices: torch.Tensor) -> None:
    """Sizes that CUDA graphs hold fast."""
    if batch_size != w._fixed_batch_size:
        raise ValueError(
            f"{w._name}: the batch size should be fixed in cudagraph mode: it is {batch_size} and "
            f"was {w._fixed_batch_size} when the wrapper was made"
        )
    if indices.shape[0] > w._paged_kv_indices_buf.shape[0]:
        raise ValueError(
            f"{w._name}: the size of indices, {indices.shape[0]}, should be less than or equal to "
            f"the allocated buffer, {w._paged_kv_indices_buf.shape[0]}"
        )


def check_kv_len(lens: torch.Tensor, q_len_per_req: int) -> None:
    """Every query must be among the tokens; only asked of lengths on the host."""
    if q_len_per_req > 1 and lens.numel():
        least = int(lens.min())
        if least < q_len_per_req:
            raise ValueError(
                f"q_len_per_req={q_len_per_req} requires kv_len >= q_len_per_req for every request "
                f"(its queries must be appended to the KV cache before), but got a request with "
                f"kv_len={least}: its first rows would attend to an empty KV range"
            )


def check_q_len(wrapper: DecodePlan, q: torch.Tensor, q_len_per_req: int) -> None:
    """The deprecated argument of ``run()`` against the number of queries."""
    w: Any = wrapper
    warnings.warn(
        f"Passing `q_len_per_req` to {w._name}.run() is deprecated; pass it to plan() instead",
        DeprecationWarning,
        stacklevel=3,
    )
    tokens, batch = q.shape[0], w._batch_size
    if w._plan_info is not None and tokens != batch * q_len_per_req:
        raise ValueError(
            f"q.shape[0] ({tokens}) does not match batch_size * q_len_per_req "
            f"({batch} * {q_len_per_req} = {batch * q_len_per_req})"
        )


def check_rows(wrapper: DecodePlan, tokens: int) -> None:
    """Say why a number of queries is not that of the plan."""
    w: Any = wrapper
    batch, planned = w._batch_size, w._q_len_per_req
    if batch and tokens and tokens % batch == 0:
        implied = tokens // batch
        if not w._use_tensor_cores:
            raise ValueError(
                f"q implies q_len_per_req={implied}, but without use_tensor_cores only "
                f"q_len_per_req=1 is supported"
            )
        raise ValueError(
            f"q implies q_len_per_req={implied} but the prior plan() used {planned}; re-plan with "
            f"the matching q_len_per_req"
        )
    raise ValueError(
        f"q.shape[0] ({tokens}) does not match batch_size * q_len_per_req of the prior plan() "
        f"({batch} * {planned} = {batch * planned})"
    )
