# SPDX-License-Identifier: Apache-2.0
"""Keys and values of multi-head latent attention in e4m3.

Source: DeepSeek-AI, DeepSeek-V2, arXiv:2405.04434.
"""

from __future__ import annotations

from precast._base.rounding import saturated
from precast._base.torch import torch
from precast._op.export import Export, op
from precast._op.validation import check_rank
from precast.api_logging import precast_api
from precast.trace import Const, Scalar, Tensor, TraceTemplate, Var
from precast.trace.registry import by_form

BACKENDS = ("auto", "specialized", "cake")


def concat_mla_kv_quant_fp8_reference(
    kv_nope: torch.Tensor, k_pe: torch.Tensor, nope_dim: int = 128
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`concat_mla_kv_quant_fp8` in plain PyTorch on any device, out of place."""
    tokens, heads, _ = kv_nope.shape
    rope = k_pe.reshape(tokens, 1, k_pe.shape[-1]).expand(-1, heads, -1)
    parts = torch.cat([kv_nope[..., :nope_dim], rope], dim=-1), kv_nope[..., nope_dim:]
    key, value = (saturated(part.float(), torch.float8_e4m3fn) for part in parts)
    return key, value.contiguous()


def _check(
    export: str, kv_nope: torch.Tensor, k_pe: torch.Tensor, nope_dim: int, key: torch.Tensor
) -> None:
    tokens, heads, kv_dim = kv_nope.shape
    if not 1 <= nope_dim < kv_dim:
        raise ValueError(
            f"{export}: nope_dim must be from 1 to below kv_nope's last dimension, {kv_dim}, got "
            f"{nope_dim}"
        )
    check_rank(export, "k_pe", k_pe, 2, 3)
    rope_dim = k_pe.shape[-1]
    if k_pe.shape not in ((tokens, rope_dim), (tokens, 1, rope_dim)):
        raise ValueError(
            f"{export}: k_pe must have shape [{tokens}, rope_dim] or [{tokens}, 1, rope_dim], got "
            f"{[*k_pe.shape]}"
        )
    if key.shape != (tokens, heads, nope_dim + rope_dim):
        raise ValueError(
            f"{export}: key must have shape {[tokens, heads, nope_dim + rope_dim]}, got "
            f"{[*key.shape]}"
        )


_PACK = Export(
    "concat_mla_kv_quant_fp8",
    "concat_mla_kv_quant_fp8",
    "kv_nope:T=f16|bf16[tokens,heads,kv_dim] k_pe:T nope_dim:int key!:e4m3[tokens,heads,key_dim] "
    "value!:e4m3[tokens,heads,kv_dim-nope_dim] enable_pdl:pdl_on",
    reference=concat_mla_kv_quant_fp8_reference,
    check=_check,
)


def _template(of_one_head: bool) -> TraceTemplate:
    axes: dict[str, Var | Const] = {
        "num_tokens": Var(),
        "num_heads": Const("h"),
        "kv_dim": Const("kv", sample=48),
        "rope_dim": Const("rope"),
        "key_dim": Const("", value="nope_dim + rope_dim"),
        "v_dim": Const("", value="kv_dim - nope_dim"),
    }
    if of_one_head:
        axes["one"] = Const("", "All heads share it.", value="1")
    middle = ["one"] * of_one_head
    return TraceTemplate(
        op_type="mla_paged",
        name_prefix="concat_mla_kv_quant_fp8" + "_one_head" * of_one_head,
        description="Packs keys and values of latent attention from the up-projection, in e4m3.",
        axes=axes,
        inputs={
            "kv_nope": Tensor(["num_tokens", "num_heads", "kv_dim"]),
            "k_pe": Tensor(["num_tokens", *middle, "rope_dim"]),
            "nope_dim": Scalar("int32", sample=32),
        },
        outputs={
            "keys": Tensor(["num_tokens", "num_heads", "key_dim"], "key", "float8_e4m3fn"),
            "values": Tensor(["num_tokens", "num_heads", "v_dim"], "value", "float8_e4m3fn"),
        },
        reference=concat_mla_kv_quant_fp8_reference,
        tags=["mla"],
    )


_TRACE = by_form(lambda k_pe=None, **call: getattr(k_pe, "ndim", 2) == 3, _template, [False, True])


@precast_api(trace=_TRACE)
@op("concat_mla_kv_quant_fp8")
def concat_mla_kv_quant_fp8(
    kv_nope: torch.Tensor,
    k_pe: torch.Tensor,
    key: torch.Tensor | None = None,
    value: torch.Tensor | None = None,
    *,
    nope_dim: int = 128,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    r"""Pack the keys and values of MLA's prefill in e4m3, from the up-projection.

    .. math::

        key_{t,h} &= \mathrm{sat}(kv_{t,h,:nope\_dim},\ k\_pe_t) \\
        value_{t,h} &= \mathrm{sat}(kv_{t,h,nope\_dim:})

    Parameters
    ----------
    kv_nope : torch.Tensor
        ``[tokens, heads, nope_dim + v_dim]``: the up-projection, keys and values side by side;
        bfloat16 or float16, on a CUDA device; stride 1 in the last dimension, any in the others.
    k_pe : torch.Tensor
        ``[tokens, rope_dim]`` or ``[tokens, 1, rope_dim]``, dtype and device of ``kv_nope``,
        strides likewise, such as the last columns of the latent; every head gets it.
    key : torch.Tensor, optional
        ``[tokens, heads, nope_dim + rope_dim]``, float8_e4m3fn, strides likewise. Overwritten.
        Default: a new tensor.
    value : torch.Tensor, optional
        ``[tokens, heads, v_dim]``, likewise.
    nope_dim : int
        Where keys end and values begin. Default: 128.
    backend : str
        ``auto``, or FlashInfer's ``specialized`` and ``cake``: there is one kernel.

    Returns
    -------
    tuple of torch.Tensor
        ``key`` and ``value``.

    Raises
    ------
    ValueError
        A tensor that is not on a CUDA device; a dtype, shape, device or strides other than above;
        outputs that overlap another argument; another backend.

    Notes
    -----
    Rounded once to nearest even; numbers beyond 448 and infinities saturate, and NaN stays NaN. Any
    sizes; addresses, strides and dimensions that are multiples of 16 bytes are fastest. One launch;
    allocates only missing outputs; safe in CUDA graphs; not differentiable. Source:
    arXiv:2405.04434.

    Examples
    --------
    >>> import torch, precast
    >>> kv, pe = torch.tensor([[[1.0, 500.0, -2.0]]]).half(), torch.tensor([[3.0]]).half()
    >>> with precast.reference_mode():
    ...     key, value = precast.concat_mla_kv_quant_fp8(kv, pe, nope_dim=2)
    >>> key.float().tolist(), value.float().tolist()
    ([[[1.0, 448.0, 3.0]]], [[[-2.0]]])
    """
    if backend not in BACKENDS:
        legal = ", ".join(BACKENDS)
        raise ValueError(
            f"concat_mla_kv_quant_fp8: backend must be one of {legal}, got {backend!r}"
        )
    if key is None or value is None:
        if kv_nope.dim() != 3:
            check_rank("concat_mla_kv_quant_fp8", "kv_nope", kv_nope, 3, 3)
        tokens, heads, kv_dim = kv_nope.shape
        fp8, device = torch.float8_e4m3fn, kv_nope.device
        # A wrong nope_dim gets its error below.
        split = min(max(nope_dim, 0), kv_dim)
        if key is None:
            shape = (tokens, heads, split + k_pe.shape[-1])
            key = torch.empty(shape, dtype=fp8, device=device)
        if value is None:
            value = torch.empty((tokens, heads, kv_dim - split), dtype=fp8, device=device)
    _PACK.launch(kv_nope, k_pe, nope_dim, key, value)
    return key, value
