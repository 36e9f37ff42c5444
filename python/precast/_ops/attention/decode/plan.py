# SPDX-License-Identifier: Apache-2.0
"""The base class of the decode wrapper makes its plans.

Source: Osama et al., Stream-K, arXiv:2301.03598.
"""

from __future__ import annotations

import warnings
from typing import Any

from precast._base.torch import torch
from precast._ops.attention import buffers, validation
from precast._ops.attention.lengths import longest_kv, tokens_of_pages
from precast._ops.attention.plan import (
    Hints,
    Model,
    PlanField,
    PlanShape,
    Tables,
    has_plain_scores,
)
from precast._ops.attention.wrapper import AttentionWrapper, checked_model

#: Arguments of plan() that other backends read, or whose truth or equality alone counts.
UNREAD = ("non_blocking", "block_tables", "window_right", "is_causal")


class DecodePlan(AttentionWrapper):
    """Make the plan of a batch from its page table and options."""

    _q_len_per_req = PlanField("shape", "q_len_per_req")

    def _plan_batch(self, given: Any) -> None:
        name, q_len_per_req = self._name, given.q_len_per_req
        indptr, last_page_len, indices = given.indptr, given.last_page_len, given.indices
        if given.rope_scale is not None or given.rope_theta is not None:
            validation.check_rope(f"{name}.plan", given.rope_scale, given.rope_theta)
        if given.window_right != 0:
            raise NotImplementedError(
                f"{name}.plan: window_right must be 0, got {given.window_right}: a query sees "
                f"nothing behind itself"
            )
        if given.is_causal is not None and given.is_causal != (q_len_per_req > 1):
            raise NotImplementedError(
                f"{name}.plan: is_causal must be None or {q_len_per_req > 1} for "
                f"q_len_per_req={q_len_per_req}, got {given.is_causal}"
            )
        model, shape = self._shape(given, "plan")
        batch_size = shape.batch_size
        if self._use_cuda_graph:
            self._check_frozen(batch_size, indices, q_len_per_req)
        lengths = Tables(None, indptr, last_page_len, indices)
        max_kv_len = None
        if not (indptr.is_cuda or last_page_len.is_cuda):
            max_kv_len = self._longest(given)
            self._check_split(shape, lengths)
        qo_indptr, keeps_qo_indptr = self._query_bounds(batch_size, q_len_per_req)
        tables, non_blocking = self._plan.tables, given.non_blocking
        if not self._use_cuda_graph:
            tables = Tables(
                qo_indptr,
                self._on_device(indptr, non_blocking),
                self._on_device(last_page_len, non_blocking),
                self._on_device(indices, non_blocking),
            )
        elif qo_indptr is not tables.qo_indptr:
            tables = tables._replace(qo_indptr=qo_indptr)
        hints = Hints(None, max_kv_len, None, given.block_tables, False, keeps_qo_indptr)
        self._launch(given, model, shape, shape.causal, lengths, tables, hints)

    def _longest(self, given: Any) -> int:
        """Return the most tokens of a request; each has its queries. Nothing is waited for."""
        q_len_per_req, lens = given.q_len_per_req, given.seq_lens
        if lens is None or lens.is_cuda:
            if q_len_per_req == 1:
                return longest_kv(given.indptr, given.last_page_len, given.page_size) or 0
            lens = tokens_of_pages(given.indptr, given.last_page_len, given.page_size)
        if not lens.numel():
            return 0
        if q_len_per_req > 1 and (least := int(lens.min())) < q_len_per_req:
            raise ValueError(
                f"q_len_per_req={q_len_per_req} requires kv_len >= q_len_per_req for every request "
                f"(its queries must be appended to the KV cache before), but got a request with "
                f"kv_len={least}: its first rows would attend to an empty KV range"
            )
        return int(lens.max())

    def _shape(self, given: Any, method: str) -> tuple[Model, PlanShape]:
        """Return the model and the shape of a plan."""
        q_len, split = given.q_len_per_req, given.fixed_split_size
        if given.page_size < 1:
            validation.check_page_size(f"{self._name}.{method}", given.page_size)
        if q_len < 1:
            raise ValueError(f"{self._name}: q_len_per_req must be >= 1, got {q_len}")
        if q_len > 1 and not self._use_tensor_cores:
            raise ValueError(
                f"{self._name}: q_len_per_req > 1 requires tensor-core decode "
                f"(use_tensor_cores=True)"
            )
        if split is not None and not self._use_tensor_cores:
            raise ValueError(
                f"{self._name}: fixed_split_size is only supported by tensor core decode "
                f"(use_tensor_cores=True)"
            )
        both = given.data_type
        q_dtype, kv_dtype = given.q_data_type or both or "float16", given.kv_data_type or both
        dtypes = q_dtype, kv_dtype, given.o_data_type
        heads, head_dims = (given.num_qo_heads, given.num_kv_heads), (given.head_dim,) * 2
        positions, index = given.pos_encoding_mode, self._device_index
        model = checked_model(self._name, method, heads, head_dims, positions, dtypes, index)
        batch_size = given.last_page_len.shape[0]
        shape = PlanShape(
            batch_size,
            batch_size * q_len,
            q_len,
            given.page_size,
            *heads,
            *head_dims,
            model.kv_bytes,
            0,
            q_len > 1,
            given.window_left,
            split or -1,
            given.disable_split_kv,
            may_pair_heads=has_plain_scores(given.logits_soft_cap, positions)
            and not (model.is_packed or split or given.disable_split_kv),
        )
        return model, self._with_tile(model, shape, q_len)

    def _check_frozen(self, batch_size: int, indices: torch.Tensor, q_len_per_req: int) -> None:
        """Check the sizes that CUDA graphs keep; there is no ``q_len_per_req`` before a plan."""
        name, buffer = self._name, self._plan.tables.kv_indices
        assert buffer is not None
        if self._q_len_per_req not in (0, q_len_per_req):
            raise ValueError(
                f"{name}: q_len_per_req is part of the frozen cudagraph shape: this wrapper was "
                f"planned with {self._q_len_per_req}, got {q_len_per_req}. Fix: a wrapper for each "
                f"q_len_per_req"
            )
        if batch_size != self._fixed_batch_size:
            raise ValueError(
                f"{name}: the batch size should be fixed in cudagraph mode: it is {batch_size} and "
                f"was {self._fixed_batch_size} when the wrapper was made"
            )
        if indices.shape[0] > buffer.shape[0]:
            raise ValueError(
                f"{name}: the size of indices, {indices.shape[0]}, should be less than or equal to "
                f"the allocated buffer, {buffer.shape[0]}"
            )

    def _query_bounds(self, batch_size: int, q_len_per_req: int) -> tuple[torch.Tensor, bool]:
        """Return ``qo_indptr`` for engines that read it, and whether the next plan may have it.

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
        batch, planned = shape.batch_size, shape.q_len_per_req
        if batch and tokens and tokens % batch == 0:
            implied = tokens // batch
            if not self._use_tensor_cores:
                raise ValueError(
                    f"q implies q_len_per_req={implied}, but without use_tensor_cores only "
                    f"q_len_per_req=1 is supported"
                )
            raise ValueError(
                f"q implies q_len_per_req={implied} but the prior plan() used {planned}; re-plan "
                f"with the matching q_len_per_req"
            )
        raise ValueError(
            f"q.shape[0] ({tokens}) does not match batch_size * q_len_per_req of the prior plan() "
            f"({batch} * {planned} = {batch * planned})"
        )

    def _check_q_len(self, tokens: int, q_len_per_req: int) -> None:
        """Compare the deprecated argument of ``run()`` with the number of queries of the plan."""
        warnings.warn(
            f"Passing `q_len_per_req` to {self._name}.run() is deprecated; pass it to plan() "
            f"instead",
            DeprecationWarning,
            stacklevel=3,
        )
        batch = self._batch_size
        if self._plan.is_launched and tokens != batch * q_len_per_req:
            raise ValueError(
                f"q.shape[0] ({tokens}) does not match batch_size * q_len_per_req "
                f"({batch} * {q_len_per_req} = {batch * q_len_per_req})"
            )
