# SPDX-License-Identifier: Apache-2.0
"""The wrapper of MLA as vLLM finds it.

vLLM's sparse MLA on Hopper writes lengths into FlashInfer's own plan, of whose layout it knows each
word, if ``run`` has ``ckv_scale_arr`` as a keyword. Plans here have another layout, so the keyword
is not among the parameters, and vLLM takes another backend.
"""

from __future__ import annotations

from typing import Any

from precast._base.torch import torch
from precast._ops.mla.wrapper import BatchMLAPagedAttentionWrapper as _Wrapper


class BatchMLAPagedAttentionWrapper(_Wrapper):
    """:class:`precast.mla.BatchMLAPagedAttentionWrapper`, whose ``run`` takes keywords as options.

    Examples
    --------
    >>> import inspect
    >>> "ckv_scale_arr" in inspect.signature(BatchMLAPagedAttentionWrapper.run).parameters
    False
    """

    def run(
        self,
        q_nope: torch.Tensor | None = None,
        q_pe: torch.Tensor | None = None,
        ckv_cache: torch.Tensor | None = None,
        kpe_cache: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        profiler_buffer: torch.Tensor | None = None,
        kv_len: torch.Tensor | None = None,
        page_table: torch.Tensor | None = None,
        return_lse_base_on_e: bool = False,
        o_scale: float | None = None,
        **options: Any,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Call :meth:`precast.mla.BatchMLAPagedAttentionWrapper.run`."""
        return super().run(
            q_nope,
            q_pe,
            ckv_cache,
            kpe_cache,
            out,
            lse,
            return_lse,
            profiler_buffer,
            kv_len,
            page_table,
            return_lse_base_on_e,
            o_scale,
            **options,
        )
