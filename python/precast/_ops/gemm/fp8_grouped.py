# SPDX-License-Identifier: Apache-2.0
"""Products of e4m3 tokens with a weight for each group of them, as in mixtures of experts.

Source: the three ways to say the groups are those of DeepGEMM and of FlashInfer's CUTLASS kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from precast._base.torch import torch
from precast._op.docs import documented
from precast._op.export import Export, op
from precast._ops.gemm._fp8 import (
    BLOCK,
    CUTE_CHOICES,
    MMA,
    check_product,
    chosen,
    exports,
    scale_layout,
    scaled_product,
)
from precast._ops.gemm.fp8_gemm import gemm_fp8_nt_groupwise
from precast._plan.gemm_model import choices
from precast.api_logging import precast_api
from precast.trace import Const, Scalar, Tensor, TraceTemplate, Var

#: The choices that are legal: neighbouring blocks of tokens share no weight if each token says its
#: own, and no CTAs split the depth where the GPU alone knows how many tokens there are.
_OF_GROUPS, _OF_EACH = (
    [choice.number for choice in choices() if choice.is_legal(kind)]
    for kind in ("ranges", "contiguous")
)

#: Arguments and errors of all functions here, besides those of :func:`gemm_fp8_nt_groupwise`.
_GROUPS = """
Parameters
----------
b : torch.Tensor
    ``[groups, n, k]``, float8_e4m3fn; the last dimension has stride 1, rows and groups start at
    different multiples of 16 bytes; ``n`` is a multiple of 8.
a_scale : torch.Tensor
    *Dequantisation* scales of ``a``, float32, at any strides: ``[m, ceil(k / 128)]``. Or int32,
    packed as :func:`gemm_fp8_nt_groupwise` takes them: ``[m, ceil(k / 512)]``.
b_scale : torch.Tensor
    The same for ``b``: ``[groups, ceil(n / 128), ceil(k / 128)]``; packed if ``a_scale`` is.
scale_granularity_mnk : tuple of int
    ``(1, 128, 128)``.
out_dtype : torch.dtype, optional
    The dtype of a new ``out``. Default: bfloat16.

Raises
------
ValueError
    A tensor that is not on a CUDA device; a dtype, shape, device, strides or alignment other than
    above; an ``out`` that overlaps another argument; another layout, granularity or backend.
