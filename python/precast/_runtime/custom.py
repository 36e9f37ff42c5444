# SPDX-License-Identifier: Apache-2.0
"""Kernels of the user, which are built, cached and loaded like those of precast."""

from __future__ import annotations

import re
from collections.abc import Sequence
from os import PathLike
from pathlib import Path

from precast._jit.cuda_major import jit_cuda_major
from precast._plan.config import Arch
from precast._plan.installed import plan
from precast._runtime.jit_spec import JitSpec

_INCLUDE_FLAG = re.compile(
    r"-I|-isystem|-iquote|-include|--include-path|--system-include|--pre-include"
)


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
        If an argument is a string and must be a list.

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
    for flag in extra_cuda_cflags:
        if _INCLUDE_FLAG.match(flag):
            raise ValueError(
                f"extra_cuda_cflags: {flag!r} would hide headers from the fingerprint, so that a "
                f"change of them would not recompile. Fix: pass extra_include_paths"
            )
    if re.fullmatch(r"[a-z][a-z0-9_]*", name) is None:
        raise ValueError(f"name must be lower case letters, digits and '_', got {name!r}")
    paths = [Path(source).absolute() for source in sources]
    for path in paths:
        if path.suffix not in (".cu", ".cc", ".cpp"):
            raise ValueError(f"sources: {path.name} has an unknown suffix; legal: .cu, .cc, .cpp")
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
