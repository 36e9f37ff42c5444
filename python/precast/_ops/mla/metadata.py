# SPDX-License-Identifier: Apache-2.0
"""The lengths and pages of a batch, in the two forms in which ``plan()`` takes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from precast._base.torch import torch
from precast._ops.attention.buffers import stepped_range
from precast._ops.attention.plan import Tables

_CSR = ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr")
_DENSE = ("cum_seq_lens_q", "block_tables", "seq_lens")
_FIELDS = (*_CSR, *_DENSE, "max_q_len")


@dataclass(frozen=True)
class MLAPlanMetadata:
    """Lengths and pages of a batch for :meth:`BatchMLAPagedAttentionWrapper.plan`.

    A form is given whole or not at all. Where both are there, they say the same, and the first is
    read: nothing on the device is compared.

    Parameters
    ----------
    qo_indptr, kv_indptr, kv_indices, kv_len_arr : torch.Tensor, optional
        A list of pages, as :meth:`BatchMLAPagedAttentionWrapper.plan` takes it.
    cum_seq_lens_q, block_tables, seq_lens : torch.Tensor, optional
        A table of pages, as there.
    max_q_len : int, optional
        The most queries of a request, with a table.

    Examples
    --------
    >>> import torch
    >>> from precast.mla import MLAPlanMetadata
    >>> one = torch.tensor([0, 1], dtype=torch.int32)
    >>> MLAPlanMetadata.csr(one, one, one[:1], one[1:]).block_tables is None
    True
    """

    qo_indptr: torch.Tensor | None = None
    kv_indptr: torch.Tensor | None = None
    kv_indices: torch.Tensor | None = None
    kv_len_arr: torch.Tensor | None = None
    cum_seq_lens_q: torch.Tensor | None = None
    block_tables: torch.Tensor | None = None
    seq_lens: torch.Tensor | None = None
    max_q_len: int | None = None

    @classmethod
    def csr(
        cls,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_len_arr: torch.Tensor,
    ) -> MLAPlanMetadata:
        """Return the metadata of a list of pages."""
        return cls(qo_indptr, kv_indptr, kv_indices, kv_len_arr)

    @classmethod
    def dense(
        cls,
        cum_seq_lens_q: torch.Tensor,
        block_tables: torch.Tensor,
        seq_lens: torch.Tensor,
        max_q_len: int | None = None,
    ) -> MLAPlanMetadata:
        """Return the metadata of a table of pages."""
        return cls(None, None, None, None, cum_seq_lens_q, block_tables, seq_lens, max_q_len)

    @classmethod
    def dual(
        cls,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_len_arr: torch.Tensor,
        *,
        cum_seq_lens_q: torch.Tensor,
        block_tables: torch.Tensor,
        seq_lens: torch.Tensor,
        max_q_len: int | None = None,
    ) -> MLAPlanMetadata:
        """Return both forms of one batch."""
        return cls(
            qo_indptr,
            kv_indptr,
            kv_indices,
            kv_len_arr,
            cum_seq_lens_q,
            block_tables,
            seq_lens,
            max_q_len,
        )


def batch_of(name: str, given: Any) -> tuple[Any, bool]:
    """Return what has the one form that ``plan()`` was given, and whether it is a list of tensors.

    That is the arguments themselves or their metadata, which have fields of the same names.
    """
    # Why first: one whole form is all that engines give.
    if given.metadata is None:
        has_table, has_list = _is_whole_table(given), _is_whole_list(given)
        no_table = given.cum_seq_lens_q is given.block_tables is given.seq_lens is None
        no_list = given.qo_indptr is given.kv_indptr is given.kv_indices is given.kv_len_arr is None
        if has_list and no_table and given.max_q_len is None:
            return given, True
        if has_table and no_list:
            return given, False
    flat = [field for field in _FIELDS if getattr(given, field) is not None]
    if given.metadata is not None:
        if not isinstance(given.metadata, MLAPlanMetadata):
            raise TypeError(
                f"{name}: metadata must be an MLAPlanMetadata, got {type(given.metadata).__name__}"
            )
        if flat:
            raise ValueError(
                f"{name}: metadata and {flat[0]} were both given; give the batch in one form"
            )
        _check_forms(name, given.metadata)
        return given.metadata, False
    if not flat:
        raise TypeError(
            f"{name}: the batch is missing. Fix: pass metadata=MLAPlanMetadata.csr(...) or "
            f".dense(...)"
        )
    is_flat_csr = flat[0] in _CSR
    if is_flat_csr and flat[-1] not in _CSR:
        raise ValueError(
            f"{name}: {flat[0]} and {flat[-1]} are of two forms of a batch; give one of them"
        )
    _check_forms(name, given)
    return given, is_flat_csr


def _is_whole_list(batch: Any) -> bool:
    has_bounds = not (batch.qo_indptr is None or batch.kv_indptr is None)
    return has_bounds and not (batch.kv_indices is None or batch.kv_len_arr is None)


def _is_whole_table(batch: Any) -> bool:
    has_lengths = not (batch.cum_seq_lens_q is None or batch.seq_lens is None)
    return has_lengths and batch.block_tables is not None


def _check_forms(name: str, batch: Any) -> None:
    """Raise for a form of which something is missing."""
    forms = {}
    for form, fields in (("a list", _CSR), ("a table", _DENSE)):
        missing = [field for field in fields if getattr(batch, field) is None]
        forms[form] = len(missing) < len(fields)
        if forms[form] and missing:
            raise ValueError(f"{name}: {form} of pages also needs {', '.join(missing)}, got None")
    if not any(forms.values()):
        raise ValueError(f"{name}: metadata must have a list or a table of pages, got neither")
    if batch.max_q_len is not None and not forms["a table"]:
        raise ValueError(f"{name}: max_q_len belongs to a table of pages, got a list")


def tables_of(name: str, batch: Any, device: torch.device) -> tuple[Tables, int, bool]:
    """Return the tables of a plan, the number of requests, and whether kernels read them in place.

    Nothing is copied to the host.
    """
    bounds = batch.qo_indptr
    is_list = bounds is not None
    if is_list:
        indptr, indices, lens = batch.kv_indptr, batch.kv_indices, batch.kv_len_arr
    else:
        bounds, lens, table = batch.cum_seq_lens_q, batch.seq_lens, batch.block_tables
        requests = lens.numel()
        if table.dim() != 2 or table.shape[0] != requests:
            raise ValueError(
                f"{name}: block_tables must have shape [{requests}, pages] as seq_lens has "
                f"{requests} requests, got {[*table.shape]}"
            )
        indptr, indices = list_of_pages(table, device)
    count = lens.numel()
    if not (bounds.shape == indptr.shape == (count + 1,) and lens.dim() == indices.dim() == 1):
        _raise_shape(name, batch, is_list, count)
    in_place = True
    for tensor in (bounds, indptr, indices, lens):
        if tensor.device != device:
            in_place = False
            _check_places(name, batch, device)
        elif tensor.dtype is not torch.int32:
            in_place = False
    return Tables(bounds, indptr, None, indices, lens), count, in_place


def places_of(batch: Any) -> tuple[Any, ...]:
    """Return what a params block depends on of a list of pages."""
    # Why not with a loop over the tensors: every plan does this, and a loop takes half as long
    # again.
    qo_indptr, kv_indptr = batch.qo_indptr, batch.kv_indptr
    indices, lens = batch.kv_indices, batch.kv_len_arr
    return (
        *(qo_indptr.data_ptr(), qo_indptr.shape, qo_indptr.stride(), qo_indptr.dtype),
        *(kv_indptr.data_ptr(), kv_indptr.shape, kv_indptr.stride(), kv_indptr.dtype),
        *(indices.data_ptr(), indices.shape, indices.stride(), indices.dtype),
        *(lens.data_ptr(), lens.shape, lens.stride(), lens.dtype),
    )


def _raise_shape(name: str, batch: Any, is_list: bool, count: int) -> None:
    """Raise for the tensor whose shape is not that of a batch of ``count`` requests."""
    fields = ("qo_indptr", "kv_indptr", "kv_len_arr") if is_list else ("cum_seq_lens_q", "seq_lens")
    for field in fields:
        shape, size = [*getattr(batch, field).shape], count + (field != fields[-1])
        if shape != [size]:
            raise ValueError(f"{name}: {field} must have shape [{size}], got {shape}")
    raise ValueError(
        f"{name}: kv_indices must have one dimension, got shape {[*batch.kv_indices.shape]}"
    )


def _check_places(name: str, batch: Any, device: torch.device) -> None:
    """Raise for a tensor that is neither on the device nor on the host."""
    for field in (*_CSR, *_DENSE):
        tensor = getattr(batch, field)
        if tensor is not None and tensor.device not in (device, torch.device("cpu")):
            raise ValueError(
                f"{name}: {field} must be on {device} or on the host, got {tensor.device}"
            )


def list_of_pages(
    block_tables: torch.Tensor, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a table as a list in which each request starts at its row, without a copy of it.

    Rows that do not begin at multiples of one step of at least their length are copied.
    """
    batch, width = block_tables.shape
    step = block_tables.stride(0) if batch > 1 and width else width
    if (width > 1 and block_tables.stride(1) != 1) or step < width:
        block_tables, step = block_tables.contiguous(), width
    indices = (
        block_tables.as_strided((max(0, (batch - 1) * step + width),), (1,))
        if batch
        else (block_tables.flatten())
    )
    indptr, _ = stepped_range(batch + 1, step, device)
    return indptr, indices
