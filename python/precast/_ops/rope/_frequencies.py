# SPDX-License-Identifier: Apache-2.0
"""The exports of RoPE by computed frequencies: one text for all of them."""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, Signature
from typing import Any

from precast._base.torch import torch
from precast._op.dispatch import Kernel
from precast._op.validation import check_indices
from precast._ops.rope._checks import check_computed, check_requests

_OPTIONS = ("int rotary_dim", "bool interleave", "float rope_scale", "float rope_theta")
_LLAMA31 = ("float low_freq_factor", "float high_freq_factor", "int old_context_len")


def frequency_kernels(stem: str, reference: Callable[..., Any]) -> tuple[Kernel, Kernel]:
    """Of a function and its form in place; the name says what they take."""
    by_ids = stem.endswith("_pos_ids")
    where = ("Tensor pos_ids",) if by_ids else ("Tensor indptr", "Tensor offsets")
    options = _OPTIONS + (_LLAMA31 if "llama31" in stem else ())
    new = ("Tensor q", "Tensor k", *where, *options, "Tensor(a!) q_rope", "Tensor(b!) k_rope")
    in_place = ("Tensor(a!) q", "Tensor(b!) k", *where, *options)

    def kernel(export: str, arguments: tuple[str, ...]) -> Kernel:
        write = _into(export, reference, len(where), len(options))
        names = [argument.split()[-1] for argument in arguments]
        write.__signature__ = Signature(  # type: ignore[attr-defined]
            [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in names]
        )
        schema = f"({', '.join(arguments)}) -> ()"
        return Kernel("rope", export, schema=schema, reference=write)

    return kernel(stem, new), kernel(f"{stem}_inplace", in_place)


def _into(
    export: str, reference: Callable[..., Any], positions: int, options: int
) -> Callable[..., None]:
    """The reference with the arguments of the export; without outputs, it writes its inputs."""

    def write(q: torch.Tensor, k: torch.Tensor, *rest: Any) -> None:
        where, out = rest[:positions], rest[positions + options :]
        given = rest[positions : positions + options]
        rotary_dim, _, rope_scale, rope_theta, *llama31 = given
        check_computed(export, q, k, rotary_dim, rope_scale, rope_theta, tuple(llama31) or None)
        if len(where) == 1:
            check_indices(export, "pos_ids", where[0], q.shape[0], q, "q")
        else:
            check_requests(export, where[0], where[1], q)
        for target, turned in zip(out or (q, k), reference(q, k, *where, *given)):
            target.copy_(turned)

    return write
