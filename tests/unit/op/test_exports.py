# SPDX-License-Identifier: Apache-2.0
"""What the TOML files export, the kernels, the public functions and the references: one set."""

from __future__ import annotations

import inspect
import re
import sys

import pytest
import torch

import precast
from precast._op.dispatch import kernels
from precast._op.export import Export
from precast._plan.installed import plan
from precast.trace import make_inputs, registered

EXPORTS = [(op.name, export) for op in plan().config.ops.values() for export in op.exports]


def test_the_exports_are_the_kernels():
    assert {(kernel.op, kernel.export) for kernel in kernels().values()} == set(EXPORTS)
    assert {export for _, export in EXPORTS} <= kernels().keys()
    assert [(name, kernel.name) for name, kernel in kernels().items() if name != kernel.name] == []


@pytest.mark.parametrize("name", kernels())
def test_a_kernel_has_a_public_function_with_a_docstring_and_a_reference(name):
    function = getattr(precast, kernels()[name].function)
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


def public_arguments_of(kernel):
    """From the export's arguments to the public ones by name, where that is more than a name."""
    if isinstance(kernel, Export):
        return kernel.public_arguments
    if kernel.public is None:
        return None

    def by_position(args):
        values = kernel.public(*args)
        names = inspect.signature(getattr(precast, kernel.function)).parameters
        return None if values is None else dict(zip(names, values, strict=True))

    return by_position


def _leaves(value):
    return value if isinstance(value, tuple) else (value,)


@pytest.mark.parametrize("kernel", kernels().values(), ids=kernels())
def test_schema_reference_and_public_signature_agree(kernel):
    schema = torch._C.parse_schema(f"precast::{kernel.name}{kernel.schema}")
    names = [argument.name for argument in schema.arguments]
    assert list(kernel.parameters) == names
    public = inspect.signature(getattr(precast, kernel.function)).parameters
    if isinstance(kernel, Export):
        # What is declared are arguments of the public function, but for outputs that it makes and
        # what public arguments are derived from.
        declared = [p for p in kernel.declaration.parameters if not p.is_constant]
        sources = [inspect.signature(f).parameters for f in kernel.derived.values()]
        assert {*kernel.derived} <= {*public} - {p.name for p in declared}
        if kernel.traced:
            written = {p.name for p in declared if p.written}
            assert {p.name for p in declared} - {*public} <= written.union(*sources)
        assert kernel.first_tensor in names
        assert any(argument.is_write for argument in schema.arguments)
        return
    assert list(inspect.signature(kernel.reference).parameters) == names
    if inspect.isclass(getattr(precast, kernel.function)):
        assert kernel.public(*(torch.zeros(()) for _ in names)) is None
    elif kernel.public is None:
        # Outputs may be arguments of the export alone; what is only said for a new output (its
        # dtype, its layout) does not reach it.
        common = [name for name in names if name in public]
        assert [name for name in public if name in names] == common
        written = {argument.name for argument in schema.arguments if argument.is_write}
        assert {*names} - {*public} <= written
        new = {*public} - {*names}
        assert all(public[name].default is not inspect.Parameter.empty for name in new)
    else:
        given = kernel.public(*(torch.zeros(()) for _ in names))
        assert given is None or len(given) == len(public)
    assert kernel.first_tensor == names[0]
    assert any(argument.is_write for argument in schema.arguments)


@pytest.mark.parametrize(
    ("function", "template"),
    [
        pytest.param(function, template, id=template.name_prefix)
        for function, template in registered()
        if any(
            public_arguments_of(k) for k in kernels().values() if k.function == function.__name__
        )
    ],
)
def test_what_a_compiled_call_passes_on_is_what_the_caller_gave(function, template, monkeypatch):
    """The export's arguments, as those of the public function again: nothing changes places."""
    given = make_inputs(function, template, dtype=torch.bfloat16, device="cpu", seed=3)
    passed = []
    for kernel in kernels().values():
        said_by = public_arguments_of(kernel)
        if said_by is not None and kernel.function == function.__name__:

            def reference(*args, said_by=said_by, run=kernel.reference):
                passed.append(said_by(args))
                run(*args)

            monkeypatch.setattr(kernel, "reference", reference)
    bound = inspect.signature(function).bind(**given)
    bound.apply_defaults()
    with precast.reference_mode():
        function(**given)
    said = [public for public in passed if public is not None]
    assert len(said) == 1
    for name, now in said[0].items():
        if name not in bound.arguments:  # An output that the function made.
            continue
        for left, right in zip(_leaves(bound.arguments[name]), _leaves(now), strict=True):
            if isinstance(left, torch.Tensor):
                same = left.data_ptr() == right.data_ptr() and left.shape == right.shape
                assert same, name
            elif left is not None:
                assert left == right, name
