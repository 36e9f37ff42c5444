# SPDX-License-Identifier: Apache-2.0
"""The wrapper of MLA in plain PyTorch: one plan and one run."""

from __future__ import annotations

from precast._base.torch import torch
from precast._op.docs import documented
from precast._ops.mla._docs import PLAN, RUN
from precast._ops.mla.formula import attend_pages


def batch_mla_paged_attention_reference(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor | None,
    ckv_cache: torch.Tensor,
    kpe_cache: torch.Tensor | None,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_len_arr: torch.Tensor,
    causal: bool,
    sm_scale: float,
    ckv_scale: float = 1.0,
    kpe_scale: float = 1.0,
    ckv_scale_arr: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    return_lse: bool = True,
    return_lse_base_on_e: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """:class:`BatchMLAPagedAttentionWrapper` in plain PyTorch: one plan and one run.

    Parameters
    ----------
    qo_indptr, kv_indptr, kv_indices, kv_len_arr : torch.Tensor
        The batch, as for ``plan``, any device.
    ckv_scale, kpe_scale : float
        As for ``run``.

    Returns
    -------
    torch.Tensor or tuple of torch.Tensor
        The output and the log-sum-exp, float32. Rows of no request are zeros.

    Examples
    --------
    >>> import torch
    >>> q, ckv = torch.zeros(1, 2, 8), torch.arange(2.0).view(1, 2, 1).expand(1, 2, 8)
    >>> batch = torch.tensor([0, 1]), torch.tensor([0, 1]), torch.tensor([0]), torch.tensor([2])
    >>> batch_mla_paged_attention_reference(q, None, ckv, None, *batch, False, 1.0)[0][:, :, 0]
    tensor([[0.5000, 0.5000]])
    """
    out, lse, _ = attend_pages(
        q_nope,
        q_pe,
        ckv_cache,
        kpe_cache,
        qo_indptr.tolist(),
        kv_indptr,
        kv_indices,
        kv_len_arr,
        sm_scale * ckv_scale,
        causal,
        kpe_scale / ckv_scale,
        ckv_scale_arr,
        sinks,
        return_lse_base_on_e,
    )
    out = (out * ckv_scale).to(q_nope.dtype)
    return (out, lse) if return_lse else out


documented(PLAN, RUN)(batch_mla_paged_attention_reference)
