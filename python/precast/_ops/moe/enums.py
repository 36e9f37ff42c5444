# SPDX-License-Identifier: Apache-2.0
"""Numbers that name choices of a mixture of experts; the values are FlashInfer's."""

from __future__ import annotations

from enum import IntEnum

#: The numbers of SwiGLU where a caller gives none: ``x * sigmoid(alpha * x) * (y + beta)``, with
#: ``x`` and ``y`` clamped to ``limit``, which is the largest float32.
DEFAULT_SWIGLU_ALPHA = 1.0
DEFAULT_SWIGLU_BETA = 0.0
DEFAULT_SWIGLU_LIMIT = (2 - 2**-23) * 2.0**127


class _Named(IntEnum):
    """An enum whose ``repr`` is a Python expression, so that it survives in configurations."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}.{self.name}"


class RoutingMethodType(_Named):
    """The order of steps from router logits to the experts of a token and their weights."""

    Default = 0
    Renormalize = 1
    DeepSeekV3 = 2
    Llama4 = 3
    RenormalizeNaive = 4
    TopK = 5
    SigmoidRenorm = 6
    MiniMax2 = 7
    Sigmoid = 8
    TopKSigmoid = 9
    Unspecified = 10


class ActivationType(_Named):
    """The function between the two matrix products of an expert."""

    Gelu = 0
    Relu = 1
    Silu = 2
    Swiglu = 3
    Geglu = 4
    SwigluBias = 5
    Relu2 = 6
    SwigluStep = 7
    GegluTanh = 8
    Identity = 9
    Situ = 10
    InvalidType = 11
    ClampedRelu2 = 12

    @property
    def is_gated(self) -> bool:
        """Whether half of its input is a gate of the other half."""
        return self in _GATED


_GATED = frozenset(
    {
        ActivationType.Swiglu,
        ActivationType.Geglu,
        ActivationType.SwigluBias,
        ActivationType.SwigluStep,
        ActivationType.GegluTanh,
        ActivationType.Situ,
    }
)


def is_gated_activation(activation_type: int | ActivationType) -> bool:
    """Whether half of an activation's input is a gate of the other half.

    Parameters
    ----------
    activation_type : int or ActivationType
        The activation, or its number.

    Returns
    -------
    bool
        True for the members of the SwiGLU family.

    Raises
    ------
    ValueError
        If the number is that of no activation.

    Examples
    --------
    >>> is_gated_activation(ActivationType.Swiglu), is_gated_activation(1)
    (True, False)
    """
    try:
        return ActivationType(activation_type).is_gated
    except ValueError:
        legal = ", ".join(f"{member.value} ({member.name})" for member in ActivationType)
        raise ValueError(
            f"is_gated_activation: activation_type must be one of {legal}, got {activation_type!r}"
        ) from None
