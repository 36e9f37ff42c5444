# SPDX-License-Identifier: Apache-2.0
"""Compute where the tokens of a batch stand in a paged KV cache.

Source: Ye et al., FlashInfer, arXiv:2501.01005.
"""

from __future__ import annotations

from precast._base.torch import torch
from precast._op.export import Export, launches
from precast._op.validation import check_dtype, check_indices, check_memory_apart, check_rank
from precast._ops.paged._checks import check_indptr
from precast.api_logging import precast_api
from precast.trace import Const, Scalar, Tensor, TraceTemplate, Var


def get_batch_indices_positions_reference(
    append_indptr: torch.Tensor, seq_lens: torch.Tensor, nnz: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`get_batch_indices_positions` in plain PyTorch on any device."""
    indptr, batch = append_indptr.long(), append_indptr.numel() - 1
    rows = torch.arange(nnz, device=indptr.device)
    after = torch.searchsorted(indptr, rows, right=True)
    used = (after > 0) & (after <= batch)
    # One more, for the rows without a request.
    lens = torch.nn.functional.pad(seq_lens.long(), (0, 1))
    request = (after - 1).where(used, batch)
    positions = rows + lens[request] - indptr[after.clamp(max=batch)]
    return request.where(used, -1).int(), positions.where(used, 0).int()


def _check(
    export: str,
    append_indptr: torch.Tensor,
    seq_lens: torch.Tensor,
    nnz: int,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
) -> None:
    to = "append_indptr"
    check_indptr(export, to, append_indptr)
    check_indices(export, to, append_indptr, append_indptr.numel(), append_indptr, to)
    check_indices(export, "seq_lens", seq_lens, append_indptr.numel() - 1, append_indptr, to)
    for output, tensor in {"batch_indices": batch_indices, "positions": positions}.items():
        check_dtype(export, output, tensor, torch.int32)
        check_indices(export, output, tensor, nnz, append_indptr, to)
        for input, other in {to: append_indptr, "seq_lens": seq_lens}.items():
            check_memory_apart(export, output, tensor, other, input)
    check_memory_apart(export, "positions", positions, batch_indices, "batch_indices")


def _new(append_indptr: torch.Tensor, nnz: int) -> torch.Tensor:
    if not 0 <= nnz < 2**31:  # Before gigabytes are allocated; check_ranges() names the limits.
        raise ValueError("nnz")
    return torch.empty(+nnz, dtype=torch.int32, device=append_indptr.device)


_GET_BATCH_INDICES_POSITIONS = Export(
    "page",
    "get_batch_indices_positions",
    "append_indptr:tensor seq_lens:tensor nnz:size(0-2147483647) batch_indices!:tensor "
    "positions!:tensor enable_pdl:pdl",
    reference=get_batch_indices_positions_reference,
    check=_check,
    new={"batch_indices": _new, "positions": _new},
)


def _fill(call: dict[str, object]) -> None:
    indptr, lens = call["append_indptr"], call["seq_lens"]
    assert isinstance(indptr, torch.Tensor)
    assert isinstance(lens, torch.Tensor)
    starts = 3 * torch.arange(lens.numel() + 1, dtype=indptr.dtype)
    call["append_indptr"] = starts.to(indptr.device)
    lens.copy_(7 + torch.arange(lens.numel()))


_TRACE = TraceTemplate(
    op_type="page_append",
    name_prefix="get_batch_indices_positions",
    description="The request and the position of every row of a ragged tensor that is appended.",
    axes={
        "batch_size": Var("Requests."),
        "batch_size_plus_1": Var("One more than requests."),
        "nnz": Const("nnz", "Rows of the ragged tensor."),
    },
    inputs={
        "append_indptr": Tensor(["batch_size_plus_1"], dtype="int32"),
        "seq_lens": Tensor(["batch_size"], dtype="int32"),
        "nnz_kv": Scalar("int32", param="nnz"),
    },
    outputs={
        "batch_indices": Tensor(["nnz"], dtype="int32", param="batch_indices"),
        "positions": Tensor(["nnz"], dtype="int32", param="positions"),
    },
    reference=get_batch_indices_positions_reference,
    constraints=["batch_size_plus_1 == batch_size + 1"],
    fill=_fill,
)


@precast_api(trace=_TRACE)
@launches(_GET_BATCH_INDICES_POSITIONS)
def get_batch_indices_positions(
    append_indptr: torch.Tensor,
    seq_lens: torch.Tensor,
    nnz: int,
    batch_indices: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    r"""Find the request and the position of every row of a ragged tensor that is appended.

    .. math::

        batch\_indices_i = b, \quad positions_i = seq\_lens_b - indptr_{b+1} + i
        \quad \text{where} \quad indptr_b \le i < indptr_{b+1}

    so that the last row of a request has its last position. Rows of no request get -1 and
    position 0; the ops that append leave them out.

    Parameters
    ----------
    append_indptr : torch.Tensor
        ``[batch_size + 1]``, int32 or int64, ascending, contiguous, on a CUDA device: where the
        rows of each request start.
    seq_lens : torch.Tensor
        ``[batch_size]``, likewise: the lengths with the appended rows, as :func:`get_seq_lens`
        gives them.
    nnz : int
        Rows of the result: ``append_indptr[-1]``, or more where a batch is padded.
    batch_indices, positions : torch.Tensor, optional
        Where to write: ``[nnz]``, int32, contiguous, on the device of ``append_indptr``. Default:
        new tensors.

    Returns
    -------
    tuple of torch.Tensor
        ``batch_indices`` and ``positions``.

    Raises
    ------
    ValueError
        A tensor that is not on a CUDA device; a dtype, shape or strides other than above.

    Notes
    -----
    ``nnz`` is a number of the CPU, so nothing waits for the GPU. Allocates only missing outputs;
    safe in CUDA graphs. Every row of the outputs is written. Source: arXiv:2501.01005.

    Examples
    --------
    >>> import torch, precast
    >>> indptr, lens = torch.tensor([0, 1, 3]), torch.tensor([5, 7])
    >>> with precast.reference_mode():
    ...     precast.get_batch_indices_positions(indptr, lens, 4)
    (tensor([ 0,  1,  1, -1], dtype=torch.int32), tensor([4, 5, 6, 0], dtype=torch.int32))
    """


@precast_api
def get_seq_lens(
    kv_indptr: torch.Tensor, kv_last_page_len: torch.Tensor, page_size: int
) -> torch.Tensor:
    r"""Compute the length of each request of a paged KV cache.

    .. math::

        seq\_lens_b = \max(indptr_{b+1} - indptr_b - 1, 0) \cdot page\_size + last\_page\_len_b

    Parameters
    ----------
    kv_indptr : torch.Tensor
        ``[batch_size + 1]``, integers, on any device: where the pages of each request start.
    kv_last_page_len : torch.Tensor
        ``[batch_size]``: entries of the last page; 0 for a request without pages.
    page_size : int
        Entries of a page.

    Returns
    -------
    torch.Tensor
        ``[batch_size]``, on the device of the arguments.

    Raises
    ------
    ValueError
        Shapes other than above.

    Notes
    -----
    Plain PyTorch, on CPU tensors too; it allocates. Source: arXiv:2501.01005.

    Examples
    --------
    >>> import torch, precast
    >>> precast.get_seq_lens(torch.tensor([0, 2, 2, 3]), torch.tensor([5, 0, 16]), 16)
    tensor([21,  0, 16])
    """
    check_rank("get_seq_lens", "kv_indptr", kv_indptr, 1, 1)
    check_rank("get_seq_lens", "kv_last_page_len", kv_last_page_len, 1, 1)
    if kv_last_page_len.shape[0] != kv_indptr.shape[0] - 1:
        raise ValueError(
            f"get_seq_lens: kv_last_page_len must have shape [{kv_indptr.shape[0] - 1}], one less "
            f"than kv_indptr {[*kv_indptr.shape]}, got {[*kv_last_page_len.shape]}"
        )
    full_pages = (kv_indptr[1:] - kv_indptr[:-1] - 1).clamp(min=0)
    return full_pages * page_size + kv_last_page_len
