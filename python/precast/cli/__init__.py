# SPDX-License-Identifier: Apache-2.0
"""The command ``precast``.

Every module of this package whose name does not start with ``_`` is a command of the same name. Its
docstring is the help text, ``add_arguments(parser)`` declares the arguments, and ``run(args)`` does
the work and returns the exit code.

Exit codes::

  0    done; every check passed
  1    a check failed: something would have to be compiled, is missing, or is damaged
  2    the command line, an environment variable or a configuration file is wrong
  3    the machine cannot do it: no compiler, no disk space, a failed download
  130  interrupted
"""

from __future__ import annotations

from precast.cli._main import main

__all__ = ["main"]
