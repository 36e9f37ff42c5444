# SPDX-License-Identifier: Apache-2.0
"""The keys that files of ``aot_configs/`` may have, and what each means.

The planner accepts these and no others; the documentation is made from them.
"""

from __future__ import annotations

OP = {
    "description": "What the op computes, in one line.",
    "sources": "`*.cu` files for nvcc, `*.cc` files for the host compiler and `*.py` files of "
    "`python/precast/cute_dsl/` for the compiler of CuTe DSL, relative to the root of the project.",
    "exports": "The functions that every module of the op exports. A function belongs to one op.",
    "archs": "The targets that the op has kernels for; names of `[archs.*]` in `build.toml`.",
    "exact_arch": "Whether a device takes modules of the best of these targets alone, where others "
    "serve it, too: for shapes that follow from shared memory. Default: false. Optional.",
    "cuda_flags": "Further flags of nvcc, after those of `build.toml`. With `--warning-as-error` "
    "in `-Xptxas=`, what ptxas notes about wgmma and setmaxnreg fails a build, too. Optional.",
    "axes": "A table from each axis to the list of its legal values: the whole space that JIT "
    "builds in, and all of it compiles. Values are words, whole numbers or booleans; an axis named "
    "`dtype` or `dtype_*` takes dtype words. Where only some combinations exist, one key joins the "
    'axes by commas and lists the combinations: `"head_dim_qk,head_dim_vo" = [[64, 64], [192, '
    "128]]`. Each axis becomes `-DPRECAST_<AXIS>=<value>` in the `*.cu` files, and an "
    "argument of `kernels()` in the `*.py` files.",
    "tiles": "The sizes of tile that the op's kernels exist in, where they depend on axes. `make "
    "generate` writes them into `include/precast/<op>/tile_traits.cuh`. Optional.",
    "aot": "The prebuilt part of that space, as `[[aot]]` blocks.",
}
AOT = {
    "profiles": "The profiles that prebuild this block. Default: every profile.",
}
TILES = {
    "max_ctas_per_sm": "The most CTAs of one kernel that an SM holds; workspaces are sized by it.",
    "max_head_dim_v": "The most columns of V that a CTA computes. CTAs share a wider head.",
    "shapes": "The sizes, as `[[tiles.shapes]]` blocks. A block also takes keys of `[axes]`, and "
    "stands for every combination of what it lists; a key that it leaves out means the whole axis.",
}
TILE_SHAPE = {
    "block_m": "Rows of queries.",
    "min_shared_kib": "The shared memory that a CTA must have, in KiB; targets with less lack the "
    "tile. Default: 0. Optional.",
    "min_tiles_per_sm": "The least number of tiles for each SM with which this size is faster than "
    "a smaller one. Default: 0. Optional.",
}
BUILD = {
    "tvm_ffi": "The range of tvm-ffi versions that a module runs with.",
    "flags": "The flags of all modules.",
    "cute_dsl": "The compiler of kernels in CuTe DSL.",
    "cuda": "One table for each CUDA major that modules are built for.",
    "archs": "One table for each target.",
    "profiles": "One table for each named set of modules.",
}
TVM_FFI = {
    "min": "The oldest version that works.",
    "max_exclusive": "The first version that does not.",
}
CUTE_DSL = {
    "version": "The version of `nvidia-cutlass-dsl` that compiles every such kernel; a build takes "
    "no other.",
}
FLAGS = {
    "cuda": "Flags of nvcc.",
    "host": "Flags of the host compiler.",
    "link": "Flags of the link.",
    "version_script": "The linker's version script, relative to the root of the project.",
    "cuda_major": "One table for each CUDA major that needs more. Optional.",
}
FLAGS_CUDA_MAJOR = {
    "cuda": "Further flags of nvcc for this CUDA major.",
}
CUDA = {
    "min_driver": "The oldest driver that runs this CUDA major.",
    "cudart": "The file name of the CUDA runtime that modules are linked with.",
    "cudart_wheel": "The distribution on PyPI that holds it.",
    "toolkit_on_pypi": "Whether PyPI has a complete compiler of this CUDA major, which `pip "
    'install "precast[jit]"` brings. Default: false. Optional.',
}
ARCH = {
    "target": "The compute capability to compile for, with its suffix: `9.0a`.",
    "shared_kib": "The shared memory that one CTA may have, in KiB.",
    "serves": "The compute capabilities of the devices that this machine code runs on.",
    "cuda": "The oldest CUDA that can compile for it.",
}
PROFILE = {
    "description": "One line that says what the profile is for.",
    "include": "Other profiles whose modules belong to this one too. Optional.",
    "archs": "The targets to build for where the caller names none. Default: all. Optional.",
}

#: By the title of the table as it stands in a file.
TABLES = {
    "<op>.toml": OP,
    "<op>.toml: [[aot]]": AOT,
    "<op>.toml: [tiles]": TILES,
    "<op>.toml: [[tiles.shapes]]": TILE_SHAPE,
    "build.toml": BUILD,
    "build.toml: [tvm_ffi]": TVM_FFI,
    "build.toml: [cute_dsl]": CUTE_DSL,
    "build.toml: [flags]": FLAGS,
    "build.toml: [flags.cuda_major.<N>]": FLAGS_CUDA_MAJOR,
    "build.toml: [cuda.<N>]": CUDA,
    "build.toml: [archs.<name>]": ARCH,
    "build.toml: [profiles.<name>]": PROFILE,
}
