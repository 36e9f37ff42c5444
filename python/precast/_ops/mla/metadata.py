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


def metadata_of(name: str, given: Any) -> tuple[MLAPlanMetadata, bool]:
    """Return the one form that ``plan()`` was given, and whether it is a list of tensors."""
    fields = [*_CSR, *_DENSE, "max_q_len"]
    flat = [field for field in fields if getattr(given, field) is not None]
    if given.metadata is not None:
        if not isinstance(given.metadata, MLAPlanMetadata):
            raise TypeError(
                f"{name}: metadata must be an MLAPlanMetadata, got {type(given.metadata).__name__}"
            )
        if flat:
            raise ValueError(
                f"{name}: metadata and {flat[0]} were both given; give the batch in one form"
            )
        metadata, is_flat_csr = given.metadata, False
    else:
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
        metadata = MLAPlanMetadata(*(getattr(given, field) for field in fields))
    _check_forms(name, metadata)
    return metadata, is_flat_csr


def _check_forms(name: str, metadata: MLAPlanMetadata) -> None:
    """Raise for a form of which something is missing."""
    forms = {}
    for form, fields in (("a list", _CSR), ("a table", _DENSE)):
        given = [field for field in fields if getattr(metadata, field) is not None]
        forms[form] = bool(given)
        if given and len(given) < len(fields):
            missing = ", ".join(field for field in fields if field not in given)
            raise ValueError(f"{name}: {form} of pages also needs {missing}, got None")
    if not any(forms.values()):
        raise ValueError(f"{name}: metadata must have a list or a table of pages, got neither")
    if metadata.max_q_len is not None and not forms["a table"]:
        raise ValueError(f"{name}: max_q_len belongs to a table of pages, got a list")


def tables_of(name: str, metadata: MLAPlanMetadata, device: torch.device) -> Tables:
    """Return the tables of a plan, wherever they are; nothing is copied to the host."""
    m: Any = metadata
    if m.qo_indptr is not None:
        tables = Tables(m.qo_indptr, m.kv_indptr, None, m.kv_indices, m.kv_len_arr)
        batch = m.kv_len_arr.shape[0]
        shapes = {"qo_indptr": batch + 1, "kv_indptr": batch + 1, "kv_len_arr": batch}
    else:
        batch = m.seq_lens.shape[0] if m.seq_lens.dim() else 0
        if m.block_tables.dim() != 2 or m.block_tables.shape[0] != batch:
            raise ValueError(
                f"{name}: block_tables must have shape [{batch}, pages] as seq_lens has {batch} "
                f"requests, got {[*m.block_tables.shape]}"
            )
        shapes = {"cum_seq_lens_q": batch + 1, "seq_lens": batch}
        indptr, indices = list_of_pages(m.block_tables, device)
        tables = Tables(m.cum_seq_lens_q, indptr, None, indices, m.seq_lens)
    for field, size in shapes.items():
        shape = [*getattr(m, field).shape]
        if shape != [size]:
            raise ValueError(f"{name}: {field} must have shape [{size}], got {shape}")
    if m.kv_indices is not None and m.kv_indices.dim() != 1:
        raise ValueError(
            f"{name}: kv_indices must have one dimension, got shape {[*m.kv_indices.shape]}"
        )
    for field in (*_CSR, *_DENSE):
        tensor = getattr(m, field)
        if tensor is not None and tensor.device not in (device, torch.device("cpu")):
            raise ValueError(
                f"{name}: {field} must be on {device} or on the host, got {tensor.device}"
            )
    return tables


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
