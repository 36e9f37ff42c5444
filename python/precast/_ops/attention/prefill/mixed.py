# SPDX-License-Identifier: Apache-2.0
"""Prefill and decode of one batch in one plan and one launch.

Sources: Osama et al., Stream-K, arXiv:2301.03598 (the division of work); Kamath et al.,
POD-Attention, arXiv:2410.18038, and Ye et al., FlashInfer, arXiv:2501.01005 (both at once).
"""

from __future__ import annotations

from typing import Any

from precast._base.errors import PlanMismatchError
from precast._base.torch import torch
from precast._op.docs import documented
from precast._ops.attention import heuristics as tiles
from precast._ops.attention import run as running
from precast._ops.attention import validation
from precast._ops.attention._docs import PAGED_RUN, PLAN, RUN
from precast._ops.attention.batch_reference import batch_attention_reference
from precast._ops.attention.plan import Dtype, PlanField, Tables
from precast._ops.attention.prefill.paged import BatchPrefillWithPagedKVCacheWrapper
from precast._ops.attention.prefill.plan import PrefillPlan
from precast._ops.attention.prefill.trace import mixed_trace
from precast._ops.attention.run import Scale
from precast._ops.attention.signature import checked_first, gathers, public_arguments
from precast._ops.paged._cache import Cache
from precast.api_logging import precast_api

#: Arguments of plan() that are compared, or whose truth counts.
_UNREAD = ("causal", "head_dim_vo", "use_profiler")
_TRACE = mixed_trace(batch_attention_reference, lambda: BatchAttention)


