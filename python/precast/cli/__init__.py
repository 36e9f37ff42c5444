# SPDX-License-Identifier: Apache-2.0
# PYTHON_ARGCOMPLETE_OK
"""The command ``precast``.

Every module of this package whose name does not start with ``_`` is the command of that name:

- its docstring is the help text, with an example;
- ``add_arguments(parser)`` declares the arguments, and ``run(args)`` does the work and returns the
  exit code;
- ``EXIT_CODES`` lists the codes of ``_parser.EXIT_CODES`` that it can return, besides 130, 141
  and 70;
- ``JSON`` lists the keys of the object that ``--json`` prints, with their meaning.

With ``--json`` a command prints exactly one JSON object to standard output. Its key ``schema`` is
the version of the format: it grows when a key is removed or changes its meaning; new keys may be
added at any time. An error prints an object with the keys ``error``, ``fix`` (perhaps null) and
``exit_code`` instead. Progress, log and the text of errors always go to standard error.
"""

from __future__ import annotations

from precast.cli._main import main

__all__ = ["main"]
