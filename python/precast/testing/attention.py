# SPDX-License-Identifier: Apache-2.0
"""Work and traffic of attention: FLOPs, TFLOP/s and TB/s.

Names, arguments and units (milliseconds) follow FlashInfer's ``flashinfer.testing``. A product of
``[m, k]`` and ``[k, n]`` counts 2 m n k operations; the softmax counts none. A causal mask is
aligned to the bottom right, as in serving: the last query sees every key. Query ``i`` of
``qo_seqlen`` then sees ``kv_seqlen - qo_seqlen + i + 1`` keys; half of the diagonal counts, so that
a square mask is exactly half of the full product.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

Lengths: TypeAlias = "Sequence[int] | torch.Tensor"


def attention_flops(
    batch_size: int,
    qo_seqlen: int,
    kv_seqlen: int,
    head_dim_qk: int,
    head_dim_vo: int,
    num_qo_heads: int,
    causal: bool,
) -> int:
    """Operations of both products of attention, all sequences of one length.

    Parameters
    ----------
    batch_size : int
        Number of sequences.
    qo_seqlen, kv_seqlen : int
        Tokens of queries and outputs, and of keys and values, of each sequence.
    head_dim_qk, head_dim_vo : int
        Head dimension of queries and keys, and of values and outputs.
    num_qo_heads : int
        Query heads; key/value heads do not matter.
    causal : bool
        Whether a query sees only the keys up to its own, the last of both aligned.

    Returns
    -------
    int
        Multiplications and additions.

    Raises
    ------
    ValueError
        If ``causal`` and there are more queries than keys.

    Examples
    --------
    >>> attention_flops(1, 2, 2, 4, 4, 1, causal=False)
    64
    >>> attention_flops(1, 2, 2, 4, 4, 1, causal=True)
    32
    """
    pairs = batch_size * _doubled_pairs(qo_seqlen, kv_seqlen, causal)
    return pairs * num_qo_heads * (head_dim_qk + head_dim_vo)


def attention_flops_with_actual_seq_lens(
    actual_seq_lens_q: Lengths,
    actual_seq_lens_kv: Lengths,
    head_dim_qk: int,
    head_dim_vo: int,
    num_qo_heads: int,
    causal: bool,
) -> int:
    """Count as :func:`attention_flops`, with the lengths of each sequence.

    Parameters
    ----------
    actual_seq_lens_q, actual_seq_lens_kv : sequence of int or torch.Tensor
        One length a sequence; a tensor may have any shape and device (this waits for its GPU).

    Raises
    ------
    ValueError
        If the numbers of lengths differ, or ``causal`` and a sequence has more queries than keys.
    """
    pairs = sum(
        _doubled_pairs(q, kv, causal) for q, kv in _zipped(actual_seq_lens_q, actual_seq_lens_kv)
    )
    return pairs * num_qo_heads * (head_dim_qk + head_dim_vo)


def attention_tflops_per_sec(
    batch_size: int,
    qo_seqlen: int,
    kv_seqlen: int,
    head_dim_qk: int,
    head_dim_vo: int,
    num_qo_heads: int,
    causal: bool,
    time: float,
) -> float:
    """TFLOP/s (1e12) of a call that took ``time`` milliseconds; 0 if ``time`` is NaN."""
    flops = attention_flops(
        batch_size, qo_seqlen, kv_seqlen, head_dim_qk, head_dim_vo, num_qo_heads, causal
    )
    return _tera_per_second(flops, time)


def attention_tflops_per_sec_with_actual_seq_lens(
    actual_seq_lens_q: Lengths,
    actual_seq_lens_kv: Lengths,
    head_dim_qk: int,
    head_dim_vo: int,
    num_qo_heads: int,
    causal: bool,
    ms: float,
) -> float:
    """TFLOP/s (1e12) of a call that took ``ms`` milliseconds; 0 if ``ms`` is NaN."""
    flops = attention_flops_with_actual_seq_lens(
        actual_seq_lens_q, actual_seq_lens_kv, head_dim_qk, head_dim_vo, num_qo_heads, causal
    )
    return _tera_per_second(flops, ms)


def attention_tb_per_sec(
    batch_size: int,
    qo_seqlen: int,
    kv_seqlen: int,
    head_dim_qk: int,
    head_dim_vo: int,
    num_qo_heads: int,
    num_kv_heads: int,
    time: float,
    q_dtype: torch.dtype = torch.bfloat16,
    k_dtype: torch.dtype = torch.bfloat16,
    v_dtype: torch.dtype = torch.bfloat16,
    o_dtype: torch.dtype = torch.bfloat16,
) -> float:
    """TB/s (1e12 bytes) with queries, keys and values read once and outputs written once.

    ``time`` is in milliseconds; 0 if it is NaN.
    """
    moved = _bytes(
        batch_size * qo_seqlen,
        batch_size * kv_seqlen,
        (head_dim_qk, head_dim_vo),
        (num_qo_heads, num_kv_heads),
        (q_dtype, k_dtype, v_dtype, o_dtype),
    )
    return _tera_per_second(moved, time)


def attention_tb_per_sec_with_actual_seq_lens(
    actual_seq_lens_q: Lengths,
    actual_seq_lens_kv: Lengths,
    head_dim_qk: int,
    head_dim_vo: int,
    num_qo_heads: int,
    num_kv_heads: int,
    time: float,
    q_dtype: torch.dtype = torch.bfloat16,
    k_dtype: torch.dtype = torch.bfloat16,
    v_dtype: torch.dtype = torch.bfloat16,
    o_dtype: torch.dtype = torch.bfloat16,
) -> float:
    """Compute :func:`attention_tb_per_sec` with the lengths of each sequence."""
    lengths = _zipped(actual_seq_lens_q, actual_seq_lens_kv)
    moved = _bytes(
        sum(q for q, _ in lengths),
        sum(kv for _, kv in lengths),
        (head_dim_qk, head_dim_vo),
        (num_qo_heads, num_kv_heads),
        (q_dtype, k_dtype, v_dtype, o_dtype),
    )
    return _tera_per_second(moved, time)


def _doubled_pairs(queries: int, keys: int, causal: bool) -> int:
    """Twice the pairs of query and key: the operations of one product for each head dimension."""
    if not causal:
        return 2 * queries * keys
    if queries > keys:
        raise ValueError(
            f"causal attention needs at least as many keys as queries, got {keys} keys and"
            f" {queries} queries; pass causal=False, or lengths with kv >= q"
        )
    # All keys of all queries, minus the triangle that the mask hides.
    return (2 * keys - queries) * queries


def _bytes(
    queries: int,
    keys: int,
    head_dims: tuple[int, int],
    heads: tuple[int, int],
    dtypes: tuple[torch.dtype, ...],
) -> int:
    qk, vo = head_dims
    qo_heads, kv_heads = heads
    q, k, v, o = (int(dtype.itemsize) for dtype in dtypes)
    return queries * qo_heads * (qk * q + vo * o) + keys * kv_heads * (qk * k + vo * v)


def _zipped(queries: Lengths, keys: Lengths) -> list[tuple[int, int]]:
    q, kv = _integers(queries), _integers(keys)
    if len(q) != len(kv):
        raise ValueError(
            f"actual_seq_lens_q has {len(q)} lengths and actual_seq_lens_kv {len(kv)};"
            " both need one a sequence"
        )
    return list(zip(q, kv))


def _integers(lengths: Lengths) -> list[int]:
    values: Any = lengths.flatten().tolist() if isinstance(lengths, torch.Tensor) else lengths
    return [int(value) for value in values]


def _tera_per_second(amount: int, milliseconds: float) -> float:
    return 0.0 if math.isnan(milliseconds) else amount / milliseconds * 1e-9
