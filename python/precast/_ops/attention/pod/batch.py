# SPDX-License-Identifier: Apache-2.0
"""Prefill of a batch beside the decode of another, as FlashInfer's batched POD wrapper is called.

Source: Kamath et al., POD-Attention, arXiv:2410.18038 (both in one kernel, which this is not).
"""

from __future__ import annotations

from typing import Any

from precast._base.torch import torch
from precast._op.docs import documented
from precast._op.scalars import RAW_KINDS
from precast._ops.attention import kernels, validation
from precast._ops.attention._docs import PAGED_RUN, PLAN, RUN, WRAPPER
from precast._ops.attention.batch_reference import batch_prefill_with_paged_kv_cache_reference
from precast._ops.attention.lengths import pairs_of_requests
from precast._ops.attention.parts import (
    of_part,
    passed_on,
    planned_together,
    run_beside,
    share_workspace,
)
from precast._ops.attention.plan import NO_MASK, NO_TABLES, Dtype
from precast._ops.attention.pod.trace import batch_pod_trace
from precast._ops.attention.pod.wrapper import DECODE, PREFILL
from precast._ops.attention.prefill.paged import BatchPrefillWithPagedKVCacheWrapper
from precast._ops.attention.run import Scale
from precast._ops.attention.signature import checked_first, gathers
from precast._ops.paged._cache import Cache
from precast.api_logging import precast_api

#: Tables of a part, and their names in its plan.
_TABLES = {
    "qo_indptr": "qo_indptr",
    "kv_indptr": "paged_kv_indptr",
    "kv_indices": "paged_kv_indices",
    "last_page_len": "paged_kv_last_page_len",
}
_RENAMED = {name: f"{name}_p" for name in ("q", "custom_mask", "packed_custom_mask")}


def batch_pod_with_paged_kv_cache_reference(
    q_p: torch.Tensor,
    paged_kv_cache_p: Cache,
    qo_indptr_p: torch.Tensor,
    kv_indptr_p: torch.Tensor,
    kv_indices_p: torch.Tensor,
    last_page_len_p: torch.Tensor,
    q_d: torch.Tensor,
    paged_kv_cache_d: Cache,
    qo_indptr_d: torch.Tensor,
    kv_indptr_d: torch.Tensor,
    kv_indices_d: torch.Tensor,
    last_page_len_d: torch.Tensor,
    causal_p: bool = False,
    sm_scale: float | None = None,
    window_left: int = -1,
    kv_layout: str = "NHD",
    return_lse: bool = False,
) -> tuple[torch.Tensor, ...]:
    """:class:`BatchPODWithPagedKVCacheWrapper` in plain PyTorch: one plan and one run.

    Parameters
    ----------
    q_p, paged_kv_cache_p, q_d, paged_kv_cache_d, causal_p
        As for ``run``, any device.
    qo_indptr_p, kv_indptr_p, kv_indices_p, last_page_len_p : torch.Tensor
        The batch of the prefill, as for ``plan``, and so are the other options.
    qo_indptr_d, kv_indptr_d, kv_indices_d, last_page_len_d : torch.Tensor
        The batch of the decode.

    Returns
    -------
    tuple of torch.Tensor
        The outputs, and behind them the log-sum-exps if they are asked for.
    """
    out_p, lse_p = batch_prefill_with_paged_kv_cache_reference(
        q_p,
        paged_kv_cache_p,
        qo_indptr_p,
        kv_indptr_p,
        kv_indices_p,
        last_page_len_p,
        kv_layout,
        causal=causal_p,
        window_left=window_left,
        sm_scale=sm_scale,
    )
    out_d, lse_d = batch_prefill_with_paged_kv_cache_reference(
        q_d,
        paged_kv_cache_d,
        qo_indptr_d,
        kv_indptr_d,
        kv_indices_d,
        last_page_len_d,
        kv_layout,
        window_left=window_left,
        sm_scale=sm_scale,
    )
    return out_p, out_d, *([lse_p, lse_d] if return_lse else [])


class _Part(BatchPrefillWithPagedKVCacheWrapper):
    """One of the two, with errors of the whole."""

    _name = "BatchPODWithPagedKVCacheWrapper"

    #: Whether the latest run was causal, as the next one will be.
    was_causal = True

    def use_mask(
        self, causal: bool, custom_mask: torch.Tensor | None, packed_mask: torch.Tensor | None
    ) -> None:
        """Change the plan to one with this mask, and divide its work again if that needs it."""
        self._causal = causal
        before, is_masked = self._plan, not (custom_mask is None and packed_mask is None)
        if is_masked:
            given = _Masks(custom_mask, packed_mask)
            sizes = pairs_of_requests(*before.tables[:3], before.shape.page_size)
            mask, _ = self._mask(given, sizes)
            self._plan = before._replace(mask=mask, block=None)
        elif before.mask.is_used:
            self._plan = before._replace(mask=NO_MASK, block=None)
        is_causal = causal and not is_masked
        if is_causal and not before.shape.causal and not self._is_capturing():
            # Half of the work. Not in a CUDA graph, which would divide it in each replay.
            self._divide_again(before.shape._replace(causal=True))
        self._widen()
        self.was_causal = is_causal


