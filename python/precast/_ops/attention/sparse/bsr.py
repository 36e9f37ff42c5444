# SPDX-License-Identifier: Apache-2.0
"""Block-sparse attention: blocks of columns are pages, and a block row is a request.

Source: Ye et al., FlashInfer, arXiv:2501.01005 (block-sparse rows as a page table).
"""

from __future__ import annotations

from typing import Any

from precast._base.torch import torch
from precast._op.docs import documented
from precast._ops.attention._docs import PLAN, RUN, WRAPPER
from precast._ops.attention.parts import of_part, passed_on
from precast._ops.attention.plan import Dtype
from precast._ops.attention.prefill.paged import BatchPrefillWithPagedKVCacheWrapper
from precast._ops.attention.reference import paged_requests, reference_outputs
from precast._ops.attention.run import check_other_options
from precast._ops.attention.signature import checked_first, gathers, public_arguments
from precast._ops.attention.sparse.layout import convert_bsr_mask_layout
from precast._ops.attention.sparse.trace import blocks_trace
from precast.api_logging import precast_api

#: Arguments of ``plan()`` for kernels that are not here.
_OTHERS = (
    *("block_mask", "kv_block_lens", "q2k_indices", "q2k_num", "kv_splits", "use_clc"),
    *("q_scale", "k_scale", "v_scale"),
)
#: What arguments of a plan over pages are called here.
_NAMES = {
    "kv_indptr": "indptr",
    "paged_kv_indptr": "indptr",
    "kv_indices": "indices",
    "custom_mask": "mask",
    "packed_custom_mask": "packed_mask",
}


def block_sparse_attention_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    indptr: torch.Tensor,
    indices: torch.Tensor,
    R: int,  # noqa: N803
    C: int,  # noqa: N803
    packed_mask: torch.Tensor | None = None,
    mask_indptr: torch.Tensor | None = None,
    causal: bool = False,
    sm_scale: float | None = None,
    logits_soft_cap: float | None = None,
    return_lse: bool = False,
    o_dtype: torch.dtype | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """:class:`BlockSparseAttentionWrapper` in plain PyTorch: one plan and one run.

    Parameters
    ----------
    q, k, v : torch.Tensor
        As for ``run``, any device.
    indptr, indices, R, C, packed_mask
        The matrix, and so are the other options, as for ``plan``.
    mask_indptr : torch.Tensor, optional
        ``[ceil(M / R) + 1]``: where the bytes of each block row start in ``packed_mask``.

    Examples
    --------
    >>> import torch
    >>> q, k = torch.zeros(2, 1, 4), torch.arange(2.0).view(2, 1, 1).expand(2, 1, 4)
    >>> rows, blocks = torch.tensor([0, 1, 3]), torch.tensor([0, 0, 1])
    >>> block_sparse_attention_reference(q, k, k, rows, blocks, 1, 1)[:, 0, 0]
    tensor([0.0000, 0.5000])
    """
    pages = k.unflatten(0, (-1, C)), v.unflatten(0, (-1, C))
    bounds = [min(row * R, q.shape[0]) for row in range(indptr.numel())]
    last = (indptr.diff() > 0).int() * C
    out, lse = reference_outputs(
        q,
        paged_requests(*pages, bounds, indptr, indices, last),
        v.shape[-1],
        causal=causal and packed_mask is None,
        sm_scale=sm_scale,
        logits_soft_cap=logits_soft_cap,
        packed_mask=packed_mask,
        mask_indptr=mask_indptr,
        return_lse=True,
        o_dtype=None,
    )
    out = out.to(o_dtype or q.dtype)  # Kernels write the dtype of queries, which is then copied.
    return (out, lse) if return_lse else out


_TRACE = blocks_trace(block_sparse_attention_reference, lambda: BlockSparseAttentionWrapper)


class BlockRows(BatchPrefillWithPagedKVCacheWrapper):
    """A block row is a request, and a block of keys a page."""

    _name = "BlockSparseAttentionWrapper"
    _cache_argument = "k"
    _run_arguments = public_arguments(BatchPrefillWithPagedKVCacheWrapper.run, f"{_name}.run")


