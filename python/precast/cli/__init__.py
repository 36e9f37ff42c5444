# SPDX-License-Identifier: Apache-2.0
# PYTHON_ARGCOMPLETE_OK
"""The command ``precast``.

Every module of this package whose name does not start with ``_`` is a command of the same name:

- its docstring is the help text, with an example;
- ``add_arguments(parser)`` declares the arguments, and ``run(args)`` does the work and returns the
  exit code;
- ``EXIT_CODES`` are those of the table below that it can return, besides 130, 141 and 70;
- ``JSON`` are the keys of the object that ``--json`` prints, with their meaning.

With ``--json`` a command prints one JSON object to standard output and nothing else there. Its key
``schema`` is the number of the format: it grows when a key is removed or changes its meaning; new
keys may come at any time. Progress, log and errors always go to standard error.

Exit codes::

  0    done; every check passed
  1    a check failed: something would have to be compiled, is missing, or is damaged
  2    the command line, an environment variable or a configuration file is wrong
  3    the machine cannot do it: no compiler, no disk space, a failed download
  70   a bug in precast
  130  interrupted
  141  the reader of the output has left
"""

from __future__ import annotations

from precast.cli._main import main

__all__ = ["main"]
