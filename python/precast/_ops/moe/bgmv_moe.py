# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters in a mixture of experts: both products, and the tables of addresses.

Source: Chen et al., Punica: Multi-Tenant LoRA Serving, arXiv:2310.18547, section 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from precast._base.torch import torch
from precast._op.docs import documented
from precast._op.export import Export, op
from precast._op.validation import check_contiguous, check_elements_apart
from precast._ops.moe._lora import (
    PAIRS,
    VECTOR,
    check_rank_of,
    check_rows_of,
    check_weights,
    new_token_pairs,
    write_slice,
)
from precast._ops.moe._rows import check_matrix
from precast.api_logging import precast_api
from precast.trace import Const, Scalar, Tensor, TraceTemplate, Var
from precast.trace.registry import by_form

_NAME = "bgmv_moe"


def bgmv_moe_reference(
    x: torch.Tensor,
    lora_a_weights: Sequence[torch.Tensor],
    lora_b_weights: Sequence[torch.Tensor],
    sorted_token_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    lora_indices: torch.Tensor,
    topk_weights: torch.Tensor,
    num_experts: int,
    output_dim: int | None = None,
) -> torch.Tensor:
    """:func:`bgmv_moe` in plain PyTorch on any device: float32, rounded between the products."""
    columns = sum(b.shape[2] for b in lora_b_weights) if output_dim is None else output_dim
    out = x.new_zeros(len(lora_indices), columns)
    pairs = sorted_token_ids, expert_ids, lora_indices
    first = 0
    for a, b in zip(lora_a_weights, lora_b_weights):
        of_a, of_b = a[:, :num_experts], b[:, :num_experts]
        write_slice(x, of_a, of_b, pairs, topk_weights, out[:, first : first + b.shape[2]])
        first += b.shape[2]
    return out


def _write(
    x: torch.Tensor,
    lora_a_weights: torch.Tensor,
    more_a_weights: torch.Tensor | None,
    lora_b_weights: torch.Tensor,
    more_b_weights: torch.Tensor | None,
    sorted_token_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    lora_indices: torch.Tensor,
    topk_weights: torch.Tensor,
    first_column: int,
    out: torch.Tensor,
) -> None:
    pairs, features = (sorted_token_ids, expert_ids, lora_indices), lora_b_weights.shape[2]
    for a, b in ((lora_a_weights, lora_b_weights), (more_a_weights, more_b_weights)):
        if a is not None and b is not None:
            columns = out[:, first_column : first_column + features]
            write_slice(x, a, b, pairs, topk_weights, columns)
            first_column += features


def _check(
    export: str,
    x: torch.Tensor,
    lora_a_weights: torch.Tensor,
    more_a_weights: torch.Tensor | None,
    lora_b_weights: torch.Tensor,
    more_b_weights: torch.Tensor | None,
    sorted_token_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    lora_indices: torch.Tensor,
    topk_weights: torch.Tensor,
    first_column: int,
    shrunk: torch.Tensor,
    out: torch.Tensor,
    token_pairs: torch.Tensor | None,
) -> None:
    check_matrix(export, "x", x, VECTOR)
    check_weights(export, "lora_a_weights", lora_a_weights)
    check_rank_of(export, "lora_a_weights", lora_a_weights, lora_a_weights.shape[2])
    check_weights(export, "lora_b_weights", lora_b_weights)
    for name, more, first in (
        ("more_a_weights", more_a_weights, lora_a_weights),
        ("more_b_weights", more_b_weights, lora_b_weights),
    ):
        if more is not None and more.stride() != first.stride():
            raise ValueError(
                f"{export}: {name} must have the strides of lora{name[4:]}, got {[*more.stride()]}"
            )
    if (more_a_weights is None) != (more_b_weights is None):
        raise ValueError(
            f"{export}: more_b_weights must be given with more_a_weights, and only then"
        )
    check_contiguous(
        export,
        sorted_token_ids=sorted_token_ids,
        expert_ids=expert_ids,
        lora_indices=lora_indices,
        topk_weights=topk_weights,
        shrunk=shrunk,
        token_pairs=token_pairs,
    )
    check_rows_of(export, "x", x, len(lora_indices), "tokens")
    slices = 1 if more_a_weights is None else 2
    shape = [slices, len(sorted_token_ids), lora_a_weights.shape[2]]
    if [*shrunk.shape] != shape:
        raise ValueError(f"{export}: shrunk must have shape {shape}, got {[*shrunk.shape]}")
    if out.shape[1] > 1 and out.stride(1) != 1:
        raise ValueError(
            f"{export}: out must have stride 1 in its last dimension, got strides "
            f"{[*out.stride()]}; call .contiguous()"
        )
    check_elements_apart(export, "out", out)
    most = out.shape[1] - slices * lora_b_weights.shape[2]
    if not 0 <= first_column <= most:
        raise ValueError(f"{export}: first_column must be from 0 to {most}, got {first_column}")


