# SPDX-License-Identifier: Apache-2.0
"""The ops behind a name: that of an op, of a function in its modules, or of what users import."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any

from precast.cli._output import UsageError

#: Packages whose name may stand before that of a function.
_PACKAGES = ("precast", "flashinfer")
#: Arguments of FlashInfer's functions, and the axes that they decide where an op has them.
_ARGUMENTS = {
    "dtype": ("dtype_q", "dtype_kv"),
    "q_data_type": ("dtype_q",),
    "kv_data_type": ("dtype_kv",),
    "o_data_type": ("dtype_out",),
    "out_dtype": ("dtype_out", "dtype_q"),
    "head_dim": ("head_dim_qk", "head_dim_vo"),
}
#: How the name of an op over caches in NVFP4 ends.
_PACKED = "_nvfp4"
#: How that of an op for Hopper ends, which runs what it can in the place of another op.
_HOPPER = "_sm90"
#: How that of an op for Hopper ends whose queries are e4m3, as keys and values are.
_FP8 = f"{_HOPPER}_fp8"
_8_BITS = ("e4m3", "e5m2")
#: Axes that follow another one by default, as in the ``plan()`` of the attention wrappers.
_DEFAULTS = {"dtype_kv": "dtype_q", "head_dim_vo": "head_dim_qk"}


def functions() -> list[str]:
    """The functions of all modules, and the public functions and classes of all ops."""
    from precast._plan.installed import plan

    exports = [name for op in plan().config.ops.values() for name in op.exports]
    return list(dict.fromkeys([*exports, *_public()]))


def ops_of(name: str) -> list[str]:
    """The ops whose modules a call of ``name`` loads; first the one that does the work.

    An op and a function of a module are found without importing torch.

    Raises
    ------
    UsageError
        If there is no such name, or if it runs no kernel.
    """
    from precast._plan.installed import plan

    ops = plan().config.ops
    words = name.split(".")
    if words[0] in _PACKAGES and len(words) > 1:
        words = words[1:]
        # A method is explained as its class; the module before a function is no op.
        public = [word for word in words if word in _public()]
        known = public or [word for word in words if word in ops]
        words = known[-1:] or words
    word = ".".join(words)
    if word in ops:
        return [word]
    owners = [op.name for op in ops.values() if word in op.exports]
    if owners:
        return owners[:1]
    if word not in _public():
        raise UsageError(
            f"unknown op {name!r}; legal: {', '.join(ops)}, or a function: {', '.join(functions())}"
        )
    found = _ops_of_public(word)
    if not found:
        raise UsageError(
            f"{name} runs no kernel of precast: it is plain PyTorch or a type. Fix: precast list "
            f"shows all ops"
        )
    return found


def axes_of(op: str, given: Mapping[str, str]) -> dict[str, str]:
    """The axes of an op from ``KEY=VALUE``, where a key may be an argument of a function.

    ``dtype=torch.bfloat16`` is ``dtype_q=bf16 dtype_kv=bf16`` for attention. A key that is neither
    stays as it is, so that the plan refuses it.
    """
    from precast._plan.installed import plan

    axes = plan().config.op(op).axes
    found: dict[str, str] = {}
    for key, value in given.items():
        mapped = [axis for axis in _ARGUMENTS.get(key, ()) if axis in axes and axis not in given]
        for axis in mapped if mapped and key not in axes else [key]:
            found[axis] = _dtype_word(value) if axis.startswith("dtype") else value
    for axis, other in _DEFAULTS.items():
        if axis in axes and other in found:
            found.setdefault(axis, found[other])
    return found


def of_cache(ops: Sequence[str], given: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """Choose the ops of the given cache: NVFP4, which is ``kv_data_type=uint8``, or any other.

    Returns these ops, and ``given`` without what has thereby been decided.
    """
    packed = {op for op in ops if op.endswith(_PACKED)}
    if not packed or ops[0] in packed:
        return list(ops), dict(given)
    if _dtype_word(given.get("kv_data_type", "")) != "u8":
        return [op for op in ops if op not in packed], dict(given)
    plain = {op.removesuffix(_PACKED) for op in packed}
    plain |= {f"{op}{_HOPPER}" for op in plain}
    rest = [op for op in ops if op not in plain]
    chosen = sorted(rest, key=lambda op: op not in packed)
    return chosen, {key: value for key, value in given.items() if key != "kv_data_type"}


def of_queries(ops: Sequence[str], given: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """Choose the ops of the given queries: of 8 bits, or any others.

    Returns these ops, and ``given`` with the dtype that queries of 8 bits are converted to, where
    no op takes them as they are.
    """
    of_fp8 = [op for op in ops if op.endswith(_FP8)]
    if not of_fp8 or ops[0] in of_fp8:
        return list(ops), dict(given)
    rest = [op for op in ops if op not in of_fp8]
    q = _dtype_word(given.get("q_data_type", given.get("dtype", "")))
    if q not in _8_BITS:
        return rest, dict(given)
    kv = _dtype_word(given.get("kv_data_type", q))
    out = _dtype_word(given.get("o_data_type", ""))
    kept = {k: v for k, v in given.items() if k not in ("dtype", "o_data_type")}
    computed = kv if kv in ("f16", "bf16") else out if out in ("f16", "bf16") else "bf16"
    chosen = [*rest, *of_fp8] if q == kv == "e4m3" else rest
    return chosen, {**kept, "q_data_type": computed, "kv_data_type": kv}


def axes_beside(op: str, main: Mapping[str, str]) -> dict[str, str] | None:
    """The axes of an op that a call uses beside its main op; None if they do not follow from it."""
    from precast._base.errors import UnsupportedConfigError
    from precast._plan.installed import plan

    axes = plan().config.op(op).axes
    follow = {"dtype": main.get("dtype_q", ""), "dtype_o": main.get("dtype_q", ""), **main}
    found = {axis: follow.get(axis, "") for axis in axes}
    try:
        plan().config.op(op).space.checked(op, found)
    except UnsupportedConfigError:
        return None
    return found


def _dtype_word(text: str) -> str:
    """``bf16`` for ``bf16``, ``bfloat16`` and ``torch.bfloat16``."""
    from precast._base.dtypes import DTYPE_WORDS

    return DTYPE_WORDS.get(f"torch.{text.removeprefix('torch.')}", text)


def _public() -> dict[str, str]:
    """The module of each public name that an op defines; nothing is imported."""
    from precast._base import public_name

    listed = set(importlib.import_module("precast").__all__)
    return {
        name: module
        for module, name in public_name.exports()
        if name in listed and module.startswith("precast._ops.")
    }


def _ops_of_public(name: str) -> list[str]:
    from precast._base.lazy import public_object
    from precast._op.dispatch import kernels

    value = public_object(name)
    value = getattr(value, "func", value)  # of functools.partial
    found: dict[str, list[str]] = {}
    for kernel in kernels().values():
        found.setdefault(kernel.function, []).append(kernel.op)
    mine = list(found.get(value.__name__, ()))
    if not mine:
        for function in _functions_of(value):
            used = (name for name in function.__code__.co_names if name in function.__globals__)
            mine += [op for word in used for op in found.get(word, ())]
    folder = _folder(value)
    for other, ops in found.items():
        home = public_object(other)
        if inspect.isclass(home) and _folder(home) == folder:
            mine += ops  # The modules of the family's wrapper classes plan and run for all of it.
    return sorted(dict.fromkeys(mine), key=lambda op: op != folder)


def _folder(value: Any) -> str:
    """The family of ops in which a public function or class is defined."""
    return str(value.__module__).split(".")[2]


def _functions_of(value: Any) -> Iterator[FunctionType]:
    members = vars(value).values() if inspect.isclass(value) else [value]
    for member in members:
        function = inspect.unwrap(member) if callable(member) else member
        if isinstance(function, FunctionType):
            yield function
