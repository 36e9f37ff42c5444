# SPDX-License-Identifier: Apache-2.0
"""One declaration an export: schema, checks, calls and the body of a plain op follow from it.

An op that only passes its arguments on has no body of its own::

    _SCALE = Export(
        "scale", "scale",
        "input:T[*size] factor:float out!:like(input) enable_pdl:pdl",
        reference=scale_reference,
    )

    @precast_api(trace=...)
    @launches(_SCALE)
    def scale(input, factor, out=None, enable_pdl=None) -> torch.Tensor:
        \"\"\"...\"\"\"

One that has more to do calls the export from its body and is decorated with :func:`op`::

    @precast_api(trace=...)
    @op("rope")
    def apply_rope(q, k, indptr, offsets, rotary_dim=None, ...):
        size = q.shape[-1] if rotary_dim is None else rotary_dim
        q_rope, k_rope = torch.empty_like(q), torch.empty_like(k)
        _APPLY_ROPE.launch(q, k, indptr, offsets, size, ..., q_rope, k_rope)
        return q_rope, k_rope
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

from precast._base.errors import UnsupportedConfigError
from precast._base.torch import torch
from precast._op import mode as _mode
from precast._op.declaration import AXES, Declaration, Kind, TensorKind
from precast._op.decorators import CheckedOp, decorated, served_by
from precast._op.dispatch import KERNELS, Kernel
from precast._op.matcher import check_arguments, check_memory
from precast._op.requirement import Requirement
from precast._op.scalars import RAW_ERRORS, Arguments, check_ranges
from precast._op.torch_ops import torch_ops

P = ParamSpec("P")
R = TypeVar("R")


class Export(Kernel):
    """An exported function of an op's modules, and what its declaration says of it.

    Parameters
    ----------
    op : str
        The op of ``aot_configs/<op>.toml``.
    name : str
        The exported function.
    declaration : str
        Its arguments, in the language of :mod:`precast._op.declaration`.
    reference : callable
        Plain PyTorch out of place. It takes public arguments by name, those that it has; what it
        returns is copied to the arguments that are written, in their order. None for an argument
        that is None.
    check : callable, optional
        What reference mode checks besides the declaration: takes public arguments by name, and the
        export's name as ``export``, those that it has, and raises.
    write : callable, optional
        In place of ``reference``: takes public arguments by name and writes to them.
    new : mapping of str to str or callable, optional
        How :func:`launches` makes an output that the caller leaves out, where it is not like
        another tensor: a source, or a function that takes public arguments by name, and the
        export's name as ``export``. A function that takes the output itself is also called with
        one that the caller gave, or must give, and returns it.
    derived : mapping of str to callable, optional
        Public arguments that the export does not get, found again from what it gets: the dtype of
        a new output, a flag that chose its layout. Each takes declared arguments by name. A
        declared argument is named here if callers give it in another form than the export gets.
    kinds : mapping of str to Kind, optional
        The family's own kinds of arguments.
    key : str, optional
        The source of what follows the dtypes in the key: sizes that are axes of the module, and
        the device. Default: the device of the tensor with the first axis.
    around : callable, optional
        What runs in place of the module's function: takes that, then the export's arguments.
    adapt : callable, optional
        As :class:`Kernel` takes it.
    function : str, optional
        The public function that calls it, where that has another name.
    error_name : str, optional
        What errors of reference mode start with. Default: the public function.
    torch_name : str, optional
        The name of its torch op, where several public functions call one export.
    reads_host, on_host : bool
        As :class:`Kernel` takes them.
    traced : bool
        Whether a call of it is a call of the public function. False for a helper that runs first.

    Attributes
    ----------
    launch : callable
        Takes the declared arguments by position and runs the module's function, or the torch op of
        the same name while ``torch.compile`` traces.
    """

    def __init__(
        self,
        op: str,
        name: str,
        declaration: str,
        *,
        reference: Callable[..., Any] | None = None,
        check: Callable[..., None] | None = None,
        write: Callable[..., None] | None = None,
        new: Mapping[str, str | Callable[..., Any]] | None = None,
        derived: Mapping[str, Callable[..., Any]] | None = None,
        kinds: Mapping[str, Kind] | None = None,
        key: str | None = None,
        around: Callable[..., None] | None = None,
        adapt: Callable[[Callable[..., None], int], Callable[..., None]] | None = None,
        reads_host: bool = False,
        on_host: bool = False,
        function: str | None = None,
        error_name: str | None = None,
        torch_name: str | None = None,
        traced: bool = True,
    ) -> None:
        self.declaration = Declaration(declaration, kinds)
        self.new = dict(new or {})
        self.derived = dict(derived or {})
        self.traced = traced
        self._check = check
        self._reference = reference
        self._write = write
        super().__init__(
            op,
            name,
            schema=self.declaration.schema,
            reference=self._run,
            key=self._key_of,
            function=function,
            name=torch_name,
            around=around,
            adapt=adapt,
            reads_host=reads_host,
            on_host=on_host,
        )
        self.error_name = error_name or self.function
        self.first_tensor = (self.declaration.axis(AXES[0]) or self.declaration.tensors[0]).name
        self.key_source = self._key_source(key or f"{self.first_tensor}.get_device()")
        names: dict[str, Any] = {}
        parameters = ", ".join(p.name for p in self.declaration.parameters if not p.is_constant)
        source = f"def {self.name}({parameters}):\n{self.launch_source('    ', names)}\n"
        exec(source, names)
        self.launch: Callable[..., None] = names[self.name]
        self._key_function: Callable[..., tuple[Any, ...]] | None = None

    @property
    def out_of_place(self) -> Callable[..., Any]:
        """The reference, which takes public arguments by name and returns what is written."""
        assert self._reference is not None
        return self._reference

    # -- source ----------------------------------------------------------------------------------

    def _key_source(self, last: str) -> str:
        """The items of the key of the table, from the public arguments: dtypes, then ``last``."""
        tensors = self.declaration.tensors
        parts = []
        for letter in AXES:
            parameter = self.declaration.axis(letter)
            if parameter is None:
                continue
            source = f"{parameter.name}.dtype"
            if parameter.optional:  # An output that is left out has the dtype of the first axis.
                source = (
                    f"({tensors[0].name} if {parameter.name} is None else {parameter.name}).dtype"
                )
            parts.append(source)
        # The comma at the end makes a tuple of one item, too.
        return f"{', '.join([*parts, last])},"

    def _key_of(self, *args: Any) -> tuple[Any, ...]:
        """The key from the export's own arguments."""
        if self._key_function is None:
            parameters = ", ".join(self.parameters)
            self._key_function = eval(f"lambda {parameters}: ({self.key_source})")
        return self._key_function(*args)

    def launch_source(self, indent: str, names: dict[str, Any]) -> str:
        """The statements that run it, from the public arguments; they use what is in ``names``."""
        for parameter in self.declaration.parameters:
            if isinstance(parameter.kind, Kind):
                names.update(parameter.kind.names)
        names["_torch"], names["_ops"] = torch, torch_ops
        names[f"_table_{self.name}"] = self
        passed = ", ".join(parameter.source for parameter in self.declaration.parameters)
        lines = [
            "if _torch.compiler.is_compiling():",
            f"    _ops.{self.name}({passed})",
            "else:",
            f"    _table_{self.name}[{self.key_source}]({passed})",
        ]
        return "\n".join(indent + line for line in lines)

    def output_source(self, name: str, is_given: bool, names: dict[str, Any]) -> str:
        """The statement that makes an output, or nothing where callers must bring it."""
        source = self._allocation(name)
        if callable(source):
            taken = inspect.signature(source).parameters
            passed = ", ".join(repr(self.function) if key == "export" else key for key in taken)
            names[f"_new_{name}"] = source
            source, is_given = f"_new_{name}({passed})", is_given and name not in taken
        if source is None:
            return ""
        return f"if {name} is None: {name} = {source}" if is_given else f"{name} = {source}"

    def _allocation(self, name: str) -> str | Callable[..., Any] | None:
        if name in self.new:
            return self.new[name]
        kind = next(p.kind for p in self.declaration.parameters if p.name == name)
        if isinstance(kind, TensorKind) and kind.like and not (kind.axis or kind.dtypes):
            return f"_torch.empty_like({kind.like})"
        return None

    # -- reference mode --------------------------------------------------------------------------

    def public_arguments(self, args: tuple[Any, ...]) -> dict[str, Any] | None:
        """The public arguments of a call, by name; None where another export says them."""
        if not self.traced:
            return None
        given = self.declaration.decoded(args)
        return {**given, **self._found(given)}

    def _found(self, given: dict[str, Any]) -> dict[str, Any]:
        return {key: f(**accepted(f, given)) for key, f in self.derived.items()}

    def explain(self, *args: Any) -> None:
        """Raise what reference mode raises for arguments of :attr:`launch`; nothing is written."""
        given: dict[str, Any] = dict.fromkeys(p.name for p in self.declaration.parameters)
        names = (p.name for p in self.declaration.parameters if not p.is_constant)
        given.update(zip(names, args, strict=True))
        self._check_given(given)

    def _check_given(self, given: dict[str, Any]) -> None:
        """Check declared arguments; public ones besides them give errors their names."""
        check_ranges(self.error_name, self.declaration.ranges, given)
        check_arguments(self.error_name, self.declaration, given)
        if self._check is not None:
            self._check(**accepted(self._check, {**given, "export": self.error_name}))
        check_memory(self.error_name, self.declaration, given)

    def _run(self, *args: Any) -> None:
        """The reference with the arguments of the export: check, compute, write."""
        given = self.declaration.decoded(args)
        given = {**self._found(given), **given}
        self._check_given(given)
        if self._write is not None:
            self._write(**accepted(self._write, given))
            return
        assert self._reference is not None
        results = self._reference(**accepted(self._reference, given))
        if not isinstance(results, tuple):
            results = (results,)
        for parameter, result in zip(self.declaration.written, results):
            output = given[parameter.name]
            if output is not None:  # One number may be written to an output of any rank.
                output.copy_(result.reshape(output.shape) if output.numel() == 1 else result)


