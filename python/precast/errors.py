# SPDX-License-Identifier: Apache-2.0
"""The exceptions of precast.

An exception that engines expect under an unusual type is a class that is both that type and
``ValueError``, so that either ``except`` clause catches it.
"""

from __future__ import annotations

from precast._base.errors import (
    FFI_KINDS,
    BackendSupportedError,
    BundleError,
    CacheDirectoryError,
    CacheLayoutError,
    CompileError,
    ConfigError,
    DtypeRuntimeError,
    DumpError,
    EnvironmentVariableError,
    LoadError,
    MissingJITCacheError,
    MissingKernelError,
    MissingPackageError,
    OutputShapeError,
    PlanMismatchError,
    ProviderError,
    ToolchainError,
    UnsupportedConfigError,
    UnsupportedTargetError,
)

__all__ = [
    "FFI_KINDS",
    "BackendSupportedError",
    "BundleError",
    "CacheDirectoryError",
    "CacheLayoutError",
    "CompileError",
    "ConfigError",
    "DtypeRuntimeError",
    "DumpError",
    "EnvironmentVariableError",
    "LoadError",
    "MissingJITCacheError",
    "MissingKernelError",
    "MissingPackageError",
    "OutputShapeError",
    "PlanMismatchError",
    "ProviderError",
    "ToolchainError",
    "UnsupportedConfigError",
    "UnsupportedTargetError",
]
