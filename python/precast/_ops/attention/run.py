# SPDX-License-Identifier: Apache-2.0
"""Run a plan: make outputs, call the kernel, and explain errors.

Nothing is checked here that the export checks. When a call has failed, :func:`_explain` says which
argument is not that of the plan.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, TypeAlias

from precast._base.errors import CacheLayoutError, PlanMismatchError
from precast._base.torch import torch
from precast._op import mode
from precast._op.ranges import MOST_FLOAT
from precast._op.scalars import RAW_KINDS
from precast._op.torch_ops import torch_ops
from precast._op.validation import check_rank
from precast._ops.attention import head_scales, kernels, validation
from precast._ops.attention.validation import check_shape_dtype_device

if TYPE_CHECKING:
    from precast._ops.attention.plan import AttentionPlan
    from precast._ops.attention.wrapper import AttentionWrapper

    Result: TypeAlias = "tuple[torch.Tensor, torch.Tensor | None]"

_reference = False  # mode.follow() keeps it up to date.
mode.follow(globals())

#: A factor of queries, keys or values: a number, or one on the device.
Scale: TypeAlias = "float | torch.Tensor | None"

#: What exports take as ``enable_pdl`` for the first and the second of two launches that overlap.
WITH_NEXT, WITH_PREVIOUS = 2, 3

#: The defaults of both options, which are compared by identity: other types compare oddly.
LOG2, NH = "log2", "NH"
_FACTORS = {LOG2: 1.0, "ln": math.log(2.0)}


def run(
    w: AttentionWrapper,
    q: torch.Tensor,
    k: Any,
    v: Any,
    q_scale: Scale,
    k_scale: Scale,
    v_scale: Scale,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
    return_lse: bool,
    sinks: torch.Tensor | None,
    enable_pdl: bool | None,
    kv_cache_sf: Any = None,
) -> Result:
    """Run the wrapper's plan; ``v`` is None if ``k`` holds values, too.

    ``kv_cache_sf`` is for a plan of keys and values in NVFP4.
    """
    plan, given = w._plan, q
    try:
        if _reference and not torch.compiler.is_compiling():
            _check_types(
                w, q, k, v, q_scale, k_scale, v_scale, out, lse, return_lse, sinks, enable_pdl
            )
        planned = plan
        if plan.block is None:
            plan = w._packed_plan()
        if plan.hints.guesses_tile and not torch.compiler.is_compiling() and q.dim() == 3:
            plan = w._settle_tile(q.shape[0])
        paged = plan.shape.page_size > 0
        if not paged:
            if plan.hnd:
                k, v = k.transpose(0, 1), v.transpose(0, 1)
        elif k.dim() == (4 if v is None else 3):  # Page size 1, left out of the shape.
            page = -2 if plan.hnd else -3
            k, v = k.unsqueeze(page), None if v is None else v.unsqueeze(page)
        caches: tuple[Any, ...] = (k, v)
        if plan.model.is_packed:
            caches = k, v, *split_scales(w, kv_cache_sf)
        if torch.compiler.is_compiling():
            _explain(w, plan, q, k, v, out, lse if return_lse else None)
            export: Any = torch_ops.run_paged if paged else torch_ops.run_ragged
            if plan.model.is_packed:
                export = torch_ops.run_paged_nvfp4
            elif plan.multiplies_fp8:
                export = torch_ops.run_paged_sm90_fp8 if paged else torch_ops.run_ragged_sm90_fp8
            elif plan.shape.sm90:
                export = torch_ops.run_paged_sm90 if paged else torch_ops.run_ragged_sm90
        elif plan.multiplies_fp8:
            table = kernels.run_paged_sm90_fp8 if paged else kernels.run_ragged_sm90_fp8
            export = table[plan.model.fp8_key or ()]
        elif plan.shape.sm90:
            table = kernels.run_paged_sm90 if paged else kernels.run_ragged_sm90
            export = table[plan.model.key]
        elif plan.model.is_packed:
            export = kernels.run_paged_nvfp4[plan.model.key]
        elif paged:
            export = kernels.run_paged[plan.model.key]
        else:
            export = kernels.run_ragged[plan.model.key]
        result, lse = _outputs(w, plan, q, out, lse, return_lse)
        into = result
        if plan.model.converts_to is not None and q.dtype is not plan.model.q_dtype:
            _explain(w, plan, q, k, v, out, lse)  # The export cannot know.
        if not plan.model.writes_outputs:
            into = torch.empty_like(result, dtype=plan.model.key[0])
        scaled = None  # An output that is multiplied by the scales of heads behind the kernel.
        if q_scale is k_scale is v_scale is None:
            sm_factor, qk_scale, out_scale, out_factor = 1.0, None, 1.0, None
        elif plan.model.converts_to is None:
            sm_factor, qk_scale, out_scale, out_factor = scales_of(
                w._name, 1.0, q_scale, k_scale, v_scale
            )
        else:
            heads = plan.shape.num_qo_heads, plan.shape.num_kv_heads
            sm_factor, qk_scale, out_scale, out_factor = scales_of_heads(
                w._name, 1.0, heads, q.device, q_scale, k_scale, v_scale
            )
        if plan.model.converts_to is not None and not plan.multiplies_fp8:
            q, qk_scale = head_scales.scale_queries(q, qk_scale, plan.model.converts_to)
            if head_scales.has_heads(out_factor):
                scaled, out_factor = out_factor, None
        pdl: bool | int = True if enable_pdl is None else enable_pdl
        if w._overlap and pdl is True:
            fills = out is None and plan.hints.pads
            is_alone = plan is planned and q is given and not fills
            pdl = _overlapping(w, is_alone and qk_scale is out_factor is None)
        export(
            q,
            *caches,
            into,
            lse,
            w._sinks if sinks is None else sinks,
            plan.block,
            sm_factor,
            out_scale,
            qk_scale,
            out_factor,
            pdl,
        )
    except RAW_KINDS:
        q = given
        _check_types(w, q, k, v, q_scale, k_scale, v_scale, out, lse, return_lse, sinks, enable_pdl)
        _explain(w, plan, q, k, v, out, lse if return_lse else None)
        raise
    if scaled is not None:
        torch.mul(into, scaled[:, None], out=result)
    elif into is not result:
        result.copy_(into)
    return result, lse


def _overlapping(w: AttentionWrapper, is_alone: bool) -> bool | int:
    """Return the ``enable_pdl`` of a part.

    ``is_alone``: nothing else is launched between its kernel and that of the part before. A kernel
    that does not wait for the launch before it must know which one that is, so the leave is for one
    run.
    """
    overlap = w._overlap
    if overlap == WITH_PREVIOUS:
        w._overlap = 0
    if _reference or torch.compiler.is_compiling() or (overlap == WITH_PREVIOUS and not is_alone):
        return True
    return overlap


def _outputs(
    w: AttentionWrapper,
    plan: AttentionPlan,
    q: torch.Tensor,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
    return_lse: bool,
) -> Result:
    """Return the caller's outputs, which the export checks, or new ones."""
    if out is None:
        if plan.model.is_like_q and not plan.hints.pads and q.is_contiguous():
            out = torch.empty_like(q)  # Why: half as long as new_empty, of all that run() takes.
        else:
            shape = *q.shape[:-1], plan.shape.head_dim_vo
            new = q.new_zeros if plan.hints.pads else q.new_empty
            out = new(shape, dtype=plan.model.o_dtype)
    elif not plan.model.writes_outputs:
        _check_output(plan, q, out)  # The export does not see it.
    if return_lse is False and lse is None:
        return out, None
    if return_lse is not True:  # Why: no export looks at what is not asked for.
        check_options(w, return_lse=return_lse, lse=lse)
        if not return_lse:
            return out, None
    return out, q.new_empty(q.shape[:-1], dtype=torch.float32) if lse is None else lse


