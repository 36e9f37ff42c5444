# SPDX-License-Identifier: Apache-2.0
"""Find the k largest scores of each query, with the lengths of requests."""

from __future__ import annotations

from typing import Any

from precast._base.errors import BackendSupportedError
from precast._base.torch import torch
from precast._op.export import Export, op
from precast._op.validation import check_rank
from precast._ops.topk._common import MAX_COLUMNS, largest_in_windows
from precast._ops.topk._trace import LENGTH, in_order
from precast.api_logging import precast_api
from precast.trace import Const, Scalar, Tensor, TraceTemplate, Var
from precast.trace.registry import by_form

_BACKENDS = ("auto", "radix_cutlass")
_BLACKWELL = ("radix", "gvr", "gvr_2", "radix_filter")


def top_k_varlen_reference(
    logits: torch.Tensor,
    seq_lens: torch.Tensor,
    top_k: int,
    compress_ratio: int = 1,
    next_n: int = 1,
    return_values: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """:func:`top_k_varlen` in plain PyTorch on any device, in the order of ``deterministic=True``.

    Returns
    -------
    torch.Tensor or tuple of torch.Tensor
        Positions, or with ``return_values`` positions and values.
    """
    behind = torch.arange(next_n - 1, -1, -1, device=logits.device)
    tokens = (seq_lens.long()[:, None] - behind).flatten().clamp(min=0)
    at = largest_in_windows(logits, tokens // compress_ratio, top_k, 0, None)
    indices = at.to(torch.int32)
    if not return_values:
        return indices
    padded = torch.nn.functional.pad(logits, (0, 1))  # A zero for those that do not exist.
    return indices, padded.gather(1, torch.where(at < 0, logits.shape[1], at))


def _check(
    export: str, logits: torch.Tensor, seq_lens: torch.Tensor, top_k: int, next_n: int
) -> None:
    check_rank(export, "logits", logits, 2, 2)
    if logits.shape[1] > MAX_COLUMNS:
        raise ValueError(
            f"{export}: logits must have at most {MAX_COLUMNS} columns, got shape {[*logits.shape]}"
        )
    if top_k < 1:
        raise ValueError(f"{export}: top_k must be at least 1, got {top_k}")
    if top_k > MAX_COLUMNS:
        raise ValueError(f"{export}: top_k must be at most {MAX_COLUMNS}, got {top_k}")
    if len(logits) != len(seq_lens) * next_n:
        raise ValueError(
            f"{export}: logits must have next_n = {next_n} rows for each of the {len(seq_lens)} "
            f"numbers of seq_lens, got {len(logits)}"
        )


def _reference(out_values: torch.Tensor | None, **given: Any) -> Any:
    names = ("logits", "seq_lens", "top_k", "compress_ratio", "next_n")
    inputs = {name: given[name] for name in names}
    return top_k_varlen_reference(return_values=out_values is not None, **inputs)


_VARLEN = Export(
    "topk",
    "top_k_varlen",
    "logits:T=f32|f16|bf16[rows,columns] seq_lens:i32[requests] top_k:size "
    "compress_ratio:int(1-2147483647) next_n:int(1-2147483647) deterministic:bool "
    "out_indices!:i32[rows,top_k] out_values!?:T[rows,top_k] enable_pdl:pdl_on",
    reference=_reference,
    check=_check,
)


def _template(form: tuple[bool, bool]) -> TraceTemplate:
    values, drafts = form
    axes: dict[str, Var | Const] = {"batch_size": Var("Requests.")}
    rows = "batch_size"
    if drafts:
        rows, axes["num_rows"] = "num_rows", Var("Queries.", value="batch_size * 2")
    axes |= {"max_len": LENGTH, "k": Const("k", "Scores of a row.", param="top_k", multiple=2)}
    inputs: dict[str, Tensor | Scalar] = {
        "logits": Tensor([rows, "max_len"]),
        "seq_lens": Tensor(["batch_size"], dtype="int32", description="In tokens."),
        "top_k": Scalar("int32", sample=8),
        "compress_ratio": Scalar("int32", sample=2),
        "next_n": Scalar("int32", sample=2 if drafts else 1),
    }
    outputs = {"indices": Tensor([rows, "k"], param="out_indices", dtype="int32")}
    if values:
        outputs["values"] = Tensor([rows, "k"], param="out_values", dtype_from="logits")
    return TraceTemplate(
        op_type="topk",
        name_prefix="top_k_varlen" + "_values" * values + "_drafts" * drafts,
        description="Finds the k largest scores of each row, as far as its request goes",
        axes=axes,
        inputs=inputs,
        outputs=outputs,
        reference=top_k_varlen_reference,
        fixed={"return_values": True} if values else {},
        fill=_fill,
    )


def _fill(made: dict[str, Any]) -> None:
    import torch

    in_order(made)
    lengths, size = made["seq_lens"], made["logits"].shape[1]
    count = torch.arange(len(lengths), dtype=torch.int32, device=lengths.device)
    made["seq_lens"] = (count + 1) * (2 * size + 2) // (len(lengths) + 1)


_TRACE = by_form(
    lambda return_values=False, next_n=1, **call: (bool(return_values), next_n > 1),
    _template,
    [(False, False), (True, False), (False, True), (True, True)],
)


def _flat(name: str, out: torch.Tensor | None, shape: tuple[int, int]) -> torch.Tensor | None:
    """Return a flat buffer as rows; another is left for the binding to check."""
    if out is None or out.dim() != 1:
        return out
    if out.shape[0] != shape[0] * shape[1] or not out.is_contiguous():
        raise ValueError(
            f"top_k_varlen: {name} must have shape {[*shape]} or be a contiguous buffer of "
            f"{shape[0] * shape[1]} elements, got shape {[*out.shape]}"
        )
    return out.view(shape)


@precast_api(trace=_TRACE)
@op("topk", explain=_check)
def top_k_varlen(
    logits: torch.Tensor,
    seq_lens: torch.Tensor,
    top_k: int,
    pre_idx: torch.Tensor | None = None,
    compress_ratio: int = 1,
    next_n: int = 1,
    return_values: bool = False,
    out_indices: torch.Tensor | None = None,
    out_values: torch.Tensor | None = None,
    backend: str = "auto",
    load_balance: bool = True,
    workspace: dict[str, Any] | None = None,
    deterministic: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    r"""Find the k largest scores of each row of a decode step, as far as its request goes.

    Row ``t`` of request ``i``, for ``t`` below ``next_n``, is row ``i * next_n + t``; of its scores
    the first

    .. math:: \max(0,\ \lfloor (seq\_lens_i - next\_n + t + 1) / compress\_ratio \rfloor)

    count, and none behind the end of the row.

    Parameters
    ----------
    logits : torch.Tensor
        ``[requests * next_n, max_len]``, float32, float16 or bfloat16, rows with unit stride, on a
        CUDA device; ``max_len`` up to 2^20. NaN is larger than all numbers.
    seq_lens : torch.Tensor
        ``[requests]``, int32, contiguous: tokens of each request, whatever ``compress_ratio`` is.
    top_k : int
        How many are chosen; from 1 to 2^20, also above ``max_len``.
    pre_idx : torch.Tensor, optional
        Taken for compatibility, and not read: FlashInfer's kernels for compute capability 10.0
        begin their search there.
    compress_ratio : int
        Tokens that a score stands for. Default: 1.
    next_n : int
        Rows of a request, as many as tokens of a draft are verified. Default: 1.
    return_values : bool
        Whether the scores are returned, too. Default: False.
    out_indices : torch.Tensor, optional
        ``[requests * next_n, top_k]``, or so many elements in one dimension; int32, contiguous.
        Overwritten. Default: a new tensor.
    out_values : torch.Tensor, optional
        The same with the dtype of ``logits``, if ``return_values``; otherwise it is left alone.
    backend : str
        ``auto`` or ``radix_cutlass``, for which there is one kernel. FlashInfer's others, which are
        for compute capability 10.0, are an error.
    load_balance : bool
        Taken for compatibility, and without effect.
    workspace : dict, optional
        Taken for compatibility, and not read.
    deterministic : bool
        Positions in ascending order, and of scores that equal the k-th largest the first. Default:
        False.

    Returns
    -------
    tuple
        Positions within each row, ``[requests * next_n, top_k]``, int32, then -1 where a row has
        fewer scores; and their values, 0 behind them, or None.

    Raises
    ------
    ValueError
        A tensor that is not on a CUDA device; another dtype, shape or stride; numbers out of range;
        outputs that overlap another argument; an unknown backend.
    BackendSupportedError
        A backend of FlashInfer for compute capability 10.0.

    Notes
    -----
    Exact. ``deterministic`` is an addition to FlashInfer's signature. One launch; allocates only
    missing outputs; safe in CUDA graphs, whose replays may have other lengths; not differentiable.

    Examples
    --------
    >>> import torch, precast
    >>> scores = torch.tensor([[1.0, 4.0, 3.0, 9.0]])
    >>> lengths = torch.tensor([3], dtype=torch.int32)
    >>> with precast.reference_mode():
    ...     indices, values = precast.top_k_varlen(scores, lengths, 2, return_values=True)
    >>> indices.tolist(), values.tolist()
    ([[1, 2]], [[4.0, 3.0]])
    """
    if backend not in _BACKENDS:
        if backend in _BLACKWELL:
            raise BackendSupportedError(
                f"top_k_varlen: backend {backend!r} is for compute capability 10.0 in FlashInfer, "
                "and precast has one kernel for all GPUs. Fix: backend='auto'"
            )
        legal = ", ".join(_BACKENDS)
        raise ValueError(f"top_k_varlen: backend must be one of {legal}, got {backend!r}")
    shape = (logits.shape[0], top_k)
    indices = _flat("out_indices", out_indices, shape)
    if indices is None:
        indices = torch.empty(shape, dtype=torch.int32, device=logits.device)
    values = None
    if return_values:
        values = _flat("out_values", out_values, shape)
        if values is None:
            values = torch.empty(shape, dtype=logits.dtype, device=logits.device)
    _VARLEN.launch(logits, seq_lens, top_k, compress_ratio, next_n, deterministic, indices, values)
    return indices, values
