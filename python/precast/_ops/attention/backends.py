# SPDX-License-Identifier: Apache-2.0
"""The arguments ``backend`` and ``jit_args``, which choose kernels.

``fa2`` is the kernels of every GPU, ``fa3`` those for Hopper where they have what a plan asks for,
and ``auto`` the faster ones. No code can be added to kernels. One variant that FlashInfer compiles
from code is among them: attention sinks.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from precast._base.device import get_compute_capability
from precast._base.errors import BackendSupportedError
from precast._base.log import get_logger
from precast._base.torch import torch
from precast._op.ranges import FINITE
from precast._op.scalars import check_number
from precast._ops.attention.validation import softmax_scale

_OTHER_BACKENDS = (
    "cake",
    "cake_cute",
    "cudnn",
    "cutlass",
    "cute-dsl",
    "cute-dsl-prims",
    "cutile",
    "fmha_v2",
    "prims-ts",
    "trtllm-gen",
    "vsa_blackwell",
    "vsa_blackwell_blk64",
    "vsa_sm100_blk128",
    "vsa_sm100_blk64",
    "vsa_sm120_blk64",
)

#: The compute capability that FlashInfer's fa3 exists for.
FA3_CAPABILITY = (9, 0)

#: What identifies the variant with sinks among jit_args, by position: names of its tensors, names
#: of its numbers, and of itself.
_SINK_VARIANT: dict[int, object] = {7: ["sink"], 9: ["sm_scale"], 11: "AttentionSink"}
_COUNT = 13


def check_backend(name: str, backend: object, device: torch.device) -> None:
    """Raise for a backend that precast does not have, or that is not for this device."""
    word = backend if isinstance(backend, str) else ""
    if word in ("auto", "fa2"):
        return
    if word == "fa3":
        if device.type != "cuda" or get_compute_capability(device) == FA3_CAPABILITY:
            return
        raise BackendSupportedError(
            f"{name}: backend='fa3' is for compute capability 9.0, got {device}, which is another "
            f"GPU. Fix: pass backend='auto' or 'fa2'"
        )
    known = "is not part of precast" if word in _OTHER_BACKENDS else "is unknown"
    raise BackendSupportedError(
        f"{name}: backend={backend!r} {known}. Fix: pass backend='auto' or 'fa2'"
    )


@functools.cache
def note_fa3() -> None:
    """Say once that a plan is not for the kernels for Hopper."""
    get_logger().info(
        "backend='fa3': the kernels for Hopper lack what a plan asks for; those of backend='fa2' "
        "run in their place. What they have: keys and values of 16 bits or e4m3, head dimensions "
        "64, 96, 128, 256, and 192 with 128"
    )


def is_sink_variant(
    name: str, jit_args: object, jit_kwargs: object, variant_owns_mask: bool
) -> bool:
    """Whether the caller asks for sinks; raise for other code that would have to be compiled in."""
    if variant_owns_mask:
        raise ValueError(
            f"{name}: variant_owns_mask requires jit_args of a variant that masks, which no kernel "
            f"here is. Fix: pass the mask to plan() as custom_mask"
        )
    asks_for_sinks = (
        isinstance(jit_args, (list, tuple))
        and len(jit_args) == _COUNT
        and all(_is_equal(jit_args[at], value) for at, value in _SINK_VARIANT.items())
    )
    for option, value in (("jit_args", jit_args), ("jit_kwargs", jit_kwargs)):
        if value is not None and not (asks_for_sinks and isinstance(value, (list, tuple, dict))):
            refuse_code(name, option, ", or those of the variant AttentionSink")
    if isinstance(jit_kwargs, dict) and jit_kwargs.get("pos_encoding_mode"):
        raise ValueError(
            f"{name}: jit_kwargs must not have a pos_encoding_mode, got "
            f"{jit_kwargs['pos_encoding_mode']!r}. Fix: pass it to plan()"
        )
    return asks_for_sinks


def refuse_code(name: str, option: str, or_what: str = "") -> None:
    """Raise for code of the caller that would have to be compiled into the kernels."""
    raise NotImplementedError(
        f"{name}: {option} must be None{or_what}: kernels are compiled ahead of time, so no code "
        f"can be added to them. Fix: a kernel of your own with precast.jit.gen_jit_spec"
    )


def _is_equal(value: object, expected: object) -> bool:
    """Compare names, whatever sequence they are in."""
    if isinstance(value, tuple):
        value = [*value]
    return type(value) is type(expected) and value == expected


def sink_arguments(
    w: Any,  # An AttentionWrapper, whose module imports this one.
    args: Sequence[Any],
    sinks: torch.Tensor | None,
    q_scale: float | torch.Tensor | None,
) -> tuple[torch.Tensor | None, float | torch.Tensor | None]:
    """Return ``sinks`` and ``q_scale`` of a run that has ``sink`` and ``sm_scale`` by position."""
    name = f"{w._name}.run"
    if len(args) > 2:
        raise TypeError(f"{name}: takes sink and sm_scale by position, got {len(args)} arguments")
    sink, sm_scale = (*args, None, None)[:2]
    if sink is not None:
        if sinks is not None:
            raise ValueError(f"{name}: sink and sinks were both given; give one")
        if not isinstance(sink, torch.Tensor):
            raise TypeError(f"{name}: sink must be a torch.Tensor, got {type(sink).__name__}")
        sinks = sink
    if sm_scale is not None:
        check_number(name, "sm_scale", sm_scale, FINITE)
        w._check_planned(name)
        planned = softmax_scale(w._plan.scores.sm_scale, w._plan.shape.head_dim_qk)
        if planned == 0:
            raise ValueError(
                f"{name}: sm_scale cannot replace the plan's, which is 0. Fix: give plan() the "
                f"scale"
            )
        q_scale = sm_scale / planned * (1.0 if q_scale is None else q_scale)
    return sinks, q_scale
