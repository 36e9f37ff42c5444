# SPDX-License-Identifier: Apache-2.0
"""The plan of a decode: how the work of a batch is divided among the SMs.

Source: Osama et al., Stream-K, arXiv:2301.03598.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, TypeAlias

from precast._base.torch import torch
from precast._ops.attention import buffers, kernels, validation
from precast._ops.attention import heuristics as tiles
from precast._ops.attention.attributes import PlanField
from precast._ops.attention.decode.validation import (
    check_graph,
    check_kv_len,
    check_q_len_per_req,
    check_unserved,
    options_by_position,
    raise_rows,
)
from precast._ops.attention.plan import (
    NO_ITEMS,
    NO_MASK,
    AttentionPlan,
    Hints,
    PlanShape,
    Scores,
    Tables,
)
from precast._ops.attention.reference import tokens_of_pages
from precast._ops.attention.signature import arguments_of
from precast._ops.attention.wrapper import AttentionWrapper
from precast.api_logging import precast_api

Dtype: TypeAlias = "torch.dtype | str | None"


class DecodePlan(AttentionWrapper):
    """The methods of a decode wrapper that plan."""

    _use_tensor_cores: bool
    _paged_kv_indptr_buf = PlanField("tables", "kv_indptr")
    _paged_kv_indices_buf = PlanField("tables", "kv_indices")
    _paged_kv_last_page_len_buf = PlanField("tables", "kv_last_page_len")
    _q_len_per_req = PlanField("shape", "q_len_per_req")

    @precast_api
    @options_by_position
    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *deprecated_positional_args: Any,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        window_right: int = 0,
        logits_soft_cap: float | None = None,
        q_data_type: Dtype = "float16",
        kv_data_type: Dtype = None,
        o_data_type: Dtype = None,
        data_type: Dtype = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        block_tables: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        q_len_per_req: int = 1,
        is_causal: bool | None = None,
    ) -> None:
        """Divide the work of a batch, for all runs until the next plan.

        Parameters
        ----------
        indptr : torch.Tensor
            ``[batch_size + 1]``, int32, on the device or on the host: where the pages of each
            request start in ``indices``.
        indices : torch.Tensor
            int32, at least ``indptr[-1]``: the pages; what is behind them is not read.
        last_page_len : torch.Tensor
            ``[batch_size]``, int32: tokens in the last page of each request, 0 if it has none.
        num_qo_heads, num_kv_heads : int
            Heads; the first is a multiple of the second.
        head_dim : int
            64, 80, 96, 128, 256 or 512.
        page_size : int
            Tokens of a page, at least 1.
        *deprecated_positional_args
            The options by position, in FlashInfer's order; a ``DeprecationWarning``.
        pos_encoding_mode : str
            ``NONE``, ``ROPE_LLAMA`` (queries and keys are turned on the fly in float32 and rounded
            once, to the dtype of queries, or keys of 8 bits to float16) or ``ALIBI``.
        window_left : int
            A token sees itself and this many before it; -1 is all.
        window_right : int
            0; nothing is seen behind the newest token.
        logits_soft_cap : float, optional
            Logits are bent to less than this by tanh; None or 0 is off.
        q_data_type, kv_data_type, o_data_type, data_type : torch.dtype or str, optional
            Of queries (float16 or bfloat16), of keys and values (the same, float8_e4m3fn or
            float8_e5m2; default: as queries), of outputs (default: as queries), and of both where
            they are None.
        sm_scale : float, optional
            Default: ``1 / sqrt(head_dim)``.
        rope_scale, rope_theta : float, optional
            Of ``ROPE_LLAMA``. Default: 1 and 1e4.
        non_blocking : bool
            Whether lengths on the host are copied without waiting.
        block_tables, seq_lens : torch.Tensor, optional
            For other backends; the pages above are what counts.
        fixed_split_size : int, optional
            Pages of a part of a request that one CTA takes. With it the bits of a result do not
            depend on the rest of the batch, if the workspaces are as large as
            :meth:`workspace_size` says. Lengths on the host that need more are refused; those on
            the device cannot be, and make all parts longer. Default: what balances the work.
        disable_split_kv : bool
            One CTA takes all of a request and KV head; the same promise.
        q_len_per_req : int
            Queries of every request, its newest tokens; each sees what is before it.
        is_causal : bool, optional
            ``q_len_per_req > 1``, which is the default.

        Raises
        ------
        precast.errors.UnsupportedConfigError
            A ``head_dim`` or dtype that no kernel is for (a ``ValueError``).
        NotImplementedError
            ``window_right`` or ``is_causal`` of another value.
        ValueError
            Heads that do not divide; ``q_len_per_req > 1`` or ``fixed_split_size`` without
            ``use_tensor_cores``; lengths on the host with fewer tokens than ``q_len_per_req``;
            under CUDA graphs another batch size or ``q_len_per_req``, or more indices than the
            buffer has; a workspace that is too small or not aligned.
        """
        batch_size = last_page_len.shape[0]
        name = self._name
        if page_size < 1:
            raise ValueError(f"{name}.plan: page_size must be >= 1, got {page_size}")
        if rope_scale is not None or rope_theta is not None:
            validation.check_rope(f"{name}.plan", rope_scale, rope_theta)
        check_q_len_per_req(name, self._use_tensor_cores, fixed_split_size, q_len_per_req)
        if self._use_cuda_graph:
            self._check_graph(batch_size, indices, q_len_per_req)
        check_unserved(name, window_right, is_causal, q_len_per_req)
        heads = num_qo_heads, num_kv_heads
        dtypes = q_data_type or data_type or "float16", kv_data_type or data_type, o_data_type
        model = self._model(heads, (head_dim, head_dim), pos_encoding_mode, dtypes)
        causal = q_len_per_req > 1
        shape = PlanShape(
            batch_size,
            batch_size * q_len_per_req,
            q_len_per_req,
            page_size,
            num_qo_heads,
            num_kv_heads,
            head_dim,
            head_dim,
            model.kv_dtype.itemsize,
            self._choose_tile(heads, (head_dim, head_dim), q_len_per_req),
            causal,
            window_left,
            fixed_split_size or -1,
            disable_split_kv,
        )
        max_kv_len = None
        given = Tables(None, indptr, last_page_len, indices)
        if not (indptr.is_cuda or last_page_len.is_cuda):
            lens = seq_lens
            if lens is None or lens.is_cuda:  # Nothing is waited for.
                lens = tokens_of_pages(indptr, last_page_len, page_size)
            check_kv_len(lens, q_len_per_req)
            max_kv_len = int(lens.max()) if batch_size else 0
            self._check_split(shape, given._replace(kv_indices=None))
        qo_indptr, keeps_qo_indptr = self._query_bounds(batch_size, q_len_per_req)
        tables = self._plan.tables
        if not self._use_cuda_graph:
            on_device = (self._on_device(t, non_blocking) for t in (indptr, last_page_len, indices))
            tables = Tables(qo_indptr, *on_device)
        elif qo_indptr is not tables.qo_indptr:
            tables = tables._replace(qo_indptr=qo_indptr)
        plan = AttentionPlan(
            model,
            shape,
            Scores(
                causal,
                window_left,
                logits_soft_cap or 0.0,
                sm_scale,
                pos_encoding_mode,
                rope_scale,
                rope_theta,
            ),
            tables,
            NO_MASK,
            NO_ITEMS,
            Hints(None, max_kv_len, None, block_tables, False, keeps_qo_indptr),
            self._plan.hnd,
            self._int_workspace_buffer,
            self._float_workspace_buffer,
        )
        self._launch(plan, given, non_blocking)

    begin_forward = plan

    def _check_graph(self, batch_size: int, indices: torch.Tensor, q_len_per_req: int) -> None:
        buffer, fixed_q_len = self._plan.tables.kv_indices, self._plan.shape.q_len_per_req
        assert buffer is not None
        check_graph(
            self._name,
            (batch_size, self._fixed_batch_size),
            (indices.shape[0], buffer.shape[0]),
            (q_len_per_req, fixed_q_len),
        )

    def _query_bounds(self, batch_size: int, q_len_per_req: int) -> tuple[torch.Tensor, bool]:
        """``qo_indptr`` for engines that read it, and whether the next plan may have it, too.

        Kernels count the queries of a decode by ``q_len_per_req``.
        """
        before = self._plan
        sizes = before.shape.batch_size, before.shape.q_len_per_req
        if before.hints.keeps_qo_indptr and sizes == (batch_size, q_len_per_req):
            assert before.tables.qo_indptr is not None
            return before.tables.qo_indptr, True
        indptr = buffers._get_range_buf(batch_size + 1, self.device)
        if q_len_per_req > 1:
            indptr = indptr * q_len_per_req
        if self._use_cuda_graph and before.tables.qo_indptr is not None:
            # The buffer of this batch, of one length of queries: no plan before needs another.
            indptr = before.tables.qo_indptr.copy_(indptr)
        # Numbers that a captured graph makes are there when it runs.
        return indptr, not buffers.is_capturing(self.device)

    def _raise_rows(self, tokens: int) -> None:
        shape = self._plan.shape
        raise_rows(tokens, shape.batch_size, shape.q_len_per_req, self._use_tensor_cores)

    @arguments_of(plan, without=("non_blocking", "window_right", "is_causal"))
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
        name, dim = f"{self._name}.workspace_size", given.head_dim
        heads = given.num_qo_heads, given.num_kv_heads
        q_len = given.q_len_per_req
        check_q_len_per_req(self._name, self._use_tensor_cores, given.fixed_split_size, q_len)
        validation.check_heads(name, *heads)
        validation.check_head_dims(name, dim, dim)
        q_dtype = given.q_data_type or given.data_type or "float16"
        kv_dtype = validation.dtypes_of(q_dtype, given.kv_data_type or given.data_type, None)[1]
        batch_size = len(given.last_page_len)
        shape = PlanShape(
            batch_size,
            batch_size * q_len,
            q_len,
            given.page_size,
            *heads,
            dim,
            dim,
            kv_dtype.itemsize,
            tiles.choose(q_len, None, *heads, (dim, dim), self.device),
            q_len > 1,
            given.window_left,
            given.fixed_split_size or -1,
            given.disable_split_kv,
        )
        lengths = Tables(None, given.indptr, given.last_page_len)
        return kernels.workspace_bytes(self.device, shape, lengths)
