# SPDX-License-Identifier: Apache-2.0
"""The fused all-reduce by the names and arguments that came before its unified form."""

from __future__ import annotations

from typing import Any

from precast._base.torch import torch
from precast._ops.comm.allreduce_fusion import allreduce_fusion
from precast._ops.comm.create_workspace import make_workspace
from precast._ops.comm.workspace import (
    AllReduceFusionWorkspace,
    TRTLLMAllReduceFusionWorkspace,
    workspace_of_tensor,
)
from precast.api_logging import precast_api

#: Workspaces that live until they are destroyed, by the tensor that stands for them.
_LIVING: dict[int, AllReduceFusionWorkspace] = {}


@precast_api
def trtllm_create_ipc_workspace_for_all_reduce_fusion(
    tp_rank: int,
    tp_size: int,
    max_token_num: int,
    hidden_dim: int,
    use_fp32_lamport: bool = False,
    group: Any | None = None,
    create_metadata: bool = False,
    comm_backend: Any | None = None,
    use_symm_dev_mem: bool = False,
) -> tuple[Any, ...]:
    """Make the workspace of :func:`trtllm_allreduce_fusion`; every rank calls it.

    :func:`create_allreduce_fusion_workspace` is the newer form.

    Parameters
    ----------
    tp_rank, tp_size : int
        The number of this rank, and of ranks: 2, 4 or 8.
    max_token_num, hidden_dim : int
        The largest input.
    use_fp32_lamport : bool
        Whether inputs are float32. Otherwise they are float16 or bfloat16.
    group : torch.distributed.ProcessGroup, optional
        The ranks. Default: all processes.
    create_metadata : bool
        Return a dictionary of the sizes, too.
    comm_backend : CommBackend, optional
        What ranks exchange handles with. Default: ``group``.
    use_symm_dev_mem : bool
        Return a list of memory handles before the dictionary; it is empty here.

    Returns
    -------
    ipc_handles : list of list of int
        The address of each rank's buffer.
    workspace_tensor : torch.Tensor
        The same, int64 on the GPU: what :func:`trtllm_allreduce_fusion` takes.
    mem_handles : list
        With ``use_symm_dev_mem``.
    metadata : dict
        With ``create_metadata``.

    Raises
    ------
    ValueError
        Sizes that are not positive, or not those of ``group``; ``use_symm_dev_mem`` without
        ``create_metadata``.
    RuntimeError
        If the GPUs cannot access each other's memory.
    """
    function = "trtllm_create_ipc_workspace_for_all_reduce_fusion"
    if use_symm_dev_mem and not create_metadata:
        raise ValueError(f"{function}: use_symm_dev_mem=True needs create_metadata=True, got False")
    dtype = torch.float32 if use_fp32_lamport else torch.float16
    workspace = make_workspace(
        function, tp_size, tp_rank, max_token_num, hidden_dim, dtype, comm_backend, group
    )
    if not isinstance(workspace, TRTLLMAllReduceFusionWorkspace):
        workspace.destroy()
        raise RuntimeError(
            f"{function}: there is no workspace of addresses for {tp_size} ranks here. Fix: use "
            f"create_allreduce_fusion_workspace(), which falls back to the process group"
        )
    handles = workspace.ipc_handles
    _LIVING[id(handles)] = workspace
    result: tuple[Any, ...] = (handles, workspace.workspace_tensor)
    if use_symm_dev_mem:
        result = (*result, workspace.mem_handles)
    return (*result, workspace.metadata) if create_metadata else result


@precast_api
def trtllm_destroy_ipc_workspace_for_all_reduce_fusion(
    workspace: list[list[int]], group: Any | None = None
) -> None:
    """Free a workspace of :func:`trtllm_create_ipc_workspace_for_all_reduce_fusion`.

    Parameters
    ----------
    workspace : list of list of int
        The ``ipc_handles``.
    group : torch.distributed.ProcessGroup, optional
        Ignored: ranks may free theirs in any order.

    Raises
    ------
    ValueError
        If it is none, or freed already.
    """
    living = _LIVING.pop(id(workspace), None)
    if living is None:
        raise ValueError(
            "trtllm_destroy_ipc_workspace_for_all_reduce_fusion: workspace must be the ipc_handles "
            "of a workspace that lives"
        )
    living.destroy()


