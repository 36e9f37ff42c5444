# SPDX-License-Identifier: Apache-2.0
"""All-reduce, alone or with residual, RMSNorm and FP8 output in the same kernel.

Sources: Thakur, Rabenseifner and Gropp, Optimization of Collective Communication Operations in
MPICH, 2005; Zhang and Sennrich, Root Mean Square Layer Normalization, arXiv:1910.07467; scaling by
groups: DeepSeek-AI, arXiv:2412.19437, section 3.3.
"""

from __future__ import annotations

import contextlib
from typing import Any

from precast._base.errors import MissingKernelError, UnsupportedConfigError
from precast._base.torch import torch
from precast._op.declaration import Kind
from precast._op.export import Export, op
from precast._op.mode import is_reference
from precast._ops.comm.fused_reference import (
    allreduce_fusion_reference as allreduce_fusion_reference,
)
from precast._ops.comm.fused_reference import check_norm, check_plain, followed, reduced
from precast._ops.comm.group_all_reduce import all_reduce_by_group, all_reduce_norm_by_group
from precast._ops.comm.patterns import GROUP, NO_QUANT, TENSOR, TOKEN, AllReduceFusionPattern
from precast._ops.comm.patterns import fusion_of as _fusion_of
from precast._ops.comm.workspace import (
    AllReduceFusionWorkspace,
    GroupAllReduceFusionWorkspace,
    TRTLLMAllReduceFusionWorkspace,
    workspace_of_block,
)
from precast.api_logging import precast_api


