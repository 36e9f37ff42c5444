# SPDX-License-Identifier: Apache-2.0
"""Concatenations that attention needs.

Source: DeepSeek-AI, DeepSeek-V2, arXiv:2405.04434.
"""

from __future__ import annotations

from precast._base.dtypes import dtype_word
from precast._base.torch import torch
from precast._op.export import Export, op
from precast._op.validation import check_dtype, check_memory_apart, check_rank
from precast.api_logging import precast_api
from precast.trace import Const, Tensor, TraceTemplate, Var


def concat_mla_k_reference(
    k: torch.Tensor, k_nope: torch.Tensor, k_rope: torch.Tensor
) -> torch.Tensor:
    """:func:`concat_mla_k` in plain PyTorch on any device, out of place.

    Parameters
    ----------
    k : torch.Tensor
        ``[tokens, heads, nope_dim + rope_dim]``, not read.

    Returns
    -------
    torch.Tensor
        What :func:`concat_mla_k` writes to ``k``.
    """
    return torch.cat([k_nope, k_rope.expand(-1, k_nope.shape[1], -1)], dim=-1)


def _check(export: str, k: torch.Tensor, k_nope: torch.Tensor, k_rope: torch.Tensor) -> None:
    if k.element_size() not in (1, 2, 4):
        raise ValueError(
            f"{export}: k must have elements of 1, 2 or 4 bytes, got {dtype_word(k.dtype)}"
        )
    for name, tensor in (("k_nope", k_nope), ("k_rope", k_rope)):
        check_dtype(export, name, tensor, k.dtype)
        check_rank(export, name, tensor, 3, 3)
    tokens, heads, last = k.shape
    if k_nope.shape[:2] != (tokens, heads):
        raise ValueError(
            f"{export}: k_nope must have the tokens and heads of k, got {[*k_nope.shape]} for "
            f"{[*k.shape]}"
        )
    if k_rope.shape[:2] != (tokens, 1):
        raise ValueError(
            f"{export}: k_rope must have shape [{tokens}, 1, rope_dim], got {[*k_rope.shape]}"
        )
    if last != k_nope.shape[2] + k_rope.shape[2]:
        raise ValueError(
            f"{export}: k's last dimension must be those of k_nope and k_rope together, "
            f"{k_nope.shape[2]} + {k_rope.shape[2]}, got {last}"
        )
    check_memory_apart(export, "k", k, k_nope, "k_nope")
    check_memory_apart(export, "k", k, k_rope, "k_rope")


_CONCAT_MLA_K = Export(
    "concat_ops",
    "concat_mla_k",
    "k!:any[tokens,heads,total_dim] k_nope:any k_rope:any enable_pdl:pdl",
    reference=concat_mla_k_reference,
    check=_check,
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
@op("concat_ops")
def concat_mla_k(
    k: torch.Tensor,
    k_nope: torch.Tensor,
    k_rope: torch.Tensor,
    enable_pdl: bool | None = None,
    *,
    backend: str = "default",
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
    backend : str
        Only ``default``.

    Raises
    ------
    ValueError
        A tensor that is not on a CUDA device; a dtype, shape, device or strides other than above; a
        ``k`` that overlaps itself or another argument; another backend.

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
    if backend != "default":
        raise ValueError(f"concat_mla_k: backend must be 'default', got {backend!r}")
    _CONCAT_MLA_K.launch(k, k_nope, k_rope, enable_pdl)