@precast_api
def trtllm_allreduce_fusion(
    allreduce_in: torch.Tensor,
    world_size: int,
    world_rank: int,
    token_num: int,
    hidden_dim: int,
    workspace_ptrs: torch.Tensor,
    launch_with_pdl: bool,
    trigger_completion_at_end: bool,
    fp32_acc: bool,
    pattern_code: int,
    use_oneshot: bool | None,
    allreduce_out: torch.Tensor | None,
    residual_in: torch.Tensor | None,
    residual_out: torch.Tensor | None,
    norm_out: torch.Tensor | None,
    quant_out: torch.Tensor | None,
    scale_out: torch.Tensor | None,
    rms_gamma: torch.Tensor | None,
    rms_eps: float | None,
    scale_factor: torch.Tensor | float | None,
    layout_code: int | None,
    metadata: dict[str, Any] | None = None,
    block_quant_group_size: int | None = None,
    weight_bias: float | None = None,
) -> None:
    """:func:`allreduce_fusion` for tensors of any shape, which hold ``token_num`` rows.

    Parameters
    ----------
    allreduce_in, allreduce_out, residual_in, residual_out, norm_out, quant_out : torch.Tensor
        ``token_num * hidden_dim`` elements, contiguous. What the pattern needs must be given.
    world_size, world_rank : int
        Those of the workspace.
    workspace_ptrs : torch.Tensor
        The tensor that :func:`trtllm_create_ipc_workspace_for_all_reduce_fusion` returned.
    pattern_code : int
        The ``pattern`` of :func:`allreduce_fusion`.
    metadata : dict, optional
        Ignored: the workspace knows its sizes.

    Raises
    ------
    ValueError
        As :func:`allreduce_fusion`; a tensor that is no workspace's, or another number of ranks.
    """
    function = "trtllm_allreduce_fusion"
    workspace = workspace_of_tensor(function, workspace_ptrs)
    if (world_size, world_rank) != (workspace.world_size, workspace.rank):
        raise ValueError(
            f"{function}: world_size and world_rank must be those of the workspace, "
            f"{workspace.world_size} and {workspace.rank}, got {world_size} and {world_rank}"
        )

    def rows(name: str, tensor: torch.Tensor | None) -> torch.Tensor | None:
        if tensor is None:
            return None
        if tensor.numel() != token_num * hidden_dim or not tensor.is_contiguous():
            raise ValueError(
                f"{function}: {name} must hold token_num * hidden_dim = {token_num} * {hidden_dim} "
                f"contiguous elements, got shape {[*tensor.shape]} and strides "
                f"{[*tensor.stride()]}"
            )
        return tensor.view(token_num, hidden_dim)

    input = rows("allreduce_in", allreduce_in)
    assert input is not None
    if pattern_code == 0 and allreduce_out is None:
        raise ValueError(f"{function}: allreduce_out must be a tensor for this pattern, got None")
    allreduce_fusion(
        input,
        workspace,
        pattern_code,
        launch_with_pdl,
        trigger_completion_at_end,
        output=rows("allreduce_out", allreduce_out),
        residual_out=rows("residual_out", residual_out),
        norm_out=rows("norm_out", norm_out),
        quant_out=rows("quant_out", quant_out),
        scale_out=scale_out,
        residual_in=rows("residual_in", residual_in),
        rms_gamma=rms_gamma,
        rms_eps=1e-6 if rms_eps is None else rms_eps,
        scale_factor=scale_factor,
        layout_code=layout_code,
        use_oneshot=use_oneshot,
        fp32_acc=fp32_acc,
        block_quant_group_size=block_quant_group_size,
        weight_bias=0.0 if weight_bias is None else weight_bias,
    )
