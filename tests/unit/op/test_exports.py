# SPDX-License-Identifier: Apache-2.0
"""What the TOML files export, the kernels, the public functions and the references: one set."""

from __future__ import annotations

import inspect
import re
import sys

import pytest
import torch

import precast
from precast._base.lazy import public_object
from precast._op.dispatch import kernels
from precast._plan.installed import plan
from precast.trace import make_inputs, registered

EXPORTS = [(op.name, export) for op in plan().config.ops.values() for export in op.exports]


def test_the_exports_are_the_kernels():
    assert {(kernel.op, kernel.export) for kernel in kernels().values()} == set(EXPORTS)
    assert {export for _, export in EXPORTS} <= kernels().keys()
    assert [(name, kernel.name) for name, kernel in kernels().items() if name != kernel.name] == []


@pytest.mark.parametrize("name", kernels())
def test_a_kernel_has_a_public_function_with_a_docstring_and_a_reference(name):
    function = public_object(kernels()[name].function)
    if inspect.isclass(function):  # Its methods call kernels.
        function, reference = function.run, function.reference
    else:
        reference = getattr(sys.modules[function.__module__], f"{function.__name__}_reference")
    for documented in (function, reference):
        text = inspect.getdoc(documented) or ""
        sections = set(re.findall(r"^(\w+)\n-+$", text, re.MULTILINE))
        signature = inspect.signature(documented)
        in_place = signature.return_annotation == "None"
        assert sections >= ({"Parameters"} if in_place else {"Parameters", "Returns"})
        for parameter in signature.parameters:
            if parameter == "self" and documented is function:
                continue
            pattern = rf"^(\w+, )*(\*{parameter}$|{parameter}(, \w+)* : )"
            assert re.search(pattern, text, re.MULTILINE), parameter
    assert "Raises" in (inspect.getdoc(function) or "")


def _leaves(value):
    return value if isinstance(value, tuple) else (value,)


@pytest.mark.parametrize("kernel", kernels().values(), ids=kernels())
def test_schema_reference_and_public_signature_agree(kernel):
    schema = torch._C.parse_schema(f"precast::{kernel.name}{kernel.schema}")
    names = [argument.name for argument in schema.arguments]
    assert list(kernel.parameters) == names
    public = inspect.signature(public_object(kernel.function)).parameters
    # What is declared are arguments of the public function, but for outputs that it makes and what
    # public arguments are derived from.
    declared = [p for p in kernel.declaration.parameters if not p.is_constant]
    sources = [inspect.signature(f).parameters for f in kernel.derived.values()]
    assert {*kernel.derived} <= {*public}
    if kernel.traced:
        written = {p.name for p in declared if p.written}
        assert {p.name for p in declared} - {*public} <= written.union(*sources)
    assert kernel.first_tensor in names
    assert any(argument.is_write for argument in schema.arguments)


@pytest.mark.parametrize(
    ("function", "template"),
    [
        pytest.param(function, template, id=template.name_prefix)
        for function, template in registered()
        if any(k.traced for k in kernels().values() if k.function == function.__name__)
    ],
)
def test_what_a_compiled_call_passes_on_is_what_the_caller_gave(function, template, monkeypatch):
    """The export's arguments, as those of the public function again: nothing changes places."""
    given = make_inputs(function, template, dtype=torch.bfloat16, device="cpu", seed=3)
    passed = []
    for kernel in kernels().values():
        if kernel.traced and kernel.function == function.__name__:

            def reference(*args, said_by=kernel.public_arguments, run=kernel.reference):
                passed.append(said_by(args))
                run(*args)

            monkeypatch.setattr(kernel, "reference", reference)
    bound = inspect.signature(function).bind(**given)
    bound.apply_defaults()
    with precast.reference_mode():
        function(**given)
    (said,) = passed
    for name, now in said.items():
        if name not in bound.arguments:  # An output that the function made.
            continue
        for left, right in zip(_leaves(bound.arguments[name]), _leaves(now), strict=True):
            if isinstance(left, torch.Tensor):
                same = left.data_ptr() == right.data_ptr() and left.shape == right.shape
                assert same, name
            elif left is not None:
                assert left == right, name
