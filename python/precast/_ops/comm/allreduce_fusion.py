# SPDX-License-Identifier: Apache-2.0
"""All-reduce, alone or with residual, RMSNorm and FP8 output in the same kernel.

Sources: Thakur, Rabenseifner and Gropp, Optimization of Collective Communication Operations in
MPICH, 2005; Zhang and Sennrich, Root Mean Square Layer Normalization, arXiv:1910.07467; scaling by
groups: DeepSeek-AI, arXiv:2412.19437, section 3.3.
"""

from __future__ import annotations

from typing import Any

from precast._base.torch import torch
from precast._op.declaration import Kind
from precast._op.export import Export, op
from precast._op.mode import is_reference
from precast._ops.comm.fused_reference import (
    EPS,
    FP8_MAX,
    check_norm,
    check_plain,
    followed,
    reduced,
)
from precast._ops.comm.fused_reference import (
    allreduce_fusion_reference as allreduce_fusion_reference,
)
from precast._ops.comm.patterns import GROUP, NO_QUANT, TENSOR, TOKEN, AllReduceFusionPattern
from precast._ops.comm.patterns import fusion_of as _fusion_of
from precast._ops.comm.workspace import (
    AllReduceFusionWorkspace,
    GroupAllReduceFusionWorkspace,
    TRTLLMAllReduceFusionWorkspace,
    make_workspace,
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
def create_allreduce_fusion_workspace(
    backend: str = "auto",
    world_size: int | None = None,
    rank: int | None = None,
    max_token_num: int | None = None,
    hidden_dim: int | None = None,
    dtype: torch.dtype | None = None,
    gpus_per_node: int | None = None,
    comm_backend: Any | None = None,
    force_oneshot_support: bool = False,
    group: Any | None = None,
    *,
    top_k: int | None = None,
    rms_eps: float | None = None,
    weight_bias: float | None = None,
    routed_scaling_factor: float | None = None,
    include_shared_expert: bool | None = None,
    add_residual: bool | None = None,
    write_residual_output: bool | None = None,
    apply_rms_norm: bool | None = None,
    output_dtype: torch.dtype | None = None,
    dynamic_fp8: bool | None = None,
    write_norm_output: bool | None = None,
    config: Any | None = None,
) -> AllReduceFusionWorkspace:
    """Make what :func:`allreduce_fusion` needs of a group of ranks; every rank calls it.

    Parameters
    ----------
    backend : str
        ``"auto"`` or ``"trtllm"``: the kernels of precast where the GPUs of all ranks can access
        each other's memory, and otherwise the process group (NCCL) with separate kernels for what
        follows, which a line in the log says. ``"mnnvl"`` and ``"mnnvl-cutedsl"``, FlashInfer's
        backends for NVLink multicast, are refused.
    world_size, rank : int
        The number of ranks, and the number of this one. Kernels exist for 2, 4 and 8 ranks.
    max_token_num, hidden_dim : int
        The largest input. Others may have any shape of at most as many elements.
    dtype : torch.dtype
        float16, bfloat16 or float32.
    gpus_per_node : int, optional
        Not looked at: ranks tell each other their hosts.
    comm_backend : CommBackend, optional
        What ranks exchange handles with. Default: ``group``.
    force_oneshot_support : bool
        Not looked at: both strategies take messages of all sizes.
    group : torch.distributed.ProcessGroup, optional
        The ranks. Default: those of ``comm_backend`` if it is a :class:`TorchDistBackend`,
        otherwise all processes.
    top_k, rms_eps, weight_bias, routed_scaling_factor, include_shared_expert : optional
        Of ``"mnnvl-cutedsl"``; refused, as are the next ones.
    add_residual, write_residual_output, apply_rms_norm, output_dtype : optional
        As above.
    dynamic_fp8, write_norm_output, config : optional
        As above.

    Returns
    -------
    AllReduceFusionWorkspace
        Its ``backend`` is ``"trtllm"`` where the kernels of precast run. It may serve several
        streams if they do not run calls at once; streams that do need a workspace each.

    Raises
    ------
    ValueError
        Another backend, dtype, size or option; a ``world_size`` or ``rank`` that is not that of
        ``group``.
    RuntimeError
        Without a process group; if GPUs cannot share memory and there is no group for NCCL.

    Notes
    -----
    A rank has two receive buffers of about ``max_token_num * hidden_dim`` elements (two ranks) or
    1.5 to 1.75 times as many, at most 64 MiB each; longer messages go in several rounds. The memory
    is that of torch's symmetric memory, or of CUDA's IPC handles where that is missing. NVLink
    multicast is not used. ``PRECAST_COMM_TIMEOUT`` bounds how long kernels wait for each other, for
    debugging.

    Examples
    --------
    >>> import torch, precast
    >>> with precast.reference_mode():
    ...     workspace = precast.comm.create_allreduce_fusion_workspace(
    ...         world_size=1, rank=0, max_token_num=4, hidden_dim=2, dtype=torch.bfloat16
    ...     )
    >>> workspace.is_buffer_size_sufficient(1, 4, 2, torch.bfloat16)
    True
    >>> workspace.destroy()
    """
    function = "create_allreduce_fusion_workspace"
    if backend in ("mnnvl", "mnnvl-cutedsl"):
        raise ValueError(
            f"{function}: backend={backend!r} needs NVLink multicast, which precast does not use. "
            f"Fix: backend='auto'"
        )
    options = {
        "top_k": top_k,
        "rms_eps": rms_eps,
        "weight_bias": weight_bias,
        "routed_scaling_factor": routed_scaling_factor,
        "include_shared_expert": include_shared_expert,
        "add_residual": add_residual,
        "write_residual_output": write_residual_output,
        "apply_rms_norm": apply_rms_norm,
        "output_dtype": output_dtype,
        "dynamic_fp8": dynamic_fp8,
        "write_norm_output": write_norm_output,
        "config": config,
    }
    given = [name for name, value in options.items() if value is not None]
    if given:
        raise ValueError(
            f"{function}: {', '.join(given)} must be None, because backend 'mnnvl-cutedsl' alone "
            f"has it. Fix: pass rms_eps and weight_bias to allreduce_fusion()"
        )
    if backend not in ("auto", "trtllm"):
        raise ValueError(f"{function}: backend must be 'auto' or 'trtllm', got {backend!r}")
    sizes = {
        "world_size": world_size,
        "rank": rank,
        "max_token_num": max_token_num,
        "hidden_dim": hidden_dim,
        "dtype": dtype,
    }
    for name, value in sizes.items():
        if value is None:
            raise ValueError(f"{function}: {name} must be given, got None")
    return make_workspace(function, **sizes, comm_backend=comm_backend, group=group)  # type: ignore[arg-type]


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
        Of :func:`create_allreduce_fusion_workspace`.
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
        Not looked at: sums are always in float32.
    block_quant_group_size : int, optional
        Columns that share a scale: 16, 32, 64 or 128.
    weight_bias : float
        1 for the RMSNorm of Gemma.
    layout_code : int, optional
        Of FP4 output, which is not there.
    moe_reduction_device_num_experts, moe_reduction_scale_input : optional
        Of patterns with a mixture of experts, which are not there, as are the next ones.
    moe_reduction_active_experts_token_input, moe_reduction_token_input : optional
        As above.
    expanded_idx_to_permuted_idx, expert_scale_factor, shared_expert_output : optional
        As above.
    moe_finalize_backend : str
        As above.

    Returns
    -------
    torch.Tensor
        What the pattern writes last, of ``output``, ``norm_out`` and ``quant_out``: ``norm_out``
        where there is one.

    Raises
    ------
    ValueError
        A pattern that is not there; a missing tensor; a tensor that is not on a CUDA device; a
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
    if is_reference():
        output.copy_(reduced(workspace.gather(input)))
        return
    if output.data_ptr() != input.data_ptr():
        output.copy_(input)
    workspace.all_reduce(output)


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
    input, residual, weight, residual_out, norm_out, quant_out, scale_out, *numbers = tensors
    scale_factor, mode, group_size, eps, weight_bias = numbers
    if is_reference():
        total = reduced(workspace.gather(input))
    else:
        total = input.clone()
        workspace.all_reduce(total)
        if _by_kernels(workspace, total, tensors):
            return
    results = followed(total, residual, weight, eps, weight_bias, mode, group_size, scale_factor)
    outputs = (residual_out, norm_out, quant_out, scale_out)
    for output, result in zip(outputs, results):
        if output is not None and result is not None:
            output.copy_(result)


def _by_kernels(
    workspace: GroupAllReduceFusionWorkspace, total: torch.Tensor, tensors: tuple[Any, ...]
) -> bool:
    """Run what follows the sum by precast's separate kernels, if they have it."""
    from precast._ops.norm.fused_add_rmsnorm import fused_add_rmsnorm, gemma_fused_add_rmsnorm
    from precast._ops.quantize.per_tensor import per_token_quant_fp8, static_quant_fp8
    from precast._ops.quantize.per_token_group import per_token_group_quant_8bit

    _, residual, weight, residual_out, norm_out, quant_out, scale_out, *numbers = tensors
    scale_factor, mode, group_size, eps, weight_bias = numbers
    norms = {0.0: fused_add_rmsnorm, 1.0: gemma_fused_add_rmsnorm}
    norm = norms.get(float(weight_bias))
    if norm is None or total.dtype == torch.float32 or not total.is_cuda:
        return False
    added = residual.clone()
    norm(total, added, weight, eps)
    if residual_out is not None:
        residual_out.copy_(added)
    if norm_out is not None:
        norm_out.copy_(total)
    if mode == TENSOR:
        static_quant_fp8(total, scale_factor, out=quant_out)
    elif mode == TOKEN:
        per_token_quant_fp8(total, EPS, out=quant_out, out_scale=scale_out)
    elif mode == GROUP:
        per_token_group_quant_8bit(
            total,
            group_size,
            EPS * FP8_MAX,
            column_major_scales=True,
            scale_tma_aligned=True,
            scale_ue8m0=True,
            use_packed_ue8m0=True,
            out=quant_out,
            out_scale=scale_out,
        )
    return True
