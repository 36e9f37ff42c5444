# SPDX-License-Identifier: Apache-2.0
"""Check the arguments of the decode wrappers."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

from precast._base.torch import torch

Plan = TypeVar("Plan", bound=Callable[..., None])


def options_by_position(plan: Plan) -> Plan:
    """Take options of ``plan()`` by position, with a warning: that is deprecated."""
    parameters = list(inspect.signature(plan).parameters.values())
    kinds = [p.kind for p in parameters]
    required = kinds.index(inspect.Parameter.VAR_POSITIONAL)  # ``self`` is one of them.
    # They once followed ``page_size``; newer options never did.
    named = [p.name for p in parameters[required + 1 :]]
    options_in_order = [name for name in named if name not in ("window_right", "is_causal")]

    @functools.wraps(plan)
    def planned(self: Any, *args: Any, **options: Any) -> None:
        if len(args) >= required:
            given, args = args[required - 1 :], args[: required - 1]
            options = _merged(f"{self._name}.plan()", options_in_order, given, options)
        plan(self, *args, **options)

    return planned  # type: ignore[return-value]


def _merged(
    name: str, names: list[str], given: tuple[Any, ...], options: dict[str, Any]
) -> dict[str, Any]:
    if len(given) > len(names):
        raise TypeError(
            f"{name} accepts at most {len(names)} deprecated optional positional arguments "
            f"after page_size; got {len(given)}"
        )
    by_position = dict(zip(names, given))
    for option in by_position:
        if option in options:
            raise TypeError(f"{name} got multiple values for argument {option!r}")
    warnings.warn(
        f"Passing optional arguments to {name} positionally is deprecated; pass them as keyword "
        f"arguments instead",
        DeprecationWarning,
        stacklevel=3,
    )
    return {**options, **by_position}


def check_single_valued(
    name: str, window_right: int, is_causal: bool | None, q_len_per_req: int
) -> None:
    """Raise for another value of an option that only has one here."""
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


def check_q_len_per_req(
    name: str, use_tensor_cores: bool, fixed_split_size: int | None, q_len_per_req: int
) -> None:
    """Raise for options that ask for tensor cores, where those are off."""
    if q_len_per_req < 1:
        raise ValueError(f"{name}: q_len_per_req must be >= 1, got {q_len_per_req}")
    if use_tensor_cores:
        return
    if q_len_per_req > 1:
        raise ValueError(
            f"{name}: q_len_per_req > 1 requires tensor-core decode (use_tensor_cores=True)"
        )
    if fixed_split_size is not None:
        raise ValueError(
            f"{name}: fixed_split_size is only supported by tensor core decode "
            f"(use_tensor_cores=True)"
        )


def check_kv_len(lens: torch.Tensor, q_len_per_req: int) -> None:
    """Raise unless every query is among the tokens; only for lengths on the host."""
    if q_len_per_req > 1 and lens.numel():
        least = int(lens.min())
        if least < q_len_per_req:
            raise ValueError(
                f"q_len_per_req={q_len_per_req} requires kv_len >= q_len_per_req for every request "
                f"(its queries must be appended to the KV cache before), but got a request with "
                f"kv_len={least}: its first rows would attend to an empty KV range"
            )


def check_q_len(name: str, tokens: int, batch: int | None, q_len_per_req: int) -> None:
    """Compare the deprecated argument of ``run()`` with the number of queries of the plan."""
    warnings.warn(
        f"Passing `q_len_per_req` to {name}.run() is deprecated; pass it to plan() instead",
        DeprecationWarning,
        stacklevel=3,
    )
    if batch is not None and tokens != batch * q_len_per_req:
        raise ValueError(
            f"q.shape[0] ({tokens}) does not match batch_size * q_len_per_req "
            f"({batch} * {q_len_per_req} = {batch * q_len_per_req})"
        )


def raise_rows(tokens: int, batch: int, planned: int, use_tensor_cores: bool) -> None:
    """Raise an error that says why a number of queries is not that of the plan."""
    if batch and tokens and tokens % batch == 0:
        implied = tokens // batch
        if not use_tensor_cores:
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
