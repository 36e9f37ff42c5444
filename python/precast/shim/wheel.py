# SPDX-License-Identifier: Apache-2.0
"""Make the wheel of the package ``flashinfer``, without a build and without a network."""

from __future__ import annotations

import zipfile
from pathlib import Path

from precast._base.trust import record_digest
from precast._base.version import __version__
from precast.shim.facade import PACKAGE, modules, modules_below

DISTRIBUTION = "flashinfer-python"
#: The version of FlashInfer that the newest known version of each engine pins. vLLM compares the
#: public version with its pin; SGLang's pin ``==0.7.2`` takes a local version of 0.7.2 alone.
ENGINES = {"vllm": "0.7.2.post1", "sglang": "0.7.2"}

_MODULE = '''\
"""{name}, served by precast."""

from precast.shim import facade

__getattr__, __dir__ = facade(__name__, "{engine}")
'''
_ROOT = '''\
"""FlashInfer's names, served by precast {precast}."""

from precast.shim import facade

__version__ = "{version}"
__git_commit__ = "precast-{precast}"
__precast__ = "{precast}"

__getattr__, __dir__ = facade(__name__, "{engine}")
'''
_MAIN = '''\
"""Commands of FlashInfer, which have nothing to do here."""

import sys

print(
    "precast {precast} serves flashinfer here. pip installs its kernels: nothing is downloaded.\\n"
    "See what is installed: precast doctor. Install the kernels of this GPU: precast install.\\n"
    "Bring FlashInfer back: pip install --force-reinstall flashinfer-python=={public}",
    file=sys.stderr,
)
'''
_METADATA = """\
Metadata-Version: 2.1
Name: {distribution}
Version: {version}
Summary: FlashInfer's Python API, served by precast
Requires-Dist: precast=={precast}
"""
_WHEEL = """\
Wheel-Version: 1.0
Generator: precast {precast}
Root-Is-Purelib: true
Tag: py3-none-any
"""
_TIME = (2024, 1, 1, 0, 0, 0)  # The same contents give the same wheel.


def shim_version(engine: str, version: str | None = None) -> str:
    """The version of the distribution for an engine, such as ``0.7.2.post1+precast.0.1.0``.

    Parameters
    ----------
    engine : str
        ``vllm`` or ``sglang``.
    version : str, optional
        The version of FlashInfer that it pins. Default: what :data:`ENGINES` says.

    Raises
    ------
    ValueError
        If ``engine`` is unknown, or if ``version`` is no version or has a local part.
    """
    from packaging.version import InvalidVersion, Version

    if engine not in ENGINES:
        raise ValueError(f"unknown engine {engine!r}; legal: {', '.join(ENGINES)}")
    pinned = ENGINES[engine] if version is None else version
    try:
        parsed = Version(pinned)
    except InvalidVersion:
        raise ValueError(f"{pinned!r} is not a version; legal: such as {ENGINES[engine]}") from None
    if parsed.local:
        raise ValueError(
            f"the version {pinned!r} has a local part; legal: what the engine pins, such as "
            f"{parsed.public}"
        )
    # A local version has letters, digits and points alone.
    local = __version__.replace("+", ".").replace("-", ".")
    return f"{parsed}+precast.{local}"


def make_wheel(folder: Path, engine: str = "vllm", version: str | None = None) -> Path:
    """Write the wheel into ``folder``, which is made if it is missing, and return its path.

    Parameters
    ----------
    folder : Path
        Where the wheel goes. A wheel of the same name is replaced.
    engine : str
        The engine that it is for: ``vllm`` or ``sglang``.
    version : str, optional
        The version of FlashInfer that the engine pins, without a local part. Default: what
        :data:`ENGINES` says.

    Raises
    ------
    ValueError
        If ``engine`` is unknown, or ``version`` is not such a version.
    """
    files = wheel_files(engine, version)
    record = next(name for name in files if name.endswith("/RECORD"))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{record.partition('.dist-info')[0]}-py3-none-any.whl"
    partial = path.with_suffix(".part")
    with zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in files.items():
            entry = zipfile.ZipInfo(name, _TIME)
            entry.external_attr = 0o644 << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, text)
    partial.replace(path)
    return path


def wheel_files(engine: str = "vllm", version: str | None = None) -> dict[str, str]:
    """The texts of the wheel's files, by their paths in it; errors as :func:`make_wheel` has."""
    version = shim_version(engine, version)
    words = {
        "engine": engine,
        "version": version,
        "public": version.partition("+")[0],
        "precast": __version__,
        "distribution": DISTRIBUTION,
    }
    files = _package(words)
    info = f"{DISTRIBUTION.replace('-', '_')}-{version}.dist-info"
    files[f"{info}/METADATA"] = _METADATA.format(**words)
    files[f"{info}/WHEEL"] = _WHEEL.format(**words)
    files[f"{info}/RECORD"] = _record(files, f"{info}/RECORD")
    return files


def _package(words: dict[str, str]) -> dict[str, str]:
    """The files of the package: those with modules below them are folders."""
    files = {f"{PACKAGE}/__main__.py": _MAIN.format(**words)}
    engine = words["engine"]
    for module in modules(engine):
        name = f"{PACKAGE}.{module}".rstrip(".")
        ending = "/__init__.py" if modules_below(module, engine) else ".py"
        text = (_MODULE if module else _ROOT).format(name=name, **words)
        files[name.replace(".", "/") + ending] = text
    return files


def _record(files: dict[str, str], own: str) -> str:
    """RECORD: the digest and the size of every file but itself."""
    contents = {name: text.encode() for name, text in files.items()}
    rows = [f"{name},sha256={record_digest(b)},{len(b)}\n" for name, b in contents.items()]
    return "".join([*rows, f"{own},,\n"])
