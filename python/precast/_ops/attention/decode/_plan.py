# SPDX-License-Identifier: Apache-2.0
"""The plan of a decode: how the work of a batch is divided among the SMs.

Source: Osama et al., Stream-K, arXiv:2301.03598.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from precast._base.torch import torch
from precast._ops.attention import enums as words
from precast._ops.attention import heuristics as tiles
from precast._ops.attention import kernels
from precast._ops.attention.decode._checks import (
    check_graph,
    check_kv_len,
    check_plan,
    check_rows,
    check_unserved,
    merge_positional,
)
from precast._ops.attention.reference import CAUSAL, NON_CAUSAL, tokens_of_pages
from precast._ops.attention.replan import all_or_nothing
from precast._ops.attention.wrapper import PLAN_TABLES, AttentionWrapper, dtypes_of
from precast.api_logging import precast_api

Dtype: TypeAlias = "torch.dtype | str | None"


class DecodePlan(AttentionWrapper):
    """The methods of a decode wrapper that plan, and what they keep."""

    _use_tensor_cores: bool
    _q_len_per_req: Any
    _mask_mode = NON_CAUSAL
    _qo_indptr_buf: torch.Tensor | None
    _qo_indptr_of: tuple[int, int]
    _paged_kv_indptr_buf: torch.Tensor | None
    _paged_kv_indices_buf: torch.Tensor | None
    _paged_kv_last_page_len_buf: torch.Tensor | None

    def workspace_size(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: Dtype = "float16",
        kv_data_type: Dtype = None,
        o_data_type: Dtype = None,
        data_type: Dtype = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        block_tables: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        q_len_per_req: int = 1,
    ) -> tuple[int, int]:
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
        batch = len(last_page_len)
        _, kv, _ = dtypes_of(q_data_type or data_type or "float16", kv_data_type, o_data_type)
        check_plan(self, batch, indices, fixed_split_size, q_len_per_req)
        words.check_heads(f"{self._name}.workspace_size", num_qo_heads, num_kv_heads)
        words.check_head_dims(f"{self._name}.workspace_size", head_dim, head_dim)
        return kernels.workspace_bytes(
            self.device,
            None,
            indptr,
            last_page_len,
            batch,
            q_len_per_req,
            page_size,
            num_qo_heads,
            num_kv_heads,
            head_dim,
            head_dim,
            kv.itemsize,
            tiles.choose(q_len_per_req, None, num_qo_heads, num_kv_heads, head_dim, self.device),
            q_len_per_req > 1,
            window_left,
            fixed_split_size or -1,
            disable_split_kv,
        )

    @precast_api
    @all_or_nothing
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
        if deprecated_positional_args:
            options = merge_positional(
                type(self).plan, self._name, deprecated_positional_args, locals()
            )
            self.plan(
                indptr,
                indices,
                last_page_len,
                num_qo_heads,
                num_kv_heads,
                head_dim,
                page_size,
                **options,
            )
            return
        batch_size = last_page_len.shape[0]
        if page_size < 1:
            raise ValueError(f"{self._name}.plan: page_size must be >= 1, got {page_size}")
        if rope_scale is not None or rope_theta is not None:
            words.check_rope(f"{self._name}.plan", rope_scale, rope_theta)
        config = (
            num_qo_heads,
            num_kv_heads,
            head_dim,
            pos_encoding_mode,
            window_right,
            q_data_type,
            kv_data_type,
            o_data_type,
            data_type,
            fixed_split_size,
            q_len_per_req,
            is_causal,
        )
        if config != self._config:
            check_plan(self, batch_size, indices, fixed_split_size, q_len_per_req)
            check_unserved(self._name, window_right, is_causal, q_len_per_req)
            self._config = None
            self._configure(
                num_qo_heads,
                num_kv_heads,
                head_dim,
                head_dim,
                pos_encoding_mode,
                q_data_type or data_type or "float16",
                kv_data_type or data_type,
                o_data_type,
            )
            self._config = config
        elif self._use_cuda_graph:
            check_graph(self, batch_size, indices)
        self._max_kv_len = None
        if not (indptr.is_cuda or last_page_len.is_cuda):
            lens = seq_lens
            if lens is None or lens.is_cuda:  # Nothing is waited for.
                lens = tokens_of_pages(indptr, last_page_len, page_size)
            check_kv_len(lens, q_len_per_req)
            self._max_kv_len = int(lens.max()) if batch_size else 0
            if fixed_split_size is not None and fixed_split_size > 0:
                self._check_split(
                    (None, indptr, last_page_len),
                    batch_size,
                    q_len_per_req,
                    page_size,
                    head_dim,
                    self._choose_tile(q_len_per_req),
                    q_len_per_req > 1,
                    window_left,
                    fixed_split_size,
                    disable_split_kv,
                )
        self._overwritten = self._use_cuda_graph
        if self._use_cuda_graph:
            tables = self._tables(
                non_blocking,
                (None, None),
                (self._paged_kv_indptr_buf, indptr),
                (self._paged_kv_last_page_len_buf, last_page_len),
                (self._paged_kv_indices_buf, indices),
            )
        else:
            indptr = self._paged_kv_indptr_buf = self._on_device(indptr, non_blocking)
            last_page_len = self._on_device(last_page_len, non_blocking)
            self._paged_kv_last_page_len_buf = last_page_len
            self._paged_kv_indices_buf = self._on_device(indices, non_blocking)
            tables = None, indptr, last_page_len, None
        self._block_tables = block_tables
        self._launch_plan(
            tables,
            batch_size,
            page_size,
            window_left,
            fixed_split_size,
            disable_split_kv,
            q_len_per_req,
        )
        self._keep(
            pos_encoding_mode, window_left, logits_soft_cap, sm_scale, rope_scale, rope_theta
        )

    begin_forward = plan

    def _check_rows(self, tokens: int) -> None:
        check_rows(self, tokens)

    def _launch_plan(
        self,
        tables: tuple[torch.Tensor | None, ...],
        batch_size: int,
        page_size: int,
        window_left: int,
        fixed_split_size: int | None,
        disable_split_kv: bool,
        q_len_per_req: int,
    ) -> None:
        tile_rows = self._choose_tile(q_len_per_req)
        causal = q_len_per_req > 1
        self._mask_mode = CAUSAL if causal else NON_CAUSAL
        export = kernels.plan if len(tables) == PLAN_TABLES else kernels.fill_and_plan
        export[self._device_key](
            *tables,
            self._int_workspace_buffer,
            self._float_workspace_buffer,
            batch_size,
            q_len_per_req,
            page_size,
            self._num_qo_heads,
            self._num_kv_heads,
            self._head_dim_vo,
            self._head_dim_vo,
            self._cached_kv_data_type.itemsize,
            tile_rows,
            causal,
            window_left,
            fixed_split_size or -1,
            disable_split_kv,
            True,
        )
        self._overwritten = True
        self._plan_info = [tile_rows, int(causal), window_left]
        self._batch_size = batch_size
        self._page_size = page_size
        self._q_len_per_req = q_len_per_req
        self._planned_rows = batch_size * q_len_per_req
        if self._qo_indptr_of != (batch_size, q_len_per_req):
            self._make_qo_indptr(batch_size, q_len_per_req)

    def _make_qo_indptr(self, batch_size: int, q_len_per_req: int) -> None:
        """For who reads it: kernels here count queries by ``q_len_per_req``."""
        indptr = words._get_range_buf(batch_size + 1, self.device)
        if q_len_per_req > 1:
            indptr = indptr * q_len_per_req
        if self._use_cuda_graph and self._qo_indptr_buf is not None:
            self._qo_indptr_buf.copy_(indptr)
        else:
            self._qo_indptr_buf = indptr
        # Of a graph that is captured the numbers are not there yet.
        known = not words.is_capturing(self.device)
        self._qo_indptr_of = (batch_size, q_len_per_req) if known else (0, 0)

    def _keep(
        self,
        pos_encoding_mode: str,
        window_left: int,
        logits_soft_cap: float | None,
        sm_scale: float | None,
        rope_scale: float | None,
        rope_theta: float | None,
    ) -> None:
        self._pos_encoding_mode = pos_encoding_mode
        self._window_left = window_left
        self._logits_soft_cap = logits_soft_cap or 0.0
        self._sm_scale = sm_scale
        self._rope_scale = rope_scale
        self._rope_theta = rope_theta
