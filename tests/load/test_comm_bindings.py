# SPDX-License-Identifier: Apache-2.0
"""Numbers, addresses and blocks that the bindings of the all-reduces refuse, as references do."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from binding_calls import Args, Memory, Trial
from build_support import TARGET, Built
from comm_calls import BYTES, comm_calls

from precast._base.driver import device_capabilities
from precast._op.dispatch import kernels
from precast._op.export import Export
from precast._ops.comm.patterns import GROUP
from precast._runtime.library import get_function, load_library

pytestmark = pytest.mark.skipif(
    bool(device_capabilities()), reason="on a GPU, kernels would run on memory of the host"
)

NAN = float("nan")
#: One wrong argument of a call, by kernel, and what the error says. The call of
#: :func:`comm_calls` that the number selects has the other ones.
WRONG: tuple[tuple[str, int, str, Any, str], ...] = (
    ("allreduce_norm", GROUP, "block_quant_group_size", 0, "must be 16, 32, 64 or 128, got 0"),
    ("allreduce_norm", GROUP, "block_quant_group_size", 48, "must be 16, 32, 64 or 128, got 48"),
    ("allreduce_norm", 0, "rms_eps", -1e-6, "rms_eps must be"),
    ("allreduce_norm", 0, "rms_eps", NAN, "rms_eps must be"),
    ("allreduce_norm", 0, "weight_bias", NAN, "weight_bias must"),
    ("custom_all_reduce", 0, "num_ctas", 0, "num_ctas must be 1 to 160, got 0"),
    ("custom_all_reduce", 0, "num_ctas", 161, "num_ctas must be 1 to 160, got 161"),
    ("custom_all_reduce", 0, "reg_buffer_sz_bytes", 2559, "must fit reg_buffer's 2559 bytes"),
    ("vllm_all_reduce", 0, "num_ctas", 0, "num_ctas must be 1 to 160, got 0"),
    ("vllm_all_reduce", 0, "num_ctas", 161, "num_ctas must be 1 to 160, got 161"),
    ("vllm_all_reduce", 0, "reg_buffer_sz_bytes", 2559, "must fit reg_buffer's 2559 bytes"),
    ("vllm_all_reduce", 0, "fa", 1 << 40, "fa must be a handle"),
)


def function_of(built: Built, kernel: Export) -> Callable[..., None]:
    spec = next(s for s in built.specs if s.op == kernel.op and s.arch.name == TARGET)
    function = get_function(load_library(built.library(spec), spec.cuda_major), kernel.export)
    return functools.partial(kernel.around, function) if kernel.around else function


def refused(built: Built, name: str, args: Args, words: str, by_reference: bool = True) -> None:
    """Binding and reference refuse the call in the same words, and write nothing."""
    kernel = kernels()[name]
    assert isinstance(kernel, Export)
    trial = Trial("wrong", (), args)
    memory = Memory(args)
    with pytest.raises(ValueError, match=words):
        function_of(built, kernel)(*trial.for_binding(kernel))
    if by_reference:
        with pytest.raises(ValueError, match=words):
            kernel.reference(*trial.for_reference())
    assert memory.is_unchanged()


@pytest.mark.parametrize(("name", "call", "argument", "value", "words"), WRONG)
def test_wrong_numbers(
    built: Built, name: str, call: int, argument: str, value: Any, words: str
) -> None:
    args = [*comm_calls()[name][call]]
    args[kernels()[name].parameters.index(argument)] = value
    refused(built, name, tuple(args), words)


def test_a_row_that_is_too_long(built: Built) -> None:
    block, world, *_ = args = comm_calls()["allreduce_norm"][0]
    x = torch.ones(1, 16392).bfloat16()
    tensors = (x, x.clone(), x[0].clone(), x.clone(), x.clone(), None, None, None)
    words = "input's last dimension must be at most 16384, got 16392"
    refused(built, "allreduce_norm", (block, world, *tensors, *args[10:]), words)


def test_columns_that_groups_do_not_divide(built: Built) -> None:
    args = [*comm_calls()["allreduce_norm"][GROUP]]
    for at, value in enumerate(args):
        if isinstance(value, torch.Tensor) and value.shape[-1:] == (256,):
            args[at] = value[..., :-8].clone()
    refused(built, "allreduce_norm", tuple(args), "multiple of block_quant_group_size 128, got 248")


@pytest.mark.parametrize("name", ["allreduce", "allreduce_norm"])
def test_a_workspace_of_another_number_of_ranks(built: Built, name: str) -> None:
    """Reference mode runs groups of any size."""
    block, world, *rest = comm_calls()[name][0]
    words = "block must be of a workspace of 2 ranks, got"
    refused(built, name, (block, 4, *rest), f"{words} 2", by_reference=False)
    other = block.clone()
    other[1] = 4
    refused(built, name, (other, world, *rest), f"{words} 4", by_reference=False)


def with_argument(name: str, argument: str, value: Any) -> Args:
    args = comm_calls()[name][0]
    return tuple(value if n == argument else v for n, v in zip(kernels()[name].parameters, args))


def test_addresses_of_a_registered_buffer(built: Built) -> None:
    x, _, buffer, *_ = comm_calls()["custom_all_reduce"][0]
    for address, words in (
        (buffer + 8, "reg_buffer must be a multiple of 16"),
        (x.data_ptr(), "reg_buffer must not overlap inp's memory"),
    ):
        args = with_argument("custom_all_reduce", "reg_buffer", address)
        refused(built, "custom_all_reduce", args, words)
    args = with_argument("vllm_all_reduce", "reg_buffer", buffer + 16)
    refused(built, "vllm_all_reduce", args, "must be registered")


@pytest.mark.parametrize("name", ["custom_all_reduce", "vllm_all_reduce"])
def test_an_output_in_the_registered_buffer(built: Built, name: str) -> None:
    """A peer would read it while it is written."""
    in_place = comm_calls()["custom_all_reduce"][1][0]
    args = with_argument(name, "out", in_place)
    refused(built, name, args, "out must not overlap reg_buffer's memory")


def test_a_block_without_room(built: Built) -> None:
    args = comm_calls()["custom_all_reduce"][0]
    block = args[-1]
    no_signals, no_sums = block.clone(), block.clone()
    no_signals[2] = 64
    no_sums[3:5] = 0  # bytes for sums, and the largest message in one phase
    assert block[3] == BYTES
    words = "must leave [0-9]+ bytes for signals, got 64"
    refused(built, "custom_all_reduce", (*args[:-1], no_signals), words, by_reference=False)
    words = "of 2560 bytes needs 1280 bytes behind the signals of each rank, got 0"
    refused(built, "custom_all_reduce", (*args[:-1], no_sums), words)
