# SPDX-License-Identifier: Apache-2.0
"""Definitions of calls, in the schema of flashinfer-bench ("FlashInfer Trace").

A :class:`TraceTemplate` next to an op describes its calls: axes, inputs, outputs, and a reference
in plain PyTorch. :func:`fi_trace` fills it in from the arguments of a call, without running it.
``docs/trace.md`` is a walkthrough.
"""

from __future__ import annotations

from precast.trace.dump import on_call
from precast.trace.fields import DTYPES, Const, Dtype, Scalar, Tensor, Var
from precast.trace.inputs import make_inputs
from precast.trace.registry import (
    check_template,
    dispatch,
    fi_trace,
    register,
    registered,
)
from precast.trace.template import TraceTemplate

__all__ = [
    "DTYPES",
    "Const",
    "Dtype",
    "Scalar",
    "Tensor",
    "TraceTemplate",
    "Var",
    "check_template",
    "dispatch",
    "fi_trace",
    "make_inputs",
    "on_call",
    "register",
    "registered",
]
