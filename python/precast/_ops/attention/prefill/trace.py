# SPDX-License-Identifier: Apache-2.0
"""Trace templates of prefill."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from precast._ops.attention.trace import single_template
from precast.trace import TraceTemplate, dispatch


def single_prefill_trace(reference: Callable[..., Any]) -> Callable[..., TraceTemplate]:
    """Templates by layout, causal or not, with the log-sum-exp and without."""
    templates = {
        (layout, lse, causal): single_template(
            "single_prefill" + ("_causal" if causal else ""),
            "Attention of some tokens over the keys and values of their request.",
            reference,
            ["qo_len"],
            layout,
            lse,
            {"causal": True} if causal else {},
        )
        for layout in ("NHD", "HND")
        for lse in (False, True)
        for causal in (False, True)
    }

    @dispatch(*templates.values())
    def choose(
        kv_layout: Any = "NHD", return_lse: Any = False, causal: Any = False, **others: Any
    ) -> TraceTemplate:
        layout = "HND" if kv_layout == "HND" else "NHD"
        return templates[layout, bool(return_lse), bool(causal)]

    return choose
