# SPDX-License-Identifier: Apache-2.0
"""The GPUs and backends that an op supports, and the validation of a call."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from precast._base.errors import BackendSupportedError
from precast._base.torch import torch


def capability_number(value: object, name: str = "a compute capability") -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(
            f"{name} must be an integer, got {type(value).__name__}: {value!r}. Fix: write 90 for "
            f"compute capability 9.0"
        )
    return value


def declares(check: Callable[..., Any] | None) -> bool:
    return hasattr(check, "is_compute_capability_supported")


def accepts(check: Callable[..., Any] | None, cc: int | None) -> bool:
    """Whether a check allows a capability. True without a GPU, or if the check declares none."""
    if cc is None or not declares(check):
        return True
    return bool(check.is_compute_capability_supported(cc))  # type: ignore[union-attr]


class Suitable(Sequence[str]):
    """Names of backends, best first; each thread sees those of its own latest call."""

    def __init__(self) -> None:
        self._of_thread = threading.local()

    def _names(self) -> tuple[str, ...]:
        names: tuple[str, ...] = getattr(self._of_thread, "names", ())
        return names

    def replace(self, names: Sequence[str]) -> None:
        self._of_thread.names = tuple(names)

    def __getitem__(self, index: Any) -> Any:
        return self._names()[index]

    def __len__(self) -> int:
        return len(self._names())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(list(self._names()))


class Requirement:
    """The requirement of one op: the methods that the op gets, and the validation of a call."""

    def __init__(
        self,
        name: str,
        checks: dict[str, Callable[..., Any]],
        common: Callable[..., Any] | None,
        heuristic: Callable[..., Sequence[str]] | None,
        chosen_by_body: bool = False,
    ) -> None:
        self.chosen_by_body = chosen_by_body
        self.name = name
        self.checks = checks
        self.common = common
        self.heuristic = heuristic
        self.suitable = Suitable()

    def is_backend_supported(self, name: str, cc: int | None = None) -> bool:
        """Whether there is such a backend (and it declares a capability such as 90).

        Raises
        ------
        ValueError
            If the op has no backends to choose from.
        """
        if not self.checks:
            raise ValueError(
                f"Invalid is_backend_supported call: no backend choices for {self.name}"
            )
        if name not in self.checks or cc is None:
            return name in self.checks
        return self._declares(self.checks[name], capability_number(cc))

    def is_compute_capability_supported(self, cc: int) -> bool:
        """Whether the op, with some backend, runs on a capability such as 90.

        Raises
        ------
        ValueError
            If the op has no backends to choose from and its check declares no capabilities.
        """
        cc = capability_number(cc)
        if self.checks:
            return any(self._declares(check, cc) for check in self.checks.values())
        if not declares(self.common):
            check = getattr(self.common, "__name__", self.common)
            raise ValueError(
                f"Invalid is_compute_capability_supported call: {check} does not have "
                f"is_compute_capability_supported decorator ({self.name}). Fix: decorate a "
                f"common_check with @supported_compute_capability([...])"
            )
        return accepts(self.common, cc)

    def _declares(self, check: Callable[..., Any], cc: int) -> bool:
        return declares(check) and accepts(check, cc) and accepts(self.common, cc)

    def has_backend(self, name: str) -> bool:
        """Whether ``backend=name`` is legal."""
        return name in self.checks

    def has_backend_choices(self) -> bool:
        """Whether callers can choose a backend."""
        return bool(self.checks)

    # -- at a call --------------------------------------------------------------------------------

    @property
    def runs_nothing(self) -> bool:
        """Whether nothing is validated at a call, because the loader refuses unsupported GPUs."""
        return self.chosen_by_body or (
            not self.checks and hasattr(self.common, "refused_by_loader")
        )

    def validate(self, arguments: dict[str, Any], skip: bool) -> None:
        """Raise if the call is not supported, and resolve ``backend="auto"``."""
        backend = arguments.get("backend")
        # Not bool(self.checks), which torch 2.11 does not trace.
        automatic = backend == "auto" and len(self.checks) > 0 and "auto" not in self.checks
        if skip:
            if automatic:
                self._choose(arguments, _capability(arguments))
            return
        if not self.checks and self.common is None:
            raise ValueError(
                f"Invalid @backend_requirement decorator usage: no backend choices and no "
                f"common_check for {self.name}"
            )
        cc = _capability(arguments)
        if not accepts(self.common, cc):
            declared = sorted(getattr(self.common, "_supported_ccs", ()))
            those = f"; legal: {', '.join(map(_version, declared))}" if declared else ""
            raise BackendSupportedError(f"{self.name} does not support {_words(cc)}{those}")
        if automatic:
            self._run(self.common, arguments)
            self._choose(arguments, cc)
        elif self.checks:
            check = self.checks.get(backend) if isinstance(backend, str) else None
            if check is None or not accepts(check, cc):
                at = "" if cc is None else f" on {_words(cc)}"
                legal = [repr(n) for n, c in self.checks.items() if accepts(c, cc)]
                legal += ["'auto'"] if self.heuristic is not None and legal else []
                raise BackendSupportedError(
                    f"{self.name} does not support backend {backend!r}{at}; legal: "
                    f"{', '.join(legal) or 'none'}"
                )
            self._run(self.common, arguments)
            self._run(check, arguments)
        else:
            self._run(self.common, arguments)

    def _run(self, check: Callable[..., Any] | None, arguments: dict[str, Any]) -> None:
        if check is not None and not check(**arguments):
            which = getattr(check, "__name__", repr(check))
            raise ValueError(
                f"Problem size is not supported for {self.name}: {which} refused "
                f"{_problem(arguments)}"
            )

    def _choose(self, arguments: dict[str, Any], cc: int | None) -> None:
        reasons = {}
        for name, check in self.checks.items():
            try:
                if not accepts(check, cc):
                    reasons[name] = f"does not support {_words(cc)}"
                else:
                    self._run(check, arguments)
            except ValueError as error:
                reasons[name] = str(error)
        suitable = [name for name in self.checks if name not in reasons]
        if self.heuristic is None:
            raise BackendSupportedError(
                f"{self.name} does not support backend 'auto'; legal: {', '.join(self.checks)}"
            )
        ordered = list(self.heuristic(list(suitable), **arguments)) if suitable else []
        chosen = [name for name in ordered if name in suitable]
        if not chosen:
            left = dict.fromkeys(suitable, "the heuristic left it out")
            why = "; ".join(f"{name}: {reason}" for name, reason in {**reasons, **left}.items())
            raise BackendSupportedError(f"No suitable auto backends found for {self.name}: {why}")
        self.suitable.replace(chosen)


def _capability(arguments: Mapping[str, Any]) -> int | None:
    """The capability of the first CUDA tensor's GPU, 90 for 9.0; None without one."""
    for value in arguments.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            # isinstance(item, torch.Tensor) would cost more than the rest of this function.
            if getattr(item, "is_cuda", False):
                return _device_capability(item.get_device())
    return None


_of_device: dict[int, int] = {}


def _device_capability(index: int) -> int:
    cc = _of_device.get(index)
    if cc is None:
        # TorchDynamo treats the result of this function as a constant.
        properties = torch.cuda.get_device_properties(index)
        cc = _of_device[index] = int(properties.major) * 10 + int(properties.minor)
    return cc


def _words(cc: int | None) -> str:
    return "" if cc is None else f"compute capability {_version(cc)}"


def _version(cc: int) -> str:
    return f"{cc // 10}.{cc % 10}"


def _problem(arguments: Mapping[str, Any]) -> str:
    words = []
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor):
            words.append(f"{name} of shape {tuple(value.shape)} and {value.dtype}")
        elif isinstance(value, (bool, int, float, str)):
            words.append(f"{name}={value!r}")
    return ", ".join(words)
