# SPDX-License-Identifier: Apache-2.0
"""Concatenations that attention needs.

Source: DeepSeek-AI, DeepSeek-V2, arXiv:2405.04434.
"""

from __future__ import annotations

from precast._base.dtypes import dtype_word
from precast._base.torch import torch
from precast._op.decorators import backend_requirement, served_by
from precast._op.dispatch import Kernel, check_tensors
from precast._op.torch_ops import torch_ops
from precast._op.validation import (
    check_device_and_dtype,
    check_elements_apart,
    check_memory_apart,
    check_rank,
)
from precast.api_logging import precast_api
from precast.trace import Const, Tensor, TraceTemplate, Var


def concat_mla_k_reference(
    k: torch.Tensor, k_nope: torch.Tensor, k_rope: torch.Tensor
) -> torch.Tensor:
    """:func:`concat_mla_k` in plain PyTorch, out of place.

    Parameters
    ----------
    k : torch.Tensor
        ``[tokens, heads, nope_dim + rope_dim]``, not read.
    k_nope : torch.Tensor
        ``[tokens, heads, nope_dim]``, any device.
    k_rope : torch.Tensor
        ``[tokens, 1, rope_dim]``.

    Returns
    -------
    torch.Tensor
        What :func:`concat_mla_k` writes to ``k``.

    Examples
    --------
    >>> import torch
    >>> nope, rope = torch.ones(1, 2, 1), torch.full((1, 1, 2), 2.0)
    >>> concat_mla_k_reference(torch.empty(1, 2, 3), nope, rope)
    tensor([[[1., 2., 2.],
             [1., 2., 2.]]])
    """
    return torch.cat([k_nope, k_rope.expand(-1, k_nope.shape[1], -1)], dim=-1)


def _check(k: torch.Tensor, k_nope: torch.Tensor, k_rope: torch.Tensor) -> None:
    name = "concat_mla_k"
    if k.element_size() not in (1, 2, 4):
        raise ValueError(
            f"{name}: k must have elements of 1, 2 or 4 bytes, got {dtype_word(k.dtype)}"
        )
    for part, tensor in (("k", k), ("k_nope", k_nope), ("k_rope", k_rope)):
        check_device_and_dtype(name, part, tensor, k, k.dtype, "k")
        check_rank(name, part, tensor, 3, 3)
    tokens, heads, last = k.shape
    if k_nope.shape[:2] != (tokens, heads):
        raise ValueError(
            f"{name}: k_nope must have the tokens and heads of k, got {[*k_nope.shape]} for "
            f"{[*k.shape]}"
        )
    if k_rope.shape[:2] != (tokens, 1):
        raise ValueError(
            f"{name}: k_rope must have shape [{tokens}, 1, rope_dim], got {[*k_rope.shape]}"
        )
    if last != k_nope.shape[2] + k_rope.shape[2]:
        raise ValueError(
            f"{name}: k's last dimension must be those of k_nope and k_rope together, "
            f"{k_nope.shape[2]} + {k_rope.shape[2]}, got {last}"
        )
    check_elements_apart(name, "k", k)
    check_memory_apart(name, "k", k, k_nope, "k_nope")
    check_memory_apart(name, "k", k, k_rope, "k_rope")


def _concat_mla_k_into(
    k: torch.Tensor, k_nope: torch.Tensor, k_rope: torch.Tensor, enable_pdl: bool
) -> None:
    _check(k, k_nope, k_rope)
    k[..., : k_nope.shape[2]].copy_(k_nope)
    k[..., k_nope.shape[2] :].copy_(k_rope.expand(-1, k.shape[1], -1))


def _key(k: torch.Tensor, *others: object) -> tuple[int]:
    return (k.get_device(),)


_concat_mla_k = Kernel(
    "concat_ops",
    "concat_mla_k",
    schema="(Tensor(a!) k, Tensor k_nope, Tensor k_rope, bool enable_pdl) -> ()",
    reference=_concat_mla_k_into,
    key=_key,
)

_TRACE = TraceTemplate(
    op_type="mla_paged",
    name_prefix="concat_mla_k",
    description="Each head's own part of the keys, then the rotary part that all heads share.",
    axes={
        "num_tokens": Var(),
        "num_heads": Const("h"),
        "nope_dim": Const("nope"),
        "rope_dim": Const("rope"),
        "one": Const("", "All heads share it.", value="1"),
        "total_dim": Const("d", value="nope_dim + rope_dim"),
    },
    inputs={
        "k_nope": Tensor(["num_tokens", "num_heads", "nope_dim"]),
        "k_rope": Tensor(["num_tokens", "one", "rope_dim"]),
        "k": Tensor(["num_tokens", "num_heads", "total_dim"], description="Overwritten."),
    },
    outputs={
        "output": Tensor(["num_tokens", "num_heads", "total_dim"], dtype_from="k_nope", param="k")
    },
    reference=concat_mla_k_reference,
    tags=["mla"],
)


@precast_api(trace=_TRACE)
@backend_requirement({}, common_check=served_by("concat_ops"))
def concat_mla_k(
    k: torch.Tensor,
    k_nope: torch.Tensor,
    k_rope: torch.Tensor,
    enable_pdl: bool | None = None,
) -> None:
    r"""Put the two parts of MLA's keys together for prefill, in place in ``k``.

    .. math:: k_{t, h} = (k\_nope_{t, h},\ k\_rope_t)

    Parameters
    ----------
    k : torch.Tensor
        ``[tokens, heads, nope_dim + rope_dim]`` of any element type of 1, 2 or 4 bytes, on a CUDA
        device; stride 1 in the last dimension, any in the others. Overwritten. DeepSeek's shape is
        ``[tokens, 128, 192]``.
    k_nope : torch.Tensor
        ``[tokens, heads, nope_dim]``, dtype and device of ``k``, strides likewise, such as a slice
        of the up-projection.
    k_rope : torch.Tensor
        ``[tokens, 1, rope_dim]``, likewise; every head gets it.
    enable_pdl : bool, optional
        Programmatic dependent launch. Default: on; without effect below compute capability 9.0.

    Raises
    ------
    ValueError
        A tensor that is not on a CUDA device; a dtype, shape, device or strides other than above; a
        ``k`` that overlaps itself or another argument.

    Notes
    -----
    Bit for bit. Any sizes; addresses, strides and dimensions that are multiples of 16 bytes are
    fastest. No allocation; safe in CUDA graphs; not differentiable. Source: arXiv:2405.04434.

    Examples
    --------
    >>> import torch, precast
    >>> k, nope, rope = torch.empty(1, 2, 3), torch.ones(1, 2, 1), torch.full((1, 1, 2), 2.0)
    >>> with precast.reference_mode():
    ...     precast.concat_mla_k(k, nope, rope)
    >>> k
    tensor([[[1., 2., 2.],
             [1., 2., 2.]]])
    """
    try:
        if torch.compiler.is_compiling():
            torch_ops.concat_mla_k(k, k_nope, k_rope, enable_pdl is not False)
        else:
            _concat_mla_k[(k.get_device(),)](k, k_nope, k_rope, enable_pdl is not False)
    except (AttributeError, TypeError):
        check_tensors("concat_mla_k", k=k, k_nope=k_nope, k_rope=k_rope)
        raise
