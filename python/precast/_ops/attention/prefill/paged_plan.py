# SPDX-License-Identifier: Apache-2.0
"""The plan of a prefill over pages."""

from __future__ import annotations

from types import SimpleNamespace

from precast._base.torch import torch
from precast._ops.attention import heuristics as tiles
from precast._ops.attention import kernels, validation
from precast._ops.attention.attributes import PlanField
from precast._ops.attention.plan import Items, PlanShape, Scores, Tables
from precast._ops.attention.prefill.masks import paged_sizes
from precast._ops.attention.prefill.plan import Dtype, PrefillCall, PrefillPlan
from precast._ops.attention.reference import tokens_of_pages
from precast._ops.attention.signature import arguments_of
from precast.api_logging import precast_api


class PagedPrefillPlan(PrefillPlan):
    """The methods of the wrapper that plan."""

    _paged_kv_indptr_buf = PlanField("tables", "kv_indptr")
    _paged_kv_indices_buf = PlanField("tables", "kv_indices")
    _paged_kv_last_page_len_buf = PlanField("tables", "kv_last_page_len")

    @precast_api
    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: torch.dtype | str = "float16",
        kv_data_type: Dtype = None,
        o_data_type: Dtype = None,
        non_blocking: bool = True,
        prefix_len_ptr: torch.Tensor | None = None,
        token_pos_in_items_ptr: torch.Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        seq_lens_q: torch.Tensor | None = None,
        block_tables: torch.Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        uniform_q_len: int | None = None,
    ) -> None:
        """Divide the work of a batch, for all runs until the next plan.

        Parameters
        ----------
        qo_indptr : torch.Tensor
            ``[batch_size + 1]``, int32, on the device or on the host: where the queries of each
            request start.
        paged_kv_indptr : torch.Tensor
            ``[batch_size + 1]``, likewise: where its pages start in ``paged_kv_indices``.
        paged_kv_indices : torch.Tensor
            int32, at least ``paged_kv_indptr[-1]``: the pages; what is behind them is not read.
        paged_kv_last_page_len : torch.Tensor
            ``[batch_size]``, int32: tokens in the last page of each request, 0 if it has none.
            They include the tokens of the queries.
        num_qo_heads, num_kv_heads : int
            Heads; the first is a multiple of the second.
        head_dim_qk, head_dim_vo : int
            Both 64, 80, 96, 128, 256 or 512, or 192 and 128. Default of the second: the first.
        page_size : int
            Tokens of a page, at least 1.
        custom_mask : torch.Tensor, optional
            ``[sum of qo_len * kv_len]``, bool, request after request: True where a query (row)
            attends to a key (column). Takes the place of ``causal``.
        packed_custom_mask : torch.Tensor, optional
            The same as bits, uint8, the lowest of a byte first; each request starts a byte.
        causal : bool
            Whether a query sees only itself and what is before it. The last query of a request is
            its last token.
        pos_encoding_mode : str
            ``NONE``, ``ROPE_LLAMA`` (queries and keys are turned on the fly in float32 and rounded
            once, to the dtype of queries, or keys of 8 bits to float16) or ``ALIBI``.
        use_fp16_qk_reduction : bool
            Without effect: logits are summed in float32.
        sm_scale : float, optional
            Default: ``1 / sqrt(head_dim_qk)``.
        window_left : int
            A query sees this many tokens before its own, with any mask; -1 is all.
        logits_soft_cap : float, optional
            Logits ``s`` become ``cap * tanh(s / cap)``; None or 0 is off.
        rope_scale, rope_theta : float, optional
            Of ``ROPE_LLAMA``. Default: 1 and 1e4.
        q_data_type, kv_data_type, o_data_type : torch.dtype or str, optional
            Of queries (float16 or bfloat16), of keys and values (the same, float8_e4m3fn or
            float8_e5m2; default: as queries), of outputs (default: as queries).
        non_blocking : bool
            Whether lengths on the host are copied without waiting.
        prefix_len_ptr : torch.Tensor, optional
            ``[batch_size]``, uint32 or int32: multi-item scoring. Tokens behind the prefix of a
            request are items, which see the prefix and themselves.
        token_pos_in_items_ptr : torch.Tensor, optional
            uint16, for each request ``token_pos_in_items_len`` positions, of each token behind the
            prefix in its item, 0 for a delimiter, which only sees the prefix and is seen by none.
        token_pos_in_items_len : int
            The length of that, the same for every request. Default: all of it, of one request.
        max_item_len_ptr : torch.Tensor, optional
            ``[batch_size]``, uint16: the longest item of each request.
        seq_lens, seq_lens_q, block_tables : torch.Tensor, optional
            For other backends; lengths are those above.
        max_token_per_sequence : int, optional
            A bound of the queries of a request. Saves nothing but time if ``qo_indptr`` is on the
            device, where the host cannot know it.
        max_sequence_kv : int, optional
            A bound of the tokens of a request, for who reads ``_max_kv_len``.
        fixed_split_size : int, optional
            Pages of a part of a request that one CTA takes. With it the bits of a result do not
            depend on the rest of the batch, if the workspaces are as large as
            :meth:`workspace_size` says. Lengths on the host that need more are refused; those on
            the device cannot be, and make all parts longer. Default: what balances the work.
        disable_split_kv : bool
            One CTA takes all the tokens of some queries; the same promise.
        uniform_q_len : int, optional
            Queries of every request, as ``max_token_per_sequence``.

        Raises
        ------
        precast.errors.UnsupportedConfigError
            A head dimension or dtype that no kernel is for (a ``ValueError``).
        ValueError
            Heads that do not divide; a workspace that is too small or not aligned; under CUDA
            graphs another batch size, more queries than in the first plan, more indices than the
            buffer has, or a mask without buffers for it.

        Notes
        -----
        Lengths on the device stay there: nothing is copied to the host or waited for.
        """
        if page_size < 1:
            raise ValueError(f"{self._name}.plan: page_size must be >= 1, got {page_size}")
        indptr, last_page_len = paged_kv_indptr, paged_kv_last_page_len
        if max_sequence_kv is None and not (indptr.is_cuda or last_page_len.is_cuda):
            lens = tokens_of_pages(indptr, last_page_len, page_size)
            max_sequence_kv = int(lens.max()) if lens.numel() else None
        sizes = None
        if custom_mask is not None or packed_custom_mask is not None:
            sizes = paged_sizes(qo_indptr, indptr, last_page_len, page_size, non_blocking)
        self._plan_batch(
            PrefillCall(
                lengths=Tables(qo_indptr, indptr, last_page_len, paged_kv_indices),
                heads=(num_qo_heads, num_kv_heads),
                head_dims=(head_dim_qk, head_dim_qk if head_dim_vo is None else head_dim_vo),
                page_size=page_size,
                dtypes=(q_data_type, kv_data_type, o_data_type),
                scores=Scores(
                    causal,
                    window_left,
                    logits_soft_cap or 0.0,
                    sm_scale,
                    pos_encoding_mode,
                    rope_scale,
                    rope_theta,
                    use_fp16_qk_reduction,
                ),
                mask=(custom_mask, packed_custom_mask, sizes),
                items=Items(
                    prefix_len_ptr, token_pos_in_items_ptr, token_pos_in_items_len, max_item_len_ptr
                ),
                max_q_len=max_token_per_sequence or uniform_q_len,
                max_kv_len=max_sequence_kv,
                is_uniform=bool(uniform_q_len),
                block_tables=block_tables,
                fixed_split_size=fixed_split_size,
                disable_split_kv=disable_split_kv,
                non_blocking=non_blocking,
            )
        )

    begin_forward = plan

    @arguments_of(plan, without=("non_blocking",))
    def workspace_size(self, given: SimpleNamespace) -> tuple[int, int]:
        """Bytes that the workspaces of such a plan need, as :meth:`plan` takes its arguments.

        Returns
        -------
        tuple of int
            Of the float and of the int workspace; zeros in reference mode, which needs none.

        Raises
        ------
        ValueError
            As :meth:`plan`.

        Notes
        -----
        Nothing on the device is allocated or changed. Lengths on the device are waited for. A
        float workspace that is too small for other lengths costs time, not results: then less is
        divided among SMs. With ``fixed_split_size`` parts become longer then, which other lengths
        in the batch decide: take what the largest batch needs.
        """
        name, qk = f"{self._name}.workspace_size", given.head_dim_qk
        vo = qk if given.head_dim_vo is None else given.head_dim_vo
        dtypes = validation.dtypes_of(given.q_data_type, given.kv_data_type, given.o_data_type)
        heads, rows = (given.num_qo_heads, given.num_kv_heads), given.qo_indptr
        validation.check_heads(name, *heads)
        validation.check_head_dims(name, qk, vo)
        batch_size = rows.shape[0] - 1
        longest = given.max_token_per_sequence or given.uniform_q_len
        if longest is None and batch_size and not rows.is_cuda:
            longest = int(rows.diff().max())
        block_m = tiles.largest((qk, vo), self.device)
        if self._use_cuda_graph and self._plan.shape.block_m:
            block_m = self._plan.shape.block_m
        elif not (given.disable_split_kv or (given.fixed_split_size or -1) > 0):
            tokens = None if rows.is_cuda else int(rows[-1])
            block_m = tiles.choose(longest, tokens, *heads, (qk, vo), self.device)
        is_masked = given.custom_mask is not None or given.packed_custom_mask is not None
        shape = PlanShape(
            batch_size,
            -1,
            0,
            given.page_size,
            *heads,
            qk,
            vo,
            dtypes[1].itemsize,
            block_m,
            given.prefix_len_ptr is not None or (given.causal and not is_masked),
            given.window_left,
            given.fixed_split_size or -1,
            given.disable_split_kv,
        )
        lengths = Tables(rows, given.paged_kv_indptr, given.paged_kv_last_page_len)
        return kernels.workspace_bytes(self.device, shape, lengths)
