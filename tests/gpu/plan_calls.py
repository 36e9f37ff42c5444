# SPDX-License-Identifier: Apache-2.0
"""Calls of the exports of plans by name, past what the wrappers check."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from precast._ops.attention import kernels
from precast._ops.attention.plan import PlanShape, ScoreOptions, new_block
from precast._runtime.library import get_function
from precast._runtime.loader import loader

OPTIONS = ScoreOptions(
    hnd=False,
    mask_mode=0,
    window_left=-1,
    pos_encoding=0,
    token_pos_len=0,
    logits_soft_cap=0.0,
    sm_scale=0.1,
    rope_scale=1.0,
    rope_theta=1e4,
)


def function(export: str) -> Callable[..., None]:
    return get_function(loader.load("attention_plan", {}, torch.cuda.current_device()), export)


def options_of(shape: PlanShape, **given: Any) -> ScoreOptions:
    """Options that fit the plan, but for those that are given."""
    options = OPTIONS._replace(mask_mode=int(shape.causal), window_left=shape.window_left)
    return options._replace(**given)


def packed(shape: PlanShape, options: ScoreOptions | None = None, **tensors: Any) -> torch.Tensor:
    """The block of a plan; tensors are arguments of ``pack_plan`` by name."""
    block = new_block(shape, options or options_of(shape))
    if shape.page_size and "kv_indices" not in tensors:
        tensors["kv_indices"] = torch.zeros(1, dtype=torch.int32, device="cuda")
    arguments = {**tensors, "block": block}
    function("pack_plan")(*(arguments.get(name) for name in kernels.pack_plan.parameters))
    return block


def launch(block: torch.Tensor, int_workspace: torch.Tensor, **sources: Any) -> None:
    """Make the plan of a block; ``sources`` go into its buffers."""
    arguments = {**sources, "block": block, "int_workspace": int_workspace, "enable_pdl": True}
    function("plan")(*(arguments.get(name) for name in kernels.plan.parameters))


def lengths_by_name(lengths: Any) -> dict[str, torch.Tensor | None]:
    """Of the four tensors that say lengths, in the order of ``workspace_size``."""
    names = ("qo_indptr", "kv_indptr", "kv_last_page_len", "kv_len")
    return dict(zip(names, lengths, strict=True))
