# SPDX-License-Identifier: Apache-2.0
"""Kernels in CuTe DSL. Builds compile them; nothing imports them at run time.

Each file is a source of an op, named by its ``aot_configs/<op>.toml``. It has a class for each
kernel and one function, ``kernels()``, which says what a module of the op is compiled from.
``_compile.py`` makes an object from such a file, as nvcc does from a ``*.cu`` file.
"""
