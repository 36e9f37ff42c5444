# SPDX-License-Identifier: Apache-2.0
"""What tests of mixtures of experts share: calls, and their results in float64."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

import precast
from precast._base.rounding import saturated
from precast._ops.quantize._reference_8bit import group_quant
from precast.tllm_enums import ActivationType

E4M3 = torch.float8_e4m3fn
#: The error of a row by its length: of 16-bit results in units of their rounding, which products,
#: activation and sum add to; of FP8, where a code next to a boundary may become its neighbour.
UNITS, FP8_ERROR = 3.0, 0.08
COMPUTED = tuple(ActivationType(n) for n in (0, 1, 2, 3, 4, 5, 6, 8, 9))


@dataclasses.dataclass
class Experts:
    """One call, with everything that it may have."""

    x: torch.Tensor
    selected: torch.Tensor
    weights: torch.Tensor | None
    fc1: torch.Tensor
    fc2: torch.Tensor
    dtype: torch.dtype
    scales: list[torch.Tensor] | None = None
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    #: Of MXFP4 and int4: the numbers of both weights, in bfloat16, which holds those of MXFP4
    #: exactly, or in float32.
    values: tuple[torch.Tensor, torch.Tensor] | None = None

    def use_mxfp4(self, fc1: torch.Tensor, fc2: torch.Tensor) -> None:
        """Take these weights in MXFP4, interleaved as an engine does it."""
        (first, first_scale, x), (second, second_scale, y) = mxfp4(fc1), mxfp4(fc2)
        weight = precast.fused_moe.interleave_moe_weights_for_sm90_mixed_gemm
        scale = precast.fused_moe.interleave_moe_scales_for_sm90_mixed_gemm
        self.fc1, self.fc2 = weight(first, "fp4"), weight(second)
        self.scales = [scale(first_scale).view(torch.int32), scale(second_scale, 32)]
        self.values = x, y
        self.options["use_w4_group_scaling"] = True

    def use_int4(self, fc1: torch.Tensor, fc2: torch.Tensor, generator: torch.Generator) -> None:
        """Take these weights in int4, with scales of columns, and factors that undo them."""

        def drawn(*shape: int) -> torch.Tensor:
            return torch.rand(shape, generator=generator, device=fc1.device)

        (first, first_scale, x), (second, second_scale, y) = int4(fc1), int4(fc2)
        weight = precast.fused_moe.interleave_moe_weights_for_sm90_mixed_gemm
        scale = precast.fused_moe.interleave_moe_scales_for_sm90_mixed_gemm
        self.fc1, self.fc2 = weight(first, "int4"), weight(second, "int4")
        none, factors = fc1.new_empty(0), drawn(2, len(fc1)) + 0.5
        self.scales = [
            *(scale(first_scale, 128), scale(second_scale, 128)),
            *((32 * (drawn(n) + 0.5)).bfloat16() for n in (fc1.shape[2], fc2.shape[2])),
            *(none, none, factors[0] / 32, factors[1] / 32),
        ]
        self.values = x, y
        self.options["use_w4_group_scaling"] = self.options["use_packed_weights"] = True

    def run(self, **more: Any) -> torch.Tensor:
        result = precast.fused_moe.cutlass_fused_moe(
            *(self.x, self.selected, self.weights, self.fc1, self.fc2, self.dtype, self.scales),
            **{**self.options, **more},
        )
        assert isinstance(result, list)
        assert len(result) == 1
        out: torch.Tensor = result[0]
        return out

    @property
    def is_blocks(self) -> bool:
        return bool(self.options.get("use_deepseek_fp8_block_scale"))

    @property
    def is_int4(self) -> bool:
        return bool(self.options.get("use_packed_weights"))

    @property
    def is_fp8(self) -> bool:
        return self.scales is not None and self.values is None

    @property
    def sizing(self) -> dict[str, Any]:
        """What the size of a workspace depends on, besides sizes and ranks."""
        return {
            "x_dtype": self.x.dtype,
            "weight_dtype": self.fc1.dtype,
            "use_deepseek_fp8_block_scale": self.is_blocks,
            "use_w4_group_scaling": self.values is not None,
            "use_packed_weights": self.is_int4,
        }

    def of_rank(self, at: slice, **options: Any) -> Experts:
        """The same call with some of the experts, those of one rank."""
        part = dataclasses.replace(
            self, fc1=self.fc1[at], fc2=self.fc2[at], options={**self.options, **options}
        )
        if self.scales is not None:
            shared = (2, 3, 4, 5) if self.is_int4 else ()
            part.scales = [
                s if s.dim() == 0 or i in shared else s[at].contiguous()
                for i, s in enumerate(self.scales)
            ]
        if self.values is not None:
            part.values = self.values[0][at], self.values[1][at]
        for name in ("fc1_expert_biases", "fc2_expert_biases"):
            if name in part.options:
                part.options[name] = part.options[name][at]
        return part

    def plain(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The result in float64, with the quantisation of FP8, and how long rows may be.

        The latter does not cancel: the sum of the lengths of what experts add, each also as long as
        it is on average for the length of its activation.
        """
        o = self.options
        act = ActivationType(o.get("activation_type", ActivationType.Swiglu))
        numbers = [o.get(f"swiglu_{name}") for name in ("alpha", "beta", "limit")]
        sums = torch.zeros(
            len(self.x), self.fc2.shape[1], dtype=torch.float64, device=self.x.device
        )
        lengths = torch.zeros_like(sums[:, 0])
        first_expert = o.get("ep_rank", 0) * len(self.fc1)
        own = self.selected.unique().long() - first_expert
        # Why not all experts: of hundreds, eight tokens have few, and each costs fifty launches.
        for e in own[(own >= 0) & (own < len(self.fc1))].tolist():
            token, slot = (self.selected == first_expert + e).nonzero(as_tuple=True)
            x = self.x[token]
            y = self._first(x, e)
            if o.get("fc1_expert_biases") is not None:
                y = y + o["fc1_expert_biases"][e].double()
            if act.is_gated:
                up, gate = y.chunk(2, dim=1)
                alpha, beta, limit = (None if n is None else n[e].double() for n in numbers)
                y = _gated(act, up, gate, alpha, beta, limit)
            else:
                y = _pointwise(act, y)
            h, second = y.norm(dim=1), self._second(y, e)
            usual = self._second_weight(e).norm() / y.shape[1] ** 0.5
            if self.is_fp8 and not self.is_blocks:
                usual = usual * self._quant_scale(e)
            y, length = second, h * usual + second.norm(dim=1)
            if o.get("fc2_expert_biases") is not None and o.get("tp_rank", 0) == 0:
                y = y + o["fc2_expert_biases"][e].double()
            if self.weights is not None:
                y = y * self.weights[token, slot, None].double()
                length = length * self.weights[token, slot].double()
            sums.index_add_(0, token, y)
            lengths.index_add_(0, token, length)
        return sums, lengths

    def _first(self, x: torch.Tensor, e: int) -> torch.Tensor:
        if self.is_int4:
            return self._multiplied(x, e, 0)
        if self.values is not None:
            return x.double() @ self.values[0][e].double().T
        if self.scales is None:
            return x.double() @ self.fc1[e].double().T
        if self.is_blocks:
            return _rounded(x.float()) @ _block_weight(self.fc1[e], self.scales[0][e]).T
        return x.double() @ self.fc1[e].double().T * self.scales[0][e].double()

    def _multiplied(self, x: torch.Tensor, e: int, number: int) -> torch.Tensor:
        """The first or the second product with int4 weights, of tokens before their scales."""
        assert self.scales is not None
        assert self.values is not None
        of_columns, factors = self.scales[2 + number], self.scales[6 + number]
        x = x.float() * of_columns.float() if of_columns.numel() else x.float()
        y = saturated(x, E4M3).double() @ self.values[number][e].double().T
        return y * factors[e].double() if factors.numel() else y

    def _second(self, h: torch.Tensor, e: int) -> torch.Tensor:
        if self.is_int4:
            return self._multiplied(h, e, 1)
        if self.scales is not None and self.is_blocks:
            h = _rounded(h.float())
        elif self.is_fp8:
            h = saturated(h.float() * self._quant_scale(e), E4M3).double()
        return h @ self._second_weight(e).T

    def _second_weight(self, e: int) -> torch.Tensor:
        """What the second product multiplies by, with all of its scales."""
        if self.values is not None:
            weight = self.values[1][e].double()
            if self.is_int4 and self.scales is not None:
                for scale in (self.scales[3], self.scales[7][e : e + 1]):
                    weight = weight * scale.double() if scale.numel() else weight
            return weight
        if self.scales is None:
            return self.fc2[e].double()
        if self.is_blocks:
            return _block_weight(self.fc2[e], self.scales[1][e])
        return self.fc2[e].double() * self.scales[2][e].double()

    def _quant_scale(self, e: int) -> torch.Tensor:
        by = self.scales[1].reshape(-1) if self.scales is not None else torch.ones(1)
        return by[e if len(by) > 1 else 0]

    def check(self, got: torch.Tensor) -> None:
        """Compare with float64, row by row."""
        assert got.dtype == self.dtype
        want, lengths = self.plain()
        assert got.shape == want.shape
        error = (got.double() - want).norm(dim=1)
        if not self.is_fp8 and not self.is_int4:
            allowed = UNITS * torch.finfo(self.dtype).eps / 2
        else:
            allowed = FP8_ERROR
        # Rows that no expert here has are zero, exactly.
        wrong = (~(error <= allowed * lengths)).nonzero().flatten()
        if len(wrong):
            ratio = (error / lengths)[wrong[:8]].tolist()
            raise AssertionError(
                f"{len(wrong)} of {len(want)} rows: {wrong[:8].tolist()} differ by {ratio} of "
                f"their lengths; {allowed} is allowed"
            )


