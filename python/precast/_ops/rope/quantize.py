# SPDX-License-Identifier: Apache-2.0
"""RoPE and quantisation to fp8 in one pass, of queries and keys in two parts each.

Sources: Su et al., RoFormer, arXiv:2104.09864; DeepSeek-V2, arXiv:2405.04434 (MLA, where only part
of a head turns); OCP 8-bit Floating Point Specification 1.0.
"""

from __future__ import annotations

from typing import Any

from precast._base.torch import torch
from precast._op.export import Export, op
from precast._ops.rope._quantize import (
    PARTS,
    check_outputs,
    check_parts,
    new_outputs,
    quantized,
    turned_and_quantized,
    without_columns,
)
from precast._ops.rope._quantize_trace import quantize_template, quantize_trace
from precast.api_logging import precast_api


def rope_quantize_fp8_reference(
    q_rope: torch.Tensor,
    k_rope: torch.Tensor,
    q_nope: torch.Tensor | None,
    k_nope: torch.Tensor | None,
    cos_sin_cache: torch.Tensor,
    pos_ids: torch.Tensor,
    is_neox: bool = True,
    quantize_dtype: torch.dtype | None = None,
    quant_scale_q: float = 1.0,
    quant_scale_kv: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """:func:`rope_quantize_fp8` in plain PyTorch: fp32 arithmetic, one saturating cast at the end.

    Parameters
    ----------
    q_rope, q_nope : torch.Tensor
        ``[tokens, q_heads, columns]``, any device; ``q_nope`` may be None.
    k_rope, k_nope : torch.Tensor
        ``[tokens, k_heads, columns]``, or ``[tokens, columns]``; ``k_nope`` may be None.
    cos_sin_cache : torch.Tensor
        ``[max_position, rope_dim]``, float32: cosines, then sines.
    pos_ids : torch.Tensor
        ``[tokens]``, int32 or int64.
    is_neox : bool
        Pairs are halves apart; otherwise neighbours.
    quantize_dtype : torch.dtype, optional
        float8_e4m3fn (default) or float8_e5m2.
    quant_scale_q, quant_scale_kv : float
        Multipliers of queries and of keys.

    Returns
    -------
    tuple of torch.Tensor
        ``q_rope``, ``k_rope``, ``q_nope`` and ``k_nope`` in fp8.

    Examples
    --------
    >>> import torch
    >>> q, cache = torch.tensor([[[1.0, 2.0]]]), torch.tensor([[0.0, 1.0]])
    >>> rope_quantize_fp8_reference(q, q, None, None, cache, torch.tensor([0]))[0].float()
    tensor([[[-2.,  1.]]])
    """
    dtype = torch.float8_e4m3fn if quantize_dtype is None else quantize_dtype
    q_nope = without_columns(q_rope) if q_nope is None else q_nope
    k_nope = without_columns(k_rope) if k_nope is None else k_nope
    return (
        turned_and_quantized(q_rope, pos_ids, cos_sin_cache, is_neox, quant_scale_q, dtype),
        turned_and_quantized(k_rope, pos_ids, cos_sin_cache, is_neox, quant_scale_kv, dtype),
        quantized(q_nope, quant_scale_q, dtype),
        quantized(k_nope, quant_scale_kv, dtype),
    )


mla_rope_quantize_fp8_reference = rope_quantize_fp8_reference


def _export(name: str, key_ranks: tuple[int, int]) -> Export:
    """``key_ranks`` are the least and the most dimensions of keys."""

    def check(export: str, **given: Any) -> None:
        inputs = {part: given[part] for part in PARTS}
        check_parts(
            export,
            **inputs,
            cos_sin_cache=given["cos_sin_cache"],
            pos_ids=given["pos_ids"],
            key_ranks=key_ranks,
        )
        check_outputs(export, {f"{part}_out": given[f"{part}_out"] for part in PARTS}, inputs)

    return Export(
        "rope_quantize",
        name,
        "q_rope:T k_rope:T q_nope:T k_nope:T cos_sin_cache:any pos_ids:any is_neox:bool "
        "quant_scale_q:float quant_scale_kv:float q_rope_out!:U=e4m3|e5m2 k_rope_out!:U "
        "q_nope_out!:U k_nope_out!:U enable_pdl:bool",
        reference=rope_quantize_fp8_reference,
        check=check,
        derived={"quantize_dtype": lambda q_rope_out: q_rope_out.dtype},
    )


_ROPE_QUANTIZE_FP8 = _export("rope_quantize_fp8", (2, 3))
_MLA_ROPE_QUANTIZE_FP8 = _export("mla_rope_quantize_fp8", (2, 2))


@precast_api(trace=quantize_trace("rope_quantize_fp8", rope_quantize_fp8_reference))
@op("rope_quantize")
def rope_quantize_fp8(
    q_rope: torch.Tensor,
    k_rope: torch.Tensor,
    q_nope: torch.Tensor | None,
    k_nope: torch.Tensor | None,
    cos_sin_cache: torch.Tensor,
    pos_ids: torch.Tensor,
    is_neox: bool = True,
    quantize_dtype: torch.dtype | None = None,
    quant_scale_q: float = 1.0,
    quant_scale_kv: float = 1.0,
    q_rope_out: torch.Tensor | None = None,
    k_rope_out: torch.Tensor | None = None,
    q_nope_out: torch.Tensor | None = None,
    k_nope_out: torch.Tensor | None = None,
    enable_pdl: bool = False,
    backend: str = "cuda",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    r"""Turn one part of queries and keys, and quantise both parts to fp8; one pass.

    .. math:: out = \mathrm{sat}(scale \cdot \mathrm{rope}(x)), \quad
        out = \mathrm{sat}(scale \cdot x) \text{ for the part that does not turn}

    Parameters
    ----------
    q_rope, q_nope : torch.Tensor
        ``[tokens, q_heads, rope_dim]`` and ``[tokens, q_heads, no_rope_dim]``, float16 or bfloat16,
        on a CUDA device; stride 1 in the last dimension, any in the others, such as two slices of
        one tensor. ``q_nope`` may be None: no columns. Addresses need no alignment; 16-byte aligned
        heads, and sizes that are multiples of 16, are fastest.
    k_rope, k_nope : torch.Tensor
        ``[tokens, k_heads, columns]`` likewise, or for MLA ``[tokens, columns]``, both of one rank.
        ``k_nope`` may be None.
    cos_sin_cache : torch.Tensor
        ``[max_position, rope_dim]``, float32, stride 1 in the last dimension: the cosines in the
        first half of a row, the sines in the second.
    pos_ids : torch.Tensor
        ``[tokens]``, int32 or int64, contiguous: a row of the cache for each token. A token whose
        position the cache does not have, such as -1 for padding, does not turn.
    is_neox : bool
        True: pairs are half of ``rope_dim`` apart. False: they are neighbours (GPT-J).
    quantize_dtype : torch.dtype, optional
        float8_e4m3fn or float8_e5m2. Default: that of the first output given, or float8_e4m3fn.
    quant_scale_q, quant_scale_kv : float
        What queries and keys are multiplied by before the cast: the reciprocal of the scale that
        dequantises them.
    q_rope_out, k_rope_out, q_nope_out, k_nope_out : torch.Tensor, optional
        Where to write: shapes of the inputs, one fp8 type, strides as above; apart from each other
        and from the inputs in memory. Default: new tensors.
    enable_pdl : bool
        Programmatic dependent launch; without effect below compute capability 9.0.
    backend : str
        ``"cuda"``, the only one.

    Returns
    -------
    tuple of torch.Tensor
        ``q_rope``, ``k_rope``, ``q_nope`` and ``k_nope`` in fp8.

    Raises
    ------
    ValueError
        A tensor that is not on a CUDA device, or not on that of the others; a dtype ("cos_sin_cache
        should be float32"), shape, stride or size other than above; a ``quantize_dtype`` that is
        not that of an output; another backend.

    Notes
    -----
    All arithmetic is float32, rounded once to nearest even; what is beyond the largest fp8 number
    becomes that number, NaN stays NaN. Allocates only missing outputs; safe in CUDA graphs; not
    differentiable. Source: arXiv:2104.09864.

    Examples
    --------
    >>> import torch, precast
    >>> q, cache = torch.tensor([[[1.0, 2.0]]]), torch.tensor([[0.0, 1.0]])
    >>> with precast.reference_mode():
    ...     out = precast.rope_quantize_fp8(
    ...         q, q, q, None, cache, torch.tensor([0]), quant_scale_q=4
    ...     )
    >>> out[0].float(), out[2].float()
    (tensor([[[-8.,  4.]]]), tensor([[[4., 8.]]]))
    """
    if backend != "cuda":
        raise ValueError(f"rope_quantize_fp8: backend must be 'cuda', got {backend!r}")
    q_nope = without_columns(q_rope) if q_nope is None else q_nope
    k_nope = without_columns(k_rope) if k_nope is None else k_nope
    outputs = new_outputs(
        "rope_quantize_fp8",
        quantize_dtype,
        q_rope_out=(q_rope_out, q_rope),
        k_rope_out=(k_rope_out, k_rope),
        q_nope_out=(q_nope_out, q_nope),
        k_nope_out=(k_nope_out, k_nope),
    )
    _ROPE_QUANTIZE_FP8.launch(
        q_rope,
        k_rope,
        q_nope,
        k_nope,
        cos_sin_cache,
        pos_ids,
        is_neox,
        quant_scale_q,
        quant_scale_kv,
        *outputs,
        enable_pdl,
    )
    return outputs


@precast_api(
    trace=quantize_template("mla_rope_quantize_fp8", rope_quantize_fp8_reference, mla=True)
)
@op("rope_quantize")
def mla_rope_quantize_fp8(
    q_rope: torch.Tensor,
    k_rope: torch.Tensor,
    q_nope: torch.Tensor | None,
    k_nope: torch.Tensor | None,
    cos_sin_cache: torch.Tensor,
    pos_ids: torch.Tensor,
    is_neox: bool = True,
    quantize_dtype: torch.dtype | None = None,
    quant_scale_q: float = 1.0,
    quant_scale_kv: float = 1.0,
    q_rope_out: torch.Tensor | None = None,
    k_rope_out: torch.Tensor | None = None,
    q_nope_out: torch.Tensor | None = None,
    k_nope_out: torch.Tensor | None = None,
    enable_pdl: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """:func:`rope_quantize_fp8` of MLA: keys have one head and no axis for it.

    Parameters
    ----------
    q_rope, q_nope : torch.Tensor
        ``[tokens, q_heads, rope_dim]`` and ``[tokens, q_heads, no_rope_dim]``, as
        :func:`rope_quantize_fp8` takes them.
    k_rope, k_nope : torch.Tensor
        ``[tokens, rope_dim]`` and ``[tokens, no_rope_dim]``.
    cos_sin_cache : torch.Tensor
        ``[max_position, rope_dim]``, float32: cosines, then sines.
    pos_ids : torch.Tensor
        ``[tokens]``, int32 or int64, contiguous.
    is_neox : bool
        True: pairs are half of ``rope_dim`` apart. False: they are neighbours (GPT-J).
    quantize_dtype : torch.dtype, optional
        float8_e4m3fn or float8_e5m2. Default: that of the first output given, or float8_e4m3fn.
    quant_scale_q, quant_scale_kv : float
        What queries and keys are multiplied by before the cast.
    q_rope_out, k_rope_out, q_nope_out, k_nope_out : torch.Tensor, optional
        Where to write. Default: new tensors.
    enable_pdl : bool
        Programmatic dependent launch; without effect below compute capability 9.0.

    Returns
    -------
    tuple of torch.Tensor
        ``q_rope``, ``k_rope``, ``q_nope`` and ``k_nope`` in fp8.

    Raises
    ------
    ValueError
        As :func:`rope_quantize_fp8`; also if keys have an axis of heads.

    Notes
    -----
    As :func:`rope_quantize_fp8`. Sources: arXiv:2104.09864, arXiv:2405.04434.

    Examples
    --------
    >>> import torch, precast
    >>> q, cache = torch.tensor([[[1.0, 2.0]]]), torch.tensor([[0.0, 1.0]])
    >>> with precast.reference_mode():
    ...     out = precast.mla_rope_quantize_fp8(q, q[0], q, q[0], cache, torch.tensor([0]))
    >>> out[1].float(), out[3].float()
    (tensor([[-2.,  1.]]), tensor([[1., 2.]]))
    """
    q_nope = without_columns(q_rope) if q_nope is None else q_nope
    k_nope = without_columns(k_rope) if k_nope is None else k_nope
    outputs = new_outputs(
        "mla_rope_quantize_fp8",
        quantize_dtype,
        q_rope_out=(q_rope_out, q_rope),
        k_rope_out=(k_rope_out, k_rope),
        q_nope_out=(q_nope_out, q_nope),
        k_nope_out=(k_nope_out, k_nope),
    )
    _MLA_ROPE_QUANTIZE_FP8.launch(
        q_rope,
        k_rope,
        q_nope,
        k_nope,
        cos_sin_cache,
        pos_ids,
        is_neox,
        quant_scale_q,
        quant_scale_kv,
        *outputs,
        enable_pdl,
    )
    return outputs
