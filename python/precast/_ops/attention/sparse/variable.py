# SPDX-License-Identifier: Apache-2.0
"""Block-sparse attention with blocks of any sizes, and a mask of blocks for each KV head.

Source: Ye et al., FlashInfer, arXiv:2501.01005 (block-sparse rows as a page table).
"""

from __future__ import annotations

import math
from typing import Any

from precast._base.torch import torch
from precast._op.docs import documented
from precast._op.validation import check_elements_apart, check_memory_apart
from precast._ops.attention import validation
from precast._ops.attention._docs import PLAN, RUN, WRAPPER
from precast._ops.attention.parts import of_part, passed_on
from precast._ops.attention.plan import Dtype
from precast._ops.attention.prefill.paged import BatchPrefillWithPagedKVCacheWrapper
from precast._ops.attention.reference import paged_requests, reference_outputs
from precast._ops.attention.signature import checked_first, gathers, public_arguments
from precast._ops.attention.sparse.bsr import BlockRows, check_tokens
from precast._ops.attention.sparse.trace import variable_blocks_trace
from precast.api_logging import precast_api

#: The most tokens of a page. Larger ones save nothing.
_MOST_PAGE = 128


def variable_block_sparse_attention_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    block_mask_map: torch.Tensor,
    block_row_sz: torch.Tensor,
    block_col_sz: torch.Tensor,
    causal: bool = False,
    sm_scale: float | None = None,
    logits_soft_cap: float | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """:class:`VariableBlockSparseAttentionWrapper` in plain PyTorch: one plan and one run.

    Parameters
    ----------
    q, k, v : torch.Tensor
        As for ``run``, any device.
    block_mask_map, block_row_sz, block_col_sz : torch.Tensor
        The matrix, and so are the other options, as for ``plan``.

    Examples
    --------
    >>> import torch
    >>> q, k = torch.zeros(1, 2, 4), torch.arange(4.0).view(1, 4, 1).expand(1, 4, 4)
    >>> mask, rows, columns = torch.tensor([[[1, 0], [1, 1]]]), torch.ones(1, 2), [[1, 3]]
    >>> blocks = mask, rows.int(), torch.tensor(columns)
    >>> variable_block_sparse_attention_reference(q, k, k, *blocks)[0, :, 0]
    tensor([0.0000, 1.5000])
    """
    kv_heads, kv_len, dim = k.shape
    rows = q.unflatten(0, (kv_heads, -1)).transpose(1, 2).flatten(0, 1)
    # Each row of each head is a request, and each key a page.
    indptr, indices = _page_table(block_mask_map != 0, block_col_sz.to(torch.int64))
    pages = k.reshape(kv_heads * kv_len, 1, 1, dim), v.reshape(kv_heads * kv_len, 1, 1, -1)
    bounds = [0, *block_row_sz.flatten().cumsum(0).tolist()]
    last = indptr.diff().clamp(max=1)
    out, lse = reference_outputs(
        rows,
        paged_requests(*pages, bounds, indptr, indices, last),
        v.shape[-1],
        causal=causal,
        sm_scale=sm_scale,
        logits_soft_cap=logits_soft_cap,
        return_lse=True,
        o_dtype=None,
    )
    by_head = [x.unflatten(0, (kv_heads, -1)).transpose(1, 2).flatten(0, 1) for x in (out, lse)]
    return (by_head[0], by_head[1]) if return_lse else by_head[0]


_TRACE = variable_blocks_trace(
    variable_block_sparse_attention_reference, lambda: VariableBlockSparseAttentionWrapper
)


class _BlockRows(BlockRows):
    _name = "VariableBlockSparseAttentionWrapper"
    _run_arguments = public_arguments(BatchPrefillWithPagedKVCacheWrapper.run, f"{_name}.run")


