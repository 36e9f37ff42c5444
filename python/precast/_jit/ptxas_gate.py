# SPDX-License-Identifier: Apache-2.0
"""Notes of ptxas that fail a build.

ptxas says in a note (``ptxas info : (C7510) Potential Performance Loss: ...``) that it serialises
wgmma, adds a wait or a fence to it, or ignores setmaxnreg. Its option ``--warning-as-error`` leaves
notes as they are. So a command with this option runs in :data:`GATE`, which fails for them, too.
"""

from __future__ import annotations

#: The option of ptxas, in ``-Xptxas=``, with which its notes fail a command.
OPTION = "--warning-as-error"

#: A flag of nvcc: with spills and local memory, too, a command fails.
STRICT = f"-Xptxas=--warn-on-spills,--warn-on-local-memory-usage,{OPTION}"

#: What every such note has, as a regular expression.
NOTE = r"\(C75\d\d\)"

_SLOW = (
    "ptxas serialises or delays wgmma, or ignores setmaxnreg; the lines with (C75..) say where. "
    "Fix: call wgmma_fence() after registers of operands are written, read no accumulator before "
    "the wait that ends its group, call no function while wgmma runs, need no more registers than "
    "the warpgroup has, and give a kernel with setmaxnreg launch bounds"
)
_SPILLS = (
    "a kernel needs local memory. Fix: keep fewer values at once, index arrays by constants, or "
    "give the warpgroup more registers"
)

#: A function of the shell that runs a command. JIT, ``precast build`` and CMake use it alike.
GATE = rf"""
gate() {{
  case " $* " in *{OPTION}*) ;; *) "$@"; return ;; esac
  printed=$("$@" 2>&1)
  status=$?
  for object; do :; done  # the last argument
  why=
  case $printed in
    *'(C75'[0-9][0-9]')'*) why='{_SLOW}' ;;
    *'ptxas error'*'ocal memory'*) why='{_SPILLS}' ;;
  esac
  if [ -n "$why" ]; then
    printf 'error: %s: %s. See "Kernels for Hopper" in CONTRIBUTING.md\n' "$object" "$why"
    status=1
  fi
  [ -z "$printed" ] || printf '%s\n' "$printed"
  return $status
}}
"""