_WHOLE = Export(
    "bgmv_moe",
    "bgmv_moe",
    "x:T=bf16|f16[rows,hidden] lora_a_weights:T[loras,experts,rank,hidden] "
    "more_a_weights?:T[loras,experts,rank,hidden] lora_b_weights:T[loras,experts,features,rank] "
    "more_b_weights?:T[loras,experts,features,rank] sorted_token_ids:i64[pairs] "
    "expert_ids:i64[pairs] lora_indices:i64[tokens] topk_weights:f32[pairs] first_column:size "
    "shrunk!:T[slices,pairs,rank] out!:T[tokens,columns] token_pairs!?:i32[tokens,32] "
    "enable_pdl:pdl_on",
    check=_check,
    write=_write,
    derived={
        "lora_a_weights": lambda lora_a_weights: [lora_a_weights],
        "lora_b_weights": lambda lora_b_weights: [lora_b_weights],
    },
    traced=False,
)


def _explain(
    lora_a_weights: Sequence[torch.Tensor], lora_b_weights: Sequence[torch.Tensor]
) -> None:
    """Raise for lists that are none, or hold something else, after a call has failed."""
    for name, several in (("lora_a_weights", lora_a_weights), ("lora_b_weights", lora_b_weights)):
        is_list = isinstance(several, Sequence)
        if not is_list or not all(isinstance(t, torch.Tensor) for t in several):
            raise TypeError(
                f"{_NAME}: {name} must be a list of tensors, one for each slice, got "
                f"{type(several).__name__}"
            )
        for i, t in enumerate(several):
            _check_dims(f"{name}[{i}]", t)


def _check_dims(name: str, t: torch.Tensor) -> None:
    if t.dim() != 4:
        raise ValueError(f"{_NAME}: {name} must have 4 dimensions, got shape {[*t.shape]}")


def _first_experts(
    name: str, weights: Sequence[torch.Tensor], num_experts: int
) -> list[torch.Tensor]:
    """The weights of the first experts; raise unless there are so many."""
    for i, t in enumerate(weights):
        _check_dims(f"{name}[{i}]", t)
        if not 0 <= num_experts <= t.shape[1]:
            raise ValueError(
                f"{_NAME}: num_experts must be from 0 to the {t.shape[1]} experts of {name}[{i}], "
                f"got {num_experts}"
            )
    return [t[:, :num_experts] for t in weights]


def _check_slice(
    i: int, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, first: torch.Tensor
) -> None:
    """Raise for what a launch behind the first one would refuse of a slice."""
    of_a, of_b, hidden = f"lora_a_weights[{i}]", f"lora_b_weights[{i}]", x.shape[-1]
    loras, experts, rank = a.shape[:3]
    for name, t, fits, shape in (
        (of_a, a, a.shape[3] == hidden, f"adapters, experts, rank, {hidden}"),
        (
            of_b,
            b,
            (*b.shape[:2], b.shape[3]) == (loras, experts, rank),
            f"{loras}, {experts}, columns, {rank}",
        ),
    ):
        if t.dtype is not first.dtype:
            raise ValueError(f"{_NAME}: {name} must be {first.dtype}, got {t.dtype}")
        if t.device != first.device:
            raise ValueError(f"{_NAME}: {name} must be on {first.device} as x, got {t.device}")
        if not fits:
            raise ValueError(f"{_NAME}: {name} must have shape [{shape}], got {[*t.shape]}")
        check_weights(_NAME, name, t)
    check_rank_of(_NAME, of_a, a, rank)