class _Masks:
    """What a plan is told of masks."""

    non_blocking = True

    def __init__(self, custom: torch.Tensor | None, packed: torch.Tensor | None) -> None:
        self.custom_mask, self.packed_custom_mask = custom, packed


@documented(WRAPPER, PLAN)
class BatchPODWithPagedKVCacheWrapper:
    """Compute the prefill of a batch and the decode of another in one call.

    Both have pages, of one cache or of two.

    Notes
    -----
    The two parts are not one kernel here: a run launches the prefill and then the decode, because a
    kernel reads one cache. With programmatic dependent launch the decode starts on the SMs that the
    prefill leaves free; each part takes a half of the workspace. Where both parts have the same
    cache, :class:`BatchAttention` takes one launch for the whole batch.

    Examples
    --------
    >>> import torch, precast
    >>> with precast.reference_mode():
    ...     wrapper = precast.BatchPODWithPagedKVCacheWrapper(torch.empty(1024).byte())
    ...     two, one = torch.tensor([0, 2]).int(), torch.ones(1).int()
    ...     prefill, decode = (two, two, one.repeat(2).cumsum(0).int() - 1, one), (
    ...         two // 2, two // 2, one, one
    ...     )
    ...     wrapper.plan(*prefill, *decode, 2, 1, 64, 1, q_data_type="float32")
    ...     q, cache = torch.zeros(2, 2, 64), torch.arange(2.0).view(2, 1, 1, 1, 1)
    ...     cache = cache.expand(2, 2, 1, 1, 64)
    ...     out_p, out_d = wrapper.run(q, cache, q[:1], cache, causal_p=True)
    ...     out_p[:, 0, 0], out_d[:, 0, 0]
    (tensor([0.0000, 0.5000]), tensor([1.]))
    """

    _name = "BatchPODWithPagedKVCacheWrapper"
    #: The same in plain PyTorch, in one call.
    reference = staticmethod(batch_pod_with_paged_kv_cache_reference)

    @precast_api
    @checked_first
    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD") -> None:
        self._prefill = _Part(float_workspace_buffer, kv_layout)
        self._decode = _Part(float_workspace_buffer, kv_layout)
        share_workspace(self._prefill, self._decode)
        self._prefill._cache_argument = "paged_kv_cache_p"
        self._decode._cache_argument = "paged_kv_cache_d"

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """False: there are no buffers whose addresses plans keep."""
        return False

    def _plan_parts(self, given: Any) -> None:
        both = given.data_type
        more = {
            "head_dim_qk": given.head_dim,
            "q_data_type": given.q_data_type or both or "float16",
            "kv_data_type": given.kv_data_type or both,
        }
        plan = BatchPrefillWithPagedKVCacheWrapper.plan
        with planned_together(self._prefill, self._decode):
            for part, ending, words in (
                (self._prefill, "p", PREFILL),
                (self._decode, "d", DECODE),
            ):
                table = {
                    theirs: getattr(given, f"{name}_{ending}") for name, theirs in _TABLES.items()
                }
                causal = part is self._prefill and part.was_causal
                with of_part(words, **{name: f"{name}_{ending}" for name in _TABLES}):
                    part.plan(**passed_on(plan, given, **table, **more, causal=causal))

    @precast_api
    @documented(PLAN)
    @gathers(_plan_parts, ("non_blocking",))
    def plan(
        self,
        qo_indptr_p: torch.Tensor,
        kv_indptr_p: torch.Tensor,
        kv_indices_p: torch.Tensor,
        last_page_len_p: torch.Tensor,
        qo_indptr_d: torch.Tensor,
        kv_indptr_d: torch.Tensor,
        kv_indices_d: torch.Tensor,
        last_page_len_d: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        q_data_type: Dtype = "float16",
        kv_data_type: Dtype = None,
        data_type: Dtype = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
    ) -> None:
        """Divide the work of both parts, for all runs until the next plan.

        Parameters
        ----------
        qo_indptr_p, kv_indptr_p, kv_indices_p, last_page_len_p : torch.Tensor
            The batch of the prefill, as ``qo_indptr``, ``paged_kv_indptr``, ``paged_kv_indices``
            and ``paged_kv_last_page_len`` of :meth:`BatchPrefillWithPagedKVCacheWrapper.plan`.
        qo_indptr_d, kv_indptr_d, kv_indices_d, last_page_len_d : torch.Tensor
            The batch of the decode, likewise; a query sees all tokens of its request.
        head_dim : int
            64, 80, 96, 128, 256 or 512.
        q_data_type, kv_data_type, data_type : torch.dtype or str, optional
            As for :meth:`BatchDecodeWithPagedKVCacheWrapper.plan`.

        Raises
        ------
        ValueError
            As for :meth:`BatchPrefillWithPagedKVCacheWrapper.plan`, of any part, before a part has
            a new plan.

        Notes
        -----
        Lengths on the device stay there: nothing is copied to the host or waited for. The mask of
        the prefill is not known yet: its work is divided as for the latest run, causal at first. A
        run with another mask divides it again.
        """

    begin_forward = plan

    def _run_parts(self, given: Any) -> Any:
        name, prefill, before = f"{self._name}.run", self._prefill, self._prefill._plan
        prefill._check_planned(name)
        flags = ("causal_p", "return_lse", "use_fp16_qk_reduction")
        validation.check_flags(name, **{flag: getattr(given, flag) for flag in flags})
        options = {"return_lse": given.return_lse, "enable_pdl": given.enable_pdl}
        try:
            with of_part(PREFILL, **_RENAMED):
                masks = given.custom_mask_p, given.packed_custom_mask_p
                prefill.use_mask(bool(given.causal_p), *masks)
                of_prefill = prefill.run(given.q_p, given.paged_kv_cache_p, **options)
            run_beside(prefill, self._decode, given.q_p)
            with of_part(DECODE, q="q_d"):
                of_decode = self._decode.run(
                    given.q_d,
                    given.paged_kv_cache_d,
                    q_scale=given.q_scale,
                    k_scale=given.k_scale,
                    v_scale=given.v_scale,
                    **options,
                )
        except RAW_KINDS:
            divided, prefill._plan = prefill._plan.shape, before
            if divided != before.shape:  # So is what the workspace holds.
                kernels.launch(kernels.pack(before), NO_TABLES)
            raise
        if given.return_lse:
            (out_p, lse_p), (out_d, lse_d) = of_prefill, of_decode
            return (out_p, out_d), (lse_p, lse_d)
        return of_prefill, of_decode

    @precast_api(
        trace=batch_pod_trace(
            batch_pod_with_paged_kv_cache_reference, lambda: BatchPODWithPagedKVCacheWrapper
        )
    )
    @documented(RUN, PAGED_RUN)
    @gathers(_run_parts)
    def run(
        self,
        q_p: torch.Tensor,
        paged_kv_cache_p: Cache,
        q_d: torch.Tensor,
        paged_kv_cache_d: Cache,
        custom_mask_p: torch.Tensor | None = None,
        packed_custom_mask_p: torch.Tensor | None = None,
        causal_p: bool = False,
        q_scale: Scale = None,
        k_scale: Scale = None,
        v_scale: Scale = None,
        return_lse: bool = False,
        use_fp16_qk_reduction: bool = False,
        enable_pdl: bool | None = None,
    ) -> tuple[Any, Any]:
        """Compute the prefill and the decode by the latest plan.

        Parameters
        ----------
        q_p, q_d : torch.Tensor
            ``[qo_indptr_p[-1], num_qo_heads, head_dim]`` and ``[qo_indptr_d[-1], num_qo_heads,
            head_dim]``; stride 1 in the last dimension, any in the others.
        paged_kv_cache_p, paged_kv_cache_d : torch.Tensor or tuple of torch.Tensor
            As ``paged_kv_cache`` of :meth:`BatchPrefillWithPagedKVCacheWrapper.run`.
        custom_mask_p, packed_custom_mask_p : torch.Tensor, optional
            The mask of the prefill, as ``custom_mask`` and ``packed_custom_mask`` of
            :meth:`BatchPrefillWithPagedKVCacheWrapper.plan`. It is copied, and packed, at each run.
        causal_p : bool
            Whether a query of the prefill sees only itself and what is before it.
        q_scale, k_scale, v_scale : float or torch.Tensor, optional
            Of the decode, as for :meth:`BatchPrefillWithPagedKVCacheWrapper.run`.
        return_lse : bool
            Whether to return log-sum-exps, too.
        use_fp16_qk_reduction : bool
            Without effect: logits are summed in float32.

        Returns
        -------
        tuple
            ``(out_p, out_d)``, or ``((out_p, out_d), (lse_p, lse_d))`` with log-sum-exps.

        Notes
        -----
        Two launches, one for each part, and those that pack a mask. Safe in CUDA graphs; not
        differentiable.
        """

    def end_forward(self) -> None:
        """Do nothing; older engines call it."""
