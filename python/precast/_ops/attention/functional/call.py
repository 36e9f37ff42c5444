# SPDX-License-Identifier: Apache-2.0
"""What the public functions share: scales, outputs, and dtypes that no kernel has.

Kernels take queries of 16 bits and write outputs of their dtype. Queries of 8 bits are converted
before the kernel runs, unless one for Hopper takes them as they are, and outputs of another dtype
behind it, each by one more launch. The converted tensors lie at the end of the caller's workspace,
so nothing is allocated for them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

from precast._base.dtypes import canonicalize_torch_dtype, dtype_word
from precast._base.errors import UnsupportedConfigError
from precast._base.torch import torch
from precast._op.export import Export
from precast._op.ranges import POSITIVE
from precast._op.scalars import RAW_KINDS, check_number
from precast._ops.attention import validation
from precast._ops.attention.buffers import kept_buffer
from precast._ops.attention.functional.calls import Words, renamed
from precast._ops.attention.functional.geometry import ALIGNMENT, aligned
from precast._ops.attention.plan import Dtype
from precast._ops.attention.run import split_scale
from precast._ops.paged._cache import Cache, check_cache, check_layout, split
from precast._ops.quantize.per_tensor import static_quant_fp8

#: A factor: one number, or one float32 on the device.
Real: TypeAlias = "torch.Tensor | float"

#: Of logits and of outputs: numbers, then those on the device.
Factors: TypeAlias = "tuple[float, float, torch.Tensor | None, torch.Tensor | None]"

#: Dtypes of outputs besides that of queries.
_OUT_DTYPES = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")


def launch(words: Words, export: Export, *args: Any) -> None:
    """Run an export; an error has the names of the public arguments."""
    try:
        export.launch(*args)
    except RAW_KINDS as error:
        raise _explained(words, export, args, error) from None


def _explained(
    words: Words, export: Export, args: tuple[Any, ...], error: BaseException
) -> BaseException:
    """Return the error that names the public argument that a call failed for."""
    try:
        export.explain(*args)
    except RAW_KINDS as found:
        error = found
    return renamed(words, error, is_pair=args[2] is not None)


def attend_table(
    words: Words,
    export: Export,
    tensors: Outputs,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor | None,
    lse: torch.Tensor | None,
    tables: torch.Tensor,
    lens: torch.Tensor,
    q_bounds: torch.Tensor | None,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    kv_layout: str,
    q_len: int,
    causal: bool,
    window_left: int,
    factors: Factors,
    enable_pdl: bool | None,
    logits_soft_cap: float = 0.0,
    is_alibi: bool = False,
) -> torch.Tensor:
    """Return the output of attention over a block table; ``lse`` is written if it is given."""
    launch(
        words,
        export,
        tensors.query,
        k_cache,
        v_cache,
        tensors.into,
        lse,
        tensors.workspace,
        tables,
        lens.view(torch.int32) if lens.dtype is torch.uint32 else lens,
        q_bounds,
        mask,
        sinks,
        kv_layout,
        q_len,
        causal,
        window_left,
        logits_soft_cap,
        is_alibi,
        *factors,
        *((enable_pdl,) if words.has_pdl else ()),
    )
    return tensors.finished()


def attend_rows(
    words: Words,
    export: Export,
    tensors: Outputs,
    k: torch.Tensor,
    v: torch.Tensor,
    lse: torch.Tensor | None,
    q_bounds: torch.Tensor,
    kv_bounds: torch.Tensor,
    sinks: torch.Tensor | None,
    q_len: int,
    causal: bool,
    window_left: int,
    factors: Factors,
    logits_soft_cap: float = 0.0,
    is_alibi: bool = False,
) -> torch.Tensor:
    """Return the output of attention over ragged keys and values."""
    launch(
        words,
        export,
        tensors.query,
        k,
        v,
        tensors.into,
        lse,
        tensors.workspace,
        q_bounds,
        kv_bounds,
        sinks,
        q_len,
        causal,
        window_left,
        logits_soft_cap,
        is_alibi,
        *factors,
    )
    return tensors.finished()


def factors_of(
    words: Words, bmm1: Real, bmm2: Real, tensors: Outputs, o_scale: float = 1.0
) -> Factors:
    """Return the factors of a call whose caller has multiplied all scales."""
    if bmm1 is None or bmm2 is None:
        raise TypeError("no scale")  # The check of types names it.
    name = words.function
    sm_scale, qk_scale = split_scale(name, words.bmm1, bmm1, "")
    out_scale, v_scale = split_scale(name, words.bmm2, bmm2, "")
    if o_scale != 1.0:
        check_number(name, "o_scale", o_scale, POSITIVE)
        if not tensors.is_8_bit:
            out_scale *= o_scale
    return sm_scale, out_scale, qk_scale, v_scale


# -- caches ---------------------------------------------------------------------------------------


def parts_of(kv_cache: Cache) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return keys and values, or the one tensor that holds both and None."""
    keys, values = split(kv_cache)
    if values is None and keys.dim() == 5 and keys.shape[1] == 1:  # Both are the same.
        return keys[:, 0], keys[:, 0]
    return keys, values