def _alike(weights: Sequence[torch.Tensor]) -> bool:
    """Whether one launch can take the weights of two slices."""
    one, other = weights
    return one.shape == other.shape and one.stride() == other.stride() and one.dtype is other.dtype


#: How many slices a call has, and whether they have equal shapes.
_Form = tuple[int, bool]


def _form(
    lora_a_weights: Sequence[torch.Tensor],
    lora_b_weights: Sequence[torch.Tensor],
    **others: object,
) -> _Form:
    shapes = {(*a.shape, *b.shape) for a, b in zip(lora_a_weights, lora_b_weights)}
    return len(lora_a_weights), len(shapes) <= 1


def _fill(made: dict[str, Any]) -> None:
    for name, size in (
        ("sorted_token_ids", len(made["x"])),
        ("expert_ids", made["num_experts"]),
        ("lora_indices", len(made["lora_a_weights"][0])),
    ):
        numbers = torch.arange(len(made[name]), device=made[name].device)
        made[name].copy_(numbers * 11 % (size + 1) - int(name == "lora_indices"))


def _template(form: _Form) -> TraceTemplate:
    slices, are_alike = form
    of = ["" if are_alike else f"_{i}" for i in range(slices)]  # The axes of each.
    axes: dict[str, Var | Const] = {
        "num_tokens": Var(sample=6),
        "hidden_size": Const("h", multiple=8),
        "num_loras": Const("l", sample=3),
        "num_local_experts": Const("e", param="num_experts", sample=4),
    }
    inputs: dict[str, Tensor | Scalar] = {"x": Tensor(["num_tokens", "hidden_size"])}
    for word in dict.fromkeys(of):
        axes[f"rank{word}"] = Const("r", multiple=8)
        axes[f"columns{word}"] = Const("c", multiple=1)
    for letter, shape in (("a", ("rank{}", "hidden_size")), ("b", ("columns{}", "rank{}"))):
        for i, word in enumerate(of):
            own = [axis.format(word) for axis in shape]
            inputs[f"lora_{letter}_{i}"] = Tensor(
                ["num_loras", "num_local_experts", *own], param=f"lora_{letter}_weights", item=i
            )
    axes["num_pairs"] = Var(sample=11)
    axes["num_columns"] = Const("", value=" + ".join(f"columns{word}" for word in of))
    for name in ("sorted_token_ids", "expert_ids"):
        inputs[name] = Tensor(["num_pairs"], dtype="int64")
    inputs["lora_indices"] = Tensor(["num_tokens"], dtype="int64")
    inputs["topk_weights"] = Tensor(["num_pairs"], dtype="float32")
    inputs["num_experts"] = Scalar("int64", sample=4)
    return TraceTemplate(
        op_type="bgmv_moe",
        name_prefix=f"bgmv_moe_{slices}" + ("" if are_alike else "_shapes"),
        description="Computes what low-rank adapters add to a mixture of experts.",
        axes=axes,
        inputs=inputs,
        outputs={"output": Tensor(["num_tokens", "num_columns"], dtype_from="x")},
        reference=bgmv_moe_reference,
        tags=["moe", "lora"],
        fill=_fill,
    )