def _allreduce_reference(block: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
    return reduced(workspace_of_block(block).gather(input))


def _allreduce_norm_reference(
    block: torch.Tensor,
    input: torch.Tensor,
    residual_in: torch.Tensor,
    rms_gamma: torch.Tensor,
    scale_factor: torch.Tensor | None,
    quant_mode: int,
    block_quant_group_size: int,
    rms_eps: float,
    weight_bias: float,
) -> tuple[torch.Tensor | None, ...]:
    return followed(
        _allreduce_reference(block, input),
        residual_in,
        rms_gamma,
        rms_eps,
        weight_bias,
        quant_mode,
        block_quant_group_size,
        scale_factor,
    )


# Why quant_mode: torch's own functions have an argument called mode.
_BLOCK = {"block": Kind("Tensor {name}")}
_ALLREDUCE = Export(
    "allreduce_fusion",
    "allreduce",
    "block:block world:int input:T output!:like(input) strategy:int triggers_early:bool "
    "launch_with_pdl:pdl",
    reference=_allreduce_reference,
    check=check_plain,
    kinds=_BLOCK,
    key="world, input.get_device()",
    function="allreduce_fusion",
    traced=False,
)
_ALLREDUCE_NORM = Export(
    "allreduce_fusion",
    "allreduce_norm",
    "block:block world:int input:T[rows,hidden] residual_in:like(input) rms_gamma:T[hidden] "
    "residual_out!?:like(input) norm_out!?:like(input) quant_out!?:like(input,e4m3,apart) "
    "scale_out!?:any scale_factor?:f32[.] quant_mode:int block_quant_group_size:int "
    "rms_eps:float(0-) weight_bias:float(-) strategy:int triggers_early:bool launch_with_pdl:pdl",
    reference=_allreduce_norm_reference,
    check=check_norm,
    kinds=_BLOCK,
    key="world, input.get_device()",
    function="allreduce_fusion",
    traced=False,
)


@precast_api
@op("allreduce_fusion")
def allreduce_fusion(
    input: torch.Tensor,
    workspace: AllReduceFusionWorkspace,
    pattern: int,
    launch_with_pdl: bool = False,
    trigger_completion_at_end: bool = True,
    output: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
    norm_out: torch.Tensor | None = None,
    quant_out: torch.Tensor | None = None,
    scale_out: torch.Tensor | None = None,
    residual_in: torch.Tensor | None = None,
    rms_gamma: torch.Tensor | None = None,
    rms_eps: float = 1e-6,
    scale_factor: torch.Tensor | float | None = None,
    layout_code: int | None = None,
    use_oneshot: bool | None = None,
    fp32_acc: bool = False,
    moe_reduction_device_num_experts: int | None = None,
    moe_reduction_scale_input: torch.Tensor | None = None,
    moe_reduction_active_experts_token_input: torch.Tensor | None = None,
    moe_reduction_token_input: torch.Tensor | None = None,
    expanded_idx_to_permuted_idx: torch.Tensor | None = None,
    expert_scale_factor: torch.Tensor | None = None,
    shared_expert_output: torch.Tensor | None = None,
    block_quant_group_size: int | None = None,
    weight_bias: float = 0.0,
    *,
    moe_finalize_backend: str = "trtllm",
) -> torch.Tensor:
    r"""Add the inputs of all ranks, and do what follows in the same kernel.

    .. math::

        s_{r,c} &= \mathrm{round}\left(\sum_k input^{(k)}_{r,c}\right) \\
        x_{r,c} &= s_{r,c} + residual\_in_{r,c}, \quad
            residual\_out_{r,c} = \mathrm{round}(x_{r,c}) \\
        y_{r,c} &= \mathrm{round}\left(\frac{x_{r,c}}{\sqrt{\frac{1}{n} \sum_i x_{r,i}^2
            + rms\_eps}} \cdot (rms\_gamma_c + weight\_bias)\right) \\
        quant\_out_{r,c} &= \mathrm{sat}(y_{r,c} \cdot (1 / scale))

    Every rank must call it with the same shapes, dtype, pattern and ``use_oneshot``, in the same
    order. All ranks get the same bits.

    Parameters
    ----------
    input : torch.Tensor
        ``[token_num, hidden_dim]``, float16, bfloat16 or (without quantisation) float32,
        contiguous, on a CUDA device. 16-byte aligned rows are fastest. :math:`s` alone may have any
        shape; with a norm, rows have at most 32 KiB.
    workspace : AllReduceFusionWorkspace
        What :func:`create_allreduce_fusion_workspace` returned.
    pattern : int
        0, :math:`s`; 1, :math:`y`; 2 and 4, FP8 with the given ``scale_factor``; 8 and 9, FP8 with
        a scale for each group of columns; 10 and 11, FP8 with a scale for each row. 1, 4, 9 and 11
        write :math:`y`, too. :class:`AllReduceFusionPattern` has their names.
    launch_with_pdl : bool
        Let the kernel start while the previous one still runs; it waits for its end before it
        reads.
    trigger_completion_at_end : bool
        If False, the next kernel may start early in turn. It must wait as this one does.
    output : torch.Tensor, optional
        :math:`s`, for pattern 0; shape and dtype of ``input``, contiguous. Default: a new tensor.
    residual_out, norm_out : torch.Tensor, optional
        :math:`round(x)` and :math:`y`, shape and dtype of ``input``, contiguous; either may be
        ``input`` or ``residual_in``. Without ``residual_out`` it is not written; a missing
        ``norm_out`` is made if the pattern writes it.
    quant_out : torch.Tensor, optional
        Shape of ``input``, float8_e4m3fn, contiguous, memory of its own.
    scale_out : torch.Tensor, optional
        The new scales. Of rows: float32 ``[token_num, 1]``, contiguous. Of groups: biased exponents
        of powers of two (E8M0), four an int32, ``[token_num, ceil(groups / 4)]`` with strides
        ``[1, token_num rounded up to 4]``.
    residual_in : torch.Tensor, optional
        Shape and dtype of ``input``, contiguous; the same on all ranks.
    rms_gamma : torch.Tensor, optional
        ``[hidden_dim]``, dtype of ``input``.
    rms_eps : float
        Added to the mean square; at least 0.
    scale_factor : torch.Tensor or float, optional
        The given scale, what a consumer multiplies ``quant_out`` by: one float32 number on the GPU,
        which is read there. A float becomes one.
    use_oneshot : bool, optional
        Whether each rank receives all inputs whole (True), or reduces its part and sends the sums
        (False). Default: the faster one, by size and number of ranks. Two ranks always do the
        former, which sends no more bytes; the results are the same.
    fp32_acc : bool
        Ignored: sums are always in float32.
    block_quant_group_size : int, optional
        Columns that share a scale: 16, 32, 64 or 128.
    weight_bias : float
        1 for the RMSNorm of Gemma.
    layout_code : int, optional
        Ignored: it is the layout of FP4 scales, and no supported pattern writes FP4.
    moe_reduction_device_num_experts, moe_reduction_scale_input : optional
        Ignored, as the next ones: no supported pattern has a mixture of experts.
    moe_reduction_active_experts_token_input, moe_reduction_token_input : optional
        Ignored.
    expanded_idx_to_permuted_idx, expert_scale_factor, shared_expert_output : optional
        Ignored.
    moe_finalize_backend : str
        Ignored.

    Returns
    -------
    torch.Tensor
        What the pattern writes last, of ``output``, ``norm_out`` and ``quant_out``: ``norm_out``
        where there is one.

    Raises
    ------
    ValueError
        An unsupported pattern; a missing tensor; a tensor that is not on a CUDA device; a
        dtype, shape, device or strides other than above; outputs that overlap; a workspace that is
        destroyed or too small. Nothing is written, and no rank waits.

    Notes
    -----
    The sum is in the order of ranks and rounded before the residual is added, as it would be by
    separate kernels. A scale of a row is :math:`\max(\max_c |y|, 10^{-10}) / 448`; of a group,
    :math:`\max(\max_c |y| / 448, 10^{-10})` rounded up to a power of two. Ranks wait for each other
    on the GPU: a rank that does not call leaves the others waiting. A call takes at most half of a
    GPU, so two calls on two streams, each with a workspace of its own, cannot take each other's
    space. A row of a norm lies in registers. GPUs without clusters of CTAs (all but compute
    capability 9.0 and 10.x) keep it in shared memory if it has more than 16 KiB (two ranks) or
    8 KiB, and all GPUs if it is unaligned. Allocates nothing if outputs are given; safe in CUDA
    graphs; not differentiable.

    Examples
    --------
    >>> import torch, precast
    >>> from precast.comm import AllReduceFusionPattern
    >>> x, residual = torch.tensor([[2.0, 3.0]]).bfloat16(), torch.ones(1, 2).bfloat16()
    >>> with precast.reference_mode():
    ...     workspace = precast.comm.create_allreduce_fusion_workspace(
    ...         world_size=1, rank=0, max_token_num=4, hidden_dim=2, dtype=torch.bfloat16
    ...     )
    ...     y = precast.comm.allreduce_fusion(
    ...         x, workspace, AllReduceFusionPattern.kARResidualRMSNorm, residual_in=residual,
    ...         residual_out=residual, rms_gamma=torch.ones(2).bfloat16(),
    ...     )
    >>> residual, y
    (tensor([[3., 4.]], dtype=torch.bfloat16), tensor([[0.8477, 1.1328]], dtype=torch.bfloat16))
    >>> workspace.destroy()
    """
    function = "allreduce_fusion"
    # Why the type first: a test for an abstract class takes half a microsecond.
    if type(workspace) is not TRTLLMAllReduceFusionWorkspace and not isinstance(
        workspace, AllReduceFusionWorkspace
    ):
        raise TypeError(
            f"{function}: workspace must be an AllReduceFusionWorkspace, got "
            f"{type(workspace).__name__}"
        )
    if workspace._destroyed:
        raise ValueError(f"{function}: workspace must not be destroyed before the call")
    strategy = -1 if use_oneshot is None else int(bool(use_oneshot))
    options = (strategy, not trigger_completion_at_end, launch_with_pdl)
    if pattern == AllReduceFusionPattern.kAllReduce:
        if output is None:
            output = torch.empty_like(input)
        _all_reduce(workspace, input, output, options)
        return output
    mode, writes_norm = _fusion_of(function, pattern)
    if residual_in is None or rms_gamma is None:
        missing = "residual_in" if residual_in is None else "rms_gamma"
        raise ValueError(f"{function}: {missing} must be a tensor for this pattern, got None")
    if not writes_norm:
        norm_out = None
    elif norm_out is None:
        norm_out = torch.empty_like(input)
    if mode == NO_QUANT:
        quant_out = None
    if scale_factor is not None and not isinstance(scale_factor, torch.Tensor):
        scale_factor = torch.full((1,), scale_factor, dtype=torch.float32, device=input.device)
    _all_reduce_norm(
        workspace,
        (
            input,
            residual_in,
            rms_gamma,
            residual_out,
            norm_out,
            quant_out,
            scale_out if mode in (GROUP, TOKEN) else None,
            scale_factor if mode == TENSOR else None,
            mode,
            block_quant_group_size or 0,
            rms_eps,
            weight_bias,
        ),
        options,
    )
    result = quant_out if norm_out is None else norm_out
    assert result is not None
    return result


def _check_on_gpu(input: torch.Tensor) -> None:
    if not (input.is_cuda or is_reference()):
        raise ValueError(
            "allreduce_fusion: input must be a CUDA tensor, got one that is not on a GPU. Fix: "
            "move it to a GPU, or set PRECAST_REFERENCE=1 to run the PyTorch references"
        )


def load_kernels(workspace: TRTLLMAllReduceFusionWorkspace, dtype: torch.dtype) -> None:
    """Load the kernels of a workspace, as a call without elements does; none that is missing.

    CUDA loads a kernel when it is needed first, and may wait for the GPU to do that. If a kernel
    that waits for a peer runs then, on another stream, this can be for ever.
    """
    empty = torch.empty(0, dtype=dtype, device=workspace.workspace_tensor.device)
    with contextlib.suppress(MissingKernelError, UnsupportedConfigError):
        _all_reduce(workspace, empty, empty, (-1, False, False))


def _all_reduce(
    workspace: AllReduceFusionWorkspace,
    input: torch.Tensor,
    output: torch.Tensor,
    options: tuple[int, bool, bool],
) -> None:
    if type(workspace) is TRTLLMAllReduceFusionWorkspace:
        try:
            _ALLREDUCE.launch(workspace.block, workspace.world_size, input, output, *options)
        except RuntimeError as error:
            workspace.raise_failure(error)
            raise
        return
    assert isinstance(workspace, GroupAllReduceFusionWorkspace)
    _check_on_gpu(input)
    _ALLREDUCE.explain(None, workspace.world_size, input, output, *options)
    all_reduce_by_group(workspace, input, output)


def _all_reduce_norm(
    workspace: AllReduceFusionWorkspace, tensors: tuple[Any, ...], options: tuple[int, bool, bool]
) -> None:
    if type(workspace) is TRTLLMAllReduceFusionWorkspace:
        try:
            _ALLREDUCE_NORM.launch(workspace.block, workspace.world_size, *tensors, *options)
        except RuntimeError as error:
            workspace.raise_failure(error)
            raise
        return
    assert isinstance(workspace, GroupAllReduceFusionWorkspace)
    _check_on_gpu(tensors[0])
    _ALLREDUCE_NORM.explain(None, workspace.world_size, *tensors, *options)
    all_reduce_norm_by_group(workspace, tensors)
