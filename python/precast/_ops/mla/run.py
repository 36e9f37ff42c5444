# SPDX-License-Identifier: Apache-2.0
"""Run a plan of MLA: take its arguments apart, make outputs, call the kernel, explain errors.

Nothing is checked here that the export checks. When a call has failed, :func:`_explain` says which
argument is not that of the plan.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from precast._base.rounding import saturated
from precast._base.torch import torch
from precast._op import mode
from precast._op.ranges import POSITIVE
from precast._op.scalars import RAW_KINDS, check_number
from precast._op.torch_ops import torch_ops
from precast._ops.attention.run import split_scale
from precast._ops.attention.validation import check_shape_dtype_device
from precast._ops.attention.wrapper import AttentionWrapper
from precast._ops.mla import kernels

if TYPE_CHECKING:
    from precast._ops.attention.plan import AttentionPlan
    from precast._ops.mla.options import Contract

_reference = False  # mode.follow() keeps it up to date.
mode.follow(globals())

#: A factor: a number, or one on the device.
Scale: TypeAlias = "float | torch.Tensor | None"
#: Queries or caches: the compressed columns, and the rotary ones, None without any.
Parts: TypeAlias = "tuple[torch.Tensor, torch.Tensor | None]"
#: ``ckv_scale``, ``ckv_scale_arr`` and ``kpe_scale``, or ``bmm1_scale`` and ``bmm2_scale``.
Scales: TypeAlias = "tuple[Any, ...]"


class PlannedWrapper(AttentionWrapper):
    """A wrapper whose plan says what options its runs have."""

    _contract: Contract


def check_contract(
    w: PlannedWrapper,
    lse: tuple[Any, Any, Any],
    o_scale: Any,
    sinks: Any,
    kv_scales: Scales,
    bmm_scales: Scales,
) -> None:
    """Raise unless a run has the options of its plan.

    ``lse`` are ``return_lse``, ``lse`` and ``return_lse_base_on_e``.
    """
    contract = w._contract
    if not (type(lse[0]) is type(lse[2]) is bool) or lse[1] is not None:
        names = ("return_lse", "lse", "return_lse_base_on_e")
        type(w)._run_arguments.check(dict(zip(names, lse)))
    lse_mode = "basee" if lse[2] else "base2" if lse[0] or lse[1] is not None else "none"
    is_dynamic = contract.is_flat_csr and contract.lse_mode == "none"
    if lse_mode != contract.lse_mode and not is_dynamic:
        _raise_contract(w, "lse_mode", contract.lse_mode, f"a run with {lse_mode!r}")
    if (o_scale is not None) != contract.has_o_scale:
        planned = "per-tensor" if contract.has_o_scale else "none"
        _raise_contract(w, "output_scale", planned, f"o_scale={o_scale!r}")
    if (sinks is not None) != contract.use_sinks:
        _raise_contract(w, "use_sinks", contract.use_sinks, _given("sinks", sinks))
    ckv, ckv_arr, kpe = kv_scales
    has_kv = not (ckv is ckv_arr is kpe is None)
    has_bmm = not (bmm_scales[0] is bmm_scales[1] is None)
    mode = contract.scale_mode
    if mode == "default" and not has_kv and not has_bmm:
        return
    if mode == "kv-per-tensor" and not has_bmm:
        if (ckv is None) == (ckv_arr is None) or kpe is None:
            raise ValueError(
                f"{w._name}.run: with kv_data_type float8_e4m3fn, kpe_scale and one of "
                f"ckv_scale and ckv_scale_arr must be given, got {_given('ckv_scale', ckv)}, "
                f"{_given('ckv_scale_arr', ckv_arr)} and {_given('kpe_scale', kpe)}"
            )
        return
    if mode == "bmm-scalar" and not has_kv and all(x is not None for x in bmm_scales):
        return
    scales = ("ckv_scale", "ckv_scale_arr", "kpe_scale", "bmm1_scale", "bmm2_scale")
    values = zip(scales, (*kv_scales, *bmm_scales))
    given = [name for name, value in values if value is not None]
    _raise_contract(w, "scale_mode", mode, f"a run with {', '.join(given) or 'no scales'}")


def _raise_contract(w: PlannedWrapper, option: str, planned: Any, got: str) -> None:
    w._check_planned(f"{w._name}.run")
    raise ValueError(
        f"{w._name}.run: the plan has {option}={planned!r}, got {got}. Fix: plan with what "
        f"runs need"
    )


def _given(option: str, value: Any) -> str:
    return f"no {option}" if value is None else option


# -- arguments of run() ---------------------------------------------------------------------------


def refuse_options(name: str, **options: object) -> None:
    """Raise for options of other backends, which must not be ignored silently."""
    for option, value in options.items():
        if value is not None:
            raise NotImplementedError(
                f"{name}.run: {option} must be None, got {value!r:.40}: no kernel here has it"
            )


def parts(
    w: PlannedWrapper,
    names: tuple[str, str],
    compressed: Any,
    rotary: Any,
    name: str,
    both: Any,
) -> Parts:
    """Return queries or caches as two tensors: given so, as a pair, or as one tensor."""
    shape = w._plan.shape
    width = shape.head_dim_vo
    if (
        both is None
        and width != shape.head_dim_qk
        and isinstance(compressed, torch.Tensor)
        and isinstance(rotary, torch.Tensor)
    ):
        return compressed, rotary  # Why first: it is all that most runs need.
    if both is None:
        if compressed is None:
            raise TypeError(
                f"{w._name}.run: {name} or {names[0]} and {names[1]} must be given, got neither"
            )
        if rotary is None and shape.head_dim_qk != width:
            raise ValueError(f"{w._name}.run: {names[1]} must be given with {names[0]}, got None")
        both = compressed, rotary
    elif compressed is not None or rotary is not None:
        raise TypeError(
            f"{w._name}.run: {name} and {names[0]} or {names[1]} were both given; give one form"
        )
    elif isinstance(both, torch.Tensor):
        columns = shape.head_dim_qk
        if w._plan.is_launched and (not both.dim() or both.shape[-1] != columns):
            raise ValueError(
                f"{w._name}.run: {name} must have {columns} columns, {width} and "
                f"{columns - width} as in plan(), got shape {[*both.shape]}"
            )
        both = both[..., :width], both[..., width:]
    else:
        if not isinstance(both, tuple):
            raise TypeError(
                f"{w._name}.run: {name} must be a torch.Tensor or a tuple of two, got "
                f"{type(both).__name__}"
            )
        pairs = [part for part in both if isinstance(part, tuple)]
        if len(both) == 2 and len(pairs) == 1:  # Beside one tensor of the same numbers.
            both, pairs = pairs[0], []
        if len(both) != 2 or pairs:
            raise ValueError(
                f"{w._name}.run: {name} must be a torch.Tensor or a tuple of two, got a tuple of "
                f"{', '.join(type(part).__name__ for part in both)}"
            )
    compressed, rotary = both
    for part, tensor in zip(names, both):
        if not (isinstance(tensor, torch.Tensor) or (part == names[1] and tensor is None)):
            raise TypeError(
                f"{w._name}.run: {part} must be a torch.Tensor, got {type(tensor).__name__}"
            )
    # A rotary part without columns is none.
    is_empty = rotary is not None and rotary.dim() > 0 and rotary.shape[-1] == 0
    return compressed, None if is_empty else rotary


class _Factors(NamedTuple):
    """The factors of a run as the export takes them."""

    sm_factor: float = 1.0
    out_scale: float = 1.0
    qk_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    kpe_ratio: float = 1.0
    kpe_scale: torch.Tensor | None = None
    ckv_scale_arr: torch.Tensor | None = None


_NO_FACTORS = _Factors()


def _factors(
    w: PlannedWrapper,
    plan: AttentionPlan,
    o_scale: float | None,
    kv_scales: Scales,
    bmm_scales: Scales,
    device: torch.device,
) -> _Factors:
    name, factors = w._name, _NO_FACTORS
    ckv, ckv_arr, kpe = kv_scales
    if kpe is not None:
        ckv_number, ckv_tensor = _positive(name, "ckv_scale", 1.0 if ckv is None else ckv)
        kpe_number, kpe_tensor = _positive(name, "kpe_scale", kpe)
        if ckv_tensor is not None and kpe_tensor is None:
            # Beside a number on the device stands another one.
            kpe_tensor = torch.full((1,), kpe_number, dtype=torch.float32, device=device)
            kpe_number = 1.0
        factors = _Factors(
            sm_factor=ckv_number,
            out_scale=ckv_number,
            qk_scale=ckv_tensor,
            v_scale=ckv_tensor,
            kpe_ratio=kpe_number / ckv_number,
            kpe_scale=kpe_tensor,
            ckv_scale_arr=ckv_arr,
        )
    elif bmm_scales[0] is not None:
        for option, scale in zip(("bmm1_scale", "bmm2_scale"), bmm_scales):
            if isinstance(scale, torch.Tensor):
                raise TypeError(f"{name}.run: {option} must be a number, got a tensor")
        planned = float(plan.scores.sm_scale or 0.0)
        bmm1, bmm2 = (
            split_scale(name, option, scale)[0]
            for option, scale in zip(("bmm1_scale", "bmm2_scale"), bmm_scales)
        )
        if planned == 0.0:
            raise ValueError(
                f"{name}.run: bmm1_scale cannot replace the sm_scale of plan(), which is 0. Fix: "
                f"give plan() another one"
            )
        factors = factors._replace(sm_factor=bmm1 / planned, out_scale=bmm2)
    if o_scale is not None:
        check_number(f"{name}.run", "o_scale", o_scale, POSITIVE)
        factors = factors._replace(out_scale=factors.out_scale / float(o_scale))
    return factors


def _positive(name: str, option: str, scale: Any) -> tuple[float, torch.Tensor | None]:
    if type(scale) is float and POSITIVE.least <= scale <= POSITIVE.most:
        return scale, None  # Why first: each layer of a model comes here.
    number, tensor = split_scale(name, option, scale)
    if tensor is None:
        check_number(f"{name}.run", option, number, POSITIVE)
    return number, tensor


# -- run ------------------------------------------------------------------------------------------


def run(
    w: PlannedWrapper,
    queries: Parts,
    caches: Parts,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
    return_lse: bool,
    lse_base_e: bool,
    o_scale: float | None,
    sinks: torch.Tensor | None,
    kv_scales: Scales,
    bmm_scales: Scales,
) -> Any:
    """Run the wrapper's plan; returns the output, and the log-sum-exp with ``return_lse``."""
    plan = w._plan
    q_nope, q_pe = queries
    compiling = torch.compiler.is_compiling()
    try:
        if _reference and not compiling:
            _check_types(w, out, lse, return_lse, lse_base_e, o_scale, sinks, kv_scales, bmm_scales)
        if plan.block is None:
            plan = w._packed_plan()
        if plan.hints.guesses_tile and not compiling and q_nope.dim() == 3:
            plan = w._settle_tile(q_nope.shape[0])
        if compiling:
            _explain(w, plan, queries, caches, out, lse)
            export: Any = torch_ops.run_mla_sm90 if plan.shape.sm90 else torch_ops.run_mla
        else:
            table = kernels.run_mla_sm90 if plan.shape.sm90 else kernels.run_mla
            export = table[plan.model.key]
        factors = _NO_FACTORS
        if w._contract.scale_mode != "default" or o_scale is not None:
            factors = _factors(w, plan, o_scale, kv_scales, bmm_scales, q_nope.device)
        result, lse = _outputs(plan, q_nope, out, lse, return_lse)
        into = result
        if not plan.model.writes_outputs:
            into = torch.empty_like(result, dtype=plan.model.q_dtype)
        export(
            q_nope,
            q_pe,
            *caches,
            into,
            lse,
            sinks,
            plan.block,
            *factors,
            bool(lse_base_e),
            w._contract.enable_pdl,
        )
    except RAW_KINDS:
        _check_types(w, out, lse, return_lse, lse_base_e, o_scale, sinks, kv_scales, bmm_scales)
        _explain(w, plan, queries, caches, out, lse if return_lse else None)
        raise
    if into is not result:
        result.copy_(saturated(into.float(), result.dtype))
    return (result, lse) if return_lse else result


