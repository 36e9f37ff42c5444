# SPDX-License-Identifier: Apache-2.0
"""Prefill of one request beside the decode of a batch, as FlashInfer's POD wrapper is called.

Source: Kamath et al., POD-Attention, arXiv:2410.18038 (both in one kernel, which this is not).
"""

from __future__ import annotations

from typing import Any

from precast._base.errors import PlanMismatchError
from precast._base.torch import torch
from precast._op.docs import documented
from precast._ops.attention import validation
from precast._ops.attention._docs import PAGED_RUN, PLAN, RUN, WRAPPER
from precast._ops.attention.backends import refuse_code
from precast._ops.attention.batch_reference import batch_decode_with_paged_kv_cache_reference
from precast._ops.attention.decode.wrapper import BatchDecodeWithPagedKVCacheWrapper
from precast._ops.attention.parts import of_part, passed_on
from precast._ops.attention.plan import Dtype
from precast._ops.attention.pod.trace import pod_trace
from precast._ops.attention.prefill.single import (
    single_prefill_with_kv_cache,
    single_prefill_with_kv_cache_reference,
)
from precast._ops.attention.run import Scale, check_other_options
from precast._ops.attention.signature import checked_first, gathers
from precast._ops.paged._cache import Cache
from precast.api_logging import precast_api

#: The parts in errors.
PREFILL, DECODE = "the prefill, whose arguments end with _p", "the decode, with _d"

#: What the words of a run mean for its decode, of which ``plan()`` was told.
_PLANNED = {
    "pos_encoding_mode_d": ("NONE", "_pos_encoding_mode"),
    "sm_scale_d": (None, "_sm_scale"),
    "window_left_d": (-1, "_window_left"),
    "rope_scale_d": (None, "_rope_scale"),
    "rope_theta_d": (None, "_rope_theta"),
    "kv_layout_d": ("NHD", "_kv_layout"),
}


def pod_with_paged_kv_cache_reference(
    q_p: torch.Tensor,
    k_p: torch.Tensor,
    v_p: torch.Tensor,
    q_d: torch.Tensor,
    paged_kv_cache_d: Cache,
    indptr_d: torch.Tensor,
    indices_d: torch.Tensor,
    last_page_len_d: torch.Tensor,
    causal_p: bool = False,
    kv_layout_p: str = "NHD",
    sm_scale_p: float | None = None,
    window_left_p: int = -1,
    return_lse_p: bool = False,
    kv_layout_d: str = "NHD",
    sm_scale_d: float | None = None,
    window_left_d: int = -1,
    return_lse_d: bool = False,
) -> tuple[torch.Tensor, ...]:
    """:class:`PODWithPagedKVCacheWrapper` in plain PyTorch: one plan and one run.

    Parameters
    ----------
    q_p, k_p, v_p, q_d, paged_kv_cache_d
        As for ``run``, any device, and so are the options that end with ``_p``.
    indptr_d, indices_d, last_page_len_d : torch.Tensor
        The page table of the decode, as for ``plan``, and so are the options that end with ``_d``.

    Returns
    -------
    tuple of torch.Tensor
        The outputs, and behind them the log-sum-exps that are asked for.
    """
    out_p, lse_p = single_prefill_with_kv_cache_reference(
        q_p,
        k_p,
        v_p,
        causal=causal_p,
        kv_layout=kv_layout_p,
        sm_scale=sm_scale_p,
        window_left=window_left_p,
        return_lse=True,
    )
    out_d, lse_d = batch_decode_with_paged_kv_cache_reference(
        q_d,
        paged_kv_cache_d,
        indptr_d,
        indices_d,
        last_page_len_d,
        kv_layout_d,
        window_left=window_left_d,
        sm_scale=sm_scale_d,
    )
    return out_p, out_d, *([lse_p] if return_lse_p else []), *([lse_d] if return_lse_d else [])


class _Decode(BatchDecodeWithPagedKVCacheWrapper):
    """The decode, with errors of the whole."""

    _name = "PODWithPagedKVCacheWrapper"
    _cache_argument = "paged_kv_cache_d"