def _check_output(plan: AttentionPlan, q: torch.Tensor, out: torch.Tensor) -> None:
    shape = *q.shape[:-1], plan.shape.head_dim_vo
    check_shape_dtype_device(out, shape, plan.model.o_dtype, q.device, "out")


def lse_of(
    w: AttentionWrapper,
    q: torch.Tensor,
    lse: torch.Tensor | None,
    return_lse: bool,
    lse_base: str,
    lse_layout: str,
) -> Lse | None:
    """Return where a log-sum-exp goes, if it is asked for; the options may be wrong."""
    if return_lse is not True or lse_base is not LOG2 or lse_layout is not NH:
        check_options(w, q=q, lse=lse, return_lse=return_lse)
        check_word("lse_base", lse_base, tuple(_FACTORS))
        check_word("lse_layout", lse_layout, ("NH", "HN"))
    return Lse(lse_base, lse_layout, lse, q) if return_lse else None


def check_word(option: str, value: object, legal: tuple[str, ...]) -> None:
    """Raise unless ``value`` is one of the words."""
    if not (isinstance(value, str) and value in legal):
        raise ValueError(f"{option} must be {' or '.join(map(repr, legal))}, got {value!r}")


class Lse:
    """Where kernels write, ``[tokens, heads]`` in base 2, and what is made of it."""

    __slots__ = ("_factor", "_into", "buffer")

    def __init__(
        self, lse_base: str, lse_layout: str, lse: torch.Tensor | None, q: torch.Tensor
    ) -> None:
        self._factor = _FACTORS[lse_base]
        self._into: torch.Tensor | None = None
        self.buffer = lse
        if lse_layout == "HN":
            check_rank("run", "q", q, 3, 3)
            shape = (q.shape[1], q.shape[0])
            if lse is None:
                lse = q.new_empty(shape, dtype=torch.float32)
            check_shape_dtype_device(lse, shape, torch.float32, q.device, "lse")
            self._into, self.buffer = lse, None

    def __call__(self, sums: torch.Tensor) -> torch.Tensor:
        if self._into is not None:
            return torch.mul(sums.t(), self._factor, out=self._into)
        return sums if self._factor == 1.0 else sums.mul_(self._factor)