@documented(WRAPPER, PLAN)
class VariableBlockSparseAttentionWrapper:
    """Compute attention in blocks of any sizes, which each KV head chooses for itself.

    As :class:`BlockSparseAttentionWrapper`, with heads first in all tensors. The queries of a block
    row see the keys of the block columns that the mask of their KV head has.

    Examples
    --------
    >>> import torch, precast
    >>> with precast.reference_mode():
    ...     wrapper = precast.VariableBlockSparseAttentionWrapper(torch.empty(1024).byte())
    ...     mask = torch.tensor([[[True, False], [True, True]]])
    ...     rows, columns = torch.tensor([[1, 1]]), torch.tensor([[1, 3]])
    ...     wrapper.plan(mask, rows, columns, 1, 1, 64, q_data_type="float32")
    ...     k = torch.arange(4.0).view(1, 4, 1).expand(1, 4, 64)
    ...     wrapper.run(torch.zeros(1, 2, 64), k, k)[0, :, 0]
    tensor([0.0000, 1.5000])
    """

    _name = "VariableBlockSparseAttentionWrapper"
    #: The same in plain PyTorch, in one call.
    reference = staticmethod(variable_block_sparse_attention_reference)

    @precast_api
    @checked_first
    def __init__(self, float_workspace_buffer: torch.Tensor, backend: str = "auto") -> None:
        self._rows = _BlockRows(float_workspace_buffer, backend=backend)
        #: Query heads, KV heads, queries and keys of a head; of the latest plan.
        self._sizes = (0, 0, 0, 0)
        #: What it was given, which traces read.
        self._block_mask_map: torch.Tensor | None = None
        self._block_row_sz: torch.Tensor | None = None
        self._block_col_sz: torch.Tensor | None = None

    @checked_first
    @documented(BatchPrefillWithPagedKVCacheWrapper.reset_workspace_buffer)
    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor
    ) -> None:
        """Take other workspaces; then plan again."""
        self._rows.reset_workspace_buffer(float_workspace_buffer, int_workspace_buffer)

    # -- plan -------------------------------------------------------------------------------------

    def _plan_blocks(self, given: Any) -> None:
        name, heads = f"{self._name}.plan", (given.num_qo_heads, given.num_kv_heads)
        validation.check_heads(name, *heads)
        if given.pos_encoding_mode == "ALIBI":
            raise NotImplementedError(
                f"{name}: pos_encoding_mode must be NONE or ROPE_LLAMA, got 'ALIBI': heads are "
                f"requests of the kernel here, which do not have slopes of their own"
            )
        mask = given.block_mask_map
        counts = given.block_row_sz.shape[-1:], given.block_col_sz.shape[-1:]
        for argument, tensor, sizes in (
            ("block_mask_map", mask, (*counts[0], *counts[1])),
            ("block_row_sz", given.block_row_sz, counts[0]),
            ("block_col_sz", given.block_col_sz, counts[1]),
        ):
            shape = (heads[1], *sizes)
            if tensor.shape != shape:
                raise ValueError(
                    f"{name}: {argument} must have shape {[*shape]} for {heads[1]} KV heads, "
                    f"got {[*tensor.shape]}"
                )
        rows, qo_len = _whole(name, "block_row_sz", given.block_row_sz)
        columns, kv_len = _whole(name, "block_col_sz", given.block_col_sz)
        page_size = math.gcd(_MOST_PAGE, *columns.flatten().tolist())
        pages = (columns // page_size).to(mask.device)
        indptr, indices = _page_table(mask != 0, pages)
        tables = {
            "qo_indptr": torch.nn.functional.pad(rows.flatten().cumsum(0), (1, 0)).int(),
            "paged_kv_indptr": indptr,
            "paged_kv_indices": indices,
            # All pages are full, and a row without any has no last one.
            "paged_kv_last_page_len": indptr.diff().clamp_(max=1).mul_(page_size),
        }
        more = {
            "num_qo_heads": heads[0] // heads[1],
            "num_kv_heads": 1,
            "head_dim_qk": given.head_dim,
            "page_size": page_size,
        }
        with of_part("block rows of each KV head as requests"):
            plan = BatchPrefillWithPagedKVCacheWrapper.plan
            self._rows.plan(**passed_on(plan, given, **tables, **more))
        self._sizes = (*heads, qo_len, kv_len)
        self._block_mask_map = mask
        self._block_row_sz, self._block_col_sz = given.block_row_sz, given.block_col_sz

    @precast_api
    @documented(PLAN)
    @gathers(_plan_blocks, ("causal", "use_fp16_qk_reduction", "non_blocking"))
    def plan(
        self,
        block_mask_map: torch.Tensor,
        block_row_sz: torch.Tensor,
        block_col_sz: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        q_data_type: torch.dtype | str = "float16",
        kv_data_type: Dtype = None,
    ) -> None:
        """Divide the work of a matrix, for all runs until the next plan.

        Parameters
        ----------
        block_mask_map : torch.Tensor
            ``[num_kv_heads, block rows, block columns]``, bool or integers: what is not 0 attends.
        block_row_sz : torch.Tensor
            ``[num_kv_heads, block rows]``, integers: the queries of each block row. Their sum is
            the same for every head.
        block_col_sz : torch.Tensor
            ``[num_kv_heads, block columns]``, likewise: the keys of each block column.
        head_dim : int
            64, 80, 96, 128, 256 or 512.
        causal : bool
            As for :meth:`BlockSparseAttentionWrapper.plan`.
        pos_encoding_mode : str
            ``NONE`` or ``ROPE_LLAMA``; positions are counted among the keys that a block row sees.

        Raises
        ------
        precast.errors.UnsupportedConfigError
            A ``head_dim`` or dtype that no kernel is for (a ``ValueError``).
        NotImplementedError
            ``ALIBI``.
        ValueError
            Shapes that do not fit each other; sizes that are negative, or whose sums differ from
            head to head; heads that do not divide.

        Notes
        -----
        Waits for the sizes, which are copied to the host, and for the number of blocks: this plan
        cannot be captured. The size of a page is the greatest common divisor of the column sizes
        and 128; sizes that are multiples of 16 or more are fastest.
        """

    begin_forward = plan

    # -- run --------------------------------------------------------------------------------------

    def _pages(self, q: Any, k: Any, v: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values as pages of one head; in the same memory if it is contiguous."""
        name, shape = f"{self._name}.run", self._rows._plan.shape
        self._rows._check_planned(name)
        qo_heads, kv_heads, qo_len, kv_len = self._sizes
        dim, page_size = shape.head_dim_qk, shape.page_size
        check_tokens(name, "q", q, (qo_heads, qo_len, dim))
        for argument, x in (("k", k), ("v", v)):
            check_tokens(name, argument, x, (kv_heads, kv_len, dim))
        pages = kv_heads * kv_len // page_size, page_size, 1, dim
        return k.reshape(pages), v.reshape(pages)

    def _as_rows(self, x: torch.Tensor) -> torch.Tensor:
        """Turn ``[heads, tokens, ...]`` to ``[KV heads * tokens, heads of a group, ...]``."""
        by_head = x.unflatten(0, (self._sizes[1], -1)).transpose(1, 2)
        return by_head.flatten(0, 1)

    def _by_group(self, x: torch.Tensor) -> torch.Tensor:
        """Turn rows to ``[KV heads, heads of a group, tokens, ...]`` in the same memory."""
        return x.unflatten(0, (self._sizes[1], self._sizes[2])).transpose(1, 2)

    def _attend(self, given: Any) -> Any:
        q, out, return_lse = given.q, given.out, given.return_lse
        lse = given.lse if return_lse else None
        pages = self._pages(q, given.k, given.v)
        validation.check_flags(f"{self._name}.run", return_lse=return_lse)
        name = f"{self._name}.run"
        shapes = (out, q.shape, self._rows._cached_o_data_type), (lse, q.shape[:-1], torch.float32)
        for argument, (into, shape, dtype) in zip(("out", "lse"), shapes):
            if into is not None:
                validation.check_shape_dtype_device(into, shape, dtype, q.device, argument)
                check_elements_apart(name, argument, into)
        if not (out is None or lse is None):
            check_memory_apart(name, "out", out, lse, "lse")
        options: dict[str, Any] = {"return_lse": return_lse, "enable_pdl": given.enable_pdl}
        for name, into in (("out", out), ("lse", lse)):
            options[name] = None if into is None else self._rows_in(into)
        result = self._rows.run(self._as_rows(q), pages, **options)
        if isinstance(result, tuple):
            return self._returned(result[0], out), self._returned(result[1], lse)
        return self._returned(result, out)

    @precast_api(trace=_TRACE)
    @documented(RUN)
    @gathers(_attend, ("lse", "return_lse"))
    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Compute attention by the latest plan.

        Parameters
        ----------
        q : torch.Tensor
            ``[num_qo_heads, queries, head_dim]``.
        k, v : torch.Tensor
            ``[num_kv_heads, keys, head_dim]``. Contiguous ones are read where they are.
        out, lse : torch.Tensor, optional
            Where to write: the shape of ``q`` and, float32, ``[num_qo_heads, queries]``. Default:
            new ones.
        return_lse : bool
            Whether to return the base-2 log-sum-exp of the logits, too.

        Returns
        -------
        torch.Tensor or tuple of torch.Tensor
            The output, in the shape of ``q``, and the log-sum-exp if asked for. A query that sees
            nothing has output 0 and log-sum-exp minus infinity.

        Raises
        ------
        precast.errors.PlanMismatchError
            No plan (an ``AssertionError`` and a ``ValueError``).
        ValueError
            Shapes or dtypes that are not those of :meth:`plan`; another device.

        Notes
        -----
        With one query head for each KV head and contiguous tensors it is one launch. With more,
        queries and outputs are copied, because the kernel has the heads of a group side by side.
        FlashInfer's ``out`` has the kernel's own order. Safe in CUDA graphs; not differentiable.
        """

    def _rows_in(self, into: torch.Tensor) -> torch.Tensor | None:
        """Return rows in the caller's memory, if they can be there."""
        is_same = self._sizes[0] == self._sizes[1] and into.is_contiguous()
        return self._as_rows(into) if is_same else None

    def _returned(self, rows: torch.Tensor, into: torch.Tensor | None) -> torch.Tensor:
        """Return what a run has made with heads first, in the caller's tensor if there is one."""
        by_group = self._by_group(rows)
        if into is None:
            return by_group.flatten(0, 1).contiguous()
        if self._rows_in(into) is not None:
            return into
        into.unflatten(0, (self._sizes[1], -1)).copy_(by_group)
        return into

    # -- deprecated -------------------------------------------------------------------------------

    def _forward(self, given: Any) -> Any:
        pages = self._pages(given.q, given.k, given.v)
        q, forward = self._as_rows(given.q), BatchPrefillWithPagedKVCacheWrapper.forward
        more = {"q": q, "paged_kv_cache": pages, "causal": self._rows._causal}
        return self._returned(self._rows.forward(**passed_on(forward, given, **more)), None)

    @gathers(_forward, ("use_fp16_qk_reduction",))
    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> torch.Tensor:
        """Call :meth:`run` with options that :meth:`plan` has now, too."""

    def end_forward(self) -> None:
        """Do nothing; older engines call it."""


def _whole(name: str, argument: str, sizes: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return sizes on the host, and their sum of a head; raise unless it is that of every head."""
    sizes = sizes.to("cpu", torch.int64)
    if bool((sizes < 0).any()):
        raise ValueError(f"{name}: {argument} must be >= 0, got {int(sizes.min())}")
    sums = sizes.sum(1).tolist()
    if len({*sums}) > 1:
        raise ValueError(
            f"{name}: {argument} must have the same sum for every KV head, got {min(sums)} to "
            f"{max(sums)}"
        )
    return sizes, sums[0]


def _page_table(mask: torch.Tensor, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return where the pages of each row of ``mask`` start, and the pages; ``pages`` counts them.

    The pages of a block column follow one another, and so do block columns and heads.
    """
    counts = (mask * pages.unsqueeze(1)).sum(-1).flatten()
    indptr = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
    starts = (pages.flatten().cumsum(0) - pages.flatten()).view(pages.shape)
    head, _, column = mask.nonzero(as_tuple=True)
    lengths, first = pages[head, column], starts[head, column]
    before = lengths.cumsum(0) - lengths
    offsets = torch.repeat_interleave(first - before, lengths)
    indices = offsets + torch.arange(offsets.numel(), device=mask.device)
    return indptr, indices.int()
