# SPDX-License-Identifier: Apache-2.0
"""The exceptions of precast.

Where engines expect an unusual type, the exception is a class that derives from both that type and
``ValueError``, so that either ``except`` clause catches it.
"""

from __future__ import annotations

from typing import Any


class ConfigError(ValueError):
    """A file of ``aot_configs/`` says something the planner cannot accept."""


class EnvironmentVariableError(ValueError):
    """An environment variable of precast holds a value that has no meaning."""


class MissingJITCacheError(RuntimeError):
    """A module must be compiled, but the policy forbids it.

    Attributes
    ----------
    spec : precast.jit.JitSpec or None
        The module that would have been compiled.
    """

    def __init__(self, message: str, spec: Any = None) -> None:
        super().__init__(message)
        self.spec = spec


class MissingKernelError(MissingJITCacheError):
    """The kernel that a call needs is neither prebuilt nor cached, and cannot be compiled."""


class UnsupportedConfigError(ValueError):
    """A configuration lies outside the axes that ``aot_configs/<op>.toml`` declares."""


class ToolchainError(RuntimeError):
    """No compiler was found, or compiler, headers and driver do not agree."""


class CompileError(RuntimeError):
    """A compiler command failed. The message has the command, its first errors and the cause."""


class CacheDirectoryError(RuntimeError):
    """The JIT cache directory cannot be used."""


class LoadError(RuntimeError):
    """A shared library was found and accepted, but did not load."""


class ProviderError(RuntimeError):
    """A set of prebuilt modules is not the set that was planned."""


class MissingPackageError(ImportError):
    """An optional package is not installed; the message has the pip command."""


class DumpError(ValueError):
    """A dump cannot be replayed: it is incomplete, or its function does not exist here."""


class BundleError(RuntimeError):
    """An offline bundle cannot be made from these wheels, or a wheel cannot be fetched."""


class BackendSupportedError(RuntimeError):
    """An op, or the requested backend, does not support this device."""


class UnsupportedTargetError(BackendSupportedError, UnsupportedConfigError):
    """An op has no kernels for the architecture of a device."""


class OutputShapeError(AssertionError, ValueError):
    """``out`` has the wrong shape (an ``AssertionError`` where engines expect one)."""


class DtypeRuntimeError(RuntimeError, ValueError):
    """A dtype or layout is not accepted (a ``RuntimeError`` where engines expect one)."""


class PlanMismatchError(AssertionError, ValueError):
    """A run does not fit its plan (an ``AssertionError`` where engines expect one)."""


class CacheLayoutError(KeyError, ValueError):
    """A KV cache or its layout is unknown (a ``KeyError`` where engines expect one)."""

    __str__ = Exception.__str__  # KeyError quotes its message.


# Compiled modules throw these by name, so they are registered with tvm-ffi.
FFI_KINDS: tuple[type[Exception], ...] = (OutputShapeError, DtypeRuntimeError)

# Tracebacks and pickles show the path that users import from.
for _value in list(globals().values()):
    if isinstance(_value, type) and _value.__module__ == __name__:
        _value.__module__ = "precast.errors"
