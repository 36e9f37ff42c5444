# SPDX-License-Identifier: Apache-2.0
"""A mixture of experts of at most eight tokens, from the logits of the router to results.

Source: Shazeer et al., Outrageously Large Neural Networks, arXiv:1701.06538; scales of blocks:
DeepSeek-V3 Technical Report, arXiv:2412.19437, section 3.3. FlashInfer 0.7.2 has the signature.
"""

from __future__ import annotations

from typing import Any

from precast._base.torch import torch
from precast._op.export import Export, op
from precast._op.validation import check_contiguous
from precast._ops.moe._few_tokens import MAX_TOKENS, problem
from precast._ops.moe._fused_reference import cutlass_fused_moe_reference
from precast._ops.moe._rows import GROUP
from precast.api_logging import precast_api
from precast.trace import Const, Scalar, Tensor, TraceTemplate, Var

_NAME = "mono_moe"
#: ``few_tokens.cuh``: experts and slots of a token where logits are given.
MAX_EXPERTS, MAX_TOPK = 256, 8
#: Rows of both halves of the first weight that are side by side where it is interleaved.
_ROWS = 8
#: The intermediate size that :func:`alloc_scratchpad` is for, that of FlashInfer's kernel.
_INTER = 512


def mono_moe_reference(
    activations_in: torch.Tensor,
    router_logits: torch.Tensor,
    expert_weights_up: torch.Tensor,
    expert_scales_up: torch.Tensor,
    expert_weights_down: torch.Tensor,
    expert_scales_down: torch.Tensor,
    top_k: int,
    scoring_func: str = "softmax",
    renormalize: bool = True,
    interleave_up: bool = True,
) -> torch.Tensor:
    """:func:`mono_moe` in plain PyTorch on any device; each step is float32 and rounds once."""
    logits = router_logits.float()
    # A logit that is not finite counts as the lowest finite number.
    logits = torch.where(logits.isfinite(), logits, torch.finfo(router_logits.dtype).min)
    order = logits.sort(dim=1, descending=True, stable=True).indices[:, :top_k]
    scores = torch.sigmoid(logits) if scoring_func == "sigmoid" else logits.softmax(dim=1)
    weights = scores.gather(1, order)
    if renormalize and scoring_func == "softmax":
        weights = logits.gather(1, order).softmax(dim=1)
    elif renormalize:
        total = weights.sum(dim=1, keepdim=True)
        weights = torch.where(total > 0, weights / total, weights)
    # Only experts that tokens have: copies of all would take much memory.
    used, selected = order.unique(return_inverse=True)
    up, down = (
        w.view(torch.uint8)[used].view(w.dtype) for w in (expert_weights_up, expert_weights_down)
    )
    inter = down.shape[2]
    if interleave_up:
        first, second = up.view(torch.uint8).chunk(2, dim=1)
    else:
        rows = up.view(torch.uint8).unflatten(1, (inter // 8, 2, 8))
        first, second = (rows[:, :, i].flatten(1, 2) for i in (0, 1))
    gate_scale, up_scale = expert_scales_up[used].chunk(2, dim=1)
    return cutlass_fused_moe_reference(
        activations_in,
        selected.view(order.shape).int(),
        weights,
        torch.cat([second, first], dim=1).view(up.dtype),
        down,
        activations_in.dtype,
        [torch.cat([up_scale, gate_scale], dim=1), expert_scales_down[used]],
        use_deepseek_fp8_block_scale=True,
    )


def _write(
    activations_in: torch.Tensor,
    router_logits: torch.Tensor,
    expert_weights_up: torch.Tensor,
    expert_scales_up: torch.Tensor,
    expert_weights_down: torch.Tensor,
    expert_scales_down: torch.Tensor,
    top_k: int,
    scoring_func: str,
    renormalize: bool,
    interleave_up: bool,
    out: torch.Tensor,
) -> None:
    out.copy_(
        mono_moe_reference(
            *(activations_in, router_logits, expert_weights_up, expert_scales_up),
            *(expert_weights_down, expert_scales_down, top_k),
            *(scoring_func, renormalize, interleave_up),
        )
    )


def _check(
    export: str,
    activations_in: torch.Tensor,
    router_logits: torch.Tensor,
    expert_weights_up: torch.Tensor,
    expert_scales_up: torch.Tensor,
    expert_weights_down: torch.Tensor,
    expert_scales_down: torch.Tensor,
    top_k: int,
    out: torch.Tensor,
    scratchpad: torch.Tensor,
) -> None:
    tokens, hidden = activations_in.shape
    experts, _, inter = expert_weights_down.shape
    if experts > MAX_EXPERTS or experts % 8:
        raise ValueError(
            f"{export}: expert_weights_down must have a multiple of 8 experts, at most "
            f"{MAX_EXPERTS}, got {experts}"
        )
    if not 1 <= top_k <= min(MAX_TOPK, experts):
        raise ValueError(f"{export}: top_k must be in [1, {MAX_TOPK}], got {top_k}")
    wrong = problem(tokens, top_k, experts, hidden, inter, 1)
    if wrong is not None:
        raise ValueError(f"{export}: {wrong}")
    for name, t, shape in (
        ("expert_weights_up", expert_weights_up, [experts, 2 * inter, hidden]),
        ("expert_scales_up", expert_scales_up, [experts, 2 * inter // GROUP, hidden // GROUP]),
        ("expert_scales_down", expert_scales_down, [experts, hidden // GROUP, inter // GROUP]),
    ):
        if [*t.shape] != shape:
            raise ValueError(f"{export}: {name} must have shape {shape}, got {[*t.shape]}")
    needed = tokens * top_k * inter * 4
    if len(scratchpad) < needed:
        raise ValueError(
            f"{export}: scratchpad must have at least {needed} bytes, got shape "
            f"{[*scratchpad.shape]}. Fix: pass alloc_scratchpad()"
        )
    check_contiguous(
        export,
        activations_in=activations_in,
        router_logits=router_logits,
        expert_weights_up=expert_weights_up,
        expert_scales_up=expert_scales_up,
        expert_weights_down=expert_weights_down,
        expert_scales_down=expert_scales_down,
        out=out,
        scratchpad=scratchpad,
    )


_MONO_MOE = Export(
    "moe_few_tokens",
    "mono_moe",
    "activations_in:T=bf16|f16[tokens,hidden] router_logits:T[tokens,experts] "
    "expert_weights_up:U=e4m3[experts,up_rows,hidden] "
    "expert_scales_up:f32[experts,up_groups,hidden_groups] "
    "expert_weights_down:U[experts,hidden,inter] "
    "expert_scales_down:f32[experts,hidden_groups,inter_groups] top_k:int is_softmax:bool "
    "renormalize:bool is_interleaved:bool out!:T[tokens,hidden] scratchpad!:u8[bytes] "
    "enable_pdl:pdl_on",
    check=_check,
    write=_write,
    derived={
        "scoring_func": lambda is_softmax: "softmax" if is_softmax else "sigmoid",
        "interleave_up": lambda is_interleaved: not is_interleaved,
    },
)


def _fill(made: dict[str, Any]) -> None:
    made["expert_scales_up"].mul_(made["activations_in"].shape[1] ** -0.5)
    made["expert_scales_down"].mul_(made["expert_weights_down"].shape[2] ** -0.5)


@precast_api(
    trace=TraceTemplate(
        op_type="moe",
        name_prefix="mono_moe",
        description="Routes at most eight tokens and computes their FP8 mixture of experts.",
        axes={
            "num_tokens": Var(sample=5),
            "num_experts": Const("e", sample=16),
            "hidden_size": Const("h", multiple=GROUP),
            "intermediate_size": Const("i", multiple=GROUP),
            "up_size": Const("", value="2 * intermediate_size"),
            "hidden_blocks": Const("", value=f"hidden_size // {GROUP}"),
            "intermediate_blocks": Const("", value=f"intermediate_size // {GROUP}"),
            "up_blocks": Const("", value=f"2 * intermediate_size // {GROUP}"),
        },
        inputs={
            "activations_in": Tensor(["num_tokens", "hidden_size"]),
            "router_logits": Tensor(["num_tokens", "num_experts"]),
            "expert_weights_up": Tensor(
                ["num_experts", "up_size", "hidden_size"], dtype="float8_e4m3fn"
            ),
            "expert_scales_up": Tensor(
                ["num_experts", "up_blocks", "hidden_blocks"], dtype="float32"
            ),
            "expert_weights_down": Tensor(
                ["num_experts", "hidden_size", "intermediate_size"], dtype="float8_e4m3fn"
            ),
            "expert_scales_down": Tensor(
                ["num_experts", "hidden_blocks", "intermediate_blocks"], dtype="float32"
            ),
            "top_k": Scalar("int32", sample=4),
        },
        outputs={
            "output": Tensor(
                ["num_tokens", "hidden_size"], param="out", dtype_from="activations_in"
            )
        },
        reference=mono_moe_reference,
        tags=["moe"],
        fill=_fill,
    )
)
@op("moe_few_tokens")
def mono_moe(
    activations_in: torch.Tensor,
    router_logits: torch.Tensor,
    expert_weights_up: torch.Tensor,
    expert_scales_up: torch.Tensor,
    expert_weights_down: torch.Tensor,
    expert_scales_down: torch.Tensor,
    top_k: int,
    scoring_func: str = "softmax",
    renormalize: bool = True,
    out: torch.Tensor | None = None,
    scratchpad: torch.Tensor | None = None,
    interleave_up: bool = True,
) -> torch.Tensor:
    r"""Route at most eight tokens, and compute their mixture of experts with FP8 weights.

    .. math::

        out_t = \mathrm{round}\left(\sum_s w_{t,s} \left(silu(x_t G_e^T) \odot (x_t U_e^T)\right)
        D_e^T\right), \quad e = e_{t,s}

    where :math:`e_{t,s}` are the ``top_k`` experts with the largest logits, of equal ones the
    first.

    Parameters
    ----------
    activations_in : torch.Tensor
        ``[tokens, hidden]``, bfloat16 or float16, contiguous, on a CUDA device: from 0 to 8 tokens;
        ``hidden`` is a multiple of 128 up to 9216.
    router_logits : torch.Tensor
        ``[tokens, experts]`` of the same dtype, contiguous; a multiple of 8 experts up to 256. A
        logit that is not finite counts as the lowest finite number.
    expert_weights_up : torch.Tensor
        ``[experts, 2 inter, hidden]``, float8_e4m3fn, contiguous: the gate :math:`G` above
        :math:`U`, or what :func:`interleave_for_tma_wgmma_up` makes of it.
    expert_scales_up : torch.Tensor
        ``[experts, 2 inter / 128, hidden / 128]``, float32, contiguous: *dequantisation* scales of
        blocks of 128 x 128, the gate's first in both cases.
    expert_weights_down : torch.Tensor
        ``[experts, hidden, inter]``, float8_e4m3fn, contiguous: :math:`D`. ``inter`` is a multiple
        of 128; ``tokens * top_k * inter`` is at most 73728.
    expert_scales_down : torch.Tensor
        ``[experts, hidden / 128, inter / 128]``, float32, contiguous.
    top_k : int
        Experts of a token, from 1 to 8.
    scoring_func : str
        ``"softmax"`` or ``"sigmoid"``: what the weights :math:`w` are of the logits.
    renormalize : bool
        Whether the weights of a token are divided by their sum. Default: True.
    out : torch.Tensor, optional
        ``[tokens, hidden]`` of the dtype of ``activations_in``, contiguous. Default: a new tensor.
    scratchpad : torch.Tensor, optional
        Scratch memory, uint8, contiguous, at a multiple of 16 bytes: ``4 tokens top_k inter``
        bytes, as :func:`alloc_scratchpad` makes it for ``inter`` 512. What it holds does not
        matter. Calls that may run at the same time need one each. Default: new memory.
    interleave_up : bool
        True for weights as they are, False for those that are interleaved already. Both are read in
        place; nothing is copied. Default: True.

    Returns
    -------
    torch.Tensor
        ``out``, or a new tensor.

    Raises
    ------
    ValueError
        A tensor that is not on a CUDA device; a dtype, shape, device, strides or alignment other
        than above; another ``scoring_func``; outputs that overlap another argument.

    Notes
    -----
    Tokens and activations are quantised to e4m3 with a scale for 128 columns, as
    :func:`moe_permute_quant` does; the results of both products are rounded to the dtype of
    ``activations_in``; slots are added in float32 in their order. Equal arguments give equal bits,
    and a token's result does not depend on other tokens. FlashInfer's kernel has one shape, 256
    experts with 512 and 2048 columns, and one GPU, of compute capability 9.0. Two launches;
    allocates only what is missing; nothing is read by the host, so that a CUDA graph may be
    replayed with other logits; not differentiable.

    Examples
    --------
    >>> import torch, precast
    >>> x, logits = torch.ones(1, 128).bfloat16(), torch.arange(8.0).view(1, 8).bfloat16()
    >>> gate_up = torch.full((8, 256, 128), 0.125).to(torch.float8_e4m3fn)
    >>> down = torch.full((8, 128, 128), 0.125).to(torch.float8_e4m3fn)
    >>> with precast.reference_mode():
    ...     out = precast.fused_moe.mono_moe(
    ...         x, logits, gate_up, torch.full((8, 2, 1), 0.125), down, torch.ones(8, 1, 1), 2)
    >>> out.shape, round(out[0, 0].item())
    (torch.Size([1, 128]), 56)
    """
    if scoring_func not in ("softmax", "sigmoid"):
        raise ValueError(
            f"{_NAME}: scoring_func must be 'sigmoid' or 'softmax', got {scoring_func!r}"
        )
    if out is None:
        out = torch.empty_like(activations_in)
    if scratchpad is None:
        needed = 4 * len(activations_in) * top_k * expert_weights_down.shape[-1]
        scratchpad = activations_in.new_empty(max(needed, 0), dtype=torch.uint8)
    _MONO_MOE.launch(
        *(activations_in, router_logits, expert_weights_up, expert_scales_up),
        *(expert_weights_down, expert_scales_down, top_k, scoring_func == "softmax", renormalize),
        *(not interleave_up, out, scratchpad),
    )
    return out


@precast_api
def interleave_for_tma_wgmma_up(w_fp8: torch.Tensor) -> torch.Tensor:
    """Return the first weight of :func:`mono_moe` with rows of gate and up in turns of eight.

    :func:`mono_moe` reads both orders equally fast, so nothing is won by it; it is there for
    weights that FlashInfer's loaders prepare.

    Parameters
    ----------
    w_fp8 : torch.Tensor
        ``[experts, 2 inter, hidden]``, of any dtype; ``inter`` is a multiple of 64.

    Returns
    -------
    torch.Tensor
        A new contiguous tensor of the same shape and dtype.

    Raises
    ------
    ValueError
        Another shape.

    Examples
    --------
    >>> import torch, precast
    >>> rows = torch.arange(128).view(1, 128, 1)
    >>> precast.fused_moe.interleave_for_tma_wgmma_up(rows)[0, 6:10, 0].tolist()
    [6, 7, 64, 65]
    """
    if w_fp8.dim() != 3 or w_fp8.shape[1] % 128:
        raise ValueError(
            f"interleave_for_tma_wgmma_up: w_fp8 must have shape [experts, 2 inter, hidden], inter "
            f"a multiple of 64, got {[*w_fp8.shape]}"
        )
    halves = w_fp8.unflatten(1, (2, -1, _ROWS))
    return halves.transpose(1, 2).reshape(w_fp8.shape).contiguous()


@precast_api
def get_scratchpad_size_bytes() -> int:
    """Return the bytes of scratch memory that any call of FlashInfer's shape needs.

    Returns
    -------
    int
        The bytes for 8 tokens with 8 experts each and 512 intermediate columns.

    Examples
    --------
    >>> import precast
    >>> precast.fused_moe.get_scratchpad_size_bytes()
    131072
    """
    return 4 * MAX_TOKENS * MAX_TOPK * _INTER


@precast_api
def alloc_scratchpad(device: torch.device) -> torch.Tensor:
    """Return scratch memory for :func:`mono_moe`, of :func:`get_scratchpad_size_bytes` bytes.

    Parameters
    ----------
    device : torch.device
        Where it is.

    Returns
    -------
    torch.Tensor
        A one-dimensional uint8 tensor of zeros.

    Examples
    --------
    >>> import torch, precast
    >>> precast.fused_moe.alloc_scratchpad(torch.device("cpu")).shape
    torch.Size([131072])
    """
    return torch.zeros(get_scratchpad_size_bytes(), dtype=torch.uint8, device=device)


@precast_api
def has_monomoe() -> bool:
    """Return whether the current GPU has kernels of :func:`mono_moe`.

    Returns
    -------
    bool
        False without a GPU.

    Examples
    --------
    >>> import precast
    >>> isinstance(precast.fused_moe.has_monomoe(), bool)
    True
    """
    if not torch.cuda.is_available():
        return False
    major, minor = torch.cuda.get_device_capability()
    return bool(mono_moe.is_compute_capability_supported(10 * major + minor))