# -- arguments ------------------------------------------------------------------------------------


def split_cache(w: AttentionWrapper, paged_kv_cache: Any) -> tuple[Any, Any]:
    """Return the keys and values of a tuple, or the one tensor that holds both and None."""
    if not isinstance(paged_kv_cache, tuple):
        return paged_kv_cache, None
    got = f"a tuple of {len(paged_kv_cache)}"
    if len(paged_kv_cache) == 2:
        if paged_kv_cache[0] is not None and paged_kv_cache[1] is not None:
            return paged_kv_cache
        got = "NoneType in a tuple"
    raise CacheLayoutError(
        f"{w._name}.run: {w._cache_argument} must be a torch.Tensor or a tuple of two, got {got}"
    )


def split_scales(w: AttentionWrapper, kv_cache_sf: Any) -> tuple[Any, Any]:
    """Return the scales of keys and of values, or those of both and None, with all dimensions."""
    if kv_cache_sf is None:
        raise ValueError(
            f"{w._name}.run: kv_cache_sf must be given for kv_data_type uint8 (NVFP4) of plan(), "
            f"got None"
        )
    parts = kv_cache_sf if isinstance(kv_cache_sf, tuple) else (kv_cache_sf, None)
    tensors = [part for part in parts if part is not None]
    if len(parts) != 2 or not tensors or not all(isinstance(t, torch.Tensor) for t in tensors):
        raise CacheLayoutError(
            f"{w._name}.run: kv_cache_sf must be a torch.Tensor or a tuple of two, got "
            f"{type(kv_cache_sf).__name__}"
        )
    k, v = parts
    if k.dim() == (4 if v is None else 3):  # Page size 1, left out of the shape.
        page = -2 if w._plan.hnd else -3
        k, v = k.unsqueeze(page), None if v is None else v.unsqueeze(page)
    return k, v


def check_options(w: AttentionWrapper, **options: object) -> None:
    """Raise for the first of these arguments of ``run()`` that is of a wrong type."""
    type(w)._run_arguments.check(options)


def _check_types(
    w: AttentionWrapper,
    q: object,
    k: object,
    v: object,
    q_scale: object,
    k_scale: object,
    v_scale: object,
    out: object,
    lse: object,
    return_lse: object,
    sinks: object,
    enable_pdl: object,
) -> None:
    """Raise if there is no plan, or for the first argument of a wrong type."""
    w._check_planned(f"{w._name}.run")
    check_options(
        w,
        q=q,
        k=k,
        v=v,
        q_scale=q_scale,
        k_scale=k_scale,
        v_scale=v_scale,
        out=out,
        lse=lse,
        return_lse=return_lse,
        sinks=sinks,
        enable_pdl=enable_pdl,
    )


def _explain(
    w: AttentionWrapper,
    plan: AttentionPlan,
    q: Any,
    k: Any,
    v: Any,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
) -> None:
    """Raise an error that names the argument that does not fit the plan, if there is one."""
    name, shape = f"{w._name}.run", plan.shape
    for part in (k,) if v is None else (k, v):
        if not isinstance(part, torch.Tensor):
            raise CacheLayoutError(
                f"{name}: {w._cache_argument} must be a torch.Tensor or a tuple of two, got "
                f"{type(part).__name__}"
            ) from None
    check_rank(name, "q", q, 3, None)
    cache = w._cache_argument
    check_rank(name, cache, k, 3, None)
    for argument, tensor, option, planned in (
        ("q", q, "q_data_type", plan.model.q_dtype),
        (cache, k, "kv_data_type", plan.model.kv_dtype),
    ):
        if tensor.dtype != planned:
            raise ValueError(
                f"{name}: the dtype of {argument}, {tensor.dtype}, does not match the {option} "
                f"{planned} of plan()"
            )
    if shape.rows not in (-1, q.shape[0]):
        w._raise_rows(q.shape[0])
    head_at, entry_at = (-3, -2) if plan.hnd else (-2, -3)
    heads = {"q": (q, shape.num_qo_heads)}
    if not shape.page_size:
        heads = {"k": (k, shape.num_kv_heads), **heads}
    elif (k.shape[head_at], k.shape[entry_at]) != (shape.num_kv_heads, shape.page_size):
        raise ValueError(
            f"{name}: {cache} must have {shape.num_kv_heads} heads and pages of "
            f"{shape.page_size} tokens as in plan(), in layout {w._kv_layout}, got shape "
            f"{[*k.shape]}"
        )
    for argument, (tensor, planned) in heads.items():
        if tensor.shape[-2] != planned:
            raise ValueError(
                f"{name}: {argument} must have {planned} heads as in plan(), got shape "
                f"{[*tensor.shape]}"
            )
    if out is not None:
        _check_output(plan, q, out)
    if lse is not None:
        check_shape_dtype_device(lse, q.shape[:-1], torch.float32, q.device, "lse")


