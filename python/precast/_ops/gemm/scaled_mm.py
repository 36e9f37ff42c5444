# SPDX-License-Identifier: Apache-2.0
"""Products of FP8 matrices with scales of rows, of whole matrices or of the result."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from precast._base.torch import torch
from precast._op.docs import documented
from precast._op.export import Export, op
from precast._op.validation import check_contiguous
from precast._ops.gemm._fp8 import MMA
from precast._ops.gemm._plain import (
    CHOICES,
    TACTIC,
    UNSPLIT,
    Limits,
    any_backend,
    backends,
    check_choice,
    check_out,
    check_rows,
    check_sizes,
    check_tma,
    check_weight,
    chosen,
    exports,
    fill_starts,
    make_column_major,
)
from precast._ops.gemm.grouped_mm import write_groups
from precast.api_logging import precast_api
from precast.trace import Const, Dtype, Tensor, TraceTemplate, Var
from precast.trace.registry import by_form

_HALF = (torch.bfloat16, torch.float16)

#: What all functions here say besides their arguments.
_SCALED = """
Raises
------
ValueError
    A tensor that is not on a CUDA device; a dtype, shape, device, strides or alignment other than
    above; two operands of float8_e5m2; an ``out`` that overlaps another argument; another backend.

Notes
-----
Tensor cores add products in the order of the depth. Those that have FP8 keep about 14 bits, 32 of
the depth at a time: on compute capability 8.9 and 12.0 of the whole sum, by the kernels for Hopper
(9.0) of 128 of the depth, which are added up in float32. Elsewhere, and on Hopper where one operand
is float8_e5m2, operands become float16 first, which is exact. The sum is multiplied by the scales
in float32 and rounded once to nearest even.
Which tile computes a shape follows from the shape and the number of multiprocessors alone, so the
same call gives the same bits each time. Allocates only a missing ``out``; one launch; safe in CUDA
graphs; not differentiable.
"""


def scaled_mm_reference(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """:func:`scaled_mm` in plain PyTorch on any device: float32 arithmetic, one cast at the end."""
    result = (a.float() @ b.float()) * (scale_a * scale_b)
    if bias is not None:
        result = result + bias.float()
    return result.to(out_dtype or torch.bfloat16)


def bmm_fp8_reference(
    A: torch.Tensor,
    B: torch.Tensor,
    A_scale: torch.Tensor,
    B_scale: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """:func:`bmm_fp8` in plain PyTorch on any device: float32 arithmetic, one cast at the end."""
    return ((A.float() @ B.float()) * (A_scale * B_scale).reshape(())).to(dtype)


def mm_fp8_reference(
    a: torch.Tensor,
    b: torch.Tensor,
    alpha: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """:func:`mm_fp8` in plain PyTorch on any device: float32 arithmetic, one cast at the end."""
    result = a.float() @ b.float().T
    return (result if alpha is None else result * alpha.reshape(())).to(out_dtype)


def grouped_mm_fp8_reference(
    a: torch.Tensor,
    b: torch.Tensor,
    m_indptr: torch.Tensor,
    alpha: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """:func:`grouped_mm_fp8` in plain PyTorch on any device; rows of no group are zero."""
    out = a.new_zeros(len(a), b.shape[1], dtype=out_dtype)
    _write_groups(a, b, m_indptr, alpha, out)
    return out


def _write_groups(
    a: torch.Tensor,
    b: torch.Tensor,
    m_indptr: torch.Tensor,
    alpha: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    write_groups(a, b.mT, m_indptr, out, scale=alpha)


def _check_pair(export: str, first: str, a: torch.Tensor, second: str, b: torch.Tensor) -> None:
    if a.dtype == b.dtype == torch.float8_e5m2:
        raise ValueError(
            f"{export}: {first} and {second} must not both be float8_e5m2; quantise one of them to "
            f"float8_e4m3fn"
        )


def _check_scales(export: str, name: str, scales: torch.Tensor, shape: list[int]) -> None:
    """Raise unless there is one scale, or those of all rows."""
    if scales.numel() != 1 and list(scales.shape) != shape:
        raise ValueError(
            f"{export}: {name} must be one number or have shape {shape}, got shape "
            f"{[*scales.shape]}"
        )


def _check_scaled(
    export: str,
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    tactic: int,
    limits: Limits,
) -> None:
    _check_scales(export, "scale_a", scale_a, [a.shape[0], 1])
    _check_scales(export, "scale_b", scale_b, [1, b.shape[1]])
    check_contiguous(export, bias=bias)
    check_weight(export, "b", b, False)
    if limits.by_tma:
        check_tma(export, "a", a, "b", b)
    check_sizes(export, "a", a, out, tactic, limits)


def _check_batch(
    export: str,
    A: torch.Tensor,
    B: torch.Tensor,
    out: torch.Tensor,
    tactic: int,
    limits: Limits,
) -> None:
    check_weight(export, "B", B, False)
    if limits.by_tma:
        check_tma(export, "A", A, "B", B)
    check_sizes(export, "A", A, out, tactic, limits)


def _check_rows(
    export: str,
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    tactic: int,
    limits: Limits,
) -> None:
    check_rows(export, "b", b)
    if limits.by_tma:
        check_tma(export, "a", a, "b", b, True)
    check_sizes(export, "a", a, out, tactic, limits)


def _check_groups(
    export: str,
    a: torch.Tensor,
    b: torch.Tensor,
    m_indptr: torch.Tensor,
    out: torch.Tensor,
    tactic: int,
    limits: Limits,
) -> None:
    check_contiguous(export, m_indptr=m_indptr)
    _check_rows(export, a, b, out, tactic, limits)


_DTYPE = {"out_dtype": lambda out: out.dtype}
#: Operands of the kernels for every GPU.
_PAIR = "T=e4m3|e5m2", "U=e4m3|e5m2"


def _exports(
    name: str,
    declaration: str,
    check: Callable[..., None],
    tactics: Collection[int] = range(CHOICES),
    **options: Any,
) -> tuple[Export, Export]:
    """As :func:`exports`; the kernels for Hopper take e4m3 alone, in the place of ``%s``."""
    options.update(op="scaled_gemm", hopper=declaration % ("e4m3", "e4m3"))
    return exports(name, declaration % _PAIR, check, tactics, **options)


_SCALED_MM, _SCALED_MM_SM90 = _SCALED_MM_BOTH = _exports(
    "scaled_mm",
    "a:%s[m,k] b:%s[k,n] scale_a:f32 scale_b:f32 out!:V=bf16|f16|f32[m,n] bias?:V[n] tactic:int "
    "enable_pdl:pdl_on",
    _check_scaled,
    reference=lambda a, b, scale_a, scale_b, bias: scaled_mm_reference(
        a, b, scale_a, scale_b, bias, torch.float32
    ),
    derived=_DTYPE,
)
_BMM, _BMM_SM90 = _BMM_BOTH = _exports(
    "bmm_fp8",
    "A:%s[b,m,k] B:%s[b,k,n] A_scale:f32[.] B_scale:f32[.] out!:V=bf16|f16|f32[b,m,n] tactic:int "
    "enable_pdl:pdl_on",
    _check_batch,
    reference=lambda A, B, A_scale, B_scale: bmm_fp8_reference(
        A, B, A_scale, B_scale, torch.float32
    ),
    derived={"dtype": lambda out: out.dtype},
)
_MM, _MM_SM90 = _MM_BOTH = _exports(
    "mm_fp8",
    "a:%s[m,k] b:%s[n,k] alpha?:f32[.] out!:V=bf16|f16|f32[m,n] tactic:int enable_pdl:pdl_on",
    _check_rows,
    reference=lambda a, b, alpha: mm_fp8_reference(a, b, alpha, torch.float32),
    derived=_DTYPE,
)
_GROUPED, _GROUPED_SM90 = _GROUPED_BOTH = _exports(
    "grouped_mm_fp8",
    "a:%s[m,k] b:%s[groups,n,k] m_indptr:i32[groups+1] alpha?:f32[.] out!:V=bf16|f16|f32[m,n] "
    "tactic:int enable_pdl:pdl_on",
    _check_groups,
    UNSPLIT,
    write=_write_groups,
    derived=_DTYPE,
)


def _chosen(
    both: tuple[Export, Export],
    a: torch.Tensor,
    b: torch.Tensor,
    has_rows: bool = False,
    backend: str = "",
) -> Export:
    """As :func:`chosen`; two types of operands have the kernels for every GPU."""
    return both[0] if a.dtype != b.dtype else chosen(both, a, b, has_rows, backend)


def _template(
    function: str,
    inputs: Mapping[str, list[str]],
    reference: Any,
    *,
    batched: bool = False,
    **options: Any,
) -> TraceTemplate:
    """The definition of calls with e4m3 operands and an output of bfloat16."""
    batch = ["batch_size"] if batched else []
    sizes: dict[str, Var | Const] = {
        "batch_size": Const("b"),
        "num_tokens": Var("Rows of the first operand.", sample=64),
        "num_groups": Const("g", sample=4),
        "num_starts": Const("", value="num_groups + 1"),
        "num_columns": Const("n", multiple=16),
        "depth": Const("k", multiple=16),
        "one": Const("", value="1"),
    }
    used = {size for shape in inputs.values() for size in shape} | {*batch}
    if "num_starts" in used:
        used.add("num_groups")
    dtypes = {"m_indptr": "int32", "bias": "bfloat16"}
    tensors = {
        name: Tensor(
            shape,
            dtype=dtypes.get(name, "float32" if len(name) > 1 else "float8_e4m3fn"),
        )
        for name, shape in inputs.items()
    }
    return TraceTemplate(
        op_type="gemm_fp8",
        name_prefix=function,
        description="Multiplies FP8 matrices and scales the result.",
        axes={name: axis for name, axis in sizes.items() if name in used},
        inputs=tensors,
        outputs={"result": Tensor([*batch, "num_tokens", "num_columns"], dtype="bfloat16")},
        reference=reference,
        **options,
    )


def _has_bias(bias: torch.Tensor | None = None, **others: object) -> bool:
    return bias is not None


def _scaled_template(has_bias: bool) -> TraceTemplate:
    inputs = {
        "a": ["num_tokens", "depth"],
        "b": ["depth", "num_columns"],
        "scale_a": ["num_tokens", "one"],
        "scale_b": ["one", "num_columns"],
    }
    name = "scaled_mm_bias" if has_bias else "scaled_mm"
    bias = {"bias": ["num_columns"]} if has_bias else {}
    return _template(name, {**inputs, **bias}, scaled_mm_reference, fill=make_column_major)


@precast_api(trace=by_form(_has_bias, _scaled_template, [False, True]))
@op("scaled_gemm")
@documented(_SCALED, TACTIC)
def scaled_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    tactic: int = -1,
) -> torch.Tensor:
    r"""Multiply FP8 matrices that have one scale or a scale for each row, as ``torch._scaled_mm``.

    .. math::

        out_{m,n} = \mathrm{round}\left(scale\_a_m \cdot scale\_b_n \cdot \sum_k a_{m,k} \cdot
        b_{k,n} + bias_n\right)

    Parameters
    ----------
    a : torch.Tensor
        ``[m, k]``, float8_e4m3fn or float8_e5m2, on a CUDA device; stride 1 in the last dimension,
        rows at multiples of 16 bytes. ``k`` is a multiple of 16.
    b : torch.Tensor
        ``[k, n]``, float8_e4m3fn or float8_e5m2, but not both operands the latter; column-major:
        the transpose of a weight ``[n, k]`` with layout as ``a``.
    scale_a : torch.Tensor
        *Dequantisation* scale of ``a``, float32: one number in any shape, or ``[m, 1]``.
    scale_b : torch.Tensor
        That of ``b``: one number, or ``[1, n]``.
    bias : torch.Tensor, optional
        ``[n]``, of the dtype of the result, contiguous.
    out_dtype : torch.dtype, optional
        bfloat16, float16 or float32. Default: that of ``out``, or bfloat16.
    out : torch.Tensor, optional
        ``[m, n]`` of ``out_dtype``; stride 1 in the last dimension. Shares no memory with the
        others. Default: a new tensor.

    Returns
    -------
    torch.Tensor
        ``[m, n]``; ``out`` if it is given.

    Examples
    --------
    >>> import torch, precast
    >>> a, weight = (torch.ones(n, 16).to(torch.float8_e4m3fn) for n in (1, 3))
    >>> one = torch.tensor(1.0)
    >>> with precast.reference_mode():
    ...     precast.gemm.scaled_mm(a, weight.T, one, torch.tensor([[1.0, 2.0, 3.0]]))
    tensor([[16., 32., 48.]], dtype=torch.bfloat16)
    """
    if out_dtype is None:
        out_dtype = torch.bfloat16 if out is None else out.dtype
    check_out("scaled_mm", out, out_dtype)
    _check_pair("scaled_mm", "a", a, "b", b)
    if out is None:
        out = a.new_empty(a.shape[0], b.shape[1], dtype=out_dtype)
    _chosen(_SCALED_MM_BOTH, a, b).launch(a, b, scale_a, scale_b, out, bias, tactic)
    return out


@precast_api(
    trace=_template(
        "bmm_fp8",
        {
            "A": ["batch_size", "num_tokens", "depth"],
            "B": ["batch_size", "depth", "num_columns"],
            "A_scale": ["one"],
            "B_scale": ["one"],
        },
        bmm_fp8_reference,
        batched=True,
        fixed={"dtype": Dtype("bfloat16")},
        fill=make_column_major,
    )
)
@op(
    "scaled_gemm",
    backends=backends("scaled_gemm", "cudnn", "cublas", "cutlass", "cute-dsl"),
    heuristic=any_backend,
)
@documented(_SCALED, TACTIC)
def bmm_fp8(
    A: torch.Tensor,
    B: torch.Tensor,
    A_scale: torch.Tensor,
    B_scale: torch.Tensor,
    dtype: torch.dtype,
    out: torch.Tensor | None = None,
    backend: str = "cublas",
    tactic: int = -1,
) -> torch.Tensor:
    r"""Multiply batches of FP8 matrices that have one scale each side.

    .. math::

        out_{b,m,n} = \mathrm{round}\left(A\_scale \cdot B\_scale \cdot \sum_k A_{b,m,k} \cdot
        B_{b,k,n}\right)

    Parameters
    ----------
    A : torch.Tensor
        ``[b, m, k]``, float8_e4m3fn or float8_e5m2, on a CUDA device; stride 1 in the last
        dimension, rows and matrices at multiples of 16 bytes. ``k`` is a multiple of 16.
    B : torch.Tensor
        ``[b, k, n]``, float8_e4m3fn or float8_e5m2, but not both operands the latter; column-major:
        the transposes of ``[b, n, k]`` with layout as ``A``.
    A_scale, B_scale : torch.Tensor
        *Dequantisation* scales, float32, one number in any shape.
    dtype : torch.dtype
        The dtype of the result: bfloat16 or float16.
    out : torch.Tensor, optional
        ``[b, m, n]`` of ``dtype``; stride 1 in the last dimension. Shares no memory with the
        others. Default: a new tensor.
    backend : str
        One of FlashInfer's, ``"cudnn"``, ``"cublas"``, ``"cutlass"``, ``"cute-dsl"`` and
        ``"auto"``; all are the same kernels. ``"mma"`` takes those for every GPU on Hopper, too.

    Returns
    -------
    torch.Tensor
        ``[b, m, n]``; ``out`` if it is given.

    Examples
    --------
    >>> import torch, precast
    >>> a, b = (torch.ones(2, n, 16).to(torch.float8_e4m3fn) for n in (1, 3))
    >>> scale = torch.tensor(0.5)
    >>> with precast.reference_mode():
    ...     precast.bmm_fp8(a, b.mT, scale, scale, torch.bfloat16)[1]
    tensor([[4., 4., 4.]], dtype=torch.bfloat16)
    """
    if dtype not in _HALF:
        raise ValueError(f"bmm_fp8: dtype must be one of bfloat16, float16, got {dtype}")
    if out is not None and out.dtype != dtype:
        raise ValueError(f"bmm_fp8: out must be {dtype}, which is dtype, got {out.dtype}")
    _check_pair("bmm_fp8", "A", A, "B", B)
    if out is None:
        out = A.new_empty(*A.shape[:2], B.shape[2], dtype=dtype)
    _chosen(_BMM_BOTH, A, B, backend=backend).launch(A, B, A_scale, B_scale, out, tactic)
    return out


@precast_api(
    trace=_template(
        "mm_fp8",
        {"a": ["num_tokens", "depth"], "b": ["num_columns", "depth"], "alpha": ["one"]},
        mm_fp8_reference,
    )
)
@op(
    "scaled_gemm",
    backends=backends(
        "scaled_gemm", "trtllm_low_latency", "cutedsl_low_latency", "cublas", "cudnn", "cutlass"
    ),
    heuristic=any_backend,
)
@documented(_SCALED, TACTIC)
def mm_fp8(
    a: torch.Tensor,
    b: torch.Tensor,
    alpha: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    out: torch.Tensor | None = None,
    backend: str = "trtllm_low_latency",
    tactic: int = -1,
) -> torch.Tensor:
    r"""Multiply an FP8 matrix by the transpose of a weight, and scale the result.

    .. math:: out_{m,n} = \mathrm{round}\left(alpha \cdot \sum_k a_{m,k} \cdot b_{n,k}\right)

    Parameters
    ----------
    a : torch.Tensor
        ``[m, k]``, float8_e4m3fn or float8_e5m2, on a CUDA device; stride 1 in the last dimension,
        rows at multiples of 16 bytes. ``k`` is a multiple of 16.
    b : torch.Tensor
        ``[n, k]``, float8_e4m3fn or float8_e5m2, but not both operands the latter; layout as ``a``.
        The weight as it is: one that was prepared for FlashInfer's ``"trtllm_low_latency"``, of
        three dimensions, is refused.
    alpha : torch.Tensor, optional
        float32, one number in any shape. Default: 1.
    out_dtype : torch.dtype
        bfloat16, float16 or float32.
    out : torch.Tensor, optional
        ``[m, n]``; stride 1 in the last dimension. Shares no memory with the others. Default: a new
        tensor of ``out_dtype``.
    backend : str
        One of FlashInfer's, ``"trtllm_low_latency"``, ``"cutedsl_low_latency"``, ``"cublas"``,
        ``"cudnn"``, ``"cutlass"`` and ``"auto"``; all are the same kernels. ``"mma"`` takes those
        for every GPU on Hopper, too.

    Returns
    -------
    torch.Tensor
        ``[m, n]``; ``out`` if it is given.

    Examples
    --------
    >>> import torch, precast
    >>> a, weight = (torch.ones(n, 16).to(torch.float8_e4m3fn) for n in (1, 3))
    >>> with precast.reference_mode():
    ...     precast.gemm.mm_fp8(a, weight, torch.tensor(0.5))
    tensor([[8., 8., 8.]], dtype=torch.bfloat16)
    """
    if b.dim() == 3:
        raise ValueError(
            f"mm_fp8: b must be the weight as it is, [n, k], got one with 3 dimensions, "
            f"{[*b.shape]}. Fix: leave out prepare_low_latency_gemm_weights"
        )
    check_out("mm_fp8", out, out_dtype, is_equal=False)
    _check_pair("mm_fp8", "a", a, "b", b)
    if out is None:
        out = a.new_empty(a.shape[0], b.shape[0], dtype=out_dtype)
    _chosen(_MM_BOTH, a, b, True, backend).launch(a, b, alpha, out, tactic)
    return out


def _fill(made: dict[str, Any]) -> None:
    fill_starts(made["m_indptr"], len(made["a"]))


@precast_api(
    trace=_template(
        "grouped_mm_fp8",
        {
            "a": ["num_tokens", "depth"],
            "b": ["num_groups", "num_columns", "depth"],
            "m_indptr": ["num_starts"],
            "alpha": ["one"],
        },
        grouped_mm_fp8_reference,
        tags=["moe"],
        fill=_fill,
    )
)
@op("scaled_gemm")
@documented(_SCALED, TACTIC)
def grouped_mm_fp8(
    a: torch.Tensor,
    b: torch.Tensor,
    m_indptr: torch.Tensor,
    alpha: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    *,
    backend: str = "cudnn",
    tactic: int = -1,
) -> torch.Tensor:
    r"""Multiply groups of consecutive FP8 rows by a weight each, and scale the result.

    .. math::

        out_m = \mathrm{round}(alpha \cdot a_m \cdot b_g^T),
        \quad m\_indptr_g \le m < m\_indptr_{g+1}

    Parameters
    ----------
    a : torch.Tensor
        ``[m, k]``, float8_e4m3fn or float8_e5m2, on a CUDA device; stride 1 in the last dimension,
        rows at multiples of 16 bytes. ``k`` is a multiple of 16.
    b : torch.Tensor
        ``[groups, n, k]``, float8_e4m3fn or float8_e5m2, but not both operands the latter; stride 1
        in the last dimension, rows and groups at multiples of 16 bytes.
    m_indptr : torch.Tensor
        ``[groups + 1]``, int32, contiguous: where the rows of each group begin, ascending.
    alpha : torch.Tensor, optional
        float32, one number in any shape. Default: 1.
    out : torch.Tensor, optional
        ``[m, n]``, bfloat16, float16 or float32; stride 1 in the last dimension. Rows of no group
        are not written. Default: a new tensor.
    out_dtype : torch.dtype
        The dtype of a new ``out``.
    backend : str
        ``"cudnn"``, FlashInfer's. ``"mma"`` takes the kernels for every GPU on Hopper, too.

    Returns
    -------
    torch.Tensor
        ``[m, n]``; ``out`` if it is given.

    Examples
    --------
    >>> import torch, precast
    >>> a, b = (torch.ones(*n, 16).to(torch.float8_e4m3fn) for n in ((3,), (2, 1)))
    >>> starts = torch.tensor([0, 1, 3], dtype=torch.int32)
    >>> with precast.reference_mode():
    ...     precast.gemm.grouped_mm_fp8(a, b, starts, torch.tensor(2.0))[:, 0]
    tensor([32., 32., 32.], dtype=torch.bfloat16)
    """
    name = "grouped_mm_fp8"
    check_choice(name, "backend", backend, "cudnn", MMA)
    check_out(name, out, out_dtype, is_equal=False)
    _check_pair(name, "a", a, "b", b)
    if out is None:
        out = a.new_empty(a.shape[0], b.shape[1], dtype=out_dtype)
    _chosen(_GROUPED_BOTH, a, b, True, backend).launch(a, b, m_indptr, alpha, out, tactic)
    return out