def mask_of(words: Words, mask: torch.Tensor | None, batch: int, q_len: int) -> Any:
    """Return the rows of a draft mask one after the other; None where there is one query each."""
    if mask is None or not q_len > 1 or mask.dim() == 2:
        return mask if q_len > 1 else None
    if mask.shape[:-1] != (batch, q_len) or not mask.is_contiguous():
        raise ValueError(
            f"{words.function}: {words.mask} must have shape [{batch}, {q_len}, words] and be "
            f"contiguous, got shape {[*mask.shape]} with strides {[*mask.stride()]}"
        )
    return mask.view(batch * q_len, -1)


def explain_cache(export: str, kv_cache: object, kv_layout: object) -> None:
    """Raise the error of a cache or of a layout of a wrong type."""
    check_layout(export, kv_layout)
    check_cache(export, "kv_cache", kv_cache)


# -- outputs --------------------------------------------------------------------------------------


class Outputs:
    """The tensors of a call as a kernel takes them, and where its result goes.

    Attributes
    ----------
    query : torch.Tensor
        The queries, of 16 bits or of e4m3.
    into : torch.Tensor
        What the kernel writes, of 16 bits.
    workspace : torch.Tensor
        The part of the workspace that is left.
    is_fp8 : bool
        Whether the kernel takes queries of e4m3, and ``query`` is as it was given.
    """

    __slots__ = ("_out", "into", "is_fp8", "query", "workspace")

    def __init__(
        self,
        words: Words,
        query: torch.Tensor,
        values: torch.Tensor,
        out: torch.Tensor | None,
        workspace: torch.Tensor,
        out_dtype: Dtype = None,
        multiplies_fp8: Callable[[torch.dtype], bool] | None = None,
    ) -> None:
        """``multiplies_fp8`` says of a dtype of outputs whether there is a kernel for FP8."""
        dtype = query.dtype
        self.is_fp8 = False
        wanted = dtype if out is None else out.dtype
        if out_dtype is not None:
            wanted = _out_dtype(words, out_dtype, out)
        self.query, self.workspace = query, workspace
        if wanted is dtype and dtype.itemsize > 1:
            if out is None:
                out = _new(query, values.shape[-1], dtype)
            self.into = self._out = out
            return
        name = words.function
        if wanted is not dtype and dtype_word(wanted) not in _OUT_DTYPES:
            raise UnsupportedConfigError(
                f"{name}: {words.out} must be {dtype_word(dtype)} as {words.query}, or "
                f"{', '.join(_OUT_DTYPES)}, got {dtype_word(wanted)}"
            )
        if out is None:
            out = _new(query, values.shape[-1], wanted)
        shape = *query.shape[:-1], values.shape[-1]
        validation.check_shape_dtype_device(out, shape, wanted, query.device, words.out)
        self.into = self._out = out
        computed = validation.computed_dtype(dtype, values.dtype, wanted)
        if computed is not wanted:
            self.into = self.taken(words, shape, computed)
        if computed is not dtype and multiplies_fp8 is not None:
            self.is_fp8 = multiplies_fp8(computed)
        if computed is not dtype and not self.is_fp8:
            self.query = self.taken(words, tuple(query.shape), computed)
            self.query.copy_(query)

    def taken(self, words: Words, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor at the end of the workspace, which is shorter then."""
        if not torch.compiler.is_compiling():  # TorchDynamo has no addresses.
            validation.check_workspace(words.function, words.workspace, self.workspace)
        size = math.prod(shape) * dtype.itemsize
        rest = (self.workspace.numel() - aligned(size)) // ALIGNMENT * ALIGNMENT
        if rest < 0:
            raise ValueError(
                f"{words.function}: {words.workspace} must have {aligned(size)} bytes more to "
                f"convert {words.query} or {words.out} of shape {[*shape]}, got "
                f"{self.workspace.numel()} in all"
            )
        taken = self.workspace[rest : rest + size].view(dtype).view(shape)
        self.workspace = self.workspace[:rest]
        return taken

    @property
    def is_8_bit(self) -> bool:
        """Whether the caller gets numbers of 8 bits."""
        is_8_bit: bool = self._out.dtype.itemsize == 1
        return is_8_bit

    def finished(self) -> torch.Tensor:
        """Return the caller's output, or a new one, when the kernel has been launched."""
        out = self._out
        if self.into is out:
            return out
        if out.itemsize > 1:
            return out.copy_(self.into)
        one = kept_buffer("one", out.device, lambda: torch.ones(1, device=out.device))
        static_quant_fp8(self.into, one, out=out)
        return out


def _new(query: torch.Tensor, head_dim_vo: int, dtype: torch.dtype) -> torch.Tensor:
    if dtype is query.dtype and head_dim_vo == query.shape[-1] and query.is_contiguous():
        return torch.empty_like(query)
    return query.new_empty((*query.shape[:-1], head_dim_vo), dtype=dtype)


def _out_dtype(words: Words, out_dtype: Any, out: torch.Tensor | None) -> torch.dtype:
    name = words.function
    if out_dtype == "nvfp4":
        raise NotImplementedError(f"{name}: out_dtype must not be nvfp4: no kernel here writes it")
    wanted = canonicalize_torch_dtype(out_dtype, f"{name}: out_dtype")
    if out is not None and out.dtype != wanted:
        raise ValueError(
            f"{name}: out_dtype must be that of {words.out}, {dtype_word(out.dtype)}, got "
            f"{dtype_word(wanted)}"
        )
    return wanted
