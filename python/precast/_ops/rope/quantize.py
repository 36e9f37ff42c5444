# SPDX-License-Identifier: Apache-2.0
"""Rotate queries and keys, in two parts each, and quantise them to fp8 in one pass.

Sources: Su et al., RoFormer, arXiv:2104.09864; DeepSeek-V2, arXiv:2405.04434 (MLA, where only part
of a head is rotated); OCP 8-bit Floating Point Specification 1.0.
"""

from __future__ import annotations

from typing import Any

from precast._base.torch import torch
from precast._op.declaration import Kind
from precast._op.docs import documented
from precast._op.export import Export, launches
from precast._ops.rope._angles import cached_angles, rotated
from precast._ops.rope._quantize import KINDS, NEW, check_parts, quantized
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
    """:func:`rope_quantize_fp8` in plain PyTorch on any device: one saturating cast at the end."""
    dtype = torch.float8_e4m3fn if quantize_dtype is None else quantize_dtype
    angles = cached_angles(pos_ids, cos_sin_cache)
    outputs = []
    for x, scale in ((q_rope, quant_scale_q), (k_rope, quant_scale_kv)):
        heads = x.unsqueeze(1) if x.dim() == 2 else x
        outputs.append(quantized(rotated(heads, angles, not is_neox), scale, dtype).view(x.shape))
    for x, rope, scale in ((q_nope, q_rope, quant_scale_q), (k_nope, k_rope, quant_scale_kv)):
        outputs.append(quantized(rope[..., :0] if x is None else x, scale, dtype))
    return (outputs[0], outputs[1], outputs[2], outputs[3])


mla_rope_quantize_fp8_reference = rope_quantize_fp8_reference


def _reject(backend: str) -> None:
    raise ValueError(f"rope_quantize_fp8: backend must be 'cuda', got {backend!r}")


def _export(name: str, key_ranks: tuple[int, int], pdl: Kind | None = None) -> Export:
    """Make an export; ``key_ranks`` are the least and the most dimensions of keys."""

    def check(export: str, **given: Any) -> None:
        check_parts(export, given, key_ranks)

    return Export(
        "rope_quantize",
        name,
        "q_rope:T[tokens,q_heads,rope_dim] k_rope:T q_nope k_nope cos_sin_cache:any "
        "pos_ids:i32|i64[tokens] is_neox:bool "
        "quant_scale_q:float quant_scale_kv:float q_rope_out!:U=e4m3|e5m2 k_rope_out!:U "
        "q_nope_out!:U k_nope_out!:U enable_pdl",
        reference=rope_quantize_fp8_reference,
        check=check,
        new=NEW,
        derived={"quantize_dtype": lambda q_rope_out: q_rope_out.dtype},
        kinds={**KINDS, "enable_pdl": pdl or Kind("bool {name}")},
    )


_ROPE_QUANTIZE_FP8 = _export(
    "rope_quantize_fp8",
    (2, 3),
    # The module has no argument for the backend, so its one legal value is checked here.
    Kind(
        "bool {name}",
        "{name} if backend == 'cuda' else _reject(backend)",
        names={"_reject": _reject},
    ),
)
_MLA_ROPE_QUANTIZE_FP8 = _export("mla_rope_quantize_fp8", (2, 2))


@precast_api(trace=quantize_trace("rope_quantize_fp8", rope_quantize_fp8_reference))
@launches(_ROPE_QUANTIZE_FP8)
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
    r"""Rotate one part of queries and keys, and quantise both parts to fp8; one pass.

    .. math:: out = \mathrm{sat}(scale \cdot \mathrm{rope}(x)), \quad
        out = \mathrm{sat}(scale \cdot x) \text{ for the part that is not rotated}

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
        ``[tokens]``, int32 or int64, contiguous: a row of ``cos_sin_cache`` for each token. A token
        whose position it does not have, such as -1 for padding, is not rotated.
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


@precast_api(
    trace=quantize_template("mla_rope_quantize_fp8", rope_quantize_fp8_reference, mla=True)
)
@launches(_MLA_ROPE_QUANTIZE_FP8)
@documented(rope_quantize_fp8)
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
    k_rope, k_nope : torch.Tensor
        ``[tokens, rope_dim]`` and ``[tokens, no_rope_dim]``.

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
