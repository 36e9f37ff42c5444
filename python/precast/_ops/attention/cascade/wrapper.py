# SPDX-License-Identifier: Apache-2.0
"""Attention over a cache whose requests share prefixes, level by level.

Source: Ye et al., FlashInfer, arXiv:2501.01005 (composable formats); Juravsky et al., Hydragen,
arXiv:2402.05099 (attention over a shared prefix, merged with that over the rest).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from precast._base.torch import torch
from precast._op.docs import documented
from precast._op.validation import check_rank
from precast._ops.attention._docs import PAGED_RUN, PLAN, RUN, WRAPPER
from precast._ops.attention.batch_reference import batch_prefill_with_paged_kv_cache_reference
from precast._ops.attention.cascade.level_trace import levels_trace
from precast._ops.attention.cascade.merge import (
    merge_state_in_place,
    merge_state_in_place_reference,
)
from precast._ops.attention.parts import (
    of_part,
    passed_on,
    planned_together,
    run_beside,
    share_workspace,
)
from precast._ops.attention.plan import Dtype
from precast._ops.attention.prefill.paged import BatchPrefillWithPagedKVCacheWrapper
from precast._ops.attention.signature import checked_first, gathers, public_arguments
from precast._ops.paged._cache import Cache
from precast.api_logging import precast_api

#: Each has a workspace, so that a number which is no number of levels would take all memory.
_MOST_LEVELS = 256

#: A tensor for each level.
Levels: TypeAlias = "list[torch.Tensor]"


def multi_level_cascade_attention_reference(
    q: torch.Tensor,
    paged_kv_cache: Cache,
    qo_indptr_arr: Sequence[torch.Tensor],
    paged_kv_indptr_arr: Sequence[torch.Tensor],
    paged_kv_indices_arr: Sequence[torch.Tensor],
    paged_kv_last_page_len: Sequence[torch.Tensor],
    kv_layout: str = "NHD",
    causal: bool = False,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    sm_scale: float | None = None,
) -> torch.Tensor:
    """:class:`MultiLevelCascadeAttentionWrapper` in plain PyTorch: one plan and one run.

    Parameters
    ----------
    q, paged_kv_cache
        As for ``run``, any device.
    qo_indptr_arr, paged_kv_indptr_arr, paged_kv_indices_arr, paged_kv_last_page_len
        The levels, and so are the other arguments, as for ``plan``.

    Returns
    -------
    torch.Tensor
        The output. States of levels are rounded before they are merged, as those of kernels.

    Examples
    --------
    >>> import torch
    >>> q, cache = torch.zeros(1, 1, 4), torch.arange(2.0).view(2, 1, 1, 1, 1).expand(2, 2, 1, 1, 4)
    >>> one, pages = torch.tensor([0, 1]), [torch.tensor([0]), torch.tensor([1])]
    >>> tables = [one, one], [one, one], pages, [one[1:], one[1:]]
    >>> multi_level_cascade_attention_reference(q, cache, *tables)[:, 0, 0]
    tensor([0.5000])
    """
    last = len(qo_indptr_arr) - 1
    merged = None
    for level in [last, *range(last)]:
        state = batch_prefill_with_paged_kv_cache_reference(
            q,
            paged_kv_cache,
            qo_indptr_arr[level],
            paged_kv_indptr_arr[level],
            paged_kv_indices_arr[level],
            paged_kv_last_page_len[level],
            kv_layout,
            causal=causal and level == last,
            window_left=window_left,
            logits_soft_cap=logits_soft_cap,
            sm_scale=sm_scale,
        )
        merged = state if merged is None else merge_state_in_place_reference(*merged, *state)
    assert merged is not None
    return merged[0]


_TRACE = levels_trace(
    multi_level_cascade_attention_reference, lambda: MultiLevelCascadeAttentionWrapper
)


class _Level(BatchPrefillWithPagedKVCacheWrapper):
    """One level, with errors of the whole."""

    _name = "MultiLevelCascadeAttentionWrapper"
    _run_arguments = public_arguments(BatchPrefillWithPagedKVCacheWrapper.run, f"{_name}.run")


def _each_level(name: str, count: int, **arrays: Any) -> list[dict[str, torch.Tensor]]:
    """Return the tensors of each level by their names; raise unless each array has one a level."""
    for argument, array in arrays.items():
        if isinstance(array, torch.Tensor) or not isinstance(array, Sequence):
            raise TypeError(
                f"{name}: {argument} must be a list of torch.Tensor, got {type(array).__name__}"
            )
        for level, tensor in enumerate(array):
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(
                    f"{name}: {argument}[{level}] must be a torch.Tensor, got "
                    f"{type(tensor).__name__}"
                )
            check_rank(name, f"{argument}[{level}]", tensor, 1, 1)
        if len(array) != count:
            raise ValueError(
                f"{name}: {argument} must have {count} tensors, one for each level, got "
                f"{len(array)}"
            )
    return [{name: array[level] for name, array in arrays.items()} for level in range(count)]


@documented(WRAPPER, PLAN)
class MultiLevelCascadeAttentionWrapper:
    r"""Compute attention over pages in several levels, such as a shared prefix and the rest.

    .. math:: O = \mathrm{merge}_l \left( O^{(l)}, s^{(l)} \right)

    where :math:`O^{(l)}, s^{(l)}` are outputs and log-sum-exps over the tokens of level :math:`l`,
    merged as :func:`merge_states` does. A request of a level is a group of queries that have the
    level's tokens in common, which are read once for the group. The last level holds the newest
    tokens.

    Parameters
    ----------
    num_levels : int
        Levels, 1 to 256.
    use_cuda_graph : bool
        Whether :meth:`run` is captured; then the number of groups of each level is that of its
        buffers, and :meth:`plan` copies into them.
    qo_indptr_buf_arr, paged_kv_indptr_buf_arr : list of torch.Tensor, optional
        For each level ``[groups + 1]``, int32 on the device, needed with ``use_cuda_graph``.
    paged_kv_indices_buf_arr : list of torch.Tensor, optional
        For each level int32, as many pages as there ever are.
    paged_kv_last_page_len_buf_arr : list of torch.Tensor, optional
        For each level ``[groups]``, int32.

    Notes
    -----
    All levels share the float workspace. A run is one launch for each level and one for each merge.

    Examples
    --------
    >>> import torch, precast
    >>> with precast.reference_mode():
    ...     wrapper = precast.MultiLevelCascadeAttentionWrapper(2, torch.empty(1024).byte())
    ...     two, each = torch.tensor([0, 2]).int(), torch.arange(3).int()
    ...     pages = [torch.tensor([0]).int(), torch.tensor([1, 2]).int()]
    ...     last = [torch.ones(1).int(), torch.ones(2).int()]
    ...     wrapper.plan(
    ...         [two, each], [two // 2, each], pages, last, 2, 1, 64, 1, q_data_type="float32"
    ...     )
    ...     cache = torch.tensor([0.0, 1.0, 3.0]).view(3, 1, 1, 1, 1).expand(3, 2, 1, 1, 64)
    ...     wrapper.run(torch.zeros(2, 2, 64), cache)[:, 0, 0]
    tensor([0.5000, 1.5000])
    """

    _name = "MultiLevelCascadeAttentionWrapper"
    #: The same in plain PyTorch, in one call.
    reference = staticmethod(multi_level_cascade_attention_reference)

    @precast_api
    @checked_first
    def __init__(
        self,
        num_levels: int,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf_arr: Levels | None = None,
        paged_kv_indptr_buf_arr: Levels | None = None,
        paged_kv_indices_buf_arr: Levels | None = None,
        paged_kv_last_page_len_buf_arr: Levels | None = None,
    ) -> None:
        if not 1 <= num_levels <= _MOST_LEVELS:
            raise ValueError(
                f"{self._name}: num_levels must be 1 to {_MOST_LEVELS}, got {num_levels}"
            )
        arrays = {
            "qo_indptr_buf_arr": qo_indptr_buf_arr,
            "paged_kv_indptr_buf_arr": paged_kv_indptr_buf_arr,
            "paged_kv_indices_buf_arr": paged_kv_indices_buf_arr,
            "paged_kv_last_page_len_buf_arr": paged_kv_last_page_len_buf_arr,
        }
        read = {name: a for name, a in arrays.items() if use_cuda_graph or a is not None}
        levels = _each_level(self._name, num_levels, **read)
        self._batch_prefill_wrappers: list[_Level] = []
        for level, given in enumerate(levels):
            buffers = {name.removesuffix("_arr"): buffer for name, buffer in given.items()}
            with of_part(f"level {level}"):
                self._batch_prefill_wrappers.append(
                    _Level(float_workspace_buffer, kv_layout, use_cuda_graph, **buffers)
                )
        self._share_workspace()
        self._num_levels = num_levels
        self._kv_layout = kv_layout
        self._use_cuda_graph = use_cuda_graph

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """Whether the wrapper was made for CUDA graphs."""
        return self._use_cuda_graph

    # -- what traces read -------------------------------------------------------------------------

    @property
    def _last(self) -> _Level:
        return self._batch_prefill_wrappers[-1]

    @property
    def _qo_indptr_arr(self) -> tuple[torch.Tensor, ...]:
        return tuple(level._qo_indptr_buf for level in self._batch_prefill_wrappers)

    @property
    def _paged_kv_indptr_arr(self) -> tuple[torch.Tensor, ...]:
        return tuple(level._paged_kv_indptr_buf for level in self._batch_prefill_wrappers)

    @property
    def _paged_kv_indices_arr(self) -> tuple[torch.Tensor, ...]:
        return tuple(level._paged_kv_indices_buf for level in self._batch_prefill_wrappers)

    @property
    def _paged_kv_last_page_len(self) -> tuple[torch.Tensor, ...]:
        return tuple(level._paged_kv_last_page_len_buf for level in self._batch_prefill_wrappers)

    # -- plan -------------------------------------------------------------------------------------

    @checked_first
    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffers: Levels
    ) -> None:
        """Take other workspaces; then plan again.

        Parameters
        ----------
        float_workspace_buffer : torch.Tensor
            As for :meth:`BatchPrefillWithPagedKVCacheWrapper.reset_workspace_buffer`; all levels
            share it.
        int_workspace_buffers : list of torch.Tensor
            One for each level.

        Raises
        ------
        ValueError
            As there; another number of workspaces, or one for two levels.
        """
        name = f"{self._name}.reset_workspace_buffer"
        each = _each_level(name, self._num_levels, int_workspace_buffers=int_workspace_buffers)
        ints = [level["int_workspace_buffers"] for level in each]
        if len({buffer.data_ptr() for buffer in ints}) < len(ints):
            raise ValueError(
                f"{name}: int_workspace_buffers must be different ones, because the plan of each "
                f"level lies in its own"
            )
        for level, (wrapper, buffer) in enumerate(zip(self._batch_prefill_wrappers, ints)):
            with of_part(f"int_workspace_buffers[{level}]"):
                wrapper._check_workspaces(float_workspace_buffer, buffer)
        for wrapper, buffer in zip(self._batch_prefill_wrappers, ints):
            wrapper.reset_workspace_buffer(float_workspace_buffer, buffer)
        self._share_workspace()

    def _share_workspace(self) -> None:
        """Let the last level, which runs first, overlap the first one; the others run alone."""
        *others, last = self._batch_prefill_wrappers
        if others:
            share_workspace(last, others[0])

    def _plan_levels(self, given: Any) -> None:
        wrappers, last = self._batch_prefill_wrappers, self._num_levels - 1
        tables = _each_level(
            f"{self._name}.plan",
            self._num_levels,
            qo_indptr_arr=given.qo_indptr_arr,
            paged_kv_indptr_arr=given.paged_kv_indptr_arr,
            paged_kv_indices_arr=given.paged_kv_indices_arr,
            paged_kv_last_page_len=given.paged_kv_last_page_len,
        )
        self._check_queries(given.qo_indptr_arr)
        plan = BatchPrefillWithPagedKVCacheWrapper.plan
        with planned_together(*wrappers):
            for level, (wrapper, table) in enumerate(zip(wrappers, tables)):
                lengths = {name.removesuffix("_arr"): tensor for name, tensor in table.items()}
                more = {"head_dim_qk": given.head_dim, "causal": given.causal and level == last}
                with of_part(f"level {level}", qo_indptr="qo_indptr_arr"):
                    wrapper.plan(**passed_on(plan, given, **lengths, **more))

    def _check_queries(self, qo_indptr_arr: Levels) -> None:
        """Raise unless levels on the host have the same queries."""
        counts = {i: int(t[-1]) for i, t in enumerate(qo_indptr_arr) if not t.is_cuda and len(t)}
        if len({*counts.values()}) > 1:
            raise ValueError(
                f"{self._name}.plan: the tensors of qo_indptr_arr must end at the same number of "
                f"queries, got {', '.join(f'{n} in level {i}' for i, n in counts.items())}"
            )

    @precast_api
    @documented(PLAN)
    @gathers(_plan_levels, ("causal", "use_fp16_qk_reduction"))
    def plan(
        self,
        qo_indptr_arr: Levels,
        paged_kv_indptr_arr: Levels,
        paged_kv_indices_arr: Levels,
        paged_kv_last_page_len: Levels,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: Dtype = "float16",
        kv_data_type: Dtype = None,
    ) -> None:
        """Divide the work of all levels, for all runs until the next plan.

        Parameters
        ----------
        qo_indptr_arr : list of torch.Tensor
            For each level ``[groups + 1]``, int32, on the device or on the host: where the queries
            of each group start. All levels have the same queries.
        paged_kv_indptr_arr : list of torch.Tensor
            For each level ``[groups + 1]``, likewise: where the pages of each group start in its
            tensor of ``paged_kv_indices_arr``.
        paged_kv_indices_arr : list of torch.Tensor
            For each level int32: the pages.
        paged_kv_last_page_len : list of torch.Tensor
            For each level ``[groups]``, int32: tokens in the last page of each group, 0 if it has
            none.
        head_dim : int
            64, 80, 96, 128, 256 or 512.
        causal : bool
            Whether a query sees only itself and what is before it in the last level. It sees all
            of the others.
        pos_encoding_mode : str
            As for :class:`BatchPrefillWithPagedKVCacheWrapper`. Positions are those in each level.
        window_left : int
            As there; the window is that of each level on its own.

        Raises
        ------
        ValueError
            As for :meth:`BatchPrefillWithPagedKVCacheWrapper.plan`, of any level, before a level
            has a new plan; another number of tensors than levels; levels with other numbers of
            queries, where the host knows them.

        Notes
        -----
        Lengths on the device stay there: nothing is copied to the host or waited for.
        """

    begin_forward = plan

    @precast_api(trace=_TRACE)
    @documented(RUN, PAGED_RUN)
    def run(self, q: torch.Tensor, paged_kv_cache: Cache) -> torch.Tensor:
        """Compute attention over all levels by the latest plan.

        Parameters
        ----------
        q : torch.Tensor
            ``[tokens, num_qo_heads, head_dim]``; stride 1 in the last dimension, any in the others.

        Returns
        -------
        torch.Tensor
            The output; 0 for a query that sees nothing in any level. With ``use_cuda_graph``, rows
            that belong to no request are 0.

        Notes
        -----
        Allocates the outputs of each level. Safe in CUDA graphs; not differentiable.
        """
        *others, last = self._batch_prefill_wrappers
        # Made before the first launch: no other kernel may stand between two that overlap.
        of_last, *into = (self._outputs(level, q) for level in (last, *others))
        out, lse = last.run(q, paged_kv_cache, **of_last, return_lse=True)
        for level, outputs in zip(others, into):
            if level is others[0]:
                run_beside(last, level, q)
            state = level.run(q, paged_kv_cache, **outputs, return_lse=True)
            merge_state_in_place(out, lse, *state)
        return out

    def _outputs(self, level: _Level, q: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return what a level writes to under CUDA graphs, where rows of no request are 0."""
        if not (self._use_cuda_graph and isinstance(q, torch.Tensor)):
            return {}
        plan, rows = level._plan, q.shape[:-1]
        return {
            "out": q.new_zeros((*rows, plan.shape.head_dim_vo), dtype=plan.model.o_dtype),
            "lse": q.new_zeros(rows, dtype=torch.float32),
        }

    forward = run

    def end_forward(self) -> None:
        """Do nothing; older engines call it."""
