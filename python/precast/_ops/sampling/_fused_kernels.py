# SPDX-License-Identifier: Apache-2.0
"""The two exports behind ``sample``: with all that a request may ask for, and for tokens alone."""

from __future__ import annotations

from typing import Any

from precast._base.torch import torch
from precast._op.dispatch import Kernel
from precast._ops.sampling._arguments import given
from precast._ops.sampling._fused_checks import check_sample
from precast._ops.sampling._fused_reference import sample_reference


def _into(
    logits: torch.Tensor,
    temperature_arr: torch.Tensor | None,
    temperature: float,
    top_k_arr: torch.Tensor | None,
    top_k: int,
    top_p_arr: torch.Tensor | None,
    top_p: float,
    min_p_arr: torch.Tensor | None,
    min_p: float,
    joint: bool,
    repetition_arr: torch.Tensor | None,
    repetition: float,
    frequency_arr: torch.Tensor | None,
    frequency: float,
    presence_arr: torch.Tensor | None,
    presence: float,
    prompt_mask: torch.Tensor | None,
    output_counts: torch.Tensor | None,
    bitmask: torch.Tensor | None,
    seed_arr: torch.Tensor | None,
    seed: int,
    offset_arr: torch.Tensor | None,
    offset: int,
    out: torch.Tensor,
    logprobs: torch.Tensor | None,
    top_tokens: torch.Tensor | None,
    top_logprobs: torch.Tensor | None,
    valid: torch.Tensor | None,
    enable_pdl: bool,
) -> None:
    check_sample(**locals())
    results = sample_reference(
        logits,
        given(temperature_arr, temperature),
        given(top_k_arr, top_k),
        given(top_p_arr, top_p),
        given(min_p_arr, min_p),
        given(repetition_arr, repetition),
        given(frequency_arr, frequency),
        given(presence_arr, presence),
        prompt_mask,
        output_counts,
        bitmask,
        "joint" if joint else "top_k_first",
        given(seed_arr, seed),
        given(offset_arr, offset),
        0 if top_tokens is None else top_tokens.shape[1],
    )
    for target, result in zip((out, logprobs, top_tokens, top_logprobs, valid), results):
        if target is not None:
            target.copy_(result)


def _public(logits: Any, *args: Any) -> tuple[Any, ...]:
    numbers = [given(args[i], args[i + 1]) for i in (0, 2, 4, 6, 9, 11, 13)]
    joint, (prompt_mask, output_counts, bitmask) = args[8], args[15:18]
    random = given(args[18], args[19]), given(args[20], args[21])
    _, logprobs, top_tokens, _, valid, enable_pdl = args[22:]
    top = 0 if top_tokens is None or not top_tokens.dim() else top_tokens.shape[1]
    order = "joint" if joint is True else "top_k_first"
    outputs = logprobs is not None, top, valid is not None, False, enable_pdl
    return logits, *numbers, prompt_mask, output_counts, bitmask, order, None, *random, *outputs


sample_kernel = Kernel(
    "sampling_fused",
    "sample",
    schema="(Tensor logits, Tensor? temperature_arr, float temperature, Tensor? top_k_arr, "
    "SymInt top_k, Tensor? top_p_arr, float top_p, Tensor? min_p_arr, float min_p, bool joint, "
    "Tensor? repetition_arr, float repetition, Tensor? frequency_arr, float frequency, "
    "Tensor? presence_arr, float presence, Tensor? prompt_mask, Tensor? output_counts, "
    "Tensor? bitmask, Tensor? seed_arr, SymInt seed, Tensor? offset_arr, SymInt offset, "
    "Tensor(a!) out, Tensor(b!)? logprobs, Tensor(c!)? top_tokens, Tensor(d!)? top_logprobs, "
    "Tensor(e!)? valid, bool enable_pdl) -> ()",
    reference=_into,
    public=_public,
)


def _tokens_into(
    logits: torch.Tensor,
    temperature_arr: torch.Tensor | None,
    temperature: float,
    top_k_arr: torch.Tensor | None,
    top_k: int,
    top_p_arr: torch.Tensor | None,
    top_p: float,
    min_p_arr: torch.Tensor | None,
    min_p: float,
    joint: bool,
    seed_arr: torch.Tensor | None,
    seed: int,
    offset_arr: torch.Tensor | None,
    offset: int,
    out: torch.Tensor,
    valid: torch.Tensor | None,
    enable_pdl: bool,
) -> None:
    heat, filters = (temperature_arr, temperature), (top_k_arr, top_k, top_p_arr, top_p)
    penalties = None, 1.0, None, 0.0, None, 0.0
    random = seed_arr, seed, offset_arr, offset
    _into(
        *(logits, *heat, *filters, min_p_arr, min_p, joint, *penalties, None, None, None),
        *(*random, out, None, None, None, valid, enable_pdl),
    )


def _tokens_public(logits: Any, *args: Any) -> tuple[Any, ...]:
    numbers = [given(args[i], args[i + 1]) for i in (0, 2, 4, 6)]
    random = given(args[9], args[10]), given(args[11], args[12])
    order = "joint" if args[8] is True else "top_k_first"
    outputs = False, 0, args[14] is not None, False, args[15]
    return logits, *numbers, 1.0, 0.0, 0.0, None, None, None, order, None, *random, *outputs


# The kernel of `sampling`, to which nothing is added: the same tokens in less time.
tokens_kernel = Kernel(
    "sampling",
    "sample_tokens",
    schema="(Tensor logits, Tensor? temperature_arr, float temperature, Tensor? top_k_arr, "
    "SymInt top_k, Tensor? top_p_arr, float top_p, Tensor? min_p_arr, float min_p, bool joint, "
    "Tensor? seed_arr, SymInt seed, Tensor? offset_arr, SymInt offset, Tensor(a!) out, "
    "Tensor(b!)? valid, bool enable_pdl) -> ()",
    reference=_tokens_into,
    public=_tokens_public,
    function="sample",
)