def check_tokens(name: str, argument: str, x: Any, shape: tuple[int, ...]) -> None:
    """Raise unless ``x`` is a tensor of the shape that ``plan()`` had."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name}: {argument} must be a torch.Tensor, got {type(x).__name__}")
    if x.shape != shape:
        raise ValueError(
            f"{name}: {argument} must have shape {[*shape]} as in plan(), got {[*x.shape]}"
        )


@documented(WRAPPER, PLAN)
class BlockSparseAttentionWrapper:
    r"""Compute attention in the blocks of a block-sparse matrix that are not zero.

    .. math::

        O_{i, h} = \sum_{j \in S(i)} \mathrm{softmax}_{j \in S(i)}(s_{i, h, j}) V_{j, h'}

    where :math:`S(i)` are the columns of the blocks in the block row of query :math:`i`. The matrix
    is ``[M, N]``, queries by keys, in blocks ``[R, C]``, as ``scipy.sparse.bsr_matrix`` has it.

    Examples
    --------
    >>> import torch, precast
    >>> with precast.reference_mode():
    ...     wrapper = precast.BlockSparseAttentionWrapper(torch.empty(1024).byte())
    ...     # [[1, 0], [1, 1]]
    ...     indptr, indices = torch.tensor([0, 1, 3]).int(), torch.tensor([0, 0, 1]).int()
    ...     wrapper.plan(indptr, indices, 2, 2, 1, 1, 2, 1, 64, o_data_type="float16")
    ...     k = torch.tensor([1.0, 2.0]).half().view(2, 1, 1).expand(2, 1, 64)
    ...     wrapper.run(torch.zeros(2, 2, 64).half(), k, k)[:, 0, 0]
    tensor([1.0000, 1.5000], dtype=torch.float16)
    """

    _name = "BlockSparseAttentionWrapper"
    #: The same in plain PyTorch, in one call.
    reference = staticmethod(block_sparse_attention_reference)

    @precast_api
    @checked_first
    def __init__(self, float_workspace_buffer: torch.Tensor, backend: str = "auto") -> None:
        self._rows = BlockRows(float_workspace_buffer, backend=backend)
        self.M: int | None = None
        self.N: int | None = None
        self.R: int | None = None
        self.C: int | None = None

    @checked_first
    @documented(BatchPrefillWithPagedKVCacheWrapper.reset_workspace_buffer)
    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor
    ) -> None:
        """Take other workspaces; then plan again."""
        self._rows.reset_workspace_buffer(float_workspace_buffer, int_workspace_buffer)

    # -- plan -------------------------------------------------------------------------------------

    def _plan_blocks(self, given: Any) -> None:
        name = f"{self._name}.plan"
        self._check_blocks(name, given)
        block_rows, per_page = given.indptr.numel() - 1, given.C
        ends = torch.arange(block_rows + 1, dtype=torch.int32, device="cpu") * given.R
        # A block row without blocks has no last page.
        last_page_len = (given.indptr.diff() > 0).int() * per_page
        mask = given.mask
        if mask is not None and given.packed_mask is None:
            mask = convert_bsr_mask_layout(mask, given.indptr)
        tables = {
            "qo_indptr": ends.clamp_(max=given.M),
            "paged_kv_indptr": given.indptr,
            "paged_kv_indices": given.indices,
            "paged_kv_last_page_len": last_page_len,
        }
        more = {
            "head_dim_qk": given.head_dim,
            "page_size": per_page,
            "custom_mask": mask,
            "packed_custom_mask": given.packed_mask,
        }
        with of_part("block rows as requests", **_NAMES):
            plan = BatchPrefillWithPagedKVCacheWrapper.plan
            self._rows.plan(**passed_on(plan, given, **tables, **more))
        self.M, self.N, self.R, self.C = given.M, given.N, given.R, given.C

    def _check_blocks(self, name: str, given: Any) -> None:
        """Raise for blocks that do not make up a matrix, without waiting for the device."""
        for option in _OTHERS:
            if getattr(given, option) is not None:
                raise ValueError(
                    f"{name}: {option} must be None: it is for backends that precast does not "
                    f"have. Fix: pass indptr and indices, or a mask for each head to "
                    f"VariableBlockSparseAttentionWrapper"
                )
        indptr, indices = given.indptr, given.indices
        for argument, tensor in (("indptr", indptr), ("indices", indices)):
            if tensor is None:
                raise ValueError(f"{name}: {argument} must be a torch.Tensor, got None")
        rows, columns, per_row, per_column = given.M, given.N, given.R, given.C
        for argument, value, least in (("M", rows, 0), ("N", columns, 0), ("R", per_row, 1)):
            if value < least:
                raise ValueError(f"{name}: {argument} must be >= {least}, got {value}")
        if per_column < 1:
            raise ValueError(f"{name}: C must be >= 1, got {per_column}")
        if columns % per_column:
            raise ValueError(f"{name}: N must be a multiple of C={per_column}, got {columns}")
        expected = -(-rows // per_row) + 1
        if indptr.shape != (expected,):
            raise ValueError(
                f"{name}: indptr must have shape [{expected}] for M={rows} rows in blocks of "
                f"R={per_row}, got {[*indptr.shape]}"
            )
        if indices.dim() == 1 and not indices.is_cuda and indices.numel():
            low, high = int(indices.min()), int(indices.max())
            if low < 0 or high >= columns // per_column:
                raise ValueError(
                    f"{name}: indices must be 0 to {columns // per_column - 1}, the blocks of a "
                    f"row, got {low if low < 0 else high}"
                )
        if given.mask is not None and given.packed_mask is None:
            shape = indices.numel(), per_row, per_column
            if given.mask.shape != shape:
                raise ValueError(
                    f"{name}: mask must have shape {[*shape]}, one block for each of indices, got "
                    f"{[*given.mask.shape]}"
                )

    @precast_api
    @documented(PLAN)
    @gathers(_plan_blocks, ("N", "causal", "use_fp16_qk_reduction", "non_blocking"))
    def plan(
        self,
        indptr: torch.Tensor | None,
        indices: torch.Tensor | None,
        M: int,  # noqa: N803
        N: int,  # noqa: N803
        R: int,  # noqa: N803
        C: int,  # noqa: N803
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        mask: torch.Tensor | None = None,
        packed_mask: torch.Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: torch.dtype | str = "float16",
        kv_data_type: Dtype = None,
        o_data_type: Dtype = "float16",
        non_blocking: bool = True,
        block_mask: torch.Tensor | None = None,
        kv_block_lens: torch.Tensor | None = None,
        q2k_indices: torch.Tensor | None = None,
        q2k_num: torch.Tensor | None = None,
        kv_splits: int | str | None = None,
        use_clc: bool | None = None,
        q_scale: torch.Tensor | None = None,
        k_scale: torch.Tensor | None = None,
        v_scale: torch.Tensor | None = None,
    ) -> None:
        """Divide the work of a matrix, for all runs until the next plan.

        Parameters
        ----------
        indptr : torch.Tensor
            ``[ceil(M / R) + 1]``, int32, on the device or on the host: where the blocks of each
            block row start in ``indices``.
        indices : torch.Tensor
            ``[nnz]``, int32: the block column of each block.
        M, N : int
            Queries and keys. The last block row may be cut off at ``M``; ``N`` is a multiple of
            ``C``.
        R, C : int
            Rows and columns of a block, at least 1.
        head_dim : int
            64, 80, 96, 128, 256 or 512.
        mask : torch.Tensor, optional
            ``[nnz, R, C]``, bool: True where a query attends to a key, in each block. Takes the
            place of ``causal``.
        packed_mask : torch.Tensor, optional
            The same as bits, uint8, in the order of :func:`convert_bsr_mask_layout`, the lowest of
            a byte first; each block row starts a byte.
        causal : bool
            Whether the last query of a block row sees all of its keys, the one before it all but
            the last, and so on: keys are counted in the order of ``indices``.
        pos_encoding_mode : str
            As for :class:`BatchPrefillWithPagedKVCacheWrapper`; positions are counted likewise.
        o_data_type : torch.dtype or str, optional
            Of outputs: float16 by default, whatever queries are; None is the dtype of queries.
            Another one than that costs a copy.
        block_mask, kv_block_lens, q2k_indices, q2k_num, kv_splits, use_clc : None
            For other backends.
        q_scale, k_scale, v_scale : None
            For other backends.

        Raises
        ------
        precast.errors.UnsupportedConfigError
            A ``head_dim`` or dtype that no kernel is for (a ``ValueError``).
        ValueError
            Sizes that do not make up a matrix; heads that do not divide; indices on the host that
            are no block; an argument for other backends.

        Notes
        -----
        ``indptr`` and ``indices`` that are on the device stay there: nothing is copied to the host
        or waited for. A block column on the device that does not exist counts as block 0.
        """

    begin_forward = plan

    # -- run --------------------------------------------------------------------------------------

    def _pages(self, k: Any, v: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values as pages, in the same memory."""
        name, shape = f"{self._name}.run", self._rows._plan.shape
        self._rows._check_planned(name)
        assert self.N is not None
        assert self.C is not None
        pages = self.N // self.C, self.C
        for argument, x in (("k", k), ("v", v)):
            check_tokens(name, argument, x, (self.N, shape.num_kv_heads, shape.head_dim_qk))
        return k.unflatten(0, pages), v.unflatten(0, pages)

    @precast_api(trace=_TRACE)
    @documented(RUN)
    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale_q: torch.Tensor | None = None,
        scale_k: torch.Tensor | None = None,
        scale_v: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Compute attention by the latest plan.

        Parameters
        ----------
        q : torch.Tensor
            ``[M, num_qo_heads, head_dim]``; stride 1 in the last dimension, any in the others.
        k, v : torch.Tensor
            ``[N, num_kv_heads, head_dim]``, likewise.
        scale_q, scale_k, scale_v : None
            For other backends.
        out, lse : torch.Tensor, optional
            Where to write: ``[M, num_qo_heads, head_dim]`` and, float32, ``[M, num_qo_heads]``.
            Default: new ones.
        return_lse : bool
            Whether to return the base-2 log-sum-exp of the logits, too.

        Returns
        -------
        torch.Tensor or tuple of torch.Tensor
            The output, and the log-sum-exp if asked for. A query that sees nothing has output 0
            and log-sum-exp minus infinity.

        Raises
        ------
        precast.errors.PlanMismatchError
            No plan (an ``AssertionError`` and a ``ValueError``).
        NotImplementedError
            An argument for other backends.
        ValueError
            Shapes or dtypes that are not those of :meth:`plan`; a device or strides other than
            above.

        Notes
        -----
        One launch, and a copy if ``o_data_type`` is not the dtype of ``q``. Safe in CUDA graphs;
        not differentiable.
        """
        if not (scale_q is scale_k is scale_v is None):
            scales = {"scale_q": scale_q, "scale_k": scale_k, "scale_v": scale_v}
            check_other_options(self._rows, (), **scales)
        pages = self._pages(k, v)
        return self._rows.run(
            q, pages, out=out, lse=lse, return_lse=return_lse, enable_pdl=enable_pdl
        )

    # -- deprecated -------------------------------------------------------------------------------

    def _forward(self, given: Any) -> Any:
        scales = ("scale_q", "scale_k", "scale_v")
        check_other_options(self._rows, (), **{name: getattr(given, name) for name in scales})
        pages = self._pages(given.k, given.v)
        forward = BatchPrefillWithPagedKVCacheWrapper.forward
        causal = self._rows._causal
        return self._rows.forward(**passed_on(forward, given, paged_kv_cache=pages, causal=causal))

    @gathers(_forward, ("use_fp16_qk_reduction",))
    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale_q: torch.Tensor | None = None,
        scale_k: torch.Tensor | None = None,
        scale_v: torch.Tensor | None = None,
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
