# SPDX-License-Identifier: Apache-2.0
"""Make a sound call wrong, argument by argument; ``attention_composed_calls`` has the calls."""

from __future__ import annotations

import inspect
import math
import operator
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from wrong_values import bits, copies, wrong_tensors, wrong_values

#: What some arguments may be, and others may not.
DOUBTFUL = (
    *(None, True, False, 0, 1, 2, -1, -5, 7, 2**31, 2**53, -(2**40), 2**63 - 1),
    *(0.5, 1.0, -1.0, 0.0, 1e-40, -0.0, 3e38, 1e30, np.float32(0.5), np.int64(1)),
    *("x", "NHD", "HND", "auto", "ln", "HN", "ALIBI", "ROPE_LLAMA", "float32", torch.float32),
)
#: They are only there for other backends: what is not None is not supported.
_NONE = ("kv_cache_sf", "skip_softmax_threshold_scale_factor", "use_fp16_softmax")
TWO = 2.0
#: Scales of four heads, which only queries of 8 bits have.
SCALES_OF_HEADS = torch.ones(4)
_NOT_FINITE = (math.nan, math.inf, -math.inf, 1e39)
#: More of what no call can mean by an argument.
_MORE: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(_NONE, (object(), "x", [1.0], 2**70, math.nan)),
    **dict.fromkeys(("q_scale", "k_scale", "v_scale"), _NOT_FINITE),
    "o_scale": (TWO, math.nan, torch.ones(2), np.ones(2)),
    **dict.fromkeys(("custom_mask_d", "packed_custom_mask_d"), (torch.ones(2),)),
    **dict.fromkeys(("block_mask", "kv_block_lens", "q2k_indices"), (torch.ones(2),)),
    **dict.fromkeys(("kv_splits", "use_clc"), (1, "x", 1.5)),
    **dict.fromkeys(("scale_q", "scale_k", "scale_v"), (SCALES_OF_HEADS,)),
    **dict.fromkeys(("R", "C"), (0, -1)),
    "use_profiler": (True,),
    "profiler_buffer": (torch.ones(2),),
    "jit_args": ([], ["x"], 1, "x"),
    "jit_kwargs": ({}, "x"),
    "variant_owns_mask": (True,),
    "self": (None, "x", object()),
}


class Call(NamedTuple):
    """A function with sound arguments, and the wrapper that it is of, if it has a plan."""

    function: Callable[..., Any]
    arguments: dict[str, Any]
    wrapper: Any = None
    #: Values of the tables above that mean something to this function.
    legal: tuple[tuple[str, Any], ...] = ()
    #: Whether its workspace holds nothing between calls.
    has_scratch: bool = False

    def __call__(self) -> Any:
        return self.function(**self.arguments)

    def replaced(self, name: str, value: Any) -> Call:
        return self._replace(arguments={**self.arguments, name: value})


def parameters_of(function: Callable[..., Any]) -> list[inspect.Parameter]:
    parameters = inspect.signature(function).parameters.values()
    return [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def wrong_calls(call: Call) -> Iterator[tuple[str, str, Call]]:
    """Yield the call with each argument wrong: its name, what it is, the call."""
    for parameter in parameters_of(call.function):
        name = parameter.name
        # An empty tuple or dictionary, which is false, leaves a dtype out.
        falsy = (lambda v: v in ((), {})) if name.endswith("data_type") else (lambda v: False)
        for value in [*wrong_values(parameter), *_MORE.get(name, ())]:
            if not falsy(value) and not any(n == name and _is(v, value) for n, v in call.legal):
                yield name, f"{name}={value!r:.40}", call.replaced(name, value)


def _is(legal: object, value: object) -> bool:
    """Whether both are one value: numbers by their value, other objects by identity."""
    return legal is value or (type(legal) is type(value) is float and legal == value)


def assert_wrong_arguments_are_named(make: Callable[[], Call]) -> None:
    """Each argument, made wrong, is refused by its name; the sound call works afterwards."""
    call, found, tried = make(), [], 0
    for argument, words, wrong in wrong_calls(call):
        tried += 1
        try:
            said = outcome(wrong)
        except Exception as error:
            found.append(f"{words} leaked {error!r}")
            continue
        if said is None:
            found.append(f"{words} was accepted")
            call = make()
        elif argument not in said:
            found.append(f"{words} is not named: {said}")
    assert not found, "\n".join(found)
    assert tried > 5
    assert outcome(call) is None


def doubtful_outcomes(
    make: Callable[[], Call], share: float = 1, seed: int = 0
) -> Iterator[tuple[str, str | None]]:
    """Yield calls in words, and how they end, with values that are legal for some arguments.

    ``share`` is the share of the values that are tried, the same ones for the same ``seed``.
    """
    call, chance = make(), random.Random(seed)
    for parameter in parameters_of(call.function):
        name, value = parameter.name, call.arguments.get(parameter.name)
        is_large = isinstance(value, torch.Tensor) and value.numel() > 1 << 12
        if isinstance(value, torch.Tensor) and not is_large:
            values = [("None", None), *wrong_tensors(value)]
        elif not is_large and name != "self":
            values = [(repr(value), value) for value in DOUBTFUL]
        else:
            continue  # A workspace, which may be of many sizes.
        for words, value in values:
            if chance.random() >= share:
                continue
            said = outcome(call.replaced(name, value))
            yield f"{name} {words}", said
            if said is None:
                call = make()


def outcome(call: Call) -> str | None:
    """What a call raises, or None; if it raises, then it has changed nothing."""
    given, planned = _flat(call.arguments), plans_of(call.wrapper)
    before = copies(given)
    try:
        call()
        return None
    except Exception as error:
        is_ours = type(error).__module__.startswith("precast.")
        if not is_ours and type(error) not in (TypeError, ValueError, NotImplementedError):
            raise
        said = str(error)
    after = copies(given)
    if call.has_scratch:
        before.pop("workspace_buffer", None)
    for name, tensor in before.items():
        assert torch.equal(bits(tensor), bits(after[name])), f"{name} has changed: {said}"
    same = map(operator.is_, plans_of(call.wrapper), planned)
    assert all(same), f"the plan has changed: {said}"
    return said


def _flat(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments, and the members of those that are lists."""
    lists = {name: value for name, value in arguments.items() if isinstance(value, (list, tuple))}
    members = {f"{name}[{i}]": x for name, value in lists.items() for i, x in enumerate(value)}
    return {**arguments, **members}


def plans_of(wrapper: Any) -> list[Any]:
    """The plan of a wrapper, or those of its parts."""
    if wrapper is None or hasattr(wrapper, "_plan"):
        return [getattr(wrapper, "_plan", None)]
    values = [v for value in vars(wrapper).values() for v in _members(value)]
    return [part._plan for part in values if hasattr(part, "_plan")]


def _members(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