"""


def _write_group(
    out: torch.Tensor,
    rows: torch.Tensor | slice,
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
) -> None:
    """Write some rows of ``out``."""
    out[rows] = scaled_product(a[rows], b, a_scale[rows], b_scale, 1).to(out.dtype)


def _write_indexed(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    m_indices: torch.Tensor,
    out: torch.Tensor,
) -> None:
    for group in range(b.shape[0]):
        _write_group(out, m_indices == group, a, b[group], a_scale, b_scale[group])


def _write_counted(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    masked_m: torch.Tensor,
    out: torch.Tensor,
) -> None:
    for group in range(b.shape[0]):
        rows = slice(max(int(masked_m[group]), 0))
        _write_group(out[group], rows, a[group], b[group], a_scale[group], b_scale[group])


def _write_ranges(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    m_indptr: torch.Tensor,
    out: torch.Tensor,
    scales_k_major: bool,
) -> None:
    if not scales_k_major:
        a_scale, b_scale = a_scale.mT, b_scale.mT
    for group in range(b.shape[0]):
        rows = slice(max(int(m_indptr[group]), 0), max(int(m_indptr[group + 1]), 0))
        _write_group(out, rows, a, b[group], a_scale, b_scale[group])


def _check_numbers(export: str, name: str, numbers: torch.Tensor) -> None:
    if not numbers.is_contiguous():
        raise ValueError(
            f"{export}: {name} must be contiguous, got strides {[*numbers.stride()]} for shape "
            f"{[*numbers.shape]}; call .contiguous()"
        )


def _check_indexed(
    export: str,
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    m_indices: torch.Tensor,
    out: torch.Tensor,
    choice: int,
    choices: Collection[int],
) -> None:
    check_product(export, a, b, a_scale, b_scale, out, choice=choice, choices=choices)
    _check_numbers(export, "m_indices", m_indices)


def _check_counted(
    export: str,
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    masked_m: torch.Tensor,
    out: torch.Tensor,
    expected_m: int,
    choice: int,
    choices: Collection[int],
) -> None:
    if expected_m <= 0:
        raise ValueError(f"{export}: expected_m must be positive, got {expected_m}")
    check_product(export, a, b, a_scale, b_scale, out, choice=choice, choices=choices)
    _check_numbers(export, "masked_m", masked_m)


def _check_ranges(
    export: str,
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    m_indptr: torch.Tensor,
    out: torch.Tensor,
    scales_k_major: bool,
    choice: int,
    choices: Collection[int],
) -> None:
    layout = scales_k_major, scales_k_major, 1
    check_product(export, a, b, a_scale, b_scale, out, *layout, choice, choices)
    _check_numbers(export, "m_indptr", m_indptr)


def _check_backend(export: str, backend: str, *legal: str) -> None:
    legal = *legal, MMA
    if backend not in legal:
        raise ValueError(
            f"{export}: backend must be one of {', '.join(map(repr, legal))}, got {backend!r}"
        )


_DTYPE: dict[str, Callable[..., Any]] = {
    "out_dtype": lambda out: out.dtype,
    "scale_granularity_mnk": lambda: (1, BLOCK, BLOCK),
}
_INDEXED = exports(
    "group_deepgemm_fp8_nt_groupwise",
    "a:e4m3[m,k] b:e4m3[groups,n,k] a_scale:f32|i32 b_scale:f32|i32 m_indices:i32[m] "
    "out!:T=bf16|f16|f32[m,n] choice:int enable_pdl:pdl_on",
    _check_indexed,
    _OF_EACH,
    write=_write_indexed,
    derived=_DTYPE,
)
_COUNTED = exports(
    "batch_deepgemm_fp8_nt_groupwise",
    "a:e4m3[groups,m,k] b:e4m3[groups,n,k] a_scale:f32|i32 b_scale:f32|i32 masked_m:i32[groups] "
    "out!:T=bf16|f16|f32[groups,m,n] expected_m:int choice:int enable_pdl:pdl_on",
    _check_counted,
    _OF_GROUPS,
    write=_write_counted,
    derived=_DTYPE,
)
_RANGES_OF = (
    "a:e4m3[m,k] b:e4m3[groups,n,k] a_scale:f32|i32 b_scale:f32|i32 m_indptr:i32[groups+1] "
    "out!:T=bf16|f16|f32[m,n] scales_k_major:bool choice:int enable_pdl:pdl_on"
)
_DERIVED = {
    **_DTYPE,
    "scale_major_mode": lambda scales_k_major: "K" if scales_k_major else "MN",
}
_RANGES = exports(
    "group_gemm_fp8_nt_groupwise",
    _RANGES_OF,
    _check_ranges,
    _OF_GROUPS,
    write=_write_ranges,
    derived=_DERIVED,
)


def _check_cute_dsl(
    export: str,
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    m_indptr: torch.Tensor,
    out: torch.Tensor,
    scales_k_major: bool,
    choice: int,
) -> None:
    if a_scale.dtype is not torch.float32:
        raise ValueError(
            f"{export}: a_scale must be float32 with backend='cute_dsl', got int32; pass "
            f"backend='trtllm'"
        )
    given = a, b, a_scale, b_scale, m_indptr, out
    _check_ranges(export, *given, scales_k_major, choice, range(CUTE_CHOICES))


#: The kernels in CuTe DSL, for Hopper and Blackwell.
_RANGES_CUTE_DSL = Export(
    "group_gemm_fp8_cute_dsl",
    "group_gemm_fp8_nt_groupwise_cute_dsl",
    _RANGES_OF,
    function="group_gemm_fp8_nt_groupwise",
    check=_check_cute_dsl,
    write=_write_ranges,
    derived=_DERIVED,
)


def group_deepgemm_fp8_nt_groupwise_reference(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    m_indices: torch.Tensor,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """:func:`group_deepgemm_fp8_nt_groupwise` in plain PyTorch; rows of no group are zero."""
    out = a.new_zeros(a.shape[0], b.shape[1], dtype=out_dtype or torch.bfloat16)
    _write_indexed(a, b, a_scale, b_scale, m_indices, out)
    return out


def batch_deepgemm_fp8_nt_groupwise_reference(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    masked_m: torch.Tensor,
    expected_m: int = 1,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """:func:`batch_deepgemm_fp8_nt_groupwise` in plain PyTorch; rows of no group are zero."""
    out = a.new_zeros(*a.shape[:2], b.shape[1], dtype=out_dtype or torch.bfloat16)
    _write_counted(a, b, a_scale, b_scale, masked_m, out)
    return out


def group_gemm_fp8_nt_groupwise_reference(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    m_indptr: torch.Tensor,
    scale_major_mode: str = "MN",
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """:func:`group_gemm_fp8_nt_groupwise` in plain PyTorch; rows of no group are zero."""
    out = a.new_zeros(a.shape[0], b.shape[1], dtype=out_dtype or torch.bfloat16)
    _write_ranges(a, b, a_scale, b_scale, m_indptr, out, scale_major_mode == "K")
    return out


def _indices(made: dict[str, Any]) -> None:
    made["m_indices"].copy_(
        made["m_indices"].new_tensor(range(len(made["m_indices"]))) // BLOCK % len(made["b"])
    )


def _counts(made: dict[str, Any]) -> None:
    made["masked_m"].fill_(made["a"].shape[1])


def _starts(made: dict[str, Any]) -> None:
    groups, rows = len(made["b"]), len(made["a"])
    made["m_indptr"].copy_(made["m_indptr"].new_tensor(range(groups + 1)) * rows // groups)


def _template(
    function: str, numbers: str, reference: Any, fill: Any, *, batched: bool, k_major: bool = True
) -> TraceTemplate:
    group = ["num_groups"] if batched else []
    of_numbers = {
        "m_indices": "num_tokens",
        "masked_m": "num_groups",
        "m_indptr": "num_starts",
    }[numbers]
    axes: dict[str, Var | Const] = {
        "num_tokens": Var("Rows of a, of a group if it has groups.", sample=256),
        "num_groups": Const("g", sample=2),
        "num_columns": Const("n", "Rows of b.", multiple=BLOCK),
        "depth": Const("k", multiple=BLOCK),
        "num_depth_blocks": Const("", value=f"(depth + {BLOCK - 1}) // {BLOCK}"),
        "num_column_blocks": Const("", value=f"(num_columns + {BLOCK - 1}) // {BLOCK}"),
    }
    if numbers == "m_indptr":
        axes["num_starts"] = Const("", value="num_groups + 1")

    def scales(rows: str, groups: list[str]) -> Tensor:
        dims = [rows, "num_depth_blocks"]
        return Tensor([*groups, *(dims if k_major else dims[::-1])], dtype="float32")

    inputs: dict[str, Tensor | Scalar] = {
        "a": Tensor([*group, "num_tokens", "depth"], dtype="float8_e4m3fn"),
        "b": Tensor(["num_groups", "num_columns", "depth"], dtype="float8_e4m3fn"),
        "a_scale": scales("num_tokens", group),
        "b_scale": scales("num_column_blocks", ["num_groups"]),
        numbers: Tensor([of_numbers], dtype="int32"),
    }
    if batched:
        inputs["expected_m"] = Scalar("int32", sample=8)
    return TraceTemplate(
        op_type="gemm_fp8",
        name_prefix=function,
        description="Multiplies e4m3 tokens by the weights of their groups.",
        axes=axes,
        inputs=inputs,
        outputs={"result": Tensor([*group, "num_tokens", "num_columns"], dtype="bfloat16")},
        reference=reference,
        tags=["moe"],
        fill=fill,
    )


@precast_api(
    trace=_template(
        "group_deepgemm_fp8_nt_groupwise",
        "m_indices",
        group_deepgemm_fp8_nt_groupwise_reference,
        _indices,
        batched=False,
    )
)
@op("fp8_gemm")
@documented(gemm_fp8_nt_groupwise, _GROUPS)
def group_deepgemm_fp8_nt_groupwise(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    m_indices: torch.Tensor,
    scale_granularity_mnk: tuple[int, int, int] = (1, 128, 128),
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    backend: str = "deepgemm",
    choice: int = -1,
) -> torch.Tensor:
    r"""Multiply e4m3 tokens by the weight that each of them says.

    .. math:: out_m = \mathrm{round}(a_m \cdot b_{m\_indices_m}^T)

    Parameters
    ----------
    m_indices : torch.Tensor
        ``[m]``, int32, contiguous: the group of each token. A negative number, and one that is no
        group, says that the row is padding. In each 128 rows, those of one group come first, and
        the others are padding.
    out : torch.Tensor, optional
        ``[m, n]``, bfloat16, float16 or float32; strides as those of ``a``. Rows of padding are
        not written. Default: a new tensor.
    backend : str
        ``"deepgemm"``: the kernels for Hopper there, elsewhere those for every GPU. ``"mma"`` takes
        the latter on Hopper, too.
    choice : int
        The number of a tile and, on Hopper, a kind of cluster, for measurements. Default: -1, what
        the launcher expects to be the fastest.

    Returns
    -------
    torch.Tensor
        ``[m, n]``; ``out`` if it is given.

    Notes
    -----
    Sums are those of :func:`gemm_fp8_nt_groupwise`. What rows of padding hold, such as NaN, reaches
    no other row. Groups may be empty. Allocates only a missing ``out``; one launch; nothing is read
    by the host, so a CUDA graph may be replayed with other groups; not differentiable. Source:
    DeepGEMM, ``m_grouped_fp8_gemm_nt_contiguous``.

    Examples
    --------
    >>> import torch, precast
    >>> a, b = (torch.ones(*n, 128).to(torch.float8_e4m3fn) for n in ((2,), (2, 8)))
    >>> scale, of_groups = torch.ones(2, 1), torch.tensor([1.0, 2.0])[:, None, None]
    >>> groups = torch.tensor([1, 1], dtype=torch.int32)
    >>> with precast.reference_mode():
    ...     precast.gemm.group_deepgemm_fp8_nt_groupwise(a, b, scale, of_groups, groups)[:, 0]
    tensor([256., 256.], dtype=torch.bfloat16)
    """
    name = "group_deepgemm_fp8_nt_groupwise"
    _check_backend(name, backend, "deepgemm")
    scale_layout(name, "K", scale_granularity_mnk, rows=(1,))
    if out is None:
        out = a.new_empty(a.shape[0], b.shape[1], dtype=out_dtype or torch.bfloat16)
    chosen(_INDEXED, a, backend).launch(a, b, a_scale, b_scale, m_indices, out, choice)
    return out


@precast_api(
    trace=_template(
        "batch_deepgemm_fp8_nt_groupwise",
        "masked_m",
        batch_deepgemm_fp8_nt_groupwise_reference,
        _counts,
        batched=True,
    )
)
@op("fp8_gemm")
@documented(group_deepgemm_fp8_nt_groupwise, _GROUPS)
def batch_deepgemm_fp8_nt_groupwise(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    masked_m: torch.Tensor,
    expected_m: int,
    scale_granularity_mnk: tuple[int, int, int] = (1, 128, 128),
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    backend: str = "deepgemm",
    choice: int = -1,
) -> torch.Tensor:
    r"""Multiply the first tokens of each group by the group's weight, all in e4m3.

    .. math:: out_{g,m} = \mathrm{round}(a_{g,m} \cdot b_g^T), \quad m < masked\_m_g

    Parameters
    ----------
    a : torch.Tensor
        ``[groups, m, k]``, float8_e4m3fn, on a CUDA device; the last dimension has stride 1, rows
        and groups start at different multiples of 16 bytes. ``k`` is a positive multiple of 16.
    a_scale : torch.Tensor
        *Dequantisation* scales of ``a``, float32, at any strides: ``[groups, m, ceil(k / 128)]``.
        Or int32, packed as :func:`gemm_fp8_nt_groupwise` takes them.
    masked_m : torch.Tensor
        ``[groups]``, int32, contiguous: the tokens of each group, from 0 to ``m``.
    expected_m : int
        About as many tokens as a group has, for the choice of a tile; positive.
    out : torch.Tensor, optional
        ``[groups, m, n]``, bfloat16, float16 or float32; strides as those of ``a``. Rows behind the
        tokens of a group are not written. Default: a new tensor.
    backend : str
        ``"deepgemm"`` or ``"cake"``, FlashInfer's, which are the same here, or ``"mma"``: see
        :func:`gemm_fp8_nt_groupwise`.
    choice : int
        The number of a tile and, on Hopper, a kind of cluster, for measurements. Default: -1, what
        the launcher expects to be the fastest.

    Returns
    -------
    torch.Tensor
        ``[groups, m, n]``; ``out`` if it is given.

    Notes
    -----
    Sums are those of :func:`gemm_fp8_nt_groupwise`. What rows behind the tokens of a group hold,
    such as NaN, reaches no other row. Groups may be empty. Allocates only a missing ``out``; one
    launch; nothing is read by the host, so a CUDA graph may be replayed with other numbers; not
    differentiable. Source: DeepGEMM, ``m_grouped_fp8_gemm_nt_masked``.

    Examples
    --------
    >>> import torch, precast
    >>> a, b = (torch.ones(2, n, 128).to(torch.float8_e4m3fn) for n in (3, 8))
    >>> scale, of_groups = torch.ones(2, 3, 1), torch.tensor([1.0, 2.0])[:, None, None]
    >>> out = torch.zeros(2, 3, 8)
    >>> with precast.reference_mode():
    ...     _ = precast.gemm.batch_deepgemm_fp8_nt_groupwise(
    ...         a, b, scale, of_groups, torch.tensor([0, 2], dtype=torch.int32), 2, out=out)
    >>> out[:, :, 0].tolist()
    [[0.0, 0.0, 0.0], [256.0, 256.0, 0.0]]
    """
    name = "batch_deepgemm_fp8_nt_groupwise"
    _check_backend(name, backend, "deepgemm", "cake")
    scale_layout(name, "K", scale_granularity_mnk, rows=(1,))
    if out is None:
        out = a.new_empty(*a.shape[:2], b.shape[1], dtype=out_dtype or torch.bfloat16)
    chosen(_COUNTED, a, backend).launch(a, b, a_scale, b_scale, masked_m, out, expected_m, choice)
    return out


@precast_api(
    trace=_template(
        "group_gemm_fp8_nt_groupwise",
        "m_indptr",
        group_gemm_fp8_nt_groupwise_reference,
        _starts,
        batched=False,
        k_major=False,
    )
)
@op("fp8_gemm")
@documented(group_deepgemm_fp8_nt_groupwise, _GROUPS)
def group_gemm_fp8_nt_groupwise(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    m_indptr: torch.Tensor,
    scale_granularity_mnk: tuple[int, int, int] = (1, 128, 128),
    scale_major_mode: str = "MN",
    mma_sm: int = 1,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    backend: str = "trtllm",
    segment_alignment: int = 1,
    choice: int = -1,
) -> torch.Tensor:
    r"""Multiply groups of consecutive e4m3 tokens by a weight each.

    .. math:: out_m = \mathrm{round}(a_m \cdot b_g^T), \quad m\_indptr_g \le m < m\_indptr_{g+1}

    Parameters
    ----------
    a_scale : torch.Tensor
        *Dequantisation* scales of ``a``, float32, at any strides: ``[m, ceil(k / 128)]`` if
        ``scale_major_mode`` is ``"K"``, ``[ceil(k / 128), m]`` if it is ``"MN"``.
    b_scale : torch.Tensor
        The same for ``b``: ``[groups, ceil(n / 128), ceil(k / 128)]`` or
        ``[groups, ceil(k / 128), ceil(n / 128)]``.
    m_indptr : torch.Tensor
        ``[groups + 1]``, int32, contiguous: where the tokens of each group begin, ascending.
    scale_major_mode : str
        ``"K"`` or ``"MN"``.
    mma_sm : int
        1 or 2; without effect.
    out : torch.Tensor, optional
        ``[m, n]``, bfloat16, float16 or float32; strides as those of ``a``. Rows of no group are
        not written. Default: a new tensor.
    backend : str
        ``"trtllm"`` or ``"cutile"``, FlashInfer's, which are the same here, or ``"mma"``: see
        :func:`gemm_fp8_nt_groupwise`. Or ``"cute_dsl"``, the kernels written in CuTe DSL for
        compute capabilities 9.0, 10.0 and 10.3: float32 scales, ``out`` bfloat16 or float16.
    segment_alignment : int
        At least 1; without effect, as groups may begin at any row.
    choice : int
        The number of a tile and, on Hopper, a kind of cluster, for measurements; with
        ``"cute_dsl"`` 0 for clusters of one CTA or 1 for clusters of two. Default: -1, what the
        launcher expects to be the fastest.

    Returns
    -------
    torch.Tensor
        ``[m, n]``; ``out`` if it is given.

    Notes
    -----
    Sums are those of :func:`gemm_fp8_nt_groupwise`. Groups may be empty. Allocates only a missing
    ``out``; one launch; nothing is read by the host, so a CUDA graph may be replayed with other
    groups; not differentiable. FlashInfer's function needs compute capability 10.0 and groups that
    begin at multiples of 4.

    Examples
    --------
    >>> import torch, precast
    >>> a, b = (torch.ones(*n, 128).to(torch.float8_e4m3fn) for n in ((3,), (2, 8)))
    >>> scale, of_groups = torch.ones(1, 3), torch.tensor([1.0, 2.0])[:, None, None]
    >>> starts = torch.tensor([0, 1, 3], dtype=torch.int32)
    >>> with precast.reference_mode():
    ...     precast.gemm.group_gemm_fp8_nt_groupwise(a, b, scale, of_groups, starts)[:, 0]
    tensor([128., 256., 256.], dtype=torch.bfloat16)
    """
    name = "group_gemm_fp8_nt_groupwise"
    if segment_alignment < 1:
        raise ValueError(f"{name}: segment_alignment must be at least 1, got {segment_alignment}")
    _check_backend(name, backend, "trtllm", "cutile", "cute_dsl")
    k_major, _, _ = scale_layout(name, scale_major_mode, scale_granularity_mnk, mma_sm, rows=(1,))
    if out is None:
        out = a.new_empty(a.shape[0], b.shape[1], dtype=out_dtype or torch.bfloat16)
    export = _RANGES_CUTE_DSL if backend == "cute_dsl" else chosen(_RANGES, a, backend)
    export.launch(a, b, a_scale, b_scale, m_indptr, out, k_major, choice)
    return out
