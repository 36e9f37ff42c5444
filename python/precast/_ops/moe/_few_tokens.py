# SPDX-License-Identifier: Apache-2.0
"""A mixture of experts of at most eight tokens in two launches, as other ops call it."""

from __future__ import annotations

from precast._base.torch import torch
from precast._op.export import Export
from precast._op.validation import check_contiguous
from precast._ops.moe._fused_reference import cutlass_fused_moe_reference
from precast._ops.moe._rows import GROUP

#: ``few_tokens.cuh``: tokens, slots of all tokens, experts, bytes in shared memory.
MAX_TOKENS, MAX_PAIRS, MAX_EXPERTS, MAX_SHARED = 8, 128, 1024, 72 * 1024

#: Up to how many bytes of weights two launches take the place of grouped products, by the bytes of
#: a weight and whether the GPU is a Hopper: the largest calls that took less time on an H200. Those
#: of FP8 are eight tokens of Qwen3-30B (69.8 us beside 75.5; eight of DeepSeek-V3 with 32 experts,
#: 336 MiB, took 97.7 beside 89.3) with the kernels for Hopper, and with those of other GPUs two
#: tokens of 256 experts with 512 and 2048 columns (28.0 us beside 29.3; two of Qwen3-30B, 72 MiB,
#: took 38.0 beside 36.3). In bfloat16, which has one kernel, it is two tokens of Qwen3-30B (50.1
#: beside 54.0; four, 288 MiB, as long).
FASTER_UP_TO_BYTES = {
    (1, True): 288 << 20,
    (1, False): 48 << 20,
    (2, True): 144 << 20,
    (2, False): 144 << 20,
}


def is_faster(
    tokens: int, slots: int, experts: int, hidden: int, inter: int, item: int, on_hopper: bool
) -> bool:
    """Whether two launches take the place of grouped products of these sizes, which fit."""
    # Why not the experts that tokens have: the host does not know them.
    most = min(tokens * slots, experts) * 3 * hidden * inter * item
    return most <= FASTER_UP_TO_BYTES[item, on_hopper]


def fits(tokens: int, slots: int, experts: int, hidden: int, inter: int, item: int) -> bool:
    """Whether the kernels take these sizes; ``item`` is the bytes of a weight."""
    return problem(tokens, slots, experts, hidden, inter, item) is None


def problem(
    tokens: int, slots: int, experts: int, hidden: int, inter: int, item: int
) -> str | None:
    """What the kernels do not take of these sizes, in the words of their binding."""
    pairs = tokens * slots
    if tokens > MAX_TOKENS:
        return f"there must be at most {MAX_TOKENS} tokens, got {tokens}"
    if slots < 1 or pairs > MAX_PAIRS:
        return f"all tokens must have from 1 to {MAX_PAIRS} slots, got {pairs}"
    if not 1 <= experts <= MAX_EXPERTS:
        return f"there must be from 1 to {MAX_EXPERTS} experts, got {experts}"
    if min(hidden, inter) <= 0 or hidden % GROUP or inter % GROUP:
        return (
            f"the hidden and the intermediate size must be positive multiples of {GROUP}, got "
            f"{hidden} and {inter}"
        )
    of_tokens, of_slots = MAX_TOKENS * hidden * item, pairs * inter * item
    if max(of_tokens, of_slots) > MAX_SHARED:
        return (
            f"eight tokens, and the activations of all slots, must have at most {MAX_SHARED} "
            f"bytes, got {of_tokens} and {of_slots}"
        )
    return None


def _check(
    export: str,
    input: torch.Tensor,
    token_selected_experts: torch.Tensor,
    fc1_expert_weights: torch.Tensor,
    fc2_expert_weights: torch.Tensor,
    fc1_scale: torch.Tensor | None,
    fc2_scale: torch.Tensor | None,
    first_expert: int,
    h: torch.Tensor,
    output: torch.Tensor,
) -> None:
    tokens, hidden = input.shape
    experts, _, inter = fc2_expert_weights.shape
    slots = token_selected_experts.shape[1]
    item = fc2_expert_weights.element_size()
    wrong = problem(tokens, slots, experts, hidden, inter, item)
    if wrong is not None:
        raise ValueError(f"{export}: {wrong}")
    if not 0 <= first_expert < 2**31:
        raise ValueError(f"{export}: first_expert must be from 0 to 2^31 - 1, got {first_expert}")
    if fc1_expert_weights.shape[1] != 2 * inter:
        raise ValueError(
            f"{export}: fc1_expert_weights must have shape {[experts, 2 * inter, hidden]}, got "
            f"{[*fc1_expert_weights.shape]}"
        )
    for name, scale, rows, columns in (
        ("fc1_scale", fc1_scale, 2 * inter, hidden),
        ("fc2_scale", fc2_scale, hidden, inter),
    ):
        if (scale is not None) != (item == 1):
            raise ValueError(
                f"{export}: {name} must be given with float8_e4m3fn weights, and only then"
            )
        shape = [experts, rows // GROUP, columns // GROUP]
        if scale is not None and [*scale.shape] != shape:
            raise ValueError(f"{export}: {name} must have shape {shape}, got {[*scale.shape]}")
    wanted = torch.float32 if item == 1 else input.dtype
    if h.dtype is not wanted or [*h.shape] != [tokens * slots, inter]:
        raise ValueError(
            f"{export}: h must be {wanted} {[tokens * slots, inter]}, got {h.dtype} {[*h.shape]}"
        )
    check_contiguous(
        export,
        input=input,
        token_selected_experts=token_selected_experts,
        fc1_expert_weights=fc1_expert_weights,
        fc2_expert_weights=fc2_expert_weights,
        h=h,
        output=output,
    )


def _write(
    input: torch.Tensor,
    token_selected_experts: torch.Tensor,
    token_final_scales: torch.Tensor | None,
    fc1_expert_weights: torch.Tensor,
    fc2_expert_weights: torch.Tensor,
    fc1_scale: torch.Tensor | None,
    fc2_scale: torch.Tensor | None,
    first_expert: int,
    output: torch.Tensor,
) -> None:
    own = token_selected_experts.long() - first_expert
    here = (own >= 0) & (own < len(fc1_expert_weights))
    scales = None if fc1_scale is None or fc2_scale is None else (fc1_scale, fc2_scale)
    output.copy_(
        cutlass_fused_moe_reference(
            input,
            torch.where(here, own, -1).int(),
            token_final_scales,
            fc1_expert_weights,
            fc2_expert_weights,
            output.dtype,
            scales,
            use_deepseek_fp8_block_scale=scales is not None,
        )
    )


#: ``h`` is scratch memory, float32 with FP8 weights and otherwise of the dtype of ``input``.
FEW_TOKENS = Export(
    "moe_few_tokens",
    "moe_few_tokens",
    "input:T=bf16|f16[tokens,hidden] token_selected_experts:i32[tokens,slots] "
    "token_final_scales?:f32[tokens,slots] fc1_expert_weights:U=e4m3|T[experts,inputs,hidden] "
    "fc2_expert_weights:U[experts,hidden,inter] fc1_scale?:f32[experts,fc1_rows,fc1_columns] "
    "fc2_scale?:f32[experts,fc2_rows,fc2_columns] first_expert:int h!:any[rows,inter] "
    "output!:T[tokens,hidden] enable_pdl:pdl",
    check=_check,
    write=_write,
    function="cutlass_fused_moe",
    traced=False,
)
