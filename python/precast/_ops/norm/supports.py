# SPDX-License-Identifier: Apache-2.0
"""Whether norms with a gate take a call."""

from __future__ import annotations

from precast._base.torch import torch
from precast._op import mode
from precast.api_logging import precast_api


@precast_api
def supports_rmsnorm_sigmoid_gate(
    dtype: torch.dtype, head_dim: int, device: torch.device | str | None = None
) -> bool:
    """Return whether :func:`rmsnorm_sigmoid_gate` takes such heads.

    Parameters
    ----------
    dtype : torch.dtype
        Of the heads.
    head_dim : int
        Elements of a head.
    device : torch.device or str, optional
        Where they are. Default: the current CUDA device.

    Returns
    -------
    bool
        True for float16 and bfloat16, any positive size and a GPU of compute capability 8.0 or
        later, or in reference mode any device.
    """
    if dtype not in (torch.float16, torch.bfloat16) or head_dim < 1:
        return False
    if mode.is_reference():
        return True
    is_cuda = device is None or torch.device(device).type == "cuda"
    if not (is_cuda and torch.cuda.is_available()):
        return False
    return bool(torch.cuda.get_device_capability(device) >= (8, 0))


@precast_api
def supports_gated_residual_rmsnorm(
    branch: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    alpha: torch.Tensor,
    beta: torch.Tensor,
) -> bool:
    """Return whether :func:`gated_residual_rmsnorm` takes these tensors.

    Parameters
    ----------
    branch, residual, weight, alpha, beta : torch.Tensor
        As there.

    Returns
    -------
    bool
        True for dtypes, shapes and strides as there on one CUDA device, or in reference mode on
        any.
    """
    return _fits(branch, residual, {"alpha": alpha, "beta": beta}, {"weight": weight})


@precast_api
def supports_gated_residual_next_rmsnorm(
    branch: torch.Tensor,
    residual: torch.Tensor,
    next_weight: torch.Tensor,
    alpha: torch.Tensor | float,
    beta: torch.Tensor,
    *,
    post_weight: torch.Tensor | None = None,
) -> bool:
    """Return whether :func:`gated_residual_next_rmsnorm` takes these arguments.

    Parameters
    ----------
    branch, residual, next_weight, alpha, beta, post_weight : torch.Tensor
        As there.

    Returns
    -------
    bool
        True for dtypes, shapes and strides as there on one CUDA device, or in reference mode on
        any.
    """
    gates = {"beta": beta}
    if isinstance(alpha, torch.Tensor):
        gates["alpha"] = alpha
    elif not isinstance(alpha, int | float):
        return False
    weights = {"next_weight": next_weight, "post_weight": post_weight}
    return next_weight is not None and _fits(branch, residual, gates, weights)


def _fits(
    branch: torch.Tensor,
    residual: torch.Tensor,
    gates: dict[str, torch.Tensor],
    weights: dict[str, torch.Tensor | None],
) -> bool:
    given = [weight for weight in weights.values() if weight is not None]
    if branch.dim() != 2 or branch.dtype not in (torch.float16, torch.bfloat16):
        return False
    if residual.shape != branch.shape or residual.dtype != torch.float32:
        return False
    vectors = [*gates.values(), *given]
    return (
        (branch.is_cuda or mode.is_reference())
        and all(t.device == branch.device for t in (residual, *vectors))
        and all(t.shape == branch.shape[1:] and t.is_contiguous() for t in vectors)
        and all(t.dtype == torch.float32 for t in gates.values())
        and all(t.dtype == branch.dtype for t in given)
        and all(t.shape[1] <= 1 or t.stride(1) == 1 for t in (branch, residual))
    )