def _pointwise(act: ActivationType, x: torch.Tensor) -> torch.Tensor:
    if act in (ActivationType.Gelu, ActivationType.Geglu):
        return x * 0.5 * (1 + torch.erf(x / 2**0.5))
    if act is ActivationType.GegluTanh:
        inner = (2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)
        return 0.5 * x * (1 + torch.tanh(inner))
    if act in (ActivationType.Silu, ActivationType.Swiglu):
        return x / (1 + torch.exp(-x))
    if act is ActivationType.Relu:
        return x.clamp(min=0)
    if act is ActivationType.Relu2:
        return x.clamp(min=0) ** 2
    return x


def _gated(
    act: ActivationType,
    up: torch.Tensor,
    gate: torch.Tensor,
    alpha: torch.Tensor | None,
    beta: torch.Tensor | None,
    limit: torch.Tensor | None,
) -> torch.Tensor:
    has_numbers = any(n is not None for n in (alpha, beta, limit))
    if act is not ActivationType.SwigluBias and not (act is ActivationType.Swiglu and has_numbers):
        return _pointwise(act, gate) * up
    if limit is not None:
        gate = torch.minimum(gate, limit)
        up = torch.maximum(torch.minimum(up, limit), -limit)
    scaled = gate if alpha is None else alpha * gate
    return gate / (1 + torch.exp(-scaled)) * (up if beta is None else up + beta)