def accepted(function: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the arguments that ``function`` takes."""
    parameters = inspect.signature(function).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return dict(given)
    return {name: value for name, value in given.items() if name in parameters}


# -- decorators -----------------------------------------------------------------------------------


def launches(
    export: Export,
    returns: Sequence[str] | None = None,
    explain: Callable[..., None] | None = None,
) -> Callable[[Callable[P, R]], CheckedOp[P, R]]:
    """Give a function without a body the call that its export declares.

    Outputs that are None are made, the export runs, and the outputs are returned, unless the
    function is annotated to return None.

    Parameters
    ----------
    export : Export
        What runs.
    returns : sequence of str, optional
        The outputs that are returned, or the source of what is. Default: all that are written.
    explain : callable, optional
        As :func:`op` takes it.
    """

    def decorate(function: Callable[P, R]) -> CheckedOp[P, R]:
        signature = inspect.signature(function)
        names: dict[str, Any] = {}
        lines: list[str] = []
        written = [parameter.name for parameter in export.declaration.written]
        optional = [p.name for p in signature.parameters.values() if p.default is None]
        for name in written:
            if name in optional or name in export.new or name not in signature.parameters:
                lines.append(export.output_source(name, name in optional, names))
        body = "\n".join("    " + line for line in lines if line)
        body += ("\n" if lines else "") + export.launch_source("    ", names)
        if signature.return_annotation not in (None, "None"):
            body += f"\n    return {', '.join(returns or written)}"
        return _decorated(function, export.op, body, names, explain)

    return decorate


def op(
    name: str,
    explain: Callable[..., None] | None = None,
    backends: Mapping[str, Callable[..., Any]] | None = None,
    heuristic: Callable[..., Sequence[str]] | None = None,
    chosen_by_body: bool = False,
) -> Callable[[Callable[P, R]], CheckedOp[P, R]]:
    """Decorate a function whose body calls exports of an op.

    Parameters
    ----------
    name : str
        The op of ``aot_configs/<name>.toml``, which says what GPUs it runs on.
    explain : callable, optional
        Called when a call has failed with one of Python's own errors, or because there is no module
        for it, and no argument that must be a tensor is to blame. Takes arguments of the function
        by name, and its name as ``export``, and raises the error that names the wrong one.
    backends : mapping of str to callable, optional
        A check for each value of the function's argument ``backend``, in place of ``name``'s GPUs.
    heuristic : callable, optional
        Puts the backends that suit a call in order, best first, for ``backend="auto"``.
    chosen_by_body : bool
        Whether the body itself takes ``"auto"`` and refuses what is no backend, so that a call
        pays for no validation. The loader refuses a GPU that a backend has no module for.
    """

    def decorate(function: Callable[P, R]) -> CheckedOp[P, R]:
        parameters = inspect.signature(function).parameters.values()
        passed = ", ".join(
            f"{p.name}={p.name}" if p.kind is p.KEYWORD_ONLY else p.name for p in parameters
        )
        body = f"    return _function({passed})"
        names = {"_function": function}
        return _decorated(function, name, body, names, explain, backends, heuristic, chosen_by_body)

    return decorate


def _decorated(
    function: Callable[P, R],
    op_name: str,
    body: str,
    names: dict[str, Any],
    explain: Callable[..., None] | None = None,
    backends: Mapping[str, Callable[..., Any]] | None = None,
    heuristic: Callable[..., Sequence[str]] | None = None,
    chosen_by_body: bool = False,
) -> CheckedOp[P, R]:
    """The op's methods, and the body inside of what explains a call that failed."""
    parameters = inspect.signature(function).parameters.values()
    name = function.__name__

    def declarations() -> list[Declaration]:
        exports = (k for k in KERNELS.values() if isinstance(k, Export))
        return [export.declaration for export in exports if export.function == name]

    arguments = Arguments(function, declarations=declarations)
    names.update(_arguments=arguments, _Unsupported=UnsupportedConfigError, _torch=torch)
    passed = f"{{{', '.join(f'{p.name!r}: {p.name}' for p in parameters)}}}"
    explained = ""
    if explain is not None:
        taken = inspect.signature(explain).parameters.values()
        every = any(p.kind is p.VAR_KEYWORD for p in taken)
        asked = {t.name for t in taken}
        given = {"export": repr(name), **{p.name: p.name for p in parameters}}
        told = ", ".join(f"{key}={value}" for key, value in given.items() if every or key in asked)
        names["_explain"] = explain
        explained = (
            "    except (AttributeError, IndexError, RuntimeError, TypeError, _Unsupported) "
            "as error:\n"
            f"        _arguments.check({passed})\n"
            f"        _explain({told})\n"
            f"        _arguments.check_ranks(error, {passed})\n        raise\n"
        )

    def source(validation: str) -> str:
        inner = "\n".join("    " + line for line in f"{validation}{body}".split("\n"))
        return (
            f"    if _reference and not _torch.compiler.is_compiling():\n"
            f"        _arguments.check({passed})\n"
            f"    try:\n{inner}\n{explained}"
            f"    except {RAW_ERRORS} as error:\n"
            f"        _arguments.check({passed})\n"
            f"        _arguments.check_ranks(error, {passed})\n        raise"
        )

    common = None if backends else served_by(op_name)
    requirement = Requirement(name, dict(backends or {}), common, heuristic, chosen_by_body)
    result = decorated(function, requirement, source, names)
    _mode.follow(result.__globals__)  # type: ignore[attr-defined]
    return result
