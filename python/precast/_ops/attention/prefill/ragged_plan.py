# SPDX-License-Identifier: Apache-2.0
"""The plan of a prefill without pages."""

from __future__ import annotations

from precast._base.torch import torch
from precast._ops.attention.attributes import PlanField
from precast._ops.attention.plan import Items, Scores, Tables
from precast._ops.attention.prefill.masks import ragged_sizes
from precast._ops.attention.prefill.plan import Dtype, PrefillCall, PrefillPlan
from precast.api_logging import precast_api


class RaggedPrefillPlan(PrefillPlan):
    """The methods of the wrapper that plan."""

    _kv_indptr_buf = PlanField("tables", "kv_indptr")

    @precast_api
    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int | None = None,
        custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
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
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        seq_lens: torch.Tensor | None = None,
        seq_lens_q: torch.Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        v_indptr: torch.Tensor | None = None,
        o_indptr: torch.Tensor | None = None,
        uniform_q_len: int | None = None,
    ) -> None:
        """Divide the work of a batch, for all runs until the next plan.

        Parameters
        ----------
        qo_indptr, kv_indptr : torch.Tensor
            ``[batch_size + 1]``, int32, on the device or on the host: where the queries, and the
            keys and values, of each request start.
        num_qo_heads, num_kv_heads : int
            Heads; the first is a multiple of the second.
        head_dim_qk, head_dim_vo : int
            Both 64, 80, 96, 128, 256 or 512, or 192 and 128. Default of the second: the first.
        custom_mask, packed_custom_mask : torch.Tensor, optional
            As for :meth:`BatchPrefillWithPagedKVCacheWrapper.plan`.
        causal : bool
            Whether a query sees only itself and what is before it. The last query of a request is
            its last token.
        pos_encoding_mode : str
            ``NONE``, ``ROPE_LLAMA`` or ``ALIBI``.
        use_fp16_qk_reduction : bool
            Without effect: logits are summed in float32.
        window_left : int
            A query sees this many tokens before its own, with any mask; -1 is all.
        logits_soft_cap, sm_scale : float, optional
            As for :meth:`BatchPrefillWithPagedKVCacheWrapper.plan`.
        rope_scale, rope_theta : float, optional
            Of ``ROPE_LLAMA``. Default: 1 and 1e4.
        q_data_type, kv_data_type, o_data_type : torch.dtype or str, optional
            Of queries (float16 or bfloat16), of keys and values (the same, float8_e4m3fn or
            float8_e5m2; default: as queries), of outputs (default: as queries).
        non_blocking : bool
            Whether lengths on the host are copied without waiting.
        prefix_len_ptr, token_pos_in_items_ptr, max_item_len_ptr : torch.Tensor, optional
            Multi-item scoring, as for :meth:`BatchPrefillWithPagedKVCacheWrapper.plan`.
        token_pos_in_items_len : int
            Likewise.
        fixed_split_size : int, optional
            Tokens of a part of a request that one CTA takes. With it the bits of a result do not
            depend on the rest of the batch, if the float workspace has room for all parts. Lengths
            on the host that need more are refused, in words that say how much; those on the device
            cannot be, and make all parts longer. Default: what balances the work.
        disable_split_kv : bool
            One CTA takes all the tokens of some queries; the same promise.
        seq_lens, seq_lens_q : torch.Tensor, optional
            For other backends; lengths are those above.
        max_token_per_sequence, max_sequence_kv : int, optional
            Bounds of the queries and of the tokens of a request, where ``qo_indptr`` and
            ``kv_indptr`` are on the device.
        v_indptr, o_indptr : None
            For other backends: values lie as keys, and outputs as queries.
        uniform_q_len : int, optional
            Queries of every request, as ``max_token_per_sequence``.

        Raises
        ------
        precast.errors.UnsupportedConfigError
            Head dimensions or dtypes that no kernel is for (a ``ValueError``).
        NotImplementedError
            ``v_indptr`` or ``o_indptr``.
        ValueError
            Heads that do not divide; indptrs of different lengths; a workspace that is too small
            or not aligned; under CUDA graphs another batch size, more queries than in the first
            plan, or a mask without buffers for it.

        Notes
        -----
        Lengths on the device stay there: nothing is copied to the host or waited for.
        """
        for name, indptr in (("v_indptr", v_indptr), ("o_indptr", o_indptr)):
            if indptr is not None:
                raise NotImplementedError(f"{self._name}.plan: {name} must be None")
        batch_size = qo_indptr.shape[0] - 1
        if kv_indptr.shape[0] != batch_size + 1:
            raise ValueError(
                f"{self._name}.plan: kv_indptr must have length {batch_size + 1} as qo_indptr, got "
                f"{kv_indptr.shape[0]}"
            )
        if max_sequence_kv is None and not kv_indptr.is_cuda and batch_size:
            max_sequence_kv = int(kv_indptr.diff().max())
        sizes = None
        if custom_mask is not None or packed_custom_mask is not None:
            sizes = ragged_sizes(qo_indptr, kv_indptr, non_blocking)
        self._plan_batch(
            PrefillCall(
                lengths=Tables(qo_indptr, kv_indptr),
                heads=(num_qo_heads, num_kv_heads),
                head_dims=(head_dim_qk, head_dim_qk if head_dim_vo is None else head_dim_vo),
                page_size=0,
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
                is_uniform=True,  # No row is padding.
                block_tables=None,
                fixed_split_size=fixed_split_size,
                disable_split_kv=disable_split_kv,
                non_blocking=non_blocking,
            )
        )

    begin_forward = plan