def _rounded(x: torch.Tensor) -> torch.Tensor:
    """What e4m3 with a scale for each 128 columns makes of float32."""
    codes, scales = group_quant(x, 128, 1e-10, E4M3)
    return codes.double() * scales.double().repeat_interleave(128, 1)


def _block_weight(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    whole = scales.double().repeat_interleave(128, 0).repeat_interleave(128, 1)
    return weight.double() * whole[: weight.shape[0], : weight.shape[1]]


# -- calls ----------------------------------------------------------------------------------------


def quantised(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """An e4m3 weight ``[experts, n, k]`` with scales of blocks of 128 x 128."""
    blocks = weight.float().unflatten(1, (-1, 128)).unflatten(3, (-1, 128))
    scales = blocks.abs().amax((2, 4)) / 448
    codes = (blocks / scales[:, :, None, :, None]).to(E4M3)
    return codes.reshape(weight.shape), scales


def mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Round a weight ``[experts, n, k]`` to MXFP4: packed numbers, scales, values in bf16."""
    groups = weight.float().unflatten(2, (-1, 32))
    exponent = (groups.abs().amax(3) / 6).log2().ceil().clamp(min=-126)
    steps = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6], device=weight.device)
    ratio = groups / exponent.exp2()[..., None]
    between = (steps[1:] + steps[:-1]) / 2
    codes = torch.bucketize(ratio.abs().contiguous(), between).byte()
    values = steps[codes.long()].copysign(ratio) * exponent.exp2()[..., None]
    codes = (codes | ratio.signbit().byte() << 3).flatten(2)
    packed = codes[..., ::2] | codes[..., 1::2] << 4
    return packed, (exponent + 127).byte(), values.flatten(2).bfloat16()


def int4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Round a weight ``[experts, n, k]`` to int4: packed numbers, scales, values in float32."""
    groups = weight.float().unflatten(2, (-1, 128))
    scales = (groups.abs().amax(3) / 7).clamp(min=2.0**-100).bfloat16()
    each = scales.float()[..., None]
    numbers = (groups / each).round().clamp(-8, 7)
    codes = (numbers.to(torch.int8) & 15).byte().flatten(2)
    return codes[..., ::2] | codes[..., 1::2] << 4, scales, (numbers * each).flatten(2)


def random_selection(
    tokens: int, slots: int, experts: int, generator: torch.Generator, skew: float = 0.0
) -> torch.Tensor:
    """Experts of tokens: all different if there are enough, more often the first with a skew."""
    device = generator.device
    popularity = torch.arange(1, experts + 1, device=device).float() ** -skew
    if slots > experts:
        return torch.randint(
            0, experts, (tokens, slots), generator=generator, device=device, dtype=torch.int32
        )
    noise = torch.rand(tokens, experts, generator=generator, device=device).log() / popularity
    return noise.topk(slots, dim=1).indices.int()


def draw(
    tokens: int,
    slots: int,
    experts: int,
    hidden: int,
    inter: int,
    generator: torch.Generator,
    dtype: torch.dtype = torch.bfloat16,
    mode: str = "half",
    act: ActivationType = ActivationType.Swiglu,
    biases: bool = False,
    ep_size: int = 1,
    skew: float = 0.0,
    **options: Any,
) -> Experts:
    """A call with random numbers; ``experts`` are those of a rank."""
    device = generator.device

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device) * scale

    rows = 2 * inter if act.is_gated else inter
    x = normal(tokens, hidden)
    fc1, fc2 = (normal(experts, n, k, scale=k**-0.5) for n, k in ((rows, hidden), (hidden, inter)))
    options["activation_type"] = act
    if ep_size > 1:
        options["ep_size"] = ep_size
    if biases:
        options["fc1_expert_biases"] = normal(experts, rows, scale=0.5).to(dtype)
        options["fc2_expert_biases"] = normal(experts, hidden, scale=0.5).to(dtype)
    if act is ActivationType.SwigluBias:
        for name, low in (("alpha", 1.0), ("beta", 0.5), ("limit", 1.0)):
            drawn = torch.rand(experts, generator=generator, device=device)
            options[f"swiglu_{name}"] = drawn + low
    selected = random_selection(tokens, slots, experts * ep_size, generator, skew)
    weights = torch.rand(tokens, slots, generator=generator, device=device) + 0.1
    call = Experts(x.to(dtype), selected, weights, fc1, fc2, dtype, None, options)
    if mode == "half":
        call.fc1, call.fc2 = fc1.to(dtype), fc2.to(dtype)
    elif mode == "mxfp4":
        call.use_mxfp4(fc1, fc2)
    elif mode == "int4":
        call.use_int4(fc1, fc2, generator)
    elif mode == "blocks":
        (call.fc1, first), (call.fc2, second) = quantised(fc1), quantised(fc2)
        call.scales = [first, second]
        options["use_deepseek_fp8_block_scale"] = True
    else:
        call.x = (x.clamp(-4, 4) * 64).to(E4M3)
        call.fc1, call.fc2 = (fc1 * 64).to(E4M3), (fc2 * 64).to(E4M3)
        each = torch.rand(experts, generator=generator, device=device) + 0.5
        call.scales = [
            each / 64**2,
            torch.tensor(32.0, device=device),
            each.flip(0) / (32 * 64),
            torch.tensor(1 / 64, device=device),
        ]
    return call