def scales_of(
    name: str, sm_scale: float, q_scale: Scale, k_scale: Scale, v_scale: Scale
) -> tuple[float, torch.Tensor | None, float, torch.Tensor | None]:
    """Return the factors of logits, a number and one on the device, and those of outputs."""
    factor = None
    for option, scale in (("q_scale", q_scale), ("k_scale", k_scale)):
        number, on_device = split_scale(name, option, scale)
        sm_scale *= number
        if on_device is not None:
            factor = on_device if factor is None else factor * on_device
    out_scale, v_factor = split_scale(name, "v_scale", v_scale)
    return sm_scale, factor, out_scale, v_factor


def scales_of_heads(
    name: str,
    sm_scale: float,
    heads: tuple[int, int],
    device: torch.device,
    q_scale: Scale,
    k_scale: Scale,
    v_scale: Scale,
    where: str = ".run: {}_scale",
) -> tuple[float, torch.Tensor | None, float, torch.Tensor | None]:
    """Do as :func:`scales_of` for queries of 8 bits, whose factors may be one for each query head.

    ``heads`` are those of queries and of keys, for which the scales may have a number each; errors
    have ``where`` behind the function's name.
    """
    given = {"q": q_scale, "k": k_scale, "v": v_scale}
    vectors = {
        option: head_scales.of_query_heads(
            name + where.format(option), scale, heads[option != "q"], heads[0], device
        )
        for option, scale in given.items()
        if isinstance(scale, torch.Tensor) and head_scales.has_heads(scale)
    }
    rest = (None if option in vectors else scale for option, scale in given.items())
    sm_scale, qk, out_scale, v = scales_of(name, sm_scale, *rest)
    for option in ("q", "k"):
        if option in vectors:
            qk = vectors[option] if qk is None else qk * vectors[option]
    if "v" in vectors:
        v = vectors["v"]
    return sm_scale, qk, out_scale, v


def scale_arguments(
    w: AttentionWrapper, args: tuple[Any, ...], q_scale: Scale, k_scale: Scale, v_scale: Scale
) -> tuple[tuple[Any, ...], Scale, Scale, Scale]:
    """Return what is left of arguments by position, and the scales that they may be.

    FlashInfer takes those of queries of 8 bits so.
    """
    q_dtype = w._plan.model.q_dtype
    if len(args) != 3 or q_dtype is None or q_dtype.itemsize > 1:
        return args, q_scale, k_scale, v_scale
    for option, scale in (("q_scale", q_scale), ("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is not None:
            raise ValueError(
                f"{w._name}.run: {option} was given by name and by position; give one of them"
            )
    return ((), *args)


def split_scale(
    name: str, option: str, scale: Scale, method: str = ".run"
) -> tuple[float, torch.Tensor | None]:
    """Return a number, or 1 and one float32 on the device; ``method`` is behind errors' name."""
    if scale is None:
        return 1.0, None
    if type(scale) is float and -MOST_FLOAT <= scale <= MOST_FLOAT:
        return scale, None
    if not isinstance(scale, torch.Tensor):
        return validation.number(f"{name}{method}", option, scale), None
    if scale.numel() != 1:
        raise ValueError(
            f"{name}{method}: {option} must be one number, got a tensor of shape {[*scale.shape]}"
        )
    if scale.is_cuda:
        return 1.0, scale.reshape(1).float()
    return validation.number(f"{name}{method}", option, scale.item()), None


def check_window(w: AttentionWrapper, window_left: int) -> None:
    """Raise unless a run has the window of its plan."""
    check_options(w, window_left=window_left)
    w._check_planned(f"{w._name}.run")
    if window_left != w._window_left:
        raise PlanMismatchError(
            f"{w._name}.run: window_left must be {w._window_left} as in plan(), got {window_left}"
        )


def check_other_options(w: AttentionWrapper, args: tuple[object, ...], **options: object) -> None:
    """Raise for options of other backends, which must not be ignored silently."""
    if args:
        raise TypeError(
            f"{w._name}.run: takes no further arguments by position, got {len(args)}: they are for "
            f"code that is compiled into the kernels"
        )
    for name, value in options.items():
        if value is not None:
            raise NotImplementedError(
                f"{w._name}.run: {name} must be None, got {value!r}: no kernel here has it"
            )