@precast_api(trace=by_form(_form, _template, [(1, True), (2, True), (2, False)]))
@op("bgmv_moe", explain=_explain)
@documented(PAIRS)
def bgmv_moe(
    x: torch.Tensor,
    lora_a_weights: Sequence[torch.Tensor],
    lora_b_weights: Sequence[torch.Tensor],
    sorted_token_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    lora_indices: torch.Tensor,
    topk_weights: torch.Tensor,
    num_experts: int,
    output_dim: int | None = None,
) -> torch.Tensor:
    r"""Compute what the low-rank adapters of tokens add to a mixture of experts.

    .. math::

        out_{t,\,s} = \mathrm{round}\left(\sum_{p: t_p = t} topk\_weights_p \, B_{s,l,e} \,
        \mathrm{round}(A_{s,l,e}\,x_t)\right), \quad t_p = sorted\_token\_ids_p, \quad
        e = expert\_ids_p, \quad l = lora\_indices_t

    The columns of the slices :math:`s`, such as gate and up projection, stand side by side.

    Parameters
    ----------
    x : torch.Tensor
        ``[tokens, hidden]``, bfloat16 or float16, on a CUDA device; ``hidden`` is a multiple of 8,
        the last dimension has stride 1, rows start at multiples of 16 bytes.
    lora_a_weights : sequence of torch.Tensor
        For each slice :math:`A`, ``[adapters, experts, rank, hidden]``, of the dtype of ``x``.
        Matrices are contiguous and start at multiples of 16 bytes; the rank is a multiple of 8.
    lora_b_weights : sequence of torch.Tensor
        For each slice :math:`B`, ``[adapters, experts, columns, rank]``, in the same way. An
        adapter that a slice does not have adds nothing there.
    topk_weights : torch.Tensor
        ``[pairs]``, float32, contiguous: the weight of each pair.
    num_experts : int
        How many experts of the weights are used, from the first.
    output_dim : int, optional
        The columns of the result; those behind the slices are zero. Default: those of the slices.

    Returns
    -------
    torch.Tensor
        ``[tokens, output_dim]``, of the dtype of ``x``. Tokens without an adapter are zeros.

    Notes
    -----
    Sums are float32, over the pairs of a token in their order: equal arguments give equal bits, and
    a token's sum does not depend on other tokens. The rows of pairs without weights are not read:
    NaN there reaches nothing. Two launches for one slice or for two that have equal shapes and
    strides, otherwise two for each, and a further one and scratch memory of 128 bytes for each
    token with more than 1024 pairs; allocates that, the result, and ``[slices, pairs, rank]``
    between the products; nothing is copied from the host; safe in CUDA graphs, whichever
    experts and adapters are chosen; not differentiable.

    Examples
    --------
    >>> import torch, precast
    >>> a, b = torch.ones(1, 2, 8, 8).half(), torch.ones(1, 2, 3, 8).half()
    >>> tokens, experts = torch.tensor([0, 0, 1]), torch.tensor([1, 0, 1])
    >>> weights = torch.tensor([0.5, 0.25, 1.0])
    >>> with precast.reference_mode():
    ...     precast.fused_moe.bgmv_moe(
    ...         torch.ones(2, 8).half(), [a], [b], tokens, experts, torch.tensor([0, -1]), weights,
    ...         num_experts=2)
    tensor([[48., 48., 48.],
            [ 0.,  0.,  0.]], dtype=torch.float16)
    """
    a, b = lora_a_weights, lora_b_weights
    if len(a) == 0 or len(a) != len(b):
        raise ValueError(
            f"{_NAME}: lora_a_weights and lora_b_weights must have as many tensors, at least one, "
            f"got {len(a)} and {len(b)}"
        )
    sizes = [t.shape[2] for t in b]
    written = sum(sizes)
    if output_dim is not None and output_dim < written:
        raise ValueError(
            f"{_NAME}: output_dim must be at least {written}, the columns of lora_b_weights, got "
            f"{output_dim}"
        )
    if {t.shape[1] for t in (*a, *b)} != {num_experts}:
        a = _first_experts("lora_a_weights", a, num_experts)
        b = _first_experts("lora_b_weights", b, num_experts)
    pairs, tokens = sorted_token_ids.shape[0], lora_indices.shape[0]
    if output_dim is None or output_dim == written:
        out = x.new_empty(tokens, written)
    else:
        out = x.new_zeros(tokens, output_dim)
    routed = sorted_token_ids, expert_ids, lora_indices, topk_weights
    if len(a) == 1:
        groups = [(0, False)]
    elif len(a) == 2 and _alike(a) and _alike(b):
        groups = [(0, True)]
    else:
        groups = [(i, False) for i in range(len(a))]
        for i in range(len(a)):  # Before the first launch.
            _check_slice(i, x, a[i], b[i], x)
    first = 0
    for i, has_two in groups:
        shrunk = x.new_empty(2 if has_two else 1, pairs, a[i].shape[2])
        more_a, more_b = (a[1], b[1]) if has_two else (None, None)
        many = new_token_pairs(sorted_token_ids, tokens)
        _WHOLE.launch(x, a[i], more_a, b[i], more_b, *routed, first, shrunk, out, many)
        first += sizes[i]
    return out


