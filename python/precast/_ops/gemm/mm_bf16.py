# SPDX-License-Identifier: Apache-2.0
"""Products of bfloat16 matrices, alone or in batches."""

from __future__ import annotations

from precast._base.torch import torch
from precast._op.docs import documented
from precast._op.export import op
from precast._ops.gemm._plain import (
    TACTIC,
    Limits,
    any_backend,
    backends,
    check_out,
    check_sizes,
    check_tma,
    check_weight,
    chosen,
    exports,
    make_column_major,
)
from precast.api_logging import precast_api
from precast.trace import Const, Dtype, Tensor, TraceTemplate, Var
from precast.trace.registry import by_form


def mm_bf16_reference(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """:func:`mm_bf16` in plain PyTorch on any device: float32 arithmetic, one cast at the end."""
    result = a.float() @ b.float()
    if bias is not None:
        result = result + bias.float()
    return result.to(out_dtype)


def bmm_bf16_reference(
    A: torch.Tensor, B: torch.Tensor, out_dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """:func:`bmm_bf16` in plain PyTorch on any device: float32 arithmetic, one cast at the end."""
    return (A.float() @ B.float()).to(out_dtype)


def _check(
    export: str,
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    tactic: int,
    limits: Limits,
) -> None:
    check_weight(export, "b", b)
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
    check_weight(export, "B", B)
    if limits.by_tma:
        check_tma(export, "A", A, "B", B)
    check_sizes(export, "A", A, out, tactic, limits)


_MM, _MM_SM90 = _MM_BOTH = exports(
    "mm_bf16",
    "a:T=bf16[m,k] b:bf16[k,n] bias?:bf16[n] out!:U=bf16|f16|f32[m,n] tactic:int pdl:pdl",
    _check,
    reference=lambda a, b, bias: mm_bf16_reference(a, b, bias, torch.float32),
    derived={"out_dtype": lambda out: out.dtype},
)
_BMM, _BMM_SM90 = _BMM_BOTH = exports(
    "bmm_bf16",
    "A:T=bf16[b,m,k] B:bf16[b,k,n] out!:U=bf16|f16|f32[b,m,n] tactic:int enable_pdl:pdl_on",
    _check_batch,
    reference=lambda A, B: bmm_bf16_reference(A, B, torch.float32),
    derived={"out_dtype": lambda out: out.dtype},
)

#: Whether there is a bias, and the dtype of the output.
_Form = tuple[bool, str]


def _form(
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    **others: object,
) -> _Form:
    return bias is not None, str(out_dtype).removeprefix("torch.")


def _template(batched: bool, form: _Form) -> TraceTemplate:
    has_bias, dtype = form
    batch = ["batch_size"] if batched else []
    axes: dict[str, Var | Const] = {"batch_size": Const("b")} if batched else {}
    axes |= {
        "num_tokens": Var("Rows of the first operand."),
        "num_columns": Const("n", multiple=8),
        "depth": Const("k", multiple=8),
    }
    first, second = ("A", "B") if batched else ("a", "b")
    inputs = {
        first: Tensor([*batch, "num_tokens", "depth"], dtype="bfloat16"),
        second: Tensor([*batch, "depth", "num_columns"], dtype="bfloat16"),
    }
    if has_bias:
        inputs["bias"] = Tensor(["num_columns"], dtype="bfloat16")
    return TraceTemplate(
        op_type="gemm_bf16",
        name_prefix=("bmm_bf16" if batched else "mm_bf16")
        + ("_bias" if has_bias else "")
        + ("" if dtype == "bfloat16" else f"_{dtype}"),
        description="Multiplies bfloat16 matrices with sums in float32.",
        axes=axes,
        inputs=inputs,
        outputs={"result": Tensor([*batch, "num_tokens", "num_columns"], dtype=dtype)},
        reference=bmm_bf16_reference if batched else mm_bf16_reference,
        fixed={} if dtype == "bfloat16" else {"out_dtype": Dtype(dtype)},
        # Generated calls have both layouts.
        fill=None if has_bias or dtype != "bfloat16" else make_column_major,
    )


_USUAL: list[_Form] = [(False, "bfloat16"), (True, "bfloat16"), (False, "float32")]


@precast_api(trace=by_form(_form, lambda form: _template(False, form), _USUAL))
@op(
    "gemm",
    backends=backends(
        "gemm", "cudnn", "cutlass", "tgv", "cublaslt", "tinygemm", "cutile", "cute-dsl"
    ),
    heuristic=any_backend,
)
@documented(TACTIC)
def mm_bf16(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    pdl: bool = False,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    backend: str = "cudnn",
    tactic: int = -1,
) -> torch.Tensor:
    r"""Multiply bfloat16 matrices.

    .. math:: out_{m,n} = \mathrm{round}\left(\sum_k a_{m,k} \cdot b_{k,n} + bias_n\right)

    Parameters
    ----------
    a : torch.Tensor
        ``[m, k]``, bfloat16, on a CUDA device; stride 1 in the last dimension, rows at multiples
        of 16 bytes. ``k`` is a multiple of 8.
    b : torch.Tensor
        ``[k, n]``, bfloat16: column-major, the transpose of a weight ``[n, k]`` with layout as
        ``a``; or row-major with layout as ``a``, where ``n`` is a multiple of 8.
    bias : torch.Tensor, optional
        ``[n]``, bfloat16, contiguous; added in float32.
    pdl : bool
        Programmatic dependent launch; without effect below compute capability 9.0.
    out : torch.Tensor, optional
        ``[m, n]`` of ``out_dtype``; stride 1 in the last dimension. Shares no memory with the
        others. Default: a new tensor.
    out_dtype : torch.dtype
        bfloat16, float16 or float32.
    backend : str
        One of FlashInfer's, ``"cudnn"``, ``"cutlass"``, ``"tgv"``, ``"cublaslt"``, ``"tinygemm"``,
        ``"cutile"``, ``"cute-dsl"`` and ``"auto"``; all are the same kernels. ``"mma"`` takes those
        for every GPU on Hopper, too.

    Returns
    -------
    torch.Tensor
        ``[m, n]``; ``out`` if it is given.

    Raises
    ------
    BackendSupportedError
        Another backend, or a GPU that no module runs on; it is a ValueError, too.
    ValueError
        A tensor that is not on a CUDA device; a dtype, shape, device, strides or alignment other
        than above; an ``out`` that overlaps another argument.

    Notes
    -----
    Tensor cores add products in float32 in the order of the depth, and the result is rounded once
    to nearest even. Which tile computes a shape follows from the shape and the number of
    multiprocessors alone, so the same call gives the same bits each time. Allocates only a missing
    ``out``; one launch; safe in CUDA graphs; not differentiable. FlashInfer's backends take other
    subsets: some have no bias, or only column-major ``b``.

    Examples
    --------
    >>> import torch, precast
    >>> a, weight = torch.ones(2, 16).bfloat16(), torch.ones(3, 16).bfloat16()
    >>> with precast.reference_mode():
    ...     precast.gemm.mm_bf16(a, weight.T, bias=torch.tensor([0.0, 1.0, 2.0]).bfloat16())
    tensor([[16., 17., 18.],
            [16., 17., 18.]], dtype=torch.bfloat16)
    """
    check_out("mm_bf16", out, out_dtype)
    if out is None:
        out = a.new_empty(a.shape[0], b.shape[1], dtype=out_dtype)
    chosen(_MM_BOTH, a, b, backend=backend).launch(a, b, bias, out, tactic, pdl)
    return out


@precast_api(
    trace=by_form(
        _form, lambda form: _template(True, form), [form for form in _USUAL if not form[0]]
    )
)
@op(
    "gemm",
    backends=backends("gemm", "cudnn", "cutlass", "cutile", "tgv", "cake"),
    heuristic=any_backend,
)
@documented(mm_bf16)
def bmm_bf16(
    A: torch.Tensor,
    B: torch.Tensor,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    backend: str = "cudnn",
    tactic: int = -1,
) -> torch.Tensor:
    r"""Multiply batches of bfloat16 matrices.

    .. math:: out_{b,m,n} = \mathrm{round}\left(\sum_k A_{b,m,k} \cdot B_{b,k,n}\right)

    Parameters
    ----------
    A : torch.Tensor
        ``[b, m, k]``, bfloat16, on a CUDA device; stride 1 in the last dimension, rows and matrices
        at multiples of 16 bytes, also at 0. ``k`` is a multiple of 8.
    B : torch.Tensor
        ``[b, k, n]``, bfloat16: column-major, the transposes of ``[b, n, k]`` with layout as ``A``;
        or row-major with layout as ``A``, where ``n`` is a multiple of 8.
    out : torch.Tensor, optional
        ``[b, m, n]`` of ``out_dtype``; stride 1 in the last dimension. Shares no memory with the
        others. Default: a new tensor.
    backend : str
        One of FlashInfer's, ``"cudnn"``, ``"cutlass"``, ``"cutile"``, ``"tgv"``, ``"cake"`` and
        ``"auto"``; all are the same kernels. ``"mma"`` takes those for every GPU, as above.

    Returns
    -------
    torch.Tensor
        ``[b, m, n]``; ``out`` if it is given.

    Examples
    --------
    >>> import torch, precast
    >>> a, weights = torch.ones(2, 1, 16).bfloat16(), torch.ones(2, 3, 16).bfloat16()
    >>> with precast.reference_mode():
    ...     precast.gemm.bmm_bf16(a, weights.mT, out_dtype=torch.float32)
    tensor([[[16., 16., 16.]],
    <BLANKLINE>
            [[16., 16., 16.]]])
    """
    check_out("bmm_bf16", out, out_dtype)
    if out is None:
        out = A.new_empty(*A.shape[:2], B.shape[2], dtype=out_dtype)
    chosen(_BMM_BOTH, A, B, backend=backend).launch(A, B, out, tactic)
    return out
