# SPDX-License-Identifier: Apache-2.0
"""From a call to a loaded function: one dictionary look-up when the function is known."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from precast._base.dtypes import DTYPE_WORDS
from precast._base.lazy import import_all
from precast._op import mode as _mode

#: The kernels of the imported ops by name: that of the export, unless several kernels share one.
KERNELS: dict[str, Kernel] = {}


def kernels() -> dict[str, Kernel]:
    """Every kernel of the library by its name. Imports all ops."""
    import_all()
    return dict(KERNELS)


class Kernel(dict[tuple[Any, ...], Callable[..., None]]):
    """The loaded functions of one export, keyed ``(axis value, ..., device index)``.

    A known key costs one dictionary look-up. For a new key, the loader loads a prebuilt or cached
    module, compiles one, or raises an error that says why it cannot.

    Parameters
    ----------
    op : str
        The op of ``aot_configs/<op>.toml``; its axes, in order, are the first part of a key.
    export : str
        The function to call in the op's modules.
    schema : str
        The torch schema of the export, for ``torch.compile``: ``(Tensor input, ...) -> ()``.
        Outputs are arguments marked as mutated; the same arguments go to export and reference.
    reference : callable
        Plain PyTorch with the arguments of the export; writes its outputs in place.
    key : callable
        From the arguments of the export to the key.
    function : str, optional
        The public function that calls it, where that is not the one of its name.
    name : str, optional
        Its own name, where several public functions call one export. Default: the export's.
    around : callable, optional
        What runs in place of the loaded function, which is its first argument.
    adapt : callable, optional
        Called once with a loaded function and the index of its device. What it returns is called in
        the place of the function.
    reads_host : bool
        Whether it reads memory of the host when it is launched, which a captured graph would not
        read again: the CUDA graphs of ``torch.compile`` leave it out.
    on_host : bool
        Whether CPU tensors run the reference, where FlashInfer's function computes on the CPU.
    """

    def __init__(
        self,
        op: str,
        export: str,
        *,
        schema: str,
        reference: Callable[..., None],
        key: Callable[..., tuple[Any, ...]],
        function: str | None = None,
        name: str | None = None,
        around: Callable[..., None] | None = None,
        adapt: Callable[[Callable[..., None], int], Callable[..., None]] | None = None,
        reads_host: bool = False,
        on_host: bool = False,
    ) -> None:
        super().__init__()
        self.op = op
        self.export = export
        self.schema = schema
        self.reference = reference
        self.key = key
        self.around = around
        self.adapt = adapt
        self.reads_host = reads_host
        self.on_host = on_host
        self.name = name or export
        self.function = function or self.name
        arguments = schema.partition(") ->")[0].lstrip("(").split(", ")
        self.parameters = tuple(argument.split()[-1] for argument in arguments)
        self.first_tensor = self.parameters[0]
        KERNELS[self.name] = self
        _mode.on_change(self.clear)

    def __missing__(self, key: tuple[Any, ...]) -> Callable[..., None]:
        if _mode.is_reference():
            _mode.tell_followers()  # PRECAST_REFERENCE may have been set after import.
            return self._run_reference
        from precast._runtime.library import get_function
        from precast._runtime.loader import loader

        *values, device = key
        if device < 0:
            if self.on_host:
                return self._run_on_host
            raise self._not_on_gpu()
        axes = loader.axis_names(self.op)
        words = {axis: DTYPE_WORDS.get(str(v), v) for axis, v in zip(axes, values)}
        function: Callable[..., None] = get_function(
            loader.load(self.op, words, device), self.export
        )
        if self.adapt is not None:
            function = self.adapt(function, device)
        if self.around is not None:
            function = functools.partial(self.around, function)
        self[key] = function
        if _mode.is_reference():  # Another thread has entered reference mode.
            self.clear()
        return function

    def _not_on_gpu(self) -> ValueError:
        return ValueError(
            f"{self.function}: {self.first_tensor} must be a CUDA tensor, got one that is not on a "
            f"GPU. Fix: move it to a GPU, or set PRECAST_REFERENCE=1 to run the PyTorch references"
        )

    def _run_on_host(self, *args: Any) -> None:
        if not args[self.parameters.index(self.first_tensor)].is_cpu:  # On the meta device.
            raise self._not_on_gpu()
        self._run_reference(*args)

    def _run_reference(self, *args: Any) -> None:
        import torch

        with torch.no_grad():  # Results of a kernel never require grad, either.
            self.reference(*args)

    def call(self, *args: Any) -> None:
        """Call by arguments alone."""
        self[self.key(*args)](*args)


def check_tensors(export: str, tensors: Mapping[str, object]) -> None:
    """Raise a TypeError that names the first argument that is not a tensor, if there is one.

    It is called after a call has failed, so it costs nothing when a call succeeds.
    """
    import torch

    for name, value in tensors.items():
        if not isinstance(value, torch.Tensor):
            raise TypeError(
                f"{export}: {name} must be a torch.Tensor, got {type(value).__name__}"
            ) from None