@precast_api
def fill_w_ptr(w_ptr: torch.Tensor, weights: torch.Tensor, num_experts: int, slice_id: int) -> int:
    """Write the addresses of the matrices of a slice to a table, and return their distance.

    Parameters
    ----------
    w_ptr : torch.Tensor
        ``[slices, experts]``, int64, on the device of ``weights``: the table. The first
        ``num_experts`` elements of row ``slice_id`` are overwritten.
    weights : torch.Tensor
        ``[adapters, experts, a, b]``, bfloat16 or float16; ``[a, b]`` is contiguous. The table
        points into its memory, which must live as long.
    num_experts : int
        How many experts are written, from the first.
    slice_id : int
        The slice.

    Returns
    -------
    int
        Elements from the matrix of an adapter to that of the next: ``lora_stride``.

    Raises
    ------
    ValueError
        A table that is not int64, or has no such slice or not so many experts; weights that are not
        4-D, have fewer experts, are on another device, or whose matrices are not contiguous.

    Notes
    -----
    Nothing is copied from the host. A CUDA graph that captures it keeps the addresses.

    Examples
    --------
    >>> import torch, precast
    >>> table = torch.zeros(1, 2, dtype=torch.int64)
    >>> weights = torch.zeros(3, 2, 8, 16).half()
    >>> precast.fused_moe.fill_w_ptr(table, weights, 2, 0)
    256
    >>> (table - weights.data_ptr()).tolist()
    [[0, 256]]
    """
    name = "fill_w_ptr"
    if w_ptr.dtype is not torch.int64 or w_ptr.dim() != 2:
        raise ValueError(
            f"{name}: w_ptr must be int64 [slices, experts], got {w_ptr.dtype} {[*w_ptr.shape]}"
        )
    if weights.dim() != 4:
        raise ValueError(f"{name}: weights must have 4 dimensions, got shape {[*weights.shape]}")
    if weights.device != w_ptr.device:
        raise ValueError(
            f"{name}: weights must be on {w_ptr.device} as w_ptr, got {weights.device}"
        )
    check_weights(name, "weights", weights)
    most = min(w_ptr.shape[1], weights.shape[1])
    if not 0 <= num_experts <= most:
        raise ValueError(f"{name}: num_experts must be from 0 to {most}, got {num_experts}")
    if not 0 <= slice_id < w_ptr.shape[0]:
        raise ValueError(f"{name}: slice_id must be from 0 to {w_ptr.shape[0] - 1}, got {slice_id}")
    expert = torch.arange(num_experts, dtype=torch.int64, device=w_ptr.device)
    step = weights.stride(1) * weights.element_size()
    w_ptr[slice_id, :num_experts] = expert * step + weights.data_ptr()
    return int(weights.stride(0))


@precast_api
def has_bgmv_moe() -> bool:
    """Return whether the current GPU has kernels of :func:`bgmv_moe`.

    Returns
    -------
    bool
        False without a GPU.

    Examples
    --------
    >>> import precast
    >>> isinstance(precast.fused_moe.has_bgmv_moe(), bool)
    True
    """
    if not torch.cuda.is_available():
        return False
    major, minor = torch.cuda.get_device_capability()
    return bool(bgmv_moe.is_compute_capability_supported(10 * major + minor))
