# SPDX-License-Identifier: Apache-2.0
"""Prefill over keys and values that lie one request behind the other, without pages.

Sources: Ye et al., FlashInfer, arXiv:2501.01005 (the wrapper); Dao, FlashAttention-2,
arXiv:2307.08691.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any, TypeAlias

from precast._base.torch import torch
from precast._ops.attention import run as running
from precast._ops.attention import validation
from precast._ops.attention.batch_trace import ragged_trace
from precast._ops.attention.plan import Mask, Scores, Tables, scores_of
from precast._ops.attention.prefill.lse import Lse
from precast._ops.attention.prefill.ragged_plan import RaggedPrefillPlan
from precast._ops.attention.prefill.reference import batch_prefill_with_ragged_kv_cache_reference
from precast._ops.attention.signature import arguments_of
from precast.api_logging import precast_api

Scale: TypeAlias = "float | torch.Tensor | None"


_TRACE = ragged_trace(
    "batch_prefill_ragged",
    "Attention of a ragged batch of queries over ragged keys and values.",
    batch_prefill_with_ragged_kv_cache_reference,
    lambda: BatchPrefillWithRaggedKVCacheWrapper,
)


class BatchPrefillWithRaggedKVCacheWrapper(RaggedPrefillPlan):
    r"""Attention of a ragged batch of queries over ragged keys and values.

    The same as :class:`BatchPrefillWithPagedKVCacheWrapper`, but that the tokens of request
    :math:`b` are rows ``kv_indptr[b]`` to ``kv_indptr[b + 1]`` of two tensors. Head dimensions 192
    and 128 are those of MLA's prefill.

    Parameters
    ----------
    float_workspace_buffer : torch.Tensor
        uint8 or int8 on the device of the tensors, contiguous, 16-byte aligned: place for partial
        results. May hold anything.
    kv_layout : str
        ``NHD``, or ``HND`` for keys and values ``[num_kv_heads, tokens, head_dim]``.
    use_cuda_graph : bool
        Whether :meth:`run` is captured; then the batch size is that of the buffers below, and
        :meth:`plan` copies into them.
    qo_indptr_buf, kv_indptr_buf : torch.Tensor, optional
        ``[batch_size + 1]``, int32 on the device, needed with ``use_cuda_graph``.
    custom_mask_buf, mask_indptr_buf : torch.Tensor, optional
        uint8 and int32 ``[batch_size + 1]``, needed for masks with ``use_cuda_graph``.
    backend : str
        ``auto`` or ``fa2``, which are the same.
    jit_args, jit_kwargs : None
        There is no code to add: kernels are compiled ahead of time.
    variant_owns_mask : bool
        False; it says that such code masks.

    Raises
    ------
    precast.errors.BackendSupportedError
        Another backend, ``fa3`` among them until it exists.
    precast.errors.CacheLayoutError
        Another layout (a ``KeyError`` and a ``ValueError``).
    NotImplementedError
        ``jit_args``.
    ValueError
        A workspace that is not aligned; with ``use_cuda_graph``, a missing buffer;
        ``variant_owns_mask``.

    Examples
    --------
    >>> import torch, precast
    >>> with precast.reference_mode():
    ...     wrapper = precast.BatchPrefillWithRaggedKVCacheWrapper(torch.empty(1024).byte())
    ...     two = torch.tensor([0, 2], dtype=torch.int32)
    ...     wrapper.plan(two, two, 2, 1, 64, causal=True, q_data_type="float32")
    ...     k = torch.arange(2.0).view(2, 1, 1).expand(2, 1, 64)
    ...     wrapper.run(torch.zeros(2, 2, 64), k, k)[:, 0, 0]
    tensor([0.0000, 0.5000])
    """

    _name = "BatchPrefillWithRaggedKVCacheWrapper"
    #: The same in plain PyTorch, in one call.
    reference = staticmethod(batch_prefill_with_ragged_kv_cache_reference)

    @precast_api
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        kv_indptr_buf: torch.Tensor | None = None,
        custom_mask_buf: torch.Tensor | None = None,
        mask_indptr_buf: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
        variant_owns_mask: bool = False,
    ) -> None:
        super().__init__(
            float_workspace_buffer,
            kv_layout,
            use_cuda_graph,
            backend,
            jit_args,
            jit_kwargs,
            buffers=Tables(qo_indptr_buf, kv_indptr_buf),
            mask=Mask(custom_mask_buf, mask_indptr_buf),
        )
        validation.check_no_variant(self._name, variant_owns_mask)
        if not use_cuda_graph:
            return
        for name, buffer in (("qo_indptr_buf", qo_indptr_buf), ("kv_indptr_buf", kv_indptr_buf)):
            if not isinstance(buffer, torch.Tensor):
                raise ValueError(f"{name} should be a torch.Tensor in cuda graph mode")
        assert qo_indptr_buf is not None
        assert kv_indptr_buf is not None
        self._fixed_batch_size = len(qo_indptr_buf) - 1
        if len(kv_indptr_buf) != self._fixed_batch_size + 1:
            raise ValueError(
                f"The length of kv_indptr_buf ({len(kv_indptr_buf)}) should be the same as "
                f"qo_indptr_buf ({self._fixed_batch_size + 1})."
            )

    @precast_api(trace=_TRACE)
    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *args: Any,
        q_scale: Scale = None,
        k_scale: Scale = None,
        v_scale: Scale = None,
        o_scale: float | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        lse_base: str = "log2",
        lse_layout: str = "NH",
        enable_pdl: bool | None = None,
        kv_cache_sf: object = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attention by the latest plan.

        Parameters
        ----------
        q : torch.Tensor
            ``[qo_indptr[-1], num_qo_heads, head_dim_qk]``; stride 1 in the last dimension, any in
            the others.
        k, v : torch.Tensor
            ``[kv_indptr[-1], num_kv_heads, head_dim]`` in layout ``NHD``, with heads first in
            ``HND``; strides likewise.
        *args
            None: there is no code to pass them to.
        q_scale, k_scale : float or torch.Tensor, optional
            Multiply ``sm_scale``. A tensor on the device is one positive float32 and is read there.
        v_scale : float or torch.Tensor, optional
            Multiplies the output in float32, before it is rounded.
        o_scale : float, optional
            Of outputs of 8 bits, which are not written here: None or 1.
        out, lse : torch.Tensor, optional
            Where to write: ``[tokens, num_qo_heads, head_dim_vo]`` and, float32, the log-sum-exp.
            Default: new ones.
        return_lse : bool
            Whether to return the log-sum-exp of the logits, too.
        lse_base : str
            ``log2`` or ``ln``.
        lse_layout : str
            ``NH``, ``[tokens, num_qo_heads]``, or ``HN``, the other way round, by a kernel of its
            own.
        enable_pdl : bool, optional
            Programmatic dependent launch. Default: on; without effect below capability 9.0.
        kv_cache_sf : None
            For other backends.

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
            Dtypes, heads or a number of queries that are not those of :meth:`plan`; a shape, dtype,
            device or strides other than above.

        Notes
        -----
        Sinks are those in the attribute ``_sinks``, None by default. Safe in CUDA graphs; not
        differentiable.
        """
        if args or kv_cache_sf is not None or o_scale not in (None, 1.0):
            running.check_other_options(
                self,
                args,
                kv_cache_sf=kv_cache_sf,
                o_scale=None if o_scale == 1.0 else o_scale,
            )
        finish = Lse(lse_base, lse_layout, lse, q) if return_lse else None
        into = None if finish is None else finish.buffer
        result, sums = running.run(
            self, q, k, v, q_scale, k_scale, v_scale, out, into, return_lse, None, enable_pdl
        )
        if finish is None or sums is None:
            return result
        return result, finish(sums)

    run_return_lse = functools.partialmethod(run, return_lse=True)

    # -- deprecated -------------------------------------------------------------------------------

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> torch.Tensor:
        """:meth:`run`, with options that :meth:`plan` has now, too."""
        self._take_options(
            Scores(
                causal,
                window_left,
                logits_soft_cap or 0.0,
                sm_scale,
                pos_encoding_mode,
                rope_scale,
                rope_theta,
                use_fp16_qk_reduction,
            )
        )
        out = self.run(q, k, v)
        assert isinstance(out, torch.Tensor)
        return out

    @arguments_of(forward)
    def forward_return_lse(self, given: SimpleNamespace) -> tuple[torch.Tensor, torch.Tensor]:
        """:meth:`run_return_lse`, with options that :meth:`plan` has now, too."""
        self._take_options(scores_of(given))
        both = self.run(given.q, given.k, given.v, return_lse=True)
        assert isinstance(both, tuple)
        return both

    def end_forward(self) -> None:
        """Nothing; older engines call it."""