def _outputs(
    plan: AttentionPlan,
    q_nope: torch.Tensor,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
    return_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the caller's outputs, which the export checks, or new ones."""
    if out is None:
        if plan.hints.pads:
            out = q_nope.new_zeros(q_nope.shape, dtype=plan.model.o_dtype)
        else:  # Why not new_empty: it takes twice as long.
            layout = torch.contiguous_format
            out = torch.empty_like(q_nope, dtype=plan.model.o_dtype, memory_format=layout)
    elif not plan.model.writes_outputs:  # The export does not see it.
        check_shape_dtype_device(out, q_nope.shape, plan.model.o_dtype, q_nope.device, "out")
    if return_lse and lse is None:
        lse = q_nope.new_empty(q_nope.shape[:-1], dtype=torch.float32)
    return out, lse


def _check_types(
    w: PlannedWrapper,
    out: object,
    lse: object,
    return_lse: object,
    lse_base_e: object,
    o_scale: object,
    sinks: object,
    kv_scales: Scales,
    bmm_scales: Scales,
) -> None:
    """Raise if there is no plan, or for the first argument of a wrong type."""
    w._check_planned(f"{w._name}.run")
    type(w)._run_arguments.check(
        {
            "out": out,
            "lse": lse,
            "return_lse": return_lse,
            "return_lse_base_on_e": lse_base_e,
            "o_scale": o_scale,
            "sinks": sinks,
            **dict(zip(("ckv_scale", "ckv_scale_arr", "kpe_scale"), kv_scales)),
            **dict(zip(("bmm1_scale", "bmm2_scale"), bmm_scales)),
        }
    )


def _explain(
    w: PlannedWrapper,
    plan: AttentionPlan,
    queries: Parts,
    caches: Parts,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
) -> None:
    """Raise an error that names the argument that does not fit the plan, if there is one."""
    name, shape = f"{w._name}.run", plan.shape
    widths = shape.head_dim_vo, shape.head_dim_qk - shape.head_dim_vo
    for names, tensors, option, planned, sizes in (
        (("q_nope", "q_pe"), queries, "q_data_type", plan.model.q_dtype, (-1, shape.num_qo_heads)),
        (
            ("ckv_cache", "kpe_cache"),
            caches,
            "kv_data_type",
            plan.model.kv_dtype,
            (-1, shape.page_size),
        ),
    ):
        for argument, tensor, width in zip(names, tensors, widths):
            if (tensor is None) != (width == 0):
                needed = f"have {width} columns" if width else "have no columns, or be None,"
                got = "None" if tensor is None else f"shape {[*tensor.shape]}"
                raise ValueError(f"{name}: {argument} must {needed} as in plan(), got {got}")
            if tensor is None:
                continue
            if tensor.device != w.device:
                raise ValueError(
                    f"{name}: {argument} must be on {w.device} as the wrapper, got {tensor.device}"
                )
            if tensor.dtype != planned:
                raise ValueError(
                    f"{name}: the dtype of {argument}, {tensor.dtype}, does not match the {option} "
                    f"{planned} of plan()"
                )
            if tensor.dim() != 3 or (*tensor.shape[1:],) != (sizes[1], width):
                raise ValueError(
                    f"{name}: {argument} must have shape [any, {sizes[1]}, {width}] as in plan(), "
                    f"got {[*tensor.shape]}"
                )
    q_nope = queries[0]
    if shape.rows not in (-1, q_nope.shape[0]):
        raise ValueError(
            f"{name}: q_nope must have {shape.rows} rows, qo_indptr[-1] of plan(), got shape "
            f"{[*q_nope.shape]}"
        )
    if out is not None:
        check_shape_dtype_device(out, q_nope.shape, plan.model.o_dtype, q_nope.device, "out")
    if lse is not None:
        check_shape_dtype_device(lse, q_nope.shape[:-1], torch.float32, q_nope.device, "lse")