@documented(PLAN)
class BatchAttention(PrefillPlan):
    r"""Compute attention of a batch that mixes prefill and decode, over a paged KV cache.

    .. math::

        O_{i, h} = \sum_j \mathrm{softmax}_j(s_{i, h, j}) V_{j, h'}, \quad
        s_{i, h, j} = \mathrm{cap}(sm\_scale \cdot Q_{i, h} \cdot K_{j, h'}) + mask_{i, j}

    The same as :class:`BatchPrefillWithPagedKVCacheWrapper` with workspaces of its own, lengths in
    tokens in the place of last pages, and a log-sum-exp in any case. :meth:`plan` divides the
    tokens of all requests, long and short, evenly among the SMs, and :meth:`run` is one launch.

    Parameters
    ----------
    device : str
        The device of the tensors. In reference mode also ``cpu``.

    Raises
    ------
    precast.errors.CacheLayoutError
        Another layout (a ``KeyError`` and a ``ValueError``).
    ValueError
        A device that there is not.

    Notes
    -----
    All requests of a launch have tiles of one number of rows, that of the longest. Requests of one
    query leave most rows of a large tile empty, which costs tensor-core time and no memory traffic.

    Examples
    --------
    >>> import torch, precast
    >>> with precast.reference_mode():
    ...     wrapper = precast.BatchAttention(device="cpu")
    ...     rows, starts = torch.tensor([0, 2, 3]).int(), torch.arange(3).int()
    ...     lengths = torch.tensor([2, 1]).int()
    ...     wrapper.plan(
    ...         rows, starts, starts, lengths, 2, 1, 64, 64, 2, causal=True, q_data_type="float32",
    ...         kv_data_type="float32",
    ...     )
    ...     cache = torch.arange(4.0).view(2, 1, 2, 1, 1).expand(2, 2, 2, 1, 64)
    ...     wrapper.run(torch.zeros(3, 2, 64), cache)[0][:, 0, 0]
    tensor([0.0000, 0.5000, 2.0000])
    """

    _name = "BatchAttention"
    _cache_argument = "kv_cache"
    _kv_indptr_buf = PlanField("tables", "kv_indptr")
    _kv_indices = PlanField("tables", "kv_indices")
    _kv_len_arr = PlanField("tables", "kv_len")
    #: The same in plain PyTorch, in one call.
    reference = staticmethod(batch_attention_reference)

    @precast_api
    @checked_first
    def __init__(self, kv_layout: str = "NHD", device: str = "cuda") -> None:
        validation.check_kv_layout(self._name, kv_layout)
        try:
            place = torch.device(device)
            size = max(tiles.most_partial_bytes(place), 16)
            floats = torch.empty(size, dtype=torch.uint8, device=place)
        except (AssertionError, OverflowError, RuntimeError, TypeError, ValueError) as error:
            raise ValueError(
                f"{self._name}: device must be a CUDA device that there is, got {device!r}: {error}"
            ) from None
        super().__init__(floats, kv_layout, False, "auto", None)

    def _plan_mixed(self, given: Any) -> None:
        validation.check_page_size(f"{self._name}.plan", given.page_size)
        if given.use_profiler:
            raise NotImplementedError(
                f"{self._name}.plan: use_profiler must be False: kernels here record no times"
            )
        lengths = Tables(given.qo_indptr, given.kv_indptr, None, given.kv_indices, given.kv_len_arr)
        # Every row belongs to a request, as where all have as many.
        self._plan_batch(given, lengths, is_uniform=True)

    @precast_api
    @documented(PLAN)
    @gathers(
        _plan_mixed,
        ("causal", "head_dim_vo", "use_profiler"),
        like=BatchPrefillWithPagedKVCacheWrapper.plan,
    )
    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_len_arr: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int,
        page_size: int,
        causal: bool = False,
        sm_scale: float | None = None,
        logits_soft_cap: float | None = None,
        q_data_type: Dtype = "bfloat16",
        kv_data_type: Dtype = "bfloat16",
        use_profiler: bool = False,
    ) -> None:
        """Divide the work of a batch, for all runs until the next plan.

        Parameters
        ----------
        qo_indptr : torch.Tensor
            ``[batch_size + 1]``, int32, on the device or on the host: where the queries of each
            request start; one query is a decode.
        kv_indptr : torch.Tensor
            ``[batch_size + 1]``, likewise: where the pages of each request start in ``kv_indices``.
        kv_indices : torch.Tensor
            int32, at least ``kv_indptr[-1]``: the pages; what is behind them is not read.
        kv_len_arr : torch.Tensor
            ``[batch_size]``, int32, likewise: the tokens of each request, those of its queries
            among them. Its pages may have room for more.
        use_profiler : bool
            False: no kernel here records times.

        Raises
        ------
        precast.errors.UnsupportedConfigError
            A head dimension or dtype that no kernel is for (a ``ValueError``).
        NotImplementedError
            ``use_profiler``.
        ValueError
            Heads that do not divide; tensors whose lengths are not those of one batch.

        Notes
        -----
        Lengths on the device stay there: nothing is copied to the host or waited for. The tables
        that are on the device are read by :meth:`run`, so a captured run needs them to stay where
        they are.
        """

    @precast_api(trace=_TRACE)
    @documented(RUN, PAGED_RUN)
    def run(
        self,
        q: torch.Tensor,
        kv_cache: Cache,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        k_scale: Scale = None,
        v_scale: Scale = None,
        logits_soft_cap: float = 0.0,
        profiler_buffer: torch.Tensor | None = None,
        kv_cache_sf: Cache | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute attention by the latest plan, in one launch.

        Parameters
        ----------
        q : torch.Tensor
            ``[qo_indptr[-1], num_qo_heads, head_dim_qk]``; stride 1 in the last dimension, any in
            the others.
        kv_cache : torch.Tensor or tuple of torch.Tensor
            As ``paged_kv_cache`` of :meth:`BatchPrefillWithPagedKVCacheWrapper.run`.
        logits_soft_cap : float
            That of :meth:`plan`, which is the default.
        profiler_buffer, kv_cache_sf : None
            For other backends.

        Returns
        -------
        tuple of torch.Tensor
            The output and the base-2 log-sum-exp, float32. A query that sees nothing has output 0
            and log-sum-exp minus infinity.

        Notes
        -----
        With ``qo_indptr`` on the device the number of rows of ``q`` is not checked; rows that no
        request has are left as they are. Safe in CUDA graphs; not differentiable.
        """
        if type(logits_soft_cap) is not float or logits_soft_cap != 0.0:
            self._check_cap(logits_soft_cap)
        if not (profiler_buffer is kv_cache_sf is None):
            running.check_other_options(
                self, (), profiler_buffer=profiler_buffer, kv_cache_sf=kv_cache_sf
            )
        k, v = kv_cache, None
        if isinstance(k, tuple):
            k, v = running.split_cache(self, k)
        result, sums = running.run(
            self, q, k, v, None, k_scale, v_scale, out, lse, True, None, None
        )
        assert sums is not None
        return result, sums

    _run_arguments = public_arguments(run, f"{_name}.run")

    def _check_cap(self, logits_soft_cap: float) -> None:
        """Raise unless a run has the cap of its plan; one that is not positive is none."""
        running.check_options(self, logits_soft_cap=logits_soft_cap)
        self._check_planned(f"{self._name}.run")
        if logits_soft_cap > 0 and logits_soft_cap != self._logits_soft_cap:
            raise PlanMismatchError(
                f"{self._name}.run: logits_soft_cap must be {self._logits_soft_cap} as in plan(), "
                f"got {logits_soft_cap}"
            )
