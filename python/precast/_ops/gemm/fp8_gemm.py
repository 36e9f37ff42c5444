# SPDX-License-Identifier: Apache-2.0
"""Products of e4m3 matrices that have a scale for each group or block of their elements.

Source: DeepSeek-AI, DeepSeek-V3 Technical Report, arXiv:2412.19437, section 3.3, for the blocks and
for the addition of their products in float32.
"""

from __future__ import annotations

from precast._base.torch import torch
from precast._op.export import op
from precast._ops.gemm._fp8 import (
    BLOCK,
    K_MAJOR,
    check_product,
    chosen,
    exports,
    scale_layout,
    scaled_product,
)
from precast.api_logging import precast_api
from precast.trace import Const, Dtype, Tensor, TraceTemplate, Var
from precast.trace.registry import by_form


def gemm_fp8_nt_groupwise_reference(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    scale_major_mode: str | None = None,
    scale_granularity_mnk: tuple[int, int, int] = (1, 128, 128),
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """:func:`gemm_fp8_nt_groupwise` in plain PyTorch on any device: float32, one cast."""
    a_k_major, b_k_major = K_MAJOR[scale_major_mode]
    result = scaled_product(
        a,
        b,
        a_scale if a_k_major else a_scale.T,
        b_scale if b_k_major else b_scale.T,
        scale_granularity_mnk[0],
    )
    return result.to(out_dtype or torch.bfloat16)


def _reference(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    a_scale_k_major: bool,
    b_scale_k_major: bool,
    a_scale_rows: int,
) -> torch.Tensor:
    return scaled_product(
        a,
        b,
        a_scale if a_scale_k_major else a_scale.T,
        b_scale if b_scale_k_major else b_scale.T,
        a_scale_rows,
    )


def _mode(a_scale_k_major: bool, b_scale_k_major: bool) -> str | None:
    return next(k for k, v in K_MAJOR.items() if v == (a_scale_k_major, b_scale_k_major))


#: ``choice`` is -1: the choice of the launcher; or, for Hopper, a tile and a kind of cluster
#: (``sm90/choose.cuh``), else a tile (``gemm_tiles.cuh``).
_GEMM, _GEMM_SM90 = exports(
    "gemm_fp8_nt_groupwise",
    "a:e4m3[m,k] b:e4m3[n,k] a_scale:f32|i32 b_scale:f32|i32 out!:T=bf16|f16|f32[m,n] "
    "a_scale_k_major:bool b_scale_k_major:bool a_scale_rows:int choice:int enable_pdl:pdl_on",
    check_product,
    reference=_reference,
    derived={
        "scale_major_mode": _mode,
        "scale_granularity_mnk": lambda a_scale_rows: (a_scale_rows, BLOCK, BLOCK),
        "out_dtype": lambda out: out.dtype,
    },
)


#: ``scale_major_mode``, the rows of ``a`` with one scale, the dtype of the output, and whether
#: scales are packed.
_Form = tuple[str | None, int, str, bool]


def _form(
    a_scale: torch.Tensor,
    scale_major_mode: str | None,
    scale_granularity_mnk: tuple[int, int, int],
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    backend: str = "cutlass",
    **others: object,
) -> _Form:
    dtype = out_dtype or torch.bfloat16 if out is None else out.dtype
    mode = "K" if scale_major_mode is None and backend == "cutile" else scale_major_mode
    packed = a_scale.dtype == torch.int32
    return mode, scale_granularity_mnk[0], str(dtype).removeprefix("torch."), packed


def _template(form: _Form) -> TraceTemplate:
    mode, rows, dtype, packed = form
    a_k_major, b_k_major = K_MAJOR[mode]
    scale_rows = "num_tokens" if rows == 1 else "num_token_blocks"
    axes: dict[str, Var | Const] = {
        "num_tokens": Var("Rows of a."),
        "num_columns": Const("n", "Rows of b.", multiple=BLOCK),
        "depth": Const("k", multiple=BLOCK),
        "num_depth_blocks": Const("", value=f"(depth + {BLOCK - 1}) // {BLOCK}"),
        "num_column_blocks": Const("", value=f"(num_columns + {BLOCK - 1}) // {BLOCK}"),
    }
    if packed:
        axes["num_depth_words"] = Const("", value=f"(depth + {4 * BLOCK - 1}) // {4 * BLOCK}")
    if rows != 1:
        axes["num_token_blocks"] = Const("", value=f"(num_tokens + {BLOCK - 1}) // {BLOCK}")

    def scales(blocks: str, k_major: bool) -> Tensor:
        dims = [blocks, "num_depth_words" if packed else "num_depth_blocks"]
        return Tensor(dims if k_major else dims[::-1], dtype="int32" if packed else "float32")

    fixed = {"scale_major_mode": mode, "scale_granularity_mnk": (rows, BLOCK, BLOCK)}
    return TraceTemplate(
        op_type="gemm_fp8",
        name_prefix=f"gemm_fp8_nt_groupwise_{(mode or 'mixed').lower()}{rows}"
        + ("" if dtype == "bfloat16" else f"_{dtype}")
        + ("_packed" if packed else ""),
        description="Multiplies e4m3 matrices whose scales are those of groups and blocks of 128.",
        axes=axes,
        inputs={
            "a": Tensor(["num_tokens", "depth"], dtype="float8_e4m3fn"),
            "b": Tensor(["num_columns", "depth"], dtype="float8_e4m3fn"),
            "a_scale": scales(scale_rows, a_k_major),
            "b_scale": scales("num_column_blocks", b_k_major),
        },
        outputs={"result": Tensor(["num_tokens", "num_columns"], dtype=dtype)},
        reference=gemm_fp8_nt_groupwise_reference,
        fixed=fixed if dtype == "bfloat16" else {**fixed, "out_dtype": Dtype(dtype)},
    )


_USUAL: list[_Form] = [
    ("K", 1, "bfloat16", False),
    ("MN", 1, "bfloat16", False),
    ("MN", BLOCK, "bfloat16", False),
    ("K", 1, "float16", False),
]
_TRACE = by_form(_form, _template, _USUAL)


@precast_api(trace=_TRACE)
@op("fp8_gemm")
def gemm_fp8_nt_groupwise(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    scale_major_mode: str | None = None,
    mma_sm: int = 1,
    scale_granularity_mnk: tuple[int, int, int] = (1, 128, 128),
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    backend: str = "cutlass",
    choice: int = -1,
) -> torch.Tensor:
    r"""Multiply an e4m3 matrix by the transpose of another one, both with scales of blocks.

    .. math::

        out_{m,n} = \mathrm{round}\left(\sum_i a\_scale_{\lfloor m / g \rfloor, i} \cdot
        b\_scale_{\lfloor n / 128 \rfloor, i} \sum_{k = 128 i}^{128 i + 127} a_{m,k} \cdot b_{n,k}
        \right)

    Parameters
    ----------
    a : torch.Tensor
        ``[m, k]``, float8_e4m3fn, on a CUDA device; the last dimension has stride 1 and rows start
        at different multiples of 16 bytes. ``k`` is a positive multiple of 16; the last block may
        be shorter than 128.
    b : torch.Tensor
        ``[n, k]``, as ``a``; ``n`` is a multiple of 8.
    a_scale : torch.Tensor
        *Dequantisation* scales of ``a``, float32, at any strides:
        ``[ceil(m / g), ceil(k / 128)]`` if ``scale_major_mode`` is ``"K"``,
        ``[ceil(k / 128), ceil(m / g)]`` if it is ``"MN"``, where ``g`` is
        ``scale_granularity_mnk[0]``. Or int32, with ``ceil(k / 512)`` in place of
        ``ceil(k / 128)``: the biased exponents (ue8m0) of four blocks of the depth, the first one
        in the lowest byte, as :func:`per_token_group_quant_8bit` and DeepGEMM pack them.
    b_scale : torch.Tensor
        The same for ``b``: ``[ceil(n / 128), ceil(k / 128)]`` or
        ``[ceil(k / 128), ceil(n / 128)]``. Packed if ``a_scale`` is, and then also of each row of
        ``b``, of which the first one of 128 is read: ``[n, ceil(k / 512)]``.
    scale_major_mode : str, optional
        ``"K"`` or ``"MN"``. May be None with other backends than ``"cutlass"``: ``"cutile"`` then
        means ``"K"``, and ``"trtllm"`` that ``a_scale`` is as with ``"K"`` and ``b_scale`` as with
        ``"MN"``.
    mma_sm : int
        1 or 2; without effect.
    scale_granularity_mnk : tuple of int
        ``(1, 128, 128)``, or ``(128, 128, 128)``.
    out : torch.Tensor, optional
        ``[m, n]``, bfloat16, float16 or float32; strides as those of ``a``. Shares no memory with
        the others. Default: a new tensor.
    out_dtype : torch.dtype, optional
        The dtype of a new ``out``. Default: bfloat16.
    backend : str
        ``"cutlass"``, ``"trtllm"`` or ``"cutile"``, FlashInfer's, which are the same here: the
        kernels for Hopper there, elsewhere those for every GPU. ``"mma"`` takes the latter on
        Hopper, too.
    choice : int
        The number of a tile and, on Hopper, a kind of cluster, for measurements. Default: -1, what
        the launcher expects to be the fastest.

    Returns
    -------
    torch.Tensor
        ``[m, n]``; ``out`` if it is given.

    Raises
    ------
    ValueError
        A tensor that is not on a CUDA device; a dtype, shape, device, strides or alignment other
        than above; an ``out`` that overlaps another argument; another layout, granularity or
        backend.

    Notes
    -----
    Tensor cores add the products of a block of the depth, those of FP8 with about 14 bits; the sum
    of a block is multiplied by the product of its two scales and added in float32, block by block,
    and the result is rounded once to nearest even. Where tensor cores have no FP8 (compute
    capability below 8.9), and in the kernels of ``"mma"`` on 9.0 to 11.0, operands become float16
    first, which is exact. Which tile computes a shape follows from the shape, the number of
    multiprocessors and, on Hopper, the table that PRECAST_GEMM_TABLE names, so the same call gives
    the same bits each time. On Hopper, where few
    tiles would leave multiprocessors idle, parts of the depth are added up separately, then in a
    fixed order.

    Allocates only a missing ``out``; one launch; safe in CUDA graphs; not differentiable.
    FlashInfer's function needs compute capability 10.0 and takes e5m2, too, but no packed scales;
    engines call DeepGEMM for it on 9.0. Source: arXiv:2412.19437.

    Examples
    --------
    >>> import torch, precast
    >>> a, b = (torch.ones(n, 128).to(torch.float8_e4m3fn) for n in (2, 8))
    >>> with precast.reference_mode():
    ...     precast.gemm.gemm_fp8_nt_groupwise(
    ...         a, b, torch.tensor([[0.5], [2.0]]), torch.ones(1, 1), "K")[:, 0].tolist()
    [64.0, 256.0]
    """
    layout = scale_layout(
        "gemm_fp8_nt_groupwise", scale_major_mode, scale_granularity_mnk, mma_sm, backend
    )
    if out is None:
        out = a.new_empty(a.shape[0], b.shape[0], dtype=out_dtype or torch.bfloat16)
    export = chosen((_GEMM, _GEMM_SM90), a, backend)
    export.launch(a, b, a_scale, b_scale, out, *layout, choice)
    return out


@precast_api
def gemm_fp8_nt_blockscaled(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    scale_major_mode: str | None = "MN",
    mma_sm: int = 1,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Multiply as :func:`gemm_fp8_nt_groupwise` with scales of 128x128 of both matrices.

    Parameters
    ----------
    a, b : torch.Tensor
        ``[m, k]`` and ``[n, k]``.
    a_scale, b_scale : torch.Tensor
        ``[ceil(m / 128), ceil(k / 128)]`` and ``[ceil(n / 128), ceil(k / 128)]`` if
        ``scale_major_mode`` is ``"K"``, else their transposes.
    scale_major_mode : str
        ``"K"`` or ``"MN"``.
    mma_sm : int
        1 or 2; without effect.
    out : torch.Tensor, optional
        ``[m, n]``. Default: a new tensor.
    out_dtype : torch.dtype, optional
        The dtype of a new ``out``. Default: bfloat16.

    Returns
    -------
    torch.Tensor
        ``[m, n]``; ``out`` if it is given.

    Raises
    ------
    ValueError
        As :func:`gemm_fp8_nt_groupwise`.

    Examples
    --------
    >>> import torch, precast
    >>> a, b = (torch.ones(n, 128).to(torch.float8_e4m3fn) for n in (2, 8))
    >>> scale = torch.tensor([[0.5]])
    >>> with precast.reference_mode():
    ...     precast.gemm.gemm_fp8_nt_blockscaled(a, b, scale, scale)[:, 0].tolist()
    [32.0, 32.0]
    """
    granularity = (BLOCK, BLOCK, BLOCK)
    return gemm_fp8_nt_groupwise(
        a, b, a_scale, b_scale, scale_major_mode, mma_sm, granularity, out, out_dtype
    )
