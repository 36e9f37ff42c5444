# SPDX-License-Identifier: Apache-2.0
"""Decode attention over a paged KV cache: one query of each request, or a few.

Sources: Ye et al., FlashInfer, arXiv:2501.01005 (the wrapper); Kwon et al., arXiv:2309.06180
(pages); Osama et al., Stream-K, arXiv:2301.03598 (the division of work).
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any, TypeAlias

from precast._base.torch import torch
from precast._ops.attention import run as running
from precast._ops.attention.batch_trace import paged_trace
from precast._ops.attention.decode.plan import DecodePlan
from precast._ops.attention.decode.reference import batch_decode_with_paged_kv_cache_reference
from precast._ops.attention.decode.validation import check_q_len
from precast._ops.attention.plan import Scores, Tables, scores_of
from precast._ops.attention.signature import arguments_of
from precast.api_logging import precast_api

Cache: TypeAlias = "torch.Tensor | tuple[torch.Tensor, torch.Tensor]"
Scale: TypeAlias = "float | torch.Tensor | None"


_TRACE = paged_trace(
    "batch_decode",
    "Attention of the newest tokens of a batch over a paged KV cache.",
    batch_decode_with_paged_kv_cache_reference,
    lambda: BatchDecodeWithPagedKVCacheWrapper,
    decode=True,
)


class BatchDecodeWithPagedKVCacheWrapper(DecodePlan):
    r"""Attention of the newest tokens of a batch over a paged KV cache.

    .. math::

        O_{b, h} = \sum_j \mathrm{softmax}_j(s_{b, h, j}) V_{b, j, h'}, \quad
        s_{b, h, j} = \mathrm{cap}(sm\_scale \cdot Q_{b, h} \cdot K_{b, j, h'})

    where :math:`h' = \lfloor h / (H_{qo} / H_{kv}) \rfloor`. :meth:`plan` divides the work of a
    batch among the SMs, :meth:`run` does it, once for each layer.

    Parameters
    ----------
    float_workspace_buffer : torch.Tensor
        uint8 or int8 on the device of the tensors, contiguous, 16-byte aligned: place for partial
        results; 128 MB is always enough, :meth:`workspace_size` says what is. May hold anything.
    kv_layout : str
        ``NHD`` or ``HND``.
    use_cuda_graph : bool
        Whether :meth:`run` is captured; then the batch size is that of the buffers below, and
        :meth:`plan` copies into them.
    use_tensor_cores : bool
        Kernels use tensor cores in any case. True allows ``q_len_per_req`` and
        ``fixed_split_size``.
    paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer : torch.Tensor
        With ``use_cuda_graph``, int32 on the device: ``[batch_size + 1]``, as many as there ever
        are, ``[batch_size]``.
    backend : str
        ``auto`` or ``fa2``, which are the same.
    jit_args : None
        There is no code to add: kernels are compiled ahead of time.

    Raises
    ------
    precast.errors.BackendSupportedError
        Another backend, ``fa3`` among them until it exists.
    precast.errors.CacheLayoutError
        Another layout (a ``KeyError`` and a ``ValueError``).
    NotImplementedError
        ``jit_args``.
    ValueError
        A workspace that is not aligned; with ``use_cuda_graph``, a missing buffer.

    Notes
    -----
    With lengths on the device :meth:`plan` copies nothing to the host and waits for nothing, so it
    may be captured together with :meth:`run`.

    Examples
    --------
    >>> import torch, precast
    >>> with precast.reference_mode():
    ...     wrapper = precast.BatchDecodeWithPagedKVCacheWrapper(torch.empty(1024).byte())
    ...     one = torch.ones(1, dtype=torch.int32)
    ...     wrapper.plan(torch.arange(2).int(), one - 1, one, 2, 1, 64, 1, q_data_type="float32")
    ...     wrapper.run(torch.ones(1, 2, 64), torch.full((1, 2, 1, 1, 64), 3.0)).unique()
    tensor([3.])
    """

    _name = "BatchDecodeWithPagedKVCacheWrapper"
    #: The same in plain PyTorch, in one call.
    reference = staticmethod(batch_decode_with_paged_kv_cache_reference)

    @precast_api
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
    ) -> None:
        indptr, indices = paged_kv_indptr_buffer, paged_kv_indices_buffer
        last_page_len, qo_indptr, batch_size = paged_kv_last_page_len_buffer, None, 0
        if use_cuda_graph:
            for name, buffer in (
                ("paged_kv_indptr_buffer", indptr),
                ("paged_kv_indices_buffer", indices),
                ("paged_kv_last_page_len_buffer", last_page_len),
            ):
                if not isinstance(buffer, torch.Tensor):
                    raise ValueError(f"{name} should be a torch.Tensor in cudagraph mode")
            assert last_page_len is not None
            assert indptr is not None
            batch_size = len(last_page_len)
            if len(indptr) != batch_size + 1:
                raise ValueError(
                    f"The size of paged_kv_indptr_buffer should be batch_size + 1: "
                    f"{batch_size + 1} for paged_kv_last_page_len_buffer, got {len(indptr)}"
                )
            if use_tensor_cores:
                device = float_workspace_buffer.device
                qo_indptr = torch.arange(batch_size + 1, dtype=torch.int32, device=device)
        super().__init__(
            float_workspace_buffer,
            kv_layout,
            use_cuda_graph,
            backend,
            jit_args,
            buffers=Tables(qo_indptr, indptr, last_page_len, indices),
        )
        self._fixed_batch_size = batch_size
        self._use_tensor_cores = use_tensor_cores

    @property
    def use_tensor_cores(self) -> bool:
        """Whether ``q_len_per_req`` and ``fixed_split_size`` are allowed."""
        return self._use_tensor_cores

    @property
    def resolved_backend(self) -> str:
        """The backend that runs: ``fa2``."""
        return "fa2"

    # -- run --------------------------------------------------------------------------------------

    @precast_api(trace=_TRACE)
    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: Cache,
        *args: Any,
        q_scale: Scale = None,
        k_scale: Scale = None,
        v_scale: Scale = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: torch.Tensor | None = None,
        q_len_per_req: int | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        kv_cache_sf: Cache | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attention by the latest plan.

        Parameters
        ----------
        q : torch.Tensor
            ``[batch_size * q_len_per_req, num_qo_heads, head_dim]``; stride 1 in the last
            dimension, any in the others.
        paged_kv_cache : torch.Tensor or tuple of torch.Tensor
            ``[pages, 2, page_size, num_kv_heads, head_dim]`` in layout ``NHD``,
            ``[pages, 2, num_kv_heads, page_size, head_dim]`` in ``HND``, or a tuple of keys and
            values without the dimension of 2. Page size 1 may be left out of the shape. Stride 1
            in the last dimension, any in the others.
        *args
            None: there is no code to pass them to.
        q_scale, k_scale : float or torch.Tensor, optional
            Multiply ``sm_scale``. A tensor on the device is one positive float32 and is read there.
        v_scale : float or torch.Tensor, optional
            Multiplies the output in float32, before it is rounded.
        out, lse : torch.Tensor, optional
            Where to write: ``[tokens, num_qo_heads, head_dim]`` and, float32,
            ``[tokens, num_qo_heads]``. Default: new ones.
        return_lse : bool
            Whether to return the base-2 log-sum-exp of the logits, too.
        enable_pdl : bool, optional
            Programmatic dependent launch. Default: on; without effect below capability 9.0.
        window_left : int, optional
            That of :meth:`plan`, which is the default.
        sinks : torch.Tensor, optional
            ``[num_qo_heads]``, float32: a logit (base e, not scaled) that takes its share of each
            softmax and has no value.
        q_len_per_req : int, optional
            Deprecated; say it to :meth:`plan`.
        skip_softmax_threshold_scale_factor, kv_cache_sf : None
            For other backends.

        Returns
        -------
        torch.Tensor or tuple of torch.Tensor
            The output, and the log-sum-exp if asked for. A request without tokens has output 0
            and, without sinks, log-sum-exp minus infinity.

        Raises
        ------
        precast.errors.PlanMismatchError
            No plan, or another ``window_left`` (an ``AssertionError`` and a ``ValueError``).
        precast.errors.CacheLayoutError
            A cache that is neither a tensor nor a tuple of two (a ``KeyError`` and a
            ``ValueError``).
        NotImplementedError
            An argument for other backends.
        ValueError
            Dtypes, heads, pages or a number of queries that are not those of :meth:`plan`; a shape,
            dtype, device or strides other than above.

        Notes
        -----
        Safe in CUDA graphs; not differentiable.
        """
        if q_len_per_req is not None:
            batch_size = self._batch_size if self._plan.is_launched else None
            check_q_len(self._name, q.shape[0], batch_size, q_len_per_req)
        if window_left is not None:
            running.check_window(self, window_left)
        if args or not (kv_cache_sf is skip_softmax_threshold_scale_factor is None):
            running.check_other_options(
                self,
                args,
                kv_cache_sf=kv_cache_sf,
                skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor,
            )
        k, v = paged_kv_cache, None
        if isinstance(k, tuple):
            k, v = running.split_cache(self, k)
        result, sums = running.run(
            self, q, k, v, q_scale, k_scale, v_scale, out, lse, return_lse, sinks, enable_pdl
        )
        return result if sums is None else (result, sums)

    run_return_lse = functools.partialmethod(run, return_lse=True)

    # -- deprecated -------------------------------------------------------------------------------

    def forward(
        self,
        q: torch.Tensor,
        paged_kv_cache: Cache,
        pos_encoding_mode: str = "NONE",
        q_scale: Scale = None,
        k_scale: Scale = None,
        v_scale: Scale = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> torch.Tensor:
        """:meth:`run`, with options that :meth:`plan` has now, too."""
        cap, causal = logits_soft_cap or 0.0, self._causal
        self._take_scores(
            Scores(causal, window_left, cap, sm_scale, pos_encoding_mode, rope_scale, rope_theta)
        )
        return self.run(q, paged_kv_cache, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)

    @arguments_of(forward)
    def forward_return_lse(self, given: SimpleNamespace) -> tuple[torch.Tensor, torch.Tensor]:
        """:meth:`run_return_lse`, with options that :meth:`plan` has now, too."""
        self._take_scores(scores_of(given, causal=self._causal))
        scales = {f"{name}_scale": getattr(given, f"{name}_scale") for name in "qkv"}
        return self.run(given.q, given.paged_kv_cache, return_lse=True, **scales)

    def end_forward(self) -> None:
        """Nothing; older engines call it."""
