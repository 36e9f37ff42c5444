# SPDX-License-Identifier: Apache-2.0
"""A mixture of experts, from tokens and their experts to their results.

Source: Shazeer et al., Outrageously Large Neural Networks, arXiv:1701.06538; scales of blocks:
DeepSeek-V3 Technical Report, arXiv:2412.19437, section 3.3; MXFP4: OCP Microscaling Formats (MX)
Specification 1.0; scales of the channels of activations: SmoothQuant, arXiv:2211.10438.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from precast._base.device import is_hopper
from precast._base.torch import torch
from precast._op.export import op
from precast._ops.gemm._w4 import COLUMNS, DEPTH
from precast._ops.gemm.fp8_grouped import group_gemm_fp8_nt_groupwise
from precast._ops.gemm.grouped_mm import grouped_mm_bf16
from precast._ops.gemm.int4 import grouped_mm_int4
from precast._ops.gemm.mxfp4 import grouped_mm_mxfp4
from precast._ops.gemm.scaled_mm import grouped_mm_fp8
from precast._ops.moe._experts import (
    Call,
    Mode,
    Options,
    Scratch,
    Sizes,
    check_places,
    check_ranks,
    check_sizes,
    check_tensor,
    check_workspace,
    few_layout,
    function_of,
    is_fused,
    known_call,
    mode_of,
    scratch_layout,
    scratch_of,
    sizes_of,
    unsupported,
)
from precast._ops.moe._few_tokens import FEW_TOKENS, fits, is_faster
from precast._ops.moe._fused_reference import cutlass_fused_moe_reference
from precast._ops.moe._gated import GROUPED_GATED
from precast._ops.moe._gated_fp8 import GROUPED_SWIGLU_FP8
from precast._ops.moe._rows import EPS, GROUP
from precast._ops.moe.enums import ActivationType
from precast._ops.moe.moe_activation import ACTIVATION
from precast._ops.moe.moe_finalize import FINALIZE
from precast._ops.moe.moe_permute import PERMUTE, PERMUTE_QUANT
from precast._ops.moe.moe_scale_columns import SCALE_COLUMNS
from precast._ops.moe.moe_sort import SORT
from precast.api_logging import precast_api
from precast.trace import Const, Dtype, Tensor, TraceTemplate, Var

_NAME = "cutlass_fused_moe"


def _check_scales(
    given: tuple[torch.Tensor, ...], x: torch.Tensor, mode: Mode, sizes: Sizes
) -> None:
    """Raise unless the scales that the mode needs are there."""
    count = {Mode.HALF: 0, Mode.FP8: 4, Mode.INT4: 8}.get(mode, 2)
    if count == 0:
        return
    if len(given) != count:
        raise ValueError(
            f"{_NAME}: quant_scales must hold {count} tensors for this mode, got {len(given)}"
        )
    experts, hidden, inter = sizes.experts, sizes.hidden, sizes.inter
    shapes: list[tuple[int, ...]]
    dtype = torch.float32
    if mode is Mode.INT4:
        _check_int4_scales(given, x, sizes)
        return
    if mode is Mode.MXFP4:
        dtype, given = torch.uint8, tuple(_bytes_of(scale) for scale in given)
        shapes = [
            (experts, sizes.inputs // COLUMNS, hidden // DEPTH, 16, 16),
            (experts, hidden // COLUMNS, inter // DEPTH, 16, 16),
        ]
    elif mode is Mode.FP8_BLOCKS:
        shapes = [
            (experts, -(-sizes.inputs // GROUP), hidden // GROUP),
            (experts, hidden // GROUP, inter // GROUP),
        ]
    else:
        # The second is one number, or one of each expert; the last is not read.
        second = (experts,) if given[1].numel() != 1 else tuple(given[1].shape)
        last = tuple(given[3].shape) if given[3].numel() == 1 else ()
        shapes = [(experts,), second, (experts,), last]
    for i, (scale, shape) in enumerate(zip(given, shapes, strict=True)):
        check_tensor(_NAME, f"quant_scales[{i}]", scale, x, dtype, *shape)


def _check_int4_scales(given: tuple[torch.Tensor, ...], x: torch.Tensor, sizes: Sizes) -> None:
    """Raise unless the eight scales are those of weights, columns, zeros, and experts."""
    experts, hidden, inter = sizes.experts, sizes.hidden, sizes.inter
    blocks = (sizes.inputs, hidden), (hidden, inter)
    for i, (columns, depth) in enumerate(blocks):
        shape = experts, columns // COLUMNS, depth // DEPTH, 8, 8
        if given[i].shape != shape:
            raise ValueError(
                f"{_NAME}: quant_scales[{i}] must have shape {[*shape]}, got {[*given[i].shape]}. "
                f"Fix: interleave_moe_scales_for_sm90_mixed_gemm(scales, {DEPTH})"
            )
        check_tensor(_NAME, f"quant_scales[{i}]", given[i], x, torch.bfloat16, *shape)
        number = i + 2
        name, of_columns = f"quant_scales[{number}]", given[number]
        if of_columns.numel() not in (0, depth):
            raise ValueError(
                f"{_NAME}: {name} must have {depth} elements, one for each column, or none, got "
                f"shape {[*of_columns.shape]}"
            )
        if of_columns.numel():
            check_tensor(_NAME, name, of_columns, x, torch.bfloat16, *of_columns.shape)
        if given[i + 4].numel():
            raise ValueError(
                f"{_NAME}: quant_scales[{i + 4}] must have no elements, because int4 weights have "
                f"no zero points here, got shape {[*given[i + 4].shape]}"
            )
        alpha = given[i + 6]
        if alpha.numel():
            check_tensor(_NAME, f"quant_scales[{i + 6}]", alpha, x, torch.float32, experts)


def _int4_scales(given: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor | None, ...]:
    """Return the scales as the steps take them: flat, and None for one without elements."""
    of_columns = tuple(scale.view(-1) if scale.numel() else None for scale in given[2:4])
    alphas = tuple(scale if scale.numel() else None for scale in given[6:8])
    return *given[:2], *of_columns, *alphas


def _bytes_of(scale: torch.Tensor) -> torch.Tensor:
    """Return scales of MXFP4 as the product takes them: bytes.

    Engines pass them as they are, or as one int32 for four of them.
    """
    if scale.dtype in (torch.int32, torch.float8_e8m0fnu) and scale.is_contiguous():
        return scale.view(torch.uint8)
    return scale


def _run(
    s: Scratch,
    call: Call,
    x: torch.Tensor,
    selected: torch.Tensor,
    weights: torch.Tensor | None,
    first_expert: int,
    fc1: torch.Tensor,
    fc2: torch.Tensor,
    scales: tuple[Any, ...],
    fc1_bias: torch.Tensor | None,
    fc2_bias: torch.Tensor | None,
    numbers: tuple[torch.Tensor | None, ...],
    output: torch.Tensor,
    tactics: Sequence[int],
    enable_pdl: bool | None,
) -> None:
    """Launch the steps."""
    mode, pdl = call.mode, enable_pdl
    SORT.launch(selected, first_expert, s.offsets, s.rows, s.row_experts, s.counts, pdl)
    act = int(call.function)
    # Where nothing differs between experts, the function does not read which expert a row has.
    alpha = scales[4] if mode is Mode.INT4 else None
    differs = mode is Mode.FP8 or any(t is not None for t in (fc1_bias, *numbers, alpha))
    of_rows = s.first, s.row_experts if differs else None, s.offsets, act, fc1_bias, *numbers
    # Tactics of the product with scales of blocks are none of that with the function.
    is_fused = call.is_fused and (mode is Mode.HALF or tactics[0] < 0)
    if is_fused and mode is Mode.HALF:
        PERMUTE.launch(x, s.rows, s.tokens, pdl)
        of_sums = act, fc1_bias, *numbers
        GROUPED_GATED.launch(s.tokens, fc1, s.offsets, *of_sums, s.active, tactics[0])
        _multiply(s.active, fc2, (), s.offsets, s.second, tactics[1])
        scale = None
    elif mode in (Mode.HALF, Mode.MXFP4):
        PERMUTE.launch(x, s.rows, s.tokens, pdl)
        _multiply(s.tokens, fc1, scales[:1], s.offsets, s.first, tactics[0])
        ACTIVATION.launch(*of_rows, None, None, False, EPS, s.active, None, pdl)
        _multiply(s.active, fc2, scales[1:], s.offsets, s.second, tactics[1])
        scale = None
    elif mode is Mode.INT4:
        of_fc1, of_fc2, of_tokens, of_active, _, scale = scales
        SCALE_COLUMNS.launch(x, of_tokens, None, s.rounded, pdl)
        PERMUTE.launch(s.rounded, s.rows, s.tokens, pdl)
        products = s.first.dtype
        grouped_mm_int4(s.tokens, fc1, of_fc1, s.offsets, s.first, products, tactic=tactics[0])
        ACTIVATION.launch(*of_rows, alpha, None, False, EPS, s.active, None, pdl)
        SCALE_COLUMNS.launch(s.active, of_active, s.offsets, s.active, pdl)
        grouped_mm_int4(s.active, fc2, of_fc2, s.offsets, s.second, products, tactic=tactics[1])
    elif mode is Mode.FP8:
        dequant, quant, scale, _ = scales
        PERMUTE.launch(x, s.rows, s.tokens, pdl)
        grouped_mm_fp8(s.tokens, fc1, s.offsets, None, s.first, s.first.dtype, tactic=tactics[0])
        ACTIVATION.launch(*of_rows, dequant, quant, False, EPS, s.active, None, pdl)
        grouped_mm_fp8(s.active, fc2, s.offsets, None, s.second, s.second.dtype, tactic=tactics[1])
    else:
        of_fc1, of_fc2 = (scale.mT for scale in scales)
        PERMUTE_QUANT.launch(x, s.rows, s.tokens, s.token_scales, pdl)
        active_scales = s.active_scales.mT
        if is_fused:
            GROUPED_SWIGLU_FP8.launch(
                *(s.tokens, fc1, s.token_scales, scales[0], s.offsets, s.active, active_scales),
                *(EPS, -1),
            )
        else:
            of_tokens = s.tokens, fc1, s.token_scales.mT, of_fc1, s.offsets
            group_gemm_fp8_nt_groupwise(*of_tokens, out=s.first, choice=tactics[0])
            ACTIVATION.launch(*of_rows, None, None, False, EPS, s.active, active_scales, pdl)
        group_gemm_fp8_nt_groupwise(
            *(s.active, fc2, active_scales, of_fc2, s.offsets), out=s.second, choice=tactics[1]
        )
        scale = None
    of_rows = s.second, s.rows, weights, s.row_experts, scale
    FINALIZE.launch(*of_rows, output, fc2_bias, call.ranks, pdl)


def _multiply(
    a: torch.Tensor,
    b: torch.Tensor,
    scales: tuple[torch.Tensor, ...],
    offsets: torch.Tensor,
    out: torch.Tensor,
    tactic: int,
) -> None:
    """Write the products of 16-bit rows with weights of 16 bits, or of MXFP4 with their scales."""
    if scales:
        grouped_mm_mxfp4(a, b, scales[0], offsets, out, out.dtype, tactic=tactic)
    else:
        grouped_mm_bf16(a, b, offsets, out, out.dtype, tactic=tactic)


def _fill(made: dict[str, Any]) -> None:
    selected = made["token_selected_experts"]
    numbers = torch.arange(selected.numel(), device=selected.device)
    experts = len(made["fc1_expert_weights"])
    selected.copy_((numbers * 7 % experts).view(selected.shape))
    for name in ("fc1_expert_weights", "fc2_expert_weights"):
        made[name].mul_(made[name].shape[-1] ** -0.5)


@precast_api(
    trace=TraceTemplate(
        op_type="moe",
        name_prefix="cutlass_fused_moe",
        description="Computes a mixture of experts, from tokens and their experts to results.",
        axes={
            "num_tokens": Var(sample=6),
            "topk": Const("k", sample=2),
            "num_local_experts": Const("e", sample=4),
            "hidden_size": Const("h", multiple=16),
            "intermediate_size": Const("i", multiple=16),
            "fc1_size": Const("", value="2 * intermediate_size"),
        },
        inputs={
            "input": Tensor(["num_tokens", "hidden_size"], dtype="bfloat16"),
            "token_selected_experts": Tensor(["num_tokens", "topk"], dtype="int32"),
            "token_final_scales": Tensor(["num_tokens", "topk"], dtype="float32"),
            "fc1_expert_weights": Tensor(
                ["num_local_experts", "fc1_size", "hidden_size"], dtype="bfloat16"
            ),
            "fc2_expert_weights": Tensor(
                ["num_local_experts", "hidden_size", "intermediate_size"], dtype="bfloat16"
            ),
        },
        outputs={"output": Tensor(["num_tokens", "hidden_size"], dtype="bfloat16")},
        reference=cutlass_fused_moe_reference,
        tags=["moe"],
        fixed={"output_dtype": Dtype("bfloat16"), "quant_scales": None},
        fill=_fill,
    )
)
@op("moe_permute")
def cutlass_fused_moe(
    input: torch.Tensor,
    token_selected_experts: torch.Tensor,
    token_final_scales: torch.Tensor | None,
    fc1_expert_weights: torch.Tensor,
    fc2_expert_weights: torch.Tensor,
    output_dtype: torch.dtype,
    quant_scales: Sequence[torch.Tensor] | None,
    fc1_expert_biases: torch.Tensor | None = None,
    fc2_expert_biases: torch.Tensor | None = None,
    input_sf: torch.Tensor | None = None,
    swiglu_alpha: torch.Tensor | None = None,
    swiglu_beta: torch.Tensor | None = None,
    swiglu_limit: torch.Tensor | None = None,
    tp_size: int = 1,
    tp_rank: int = 0,
    ep_size: int = 1,
    ep_rank: int = 0,
    cluster_size: int = 1,
    cluster_rank: int = 0,
    output: torch.Tensor | None = None,
    enable_alltoall: bool = False,
    use_deepseek_fp8_block_scale: bool = False,
    use_w4_group_scaling: bool = False,
    use_mxfp8_act_scaling: bool = False,
    min_latency_mode: bool = False,
    use_packed_weights: bool = False,
    use_wfp4afp8_humming: bool = False,
    tune_max_num_tokens: int = 8192,
    enable_pdl: bool | None = None,
    activation_type: int = ActivationType.Swiglu,
    swizzled_input_sf: bool = True,
    use_fused_finalize: bool = True,
    profile_ids: Sequence[int] | None = None,
    workspace_buffer: torch.Tensor | None = None,
    *,
    clamped_relu2_limit: torch.Tensor | None = None,
    situ_beta: torch.Tensor | None = None,
    situ_linear_beta: torch.Tensor | None = None,
    backend: str = "cutlass",
) -> list[torch.Tensor]:
    r"""Compute a mixture of experts, from tokens and their experts to their results.

    .. math::

        out_t = \mathrm{round}\left(\sum_s scale_{t,s} \cdot \left(act(x_t W_{1,e}^T + b_{1,e})
        W_{2,e}^T + b_{2,e}\right)\right), \quad e = selected_{t,s}

    Slots whose expert another rank has add nothing here; ranks add up their results.

    Parameters
    ----------
    input : torch.Tensor
        ``[tokens, hidden]``, contiguous, on a CUDA device: bfloat16 or float16, or float8_e4m3fn
        (see Modes in the notes).
    token_selected_experts : torch.Tensor
        ``[tokens, slots]``, int32, contiguous: the experts of each token, of all ranks. Any number
        that is not one of this rank's experts is skipped; a token may have an expert twice.
    token_final_scales : torch.Tensor or None
        ``[tokens, slots]``, float32, contiguous: the weights of the experts' results. None: 1.
    fc1_expert_weights : torch.Tensor
        ``[experts, 2 inter, hidden]``, contiguous: the experts of this rank. The first half of the
        rows is the linear part (w3, up) and the second the gate (w1); without a gate there are
        ``inter`` rows. MXFP4 and int4: uint8, of half as many columns.
    fc2_expert_weights : torch.Tensor
        ``[experts, hidden, inter]``, contiguous, of the same dtype; up to 1024 experts. MXFP4
        and int4: half as many columns.
    output_dtype : torch.dtype
        bfloat16 or float16.
    quant_scales : sequence of torch.Tensor or None
        Contiguous. None or ignored for 16-bit weights; for the others see Modes in the notes.
    fc1_expert_biases : torch.Tensor, optional
        ``[experts, 2 inter]`` or ``[experts, inter]`` of ``output_dtype``, contiguous. Default:
        none.
    fc2_expert_biases : torch.Tensor, optional
        ``[experts, hidden]`` of ``output_dtype``, contiguous; added on ``tp_rank`` 0 alone.
        Default: none.
    input_sf : torch.Tensor, optional
        Only None: no mode here has scales of the input.
    swiglu_alpha, swiglu_beta, swiglu_limit : torch.Tensor, optional
        ``[experts]``, float32, contiguous: the numbers of SwigluBias, which Swiglu becomes if one
        of them is given. Default: 1, 0 and infinity.
    tp_size, tp_rank : int
        Ranks that split ``inter``, and which of them this is. Default: 1 and 0.
    ep_size, ep_rank : int
        Ranks that have ``experts`` experts each, and which of them this is. Default: 1 and 0.
    cluster_size, cluster_rank : int
        Only 1 and 0.
    output : torch.Tensor, optional
        ``[tokens, hidden]`` of ``output_dtype``, contiguous. Default: a new tensor.
    enable_alltoall : bool
        Whether tokens came from other ranks, with experts that this rank does not have. Without
        effect, as such slots are always skipped.
    use_deepseek_fp8_block_scale : bool
        Whether weights are float8_e4m3fn with scales of blocks. Default: False.
    use_w4_group_scaling : bool
        Whether weights are MXFP4, or int4 with ``use_packed_weights``. Default: False.
    use_packed_weights : bool
        Whether weights are int4: see Modes in the notes. Default: False.
    use_mxfp8_act_scaling, min_latency_mode, use_wfp4afp8_humming : bool
        Only False: no kernel has these modes.
    tune_max_num_tokens : int
        Without effect, as nothing is tuned.
    activation_type : int
        An :class:`ActivationType`, as :func:`moe_activation` takes it. Default: Swiglu.
    swizzled_input_sf : bool
        Without effect without ``input_sf``.
    use_fused_finalize : bool
        Without effect: results are always added in the same order.
    profile_ids : sequence of int, optional
        The ``tactic`` of both grouped products, -1 for what their launcher expects to be the
        fastest; with it, calls of few tokens take grouped products, too (see the notes). Default:
        -1 for both.
    workspace_buffer : torch.Tensor, optional
        Scratch memory, uint8 or int8 with one dimension, at a multiple of 128 bytes; as many bytes
        as :func:`cutlass_fused_moe_workspace_size` says for as many tokens, or more. Calls that may
        run at the same time need one each. Without effect while ``torch.compile`` traces. Default:
        new memory.
    clamped_relu2_limit, situ_beta, situ_linear_beta : torch.Tensor, optional
        Only None: no kernel computes these functions.
    backend : str
        Only ``"cutlass"``, FlashInfer's default, which are precast's own kernels.

    Returns
    -------
    list of torch.Tensor
        ``output``, or a new tensor, alone in a list.

    Raises
    ------
    BackendSupportedError
        A mode, or an ``activation_type``, that no kernel has; the message lists what there is.
    ValueError
        A tensor that is not on a CUDA device; a dtype, shape, device, strides or alignment other
        than above; sizes that are no multiples of 8 (16 with FP8, 128 with scales of blocks, MXFP4
        and int4); a rank outside of its group; an ``output`` that overlaps another argument; a
        workspace that is too small.

    Notes
    -----
    Modes:

    - ``input``, weights and ``output_dtype`` are all bfloat16 or all float16. The results of both
      products and of the activation are rounded to it; those of the first product are not on
      compute capability 9.0 with a gated function, where one kernel computes both.
    - ``input`` and weights are float8_e4m3fn. ``quant_scales``, float32, are the factor of the
      first product of each expert ``[experts]``, what activations are multiplied by before they are
      rounded (one number, or ``[experts]``), the factor of the second product ``[experts]``, and
      one number that is not read. Products are bfloat16 before these factors.
    - ``use_deepseek_fp8_block_scale``: ``input`` is bfloat16 or float16, weights float8_e4m3fn.
      ``quant_scales`` are those of the weights in blocks of 128 x 128, float32: ``[experts,
      ceil(2 inter / 128), hidden / 128]`` and ``[experts, hidden / 128, inter / 128]``. Tokens and
      activations are quantised as :func:`moe_permute_quant` does. The results of the first product
      are rounded to ``output_dtype``; they are not on compute capability 9.0 with Swiglu, without
      its numbers and without ``fc1_expert_biases``, if an expert has at least 32 rows on average,
      where one kernel computes both, unless ``profile_ids`` are given.
    - ``use_w4_group_scaling``: ``input`` and ``output_dtype`` are bfloat16, weights uint8 with two
      e2m1 numbers in a byte, as :func:`interleave_moe_weights_for_sm90_mixed_gemm` returns them.
      ``quant_scales`` are the ue8m0 scales of both weights as
      :func:`interleave_moe_scales_for_sm90_mixed_gemm` returns them: ``[experts, 2 inter / 64,
      hidden / 128, 16, 16]`` and ``[experts, hidden / 64, inter / 128, 16, 16]``, uint8, or what
      their ``.view`` as int32 or float8_e8m0fnu is. Results are rounded as with bfloat16 weights.
    - ``use_w4_group_scaling`` with ``use_packed_weights``: ``input`` and ``output_dtype`` are
      bfloat16, weights uint8 with two int4 numbers in a byte, as
      :func:`interleave_moe_weights_for_sm90_mixed_gemm` returns them with ``"int4"``. The eight
      ``quant_scales`` are those of both weights, bfloat16, as
      :func:`interleave_moe_scales_for_sm90_mixed_gemm` returns them with a group size of 128:
      ``[experts, 2 inter / 64, hidden / 128, 8, 8]`` and ``[experts, hidden / 64, inter / 128, 8,
      8]``; what the columns of tokens and of activations are multiplied by before they are rounded
      to e4m3 (:func:`moe_scale_columns`), bfloat16 with ``hidden`` and ``inter`` elements, or none:
      1; two without elements, which would be zero points; and the factors of both products of each
      expert, float32 ``[experts]``, or without elements: 1. Products and activations are bfloat16
      before they are multiplied.

    Up to eight tokens whose experts have at most 48 MiB of FP8 (288 MiB on compute capability 9.0)
    or 144 MiB of 16-bit weights, if no two tokens have the same one, take two launches in the place
    of six where the function is Swiglu without biases, weights have 16 bits or scales of blocks,
    ``output_dtype`` is that of ``input``, sizes are multiples of 128, all tokens have at most 128
    slots, and tokens and activations fit into shared memory: eight tokens, and ``tokens * slots *
    inter`` numbers of the weights' type, have at most 72 KiB. They round in the same places.

    The order of rows is stable, and slots are added in float32 in their order, so equal arguments
    give equal bits, with every value of ``use_fused_finalize``. Experts without tokens are not
    read. Allocates only a missing ``output`` and a missing workspace; nothing is read by the host,
    so that a CUDA graph may be replayed with other experts; not differentiable.

    Examples
    --------
    >>> import torch, precast
    >>> x = torch.ones(2, 8).half()
    >>> up_gate, down = torch.ones(2, 16, 8).half(), torch.ones(2, 8, 8).half()
    >>> experts = torch.tensor([[0], [1]], dtype=torch.int32)
    >>> with precast.reference_mode():
    ...     out = precast.fused_moe.cutlass_fused_moe(
    ...         x, experts, torch.tensor([[1.0], [0.5]]), up_gate, down, torch.float16, None)[0]
    >>> out[:, 0]
    tensor([511.7500, 255.8750], dtype=torch.float16)
    """
    tensors = {
        "input": input,
        "token_selected_experts": token_selected_experts,
        "token_final_scales": token_final_scales,
        "fc1_expert_weights": fc1_expert_weights,
        "fc2_expert_weights": fc2_expert_weights,
        "fc1_expert_biases": fc1_expert_biases,
        "fc2_expert_biases": fc2_expert_biases,
        "swiglu_alpha": swiglu_alpha,
        "swiglu_beta": swiglu_beta,
        "swiglu_limit": swiglu_limit,
        "output": output,
        "workspace_buffer": workspace_buffer,
    }
    flags = (
        ("use_mxfp8_act_scaling", bool(use_mxfp8_act_scaling)),
        ("min_latency_mode", bool(min_latency_mode)),
        ("use_wfp4afp8_humming", bool(use_wfp4afp8_humming)),
        ("input_sf", input_sf is not None),
        ("situ_beta", situ_beta is not None),
        ("situ_linear_beta", situ_linear_beta is not None),
        ("cluster_size", cluster_size != 1 or cluster_rank != 0),
    )
    options = Options(
        output_dtype,
        activation_type,
        use_deepseek_fp8_block_scale,
        use_w4_group_scaling,
        bool(use_packed_weights),
        (tp_size, tp_rank),
        (ep_size, ep_rank),
        flags,
        backend,
        clamped_relu2_limit is not None,
    )
    if profile_ids is not None and len(profile_ids) != 2:
        raise ValueError(
            f"{_NAME}: profile_ids must contain [gemm1_profile, gemm2_profile], got {profile_ids!r}"
        )
    scales = tuple(quant_scales or ())
    # torch.compile traces no function that remembers, and addresses are no part of what it traces.
    if torch.compiler.is_compiling():
        call = _checked(options, scales, **tensors)
    else:
        call = known_call(_checked, options, scales, tensors)
        check_places(_NAME, call.mode, scales, tensors)
    mode, sizes = call.mode, call.sizes
    if mode is Mode.HALF:
        scales = ()
    elif mode is Mode.MXFP4:
        scales = tuple(_bytes_of(scale) for scale in scales)
    elif mode is Mode.INT4:
        scales = _int4_scales(scales)
    if output is None:
        output = input.new_empty(sizes.tokens, sizes.hidden, dtype=output_dtype)
    few = call.few if profile_ids is None else None
    # Why not with what is remembered: that is about what is legal, this about what is fast.
    item = fc2_expert_weights.element_size()
    if few is not None and is_faster(*sizes[:5], item, is_hopper(input.device)):
        h = scratch_of(workspace_buffer, input, few, call.total).active
        FEW_TOKENS.launch(
            *(input, token_selected_experts, token_final_scales, fc1_expert_weights),
            *(fc2_expert_weights, *(scales or (None, None)), ep_rank * sizes.experts),
            *(h, output, enable_pdl),
        )
        return [output]
    scratch = scratch_of(workspace_buffer, input, call.layout, call.total)
    numbers = swiglu_alpha, swiglu_beta, swiglu_limit
    _run(
        *(scratch, call, input, token_selected_experts, token_final_scales),
        *(ep_rank * sizes.experts, fc1_expert_weights, fc2_expert_weights, scales),
        *(fc1_expert_biases, fc2_expert_biases if tp_rank == 0 else None, numbers, output),
        *((-1, -1) if profile_ids is None else profile_ids, enable_pdl),
    )
    return [output]


def _checked(options: Options, quant_scales: tuple[torch.Tensor, ...], **t: Any) -> Call:
    """Return what a call computes; raise unless a kernel does, and its tensors are legal.

    It looks at everything but addresses, so that equal calls need it once.
    """
    if options.backend != "cutlass":
        if options.backend == "cake":
            raise unsupported(_NAME, "backend='cake'")
        raise ValueError(f"{_NAME}: backend must be 'cutlass', got {options.backend!r}")
    if options.has_clamp:
        raise ValueError(
            f"{_NAME}: clamped_relu2_limit is supported only with ActivationType.ClampedRelu2, "
            f"which no kernel computes; pass None"
        )
    x, selected, output_dtype = t["input"], t["token_selected_experts"], options.output_dtype
    fc1, fc2 = t["fc1_expert_weights"], t["fc2_expert_weights"]
    mode = mode_of(
        *(_NAME, x.dtype, fc1.dtype, output_dtype, options.use_deepseek_fp8_block_scale),
        options.use_w4_group_scaling,
        options.use_packed_weights,
        options.flags,
    )
    numbers = t["swiglu_alpha"], t["swiglu_beta"], t["swiglu_limit"]
    function = function_of(_NAME, options.activation_type, numbers)
    check_ranks(_NAME, tp=options.tp, ep=options.ep)
    sizes = sizes_of(_NAME, x, selected, fc1, fc2, function, mode)
    tokens, slots, experts, hidden = sizes[:4]
    f32 = torch.float32
    for name, dtype, shape in (
        ("token_final_scales", f32, (tokens, slots)),
        ("fc1_expert_biases", output_dtype, (experts, sizes.inputs)),
        ("fc2_expert_biases", output_dtype, (experts, hidden)),
        ("swiglu_alpha", f32, (experts,)),
        ("swiglu_beta", f32, (experts,)),
        ("swiglu_limit", f32, (experts,)),
        ("output", output_dtype, (tokens, hidden)),
    ):
        check_tensor(_NAME, name, t[name], x, dtype, *shape)
    _check_scales(quant_scales, x, mode, sizes)
    layout, total = scratch_layout(mode, x.dtype, output_dtype, sizes)
    if t["workspace_buffer"] is not None and not torch.compiler.is_compiling():
        check_workspace(_NAME, t["workspace_buffer"], x, total)
    of_expert = sizes.rows / (experts * options.ep[0])
    fused = is_fused(mode, function, x.device, t["fc1_expert_biases"], of_expert)
    can_be_few = (
        mode in (Mode.HALF, Mode.FP8_BLOCKS)
        and function is ActivationType.Swiglu
        and x.dtype is output_dtype
        and t["fc1_expert_biases"] is None
        and t["fc2_expert_biases"] is None
        and tokens > 0
        and fits(tokens, slots, experts, hidden, sizes.inter, fc2.element_size())
    )
    few = few_layout(mode, x.dtype, sizes) if can_be_few else None
    return Call(mode, function, fused, sizes, options.ep[0], layout, total, few)


@precast_api
def cutlass_fused_moe_workspace_size(
    max_num_tokens: int,
    hidden_size: int,
    intermediate_size: int,
    num_experts_total: int,
    top_k: int,
    *,
    x_dtype: torch.dtype,
    weight_dtype: torch.dtype,
    output_dtype: torch.dtype = torch.bfloat16,
    activation_type: int = ActivationType.Swiglu,
    tp_size: int = 1,
    tp_rank: int = 0,
    ep_size: int = 1,
    ep_rank: int = 0,
    min_latency_mode: bool = False,
    use_deepseek_fp8_block_scale: bool = False,
    use_w4_group_scaling: bool = False,
    use_mxfp8_act_scaling: bool = False,
    use_fused_finalize: bool = True,
    use_packed_weights: bool = False,
    use_wfp4afp8_humming: bool = False,
    device: torch.device | str | int | None = None,
    backend: str = "cutlass",
) -> int:
    """Return the bytes of scratch memory that :func:`cutlass_fused_moe` needs.

    Parameters
    ----------
    max_num_tokens : int
        The most tokens of a call. A buffer for them serves calls with fewer.
    hidden_size : int
        The columns of tokens and results.
    intermediate_size : int
        The columns between both products, those of the last dimension of ``fc2_expert_weights``;
        of MXFP4 and int4 twice as many.
    num_experts_total : int
        The experts of all ranks.
    top_k : int
        The slots of a token.
    x_dtype, weight_dtype, output_dtype : torch.dtype
        The dtypes of tokens, weights and results. Default of the last: bfloat16.
    device : torch.device, optional
        Without effect: the size does not depend on the GPU.
    activation_type : int
        An :class:`ActivationType`. Default: Swiglu.
    tp_size, tp_rank, ep_size, ep_rank : int
        As :func:`cutlass_fused_moe` takes them.
    min_latency_mode, use_mxfp8_act_scaling, use_wfp4afp8_humming : bool
        Only False.
    use_deepseek_fp8_block_scale, use_w4_group_scaling, use_packed_weights : bool
        As :func:`cutlass_fused_moe` takes them.
    use_fused_finalize : bool
        Without effect.
    backend : str
        Only ``"cutlass"``.

    Returns
    -------
    int
        Bytes.

    Raises
    ------
    BackendSupportedError
        A mode, or an ``activation_type``, that no kernel has.
    ValueError
        A size that is not positive or no multiple of what the mode needs; a rank outside of its
        group; experts that ranks cannot share equally; another backend.

    Examples
    --------
    >>> import torch, precast
    >>> precast.fused_moe.cutlass_fused_moe_workspace_size(
    ...     1, 8, 8, 2, 1, x_dtype=torch.half, weight_dtype=torch.half, output_dtype=torch.half)
    1536
    """
    name = "cutlass_fused_moe_workspace_size"
    if backend != "cutlass":
        raise ValueError(f"{name}: backend must be 'cutlass', got {backend!r}")
    for argument, size in (
        ("max_num_tokens", max_num_tokens),
        ("hidden_size", hidden_size),
        ("intermediate_size", intermediate_size),
        ("num_experts_total", num_experts_total),
        ("top_k", top_k),
    ):
        if size <= 0:
            raise ValueError(f"{name}: {argument} must be positive, got {size}")
    check_ranks(name, tp=(tp_size, tp_rank), ep=(ep_size, ep_rank))
    if num_experts_total % ep_size:
        raise ValueError(
            f"{name}: num_experts_total must be divisible by ep_size, {ep_size}, got "
            f"{num_experts_total}"
        )
    mode = mode_of(
        *(name, x_dtype, weight_dtype, output_dtype, use_deepseek_fp8_block_scale),
        use_w4_group_scaling,
        use_packed_weights,
        (
            ("use_mxfp8_act_scaling", use_mxfp8_act_scaling),
            ("min_latency_mode", min_latency_mode),
            ("use_wfp4afp8_humming", use_wfp4afp8_humming),
        ),
    )
    function = function_of(name, activation_type, ())
    experts = num_experts_total // ep_size
    sizes = Sizes(max_num_tokens, top_k, experts, hidden_size, intermediate_size, function.is_gated)
    check_sizes(name, sizes, mode)
    return scratch_layout(mode, x_dtype, output_dtype, sizes)[1]
