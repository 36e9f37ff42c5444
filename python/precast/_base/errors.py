# SPDX-License-Identifier: Apache-2.0
"""The exceptions of precast.

An exception that engines expect under an unusual type is a class that is both that type and
``ValueError``, so that either ``except`` clause catches it.
"""

from __future__ import annotations

from typing import Any


class ConfigError(ValueError):
    """A file of ``aot_configs/`` says something the planner cannot accept."""


class EnvironmentVariableError(ValueError):
    """An environment variable of precast holds a value that has no meaning."""


class MissingJITCacheError(RuntimeError):
    """A compile would be needed and the policy forbids it.

    Attributes
    ----------
    spec : precast.jit.JitSpec or None
        What would have been compiled.
    """

    def __init__(self, message: str, spec: Any = None) -> None:
        super().__init__(message)
        self.spec = spec


class MissingKernelError(MissingJITCacheError):
    """No source, prebuilt or compiled, provides the kernel that a call needs."""


class UnsupportedConfigError(ValueError):
    """A configuration outside the axes that ``aot_configs/<op>.toml`` declares."""


class ToolchainError(RuntimeError):
    """No compiler was found, or compiler, headers and driver do not agree."""


class CompileError(RuntimeError):
    """A compiler command failed; the message shows it, its first errors and the known cause."""


class CacheDirectoryError(RuntimeError):
    """The JIT cache directory cannot be used."""


class LoadError(RuntimeError):
    """A shared library was found and accepted, but did not load."""


class ProviderError(RuntimeError):
    """A set of prebuilt modules is not the set that was planned."""


class MissingPackageError(ImportError):
    """An optional package is not installed; the message has the pip command."""


class DumpError(ValueError):
    """A dump of a call cannot be replayed: it is not whole, or its function is not here."""


class BundleError(RuntimeError):
    """An offline bundle cannot be made from these wheels, or a wheel cannot be had."""


class BackendSupportedError(RuntimeError):
    """An op, or the backend asked for, does not support this device."""


class UnsupportedTargetError(BackendSupportedError, UnsupportedConfigError):
    """An op does not exist for a device's architecture, whatever its other axes."""


class OutputShapeError(AssertionError, ValueError):
    """``out`` has the wrong shape (an ``AssertionError`` where engines expect one)."""


class DtypeRuntimeError(RuntimeError, ValueError):
    """A dtype or layout is not accepted (a ``RuntimeError`` where engines expect one)."""


class PlanMismatchError(AssertionError, ValueError):
    """A run asks for what its plan is not for (an ``AssertionError`` where engines expect one)."""


class CacheLayoutError(KeyError, ValueError):
    """A KV cache or its layout is of no known kind (a ``KeyError`` where engines expect one)."""

    __str__ = Exception.__str__  # KeyError quotes its message.


# The kinds that compiled modules throw by name; the loader registers them with tvm-ffi.
FFI_KINDS: tuple[type[Exception], ...] = (OutputShapeError, DtypeRuntimeError)
