# SPDX-License-Identifier: Apache-2.0
"""Check the options of ``plan()`` once: they choose the module, and say what runs are given.

An engine plans each step with the same options, so what follows from them is kept.
"""

from __future__ import annotations

import functools
from operator import attrgetter
from typing import Any, NamedTuple

from precast._base.dtypes import canonicalize_torch_dtype, dtype_word
from precast._base.errors import UnsupportedConfigError
from precast._base.torch import torch
from precast._ops.attention import validation
from precast._ops.attention.plan import Model
from precast._ops.attention.run import check_word
from precast._ops.mla import tiles

#: The words of options.
_WORDS = {
    "query_layout": ("split", "packed"),
    "kv_cache_layout": ("split", "packed"),
    "lse_mode": ("none", "base2", "basee"),
    "output_scale": ("none", "per-tensor"),
    "scale_mode": ("default", "kv-per-tensor", "bmm-scalar", "bmm-tensor"),
}
_8_BIT_OUTPUTS = (torch.float8_e4m3fn, torch.float8_e5m2)


class Contract(NamedTuple):
    """What a plan says of the options of its runs."""

    is_flat_csr: bool = False
    lse_mode: str = "none"
    has_o_scale: bool = False
    scale_mode: str = "default"
    use_sinks: bool = False
    enable_pdl: bool = True

    @property
    def is_plain(self) -> bool:
        """Whether runs have neither a log-sum-exp nor scales nor sinks."""
        return self[1:5] == ("none", False, "default", False)


class Options(NamedTuple):
    """Options of ``plan()`` on which nothing but the choice of the module and checks depends."""

    num_heads: Any
    head_dim_ckv: Any
    head_dim_kpe: Any
    page_size: Any
    q_data_type: Any
    kv_data_type: Any
    use_profiler: Any
    query_layout: Any
    kv_cache_layout: Any
    lse_mode: Any
    output_dtype: Any
    output_scale: Any
    scale_mode: Any
    skip_softmax: Any
    enable_pdl: Any
    use_sinks: Any


#: The options of a plan that have no default, in the order of its arguments.
_REQUIRED = (
    *("num_heads", "head_dim_ckv", "head_dim_kpe", "page_size", "causal", "sm_scale"),
    *("q_data_type", "kv_data_type"),
)
_read = attrgetter(*Options._fields)


def checked_options(
    name: str, given: Any, is_flat_csr: bool, device_index: int
) -> tuple[Model, Contract]:
    """Return the module of a plan and what its runs are told; raise for what no kernel has."""
    if given.causal is None or given.sm_scale is None:
        _check_required(name, given)
    values = _read(given)
    try:
        return _checked(name, values, is_flat_csr, device_index)
    except TypeError:  # What cannot be a key of the cache has an error that names it.
        pass
    _check_required(name, given)
    return _checked.__wrapped__(name, values, is_flat_csr, device_index)


def _check_required(name: str, given: Any) -> None:
    missing = [option for option in _REQUIRED if getattr(given, option) is None]
    if missing:
        raise TypeError(f"{name}: missing required arguments: {', '.join(missing)}")


@functools.lru_cache(maxsize=256)
def _checked(
    name: str, values: tuple[Any, ...], is_flat_csr: bool, device_index: int
) -> tuple[Model, Contract]:
    given = Options(*values)
    if any(getattr(given, option, "") is None for option in _REQUIRED):
        raise TypeError  # The caller knows all that is missing.
    for option, words in _WORDS.items():
        value = getattr(given, option)
        if not (value is None and option.endswith("_layout")):
            check_word(f"{name}: {option}", value, words)
    for option in ("use_profiler", "skip_softmax"):
        if getattr(given, option):
            raise NotImplementedError(f"{name}: {option} must be False: no kernel here has it")
    if given.scale_mode == "bmm-tensor":
        raise NotImplementedError(
            f"{name}: scale_mode must not be 'bmm-tensor', which no kernel here has. Fix: pass "
            f"scale_mode='bmm-scalar'"
        )
    contract = Contract(
        is_flat_csr=is_flat_csr,
        lse_mode=given.lse_mode,
        has_o_scale=given.output_scale != "none",
        scale_mode=given.scale_mode,
        use_sinks=bool(given.use_sinks),
        enable_pdl=given.enable_pdl is None or bool(given.enable_pdl),
    )
    validation.check_page_size(name, given.page_size)
    model = _model(name, given, contract, device_index)
    if model.kv_dtype.itemsize == 1 and contract.scale_mode == "default":
        contract = contract._replace(scale_mode="kv-per-tensor")
    return model, contract


def _model(name: str, given: Options, contract: Contract, device_index: int) -> Model:
    """Check what does not depend on the batch, and choose the module."""
    q, kv = (
        canonicalize_torch_dtype(getattr(given, option), f"{name}: {option}")
        for option in ("q_data_type", "kv_data_type")
    )
    o = q
    if given.output_dtype is not None:
        o = canonicalize_torch_dtype(given.output_dtype, f"{name}: output_dtype")
    _check_dtypes(name, q, kv, o, contract)
    head_dims = given.head_dim_ckv, given.head_dim_kpe
    if head_dims not in tiles.HEAD_DIMS:
        legal = ", ".join(f"{ckv}/{kpe}" for ckv, kpe in sorted(tiles.HEAD_DIMS, reverse=True))
        raise UnsupportedConfigError(
            f"{name}: head_dim_ckv/head_dim_kpe must be one of {legal}, got "
            f"{head_dims[0]}/{head_dims[1]}"
        )
    validation.check_heads(name, given.num_heads, 1)
    return Model(q, kv, o, (q, kv, *head_dims, device_index), writes_outputs=o is q)


def _check_dtypes(
    name: str, q: torch.dtype, kv: torch.dtype, o: torch.dtype, contract: Contract
) -> None:
    """Raise for dtypes that no module has; those of a mode that needs none pass."""
    if q.itemsize == 1 or not q.is_floating_point:
        raise UnsupportedConfigError(
            f"{name}: q_data_type must be float16 or bfloat16, got {dtype_word(q)}: only caches "
            f"may be of 8 bits"
        )
    if kv not in (q, torch.float8_e4m3fn):
        raise UnsupportedConfigError(
            f"{name}: kv_data_type must be {dtype_word(q)} as q_data_type or float8_e4m3fn, got "
            f"{dtype_word(kv)}"
        )
    if o not in (_8_BIT_OUTPUTS if contract.has_o_scale else (q,)):
        legal = "float8_e4m3fn or float8_e5m2" if contract.has_o_scale else dtype_word(q)
        raise UnsupportedConfigError(
            f"{name}: output_dtype must be {legal} with output_scale="
            f"{'per-tensor' if contract.has_o_scale else 'none'!r}, got {dtype_word(o)}"
        )
    if contract.scale_mode == "kv-per-tensor" and kv.itemsize > 1:
        raise UnsupportedConfigError(
            f"{name}: scale_mode must be 'default' or 'bmm-scalar' for kv_data_type "
            f"{dtype_word(kv)}, got 'kv-per-tensor'"
        )
