# SPDX-License-Identifier: Apache-2.0
"""Kernels of the user, which are built, cached and loaded like those of precast."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from os import PathLike
from pathlib import Path

from precast._jit.cuda_major import jit_cuda_major
from precast._jit.shell_names import is_plain
from precast._plan.config import Arch
from precast._plan.installed import plan
from precast._runtime.jit_spec import JitSpec

#: Flags that add headers or further flags, also among those for the host compiler.
_INCLUDE_FLAG = re.compile(
    r"(?:^|[=,])(?:-I|-isystem|-iquote|-idirafter|-iprefix|-iwithprefix|-isysroot|--sysroot|-B"
    r"|--?include|--?imacros|--system-include|--pre-?include|--options-file|-optf|@)"
)
#: What the shell to which nvcc gives its flags would run.
_SHELL = re.compile(r"[$`\n]")
#: Flags whose value nvcc gives to the shell without quotes, here or in the next element.
_RAW_FLAG = re.compile(r"(?:-X\w+|--[\w-]+-options)(?:=(?P<value>.*))?", re.DOTALL)


def gen_jit_spec(
    name: str,
    sources: Sequence[str | PathLike[str]],
    *,
    extra_cuda_cflags: Sequence[str] = (),
    extra_include_paths: Sequence[str | PathLike[str]] = (),
    exports: Sequence[str] = (),
    arch: str | None = None,
    cuda_major: int | None = None,
) -> JitSpec:
    """Describe a module from your own sources.

    Parameters
    ----------
    name : str
        Lower case letters, digits and underscores. It names the library and its cache folder.
    sources : sequence of path
        ``*.cu`` files go to nvcc, ``*.cc`` and ``*.cpp`` files to the host compiler. Functions are
        exported with ``TVM_FFI_DLL_EXPORT_TYPED_FUNC``. The headers of precast are on the path.
    extra_cuda_cflags : sequence of str
        Further flags of nvcc, after those of precast.
    extra_include_paths : sequence of path
        Further include folders; their headers are part of the fingerprint.
    exports : sequence of str
        Functions that the module exports. Loading fails if one is missing.
    arch : str, optional
        The target, ``"9.0a"`` or ``"sm90a"``; a known capability may have another suffix than the
        targets of precast, ``"10.0a"``. Default: the one target of
        :class:`~precast.compilation_context.CompilationContext` (``PRECAST_CUDA_ARCH_LIST``, else
        the GPU present).
    cuda_major : int, optional
        Default: that of the toolkit that would compile it.

    Returns
    -------
    JitSpec
        Nothing is compiled yet; call ``build_and_load()``.

    Raises
    ------
    ValueError
        If the name, a source or a flag cannot be used, or the target is ambiguous.
    TypeError
        If an argument or an element of a list is of another type.

    Examples
    --------
    >>> spec = gen_jit_spec("my_kernel", ["my_kernel.cu"], arch="9.0a")  # doctest: +SKIP
    >>> spec.build_and_load().get_function("my_kernel")  # doctest: +SKIP
    """
    for argument, value in (
        ("sources", sources),
        ("extra_cuda_cflags", extra_cuda_cflags),
        ("extra_include_paths", extra_include_paths),
        ("exports", exports),
    ):
        if isinstance(value, (str, bytes, PathLike)):
            raise TypeError(f"{argument} must be a list, got {value!r}. Fix: [{value!r}]")
        legal = (str,) if argument in ("extra_cuda_cflags", "exports") else (str, PathLike)
        _check_types(argument, value, legal)
    for argument, item in (("name", name), ("arch", "" if arch is None else arch)):
        if not isinstance(item, str):
            raise TypeError(f"{argument} must be a string, got {item!r}")
    if cuda_major is not None and type(cuda_major) is not int:
        raise TypeError(f"cuda_major must be a whole number such as 13, got {cuda_major!r}")
    _check_flags(extra_cuda_cflags)
    if re.fullmatch(r"[a-z][a-z0-9_]*", name) is None:
        raise ValueError(f"name must be lower case letters, digits and '_', got {name!r}")
    paths = [Path(source).absolute() for source in sources]
    for path in paths:
        if path.suffix not in (".cu", ".cc", ".cpp"):
            raise ValueError(f"sources: {path.name} has an unknown suffix; legal: .cu, .cc, .cpp")
        if not is_plain(path.name):
            raise ValueError(
                f"sources: {path.name!r} must have letters, digits and ._+- alone: compilers "
                f"read other characters in their own way. Fix: rename it"
            )
        if not path.is_file():
            raise ValueError(f"sources: {path} does not exist")
    if len({path.name for path in paths}) != len(paths) or not paths:
        raise ValueError("sources must be one or more files with different names")
    target = plan().arch(arch, any_suffix=True) if arch is not None else _only_target()
    return JitSpec(
        name=name,
        arch=target,
        sources=tuple(str(path) for path in paths),
        exports=tuple(exports),
        include_paths=tuple(Path(p).absolute() for p in extra_include_paths),
        op=name,
        ffi_in_cuda=True,
        **plan().common(cuda_major or jit_cuda_major(plan(), target), tuple(extra_cuda_cflags)),
    )


def _check_types(argument: str, value: Iterable[object], legal: tuple[type, ...]) -> None:
    try:
        items = list(value)
    except TypeError:
        raise TypeError(f"{argument} must be a list, got {value!r}") from None
    for item in items:
        if not isinstance(item, legal):
            names = " or ".join(kind.__name__ for kind in legal)
            raise TypeError(f"{argument} must be a list of {names}, got {item!r} in it")


def _check_flags(flags: Sequence[str]) -> None:
    is_raw = False
    for flag in flags:
        if _INCLUDE_FLAG.search(flag):
            raise ValueError(
                f"extra_cuda_cflags: {flag!r} would hide headers from the fingerprint, so that a "
                f"change of them would not recompile. Fix: pass extra_include_paths"
            )
        match = _RAW_FLAG.fullmatch(flag)
        raw = flag if is_raw else (match["value"] or "" if match else "")
        if _SHELL.search(flag) or re.search(r"[^\w./+@:=,~%-]", raw):
            raise ValueError(
                f"extra_cuda_cflags: nvcc would give {flag!r} to a shell, which changes "
                f"it. Fix: define it in a header of yours"
            )
        is_raw = match is not None and match["value"] is None


def _only_target() -> Arch:
    from precast._plan.compilation_context import CompilationContext

    archs = CompilationContext().archs
    if len(archs) != 1:
        got = ", ".join(a.target for a in archs) or "none (no GPU present)"
        raise ValueError(
            f"arch must be given, because the targets of this machine are: {got}. "
            f"Fix: pass arch='9.0a', or set PRECAST_CUDA_ARCH_LIST to one target"
        )
    return archs[0]