@documented(WRAPPER, PLAN)
class PODWithPagedKVCacheWrapper:
    """Compute the prefill of one request and the decode of a batch in one call.

    Parameters
    ----------
    paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer : torch.Tensor
        As for :class:`BatchDecodeWithPagedKVCacheWrapper`, needed with ``use_cuda_graph``.
    jit_args : None
        There is no code to add: kernels are compiled ahead of time.

    Notes
    -----
    The two parts are not one kernel here: a run launches the plan of the prefill, the prefill and
    the decode, one after the other, because a kernel reads one pair of keys and values. Requests
    that all lie in one paged cache take one launch with :class:`BatchAttention`.

    Examples
    --------
    >>> import torch, precast
    >>> with precast.reference_mode():
    ...     wrapper = precast.PODWithPagedKVCacheWrapper(torch.empty(1024).byte())
    ...     one = torch.ones(1).int()
    ...     wrapper.plan(torch.arange(2).int(), one - 1, one, 2, 1, 64, 1, q_data_type="float32")
    ...     q, k = torch.zeros(2, 2, 64), torch.arange(2.0).view(2, 1, 1).expand(2, 1, 64)
    ...     out_p, out_d = wrapper.run(q, k, k, q[:1], torch.ones(1, 2, 1, 1, 64), causal_p=True)
    ...     out_p[:, 0, 0], out_d[:, 0, 0]
    (tensor([0.0000, 0.5000]), tensor([1.]))
    """

    _name = "PODWithPagedKVCacheWrapper"
    #: The same in plain PyTorch, in one call.
    reference = staticmethod(pod_with_paged_kv_cache_reference)

    @precast_api
    @checked_first
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
        jit_args: list[Any] | None = None,
    ) -> None:
        if jit_args is not None:
            refuse_code(self._name, "jit_args")
        self._decode = _Decode(
            float_workspace_buffer,
            kv_layout,
            use_cuda_graph,
            paged_kv_indptr_buffer=paged_kv_indptr_buffer,
            paged_kv_indices_buffer=paged_kv_indices_buffer,
            paged_kv_last_page_len_buffer=paged_kv_last_page_len_buffer,
        )

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """Whether the wrapper was made for CUDA graphs."""
        return self._decode.is_cuda_graph_enabled

    @checked_first
    @documented(BatchDecodeWithPagedKVCacheWrapper.reset_workspace_buffer)
    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor
    ) -> None:
        """Take other workspaces; then plan again."""
        self._decode.reset_workspace_buffer(float_workspace_buffer, int_workspace_buffer)

    def _plan_decode(self, given: Any) -> None:
        self._decode.plan(**passed_on(BatchDecodeWithPagedKVCacheWrapper.plan, given))

    @precast_api
    @documented(BatchDecodeWithPagedKVCacheWrapper.plan, PLAN)
    @gathers(_plan_decode, ("non_blocking",))
    def plan(
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
        q_data_type: Dtype = "float16",
        kv_data_type: Dtype = None,
        data_type: Dtype = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
    ) -> None:
        """Divide the work of the decode, for all runs until the next plan.

        Parameters
        ----------
        q_data_type, kv_data_type, data_type : torch.dtype or str, optional
            As for :meth:`BatchDecodeWithPagedKVCacheWrapper.plan`.
        """

    begin_forward = plan

    def _run_parts(self, given: Any) -> Any:
        self._decode._check_planned(f"{self._name}.run")
        self._check_decode_options(given)
        prefill = {
            name.removesuffix("_p"): getattr(given, name)
            for name in given._fields
            if name.endswith("_p")
        }
        with of_part(PREFILL, **{name: f"{name}_p" for name in prefill}):
            result = single_prefill_with_kv_cache(
                **prefill, use_fp16_qk_reduction=given.use_fp16_qk_reduction
            )
        out_p, lse_p = result if given.return_lse_p else (result, None)
        with of_part(DECODE, q="q_d"):
            result = self._decode.run(
                given.q_d,
                given.paged_kv_cache_d,
                q_scale=given.q_scale,
                k_scale=given.k_scale,
                v_scale=given.v_scale,
                return_lse=given.return_lse_d,
                enable_pdl=given.enable_pdl,
            )
        out_d, lse_d = result if given.return_lse_d else (result, None)
        if lse_p is None is lse_d:
            return out_p, out_d
        return (out_p, out_d), (lse_p, lse_d)

    def _check_decode_options(self, given: Any) -> None:
        """Raise for options that the decode does not have, or that are not those of its plan."""
        check_other_options(
            self._decode,
            (),
            custom_mask_d=given.custom_mask_d,
            packed_custom_mask_d=given.packed_custom_mask_d,
        )
        for option, (default, attribute) in _PLANNED.items():
            value, planned = getattr(given, option), getattr(self._decode, attribute)
            if value not in (default, planned):
                where = "the wrapper has it" if option == "kv_layout_d" else "in plan()"
                raise PlanMismatchError(
                    f"{self._name}.run: {option} must be {planned!r} as {where}, got {value!r}"
                )
        names = ("causal_p", "causal_d", "return_lse_p", "return_lse_d", "use_fp16_qk_reduction")
        validation.check_flags(f"{self._name}.run", **{n: getattr(given, n) for n in names})

    @precast_api(
        trace=pod_trace(pod_with_paged_kv_cache_reference, lambda: PODWithPagedKVCacheWrapper)
    )
    @documented(RUN, PAGED_RUN)
    @gathers(_run_parts, ("window_left_d",))
    def run(
        self,
        q_p: torch.Tensor,
        k_p: torch.Tensor,
        v_p: torch.Tensor,
        q_d: torch.Tensor,
        paged_kv_cache_d: Cache,
        custom_mask_p: torch.Tensor | None = None,
        packed_custom_mask_p: torch.Tensor | None = None,
        causal_p: bool = False,
        kv_layout_p: str = "NHD",
        pos_encoding_mode_p: str = "NONE",
        sm_scale_p: float | None = None,
        window_left_p: int = -1,
        rope_scale_p: float | None = None,
        rope_theta_p: float | None = None,
        return_lse_p: bool = False,
        custom_mask_d: torch.Tensor | None = None,
        packed_custom_mask_d: torch.Tensor | None = None,
        causal_d: bool = False,
        kv_layout_d: str = "NHD",
        pos_encoding_mode_d: str = "NONE",
        sm_scale_d: float | None = None,
        window_left_d: int = -1,
        rope_scale_d: float | None = None,
        rope_theta_d: float | None = None,
        q_scale: Scale = None,
        k_scale: Scale = None,
        v_scale: Scale = None,
        return_lse_d: bool = False,
        use_fp16_qk_reduction: bool = False,
        enable_pdl: bool | None = None,
        *args: Any,
    ) -> tuple[Any, Any]:
        """Compute the prefill and, by the latest plan, the decode.

        Parameters
        ----------
        q_p, k_p, v_p : torch.Tensor
            As ``q``, ``k`` and ``v`` of :func:`single_prefill_with_kv_cache`, and so are the other
            arguments of this ending.
        q_d : torch.Tensor
            ``[batch_size, num_qo_heads, head_dim]``.
        paged_kv_cache_d : torch.Tensor or tuple of torch.Tensor
            As ``paged_kv_cache`` of :meth:`BatchDecodeWithPagedKVCacheWrapper.run`.
        custom_mask_p, packed_custom_mask_p : torch.Tensor, optional
            The mask of the prefill.
        causal_p : bool
            Whether a query of the prefill sees only itself and what is before it.
        kv_layout_p, pos_encoding_mode_p : str
            Of the prefill.
        sm_scale_p, rope_scale_p, rope_theta_p : float, optional
            Of the prefill.
        window_left_p : int
            Of the prefill.
        return_lse_p, return_lse_d : bool
            Whether to return the log-sum-exp of the prefill, and of the decode.
        custom_mask_d, packed_custom_mask_d : None
            A decode has no mask.
        causal_d : bool
            Without effect: the one query of each request is its last token.
        kv_layout_d, pos_encoding_mode_d, sm_scale_d, window_left_d, rope_scale_d, rope_theta_d
            Those of the wrapper and of :meth:`plan`, or the defaults.
        q_scale, k_scale, v_scale : float or torch.Tensor, optional
            Of the decode, as for :meth:`BatchDecodeWithPagedKVCacheWrapper.run`.
        enable_pdl : bool, optional
            Of the decode.
        *args
            None.

        Returns
        -------
        tuple
            The outputs ``(out_p, out_d)``; with a log-sum-exp ``((out_p, out_d), (lse_p, lse_d))``,
            where the one that was not asked for is None.

        Notes
        -----
        Three launches, see above. Allocates outputs and the workspaces of the prefill. Safe in CUDA
        graphs; not differentiable. FlashInfer returns no log-sum-exp, and takes the ``_d`` options
        but does not read them; here one that differs from the plan is an error.
        """

    def end_forward(self) -> None:
        """Do nothing; older engines call it."""
