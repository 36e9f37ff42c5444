# SPDX-License-Identifier: Apache-2.0
"""Mistakes in aot_configs, each with the words that its one error must hold."""

from __future__ import annotations

import re

BUILD, SCALE = "aot_configs/build.toml", "aot_configs/scale.toml"
ATTENTION = "aot_configs/attention.toml"

# file, what to replace (None: the whole file), by what, the words that the one error must hold:
# the key, what was got, what is legal.
MISTAKES = {
    "not TOML": (SCALE, "[axes]", "[axes", ["not valid TOML", "line"]),
    "not UTF-8": (SCALE, None, b"description = '\xff'", ["not valid TOML", "UTF-8"]),
    "unknown key": (SCALE, "exports =", "export =", ["export:", "unknown key", "exports"]),
    "unknown key in a block": (
        SCALE,
        'profiles = ["ci"]',
        'when = ["ci"]',
        ["aot[0].when", "profiles, dtype"],
    ),
    "missing key": (SCALE, 'exports = ["scale"]', "", ["exports: missing", "a list of strings"]),
    "wrong type": (
        SCALE,
        'exports = ["scale"]',
        'exports = "scale"',
        ["exports: got 'scale'", "a list"],
    ),
    "no exports": (SCALE, 'exports = ["scale"]', "exports = []", ["exports: empty"]),
    "export that C cannot spell": (
        SCALE,
        '["scale"]',
        '["scale-it"]',
        ["exports", "'scale-it'", "lower case"],
    ),
    "export twice": (
        SCALE,
        '["scale"]',
        '["scale", "scale"]',
        ["exports: 'scale' is listed twice"],
    ),
    "export of another op": (
        SCALE,
        '["scale"]',
        '["rmsnorm"]',
        ["'rmsnorm'", "aot_configs/norm.toml", "one op"],
    ),
    "missing source": (
        SCALE,
        "csrc/elementwise/scale.cu",
        "csrc/none.cu",
        ["sources", "csrc/none.cu", "csrc/elementwise/scale.cu"],
    ),
    "source outside": (
        SCALE,
        "csrc/elementwise/scale.cu",
        "../tree/csrc/elementwise/scale.cu",
        ["sources", "leaves the project"],
    ),
    "source of another kind": (
        SCALE,
        "csrc/elementwise/scale.cu",
        "csrc/core/exports.map",
        ["unknown suffix", "*.cu, *.cc"],
    ),
    "no sources": (
        SCALE,
        '["csrc/elementwise/scale.cu", "csrc/elementwise/scale_binding.cc"]',
        "[]",
        ["sources: empty"],
    ),
    "unknown arch": (SCALE, '"sm80"', '"sm81"', ["archs: unknown value 'sm81'", "sm80, sm86"]),
    "no archs": (SCALE, re.compile(r"archs = .*"), "archs = []", ["archs: empty", "sm90a"]),
    "bad dtype": (
        SCALE,
        'dtype = ["f16", "bf16", "f32"]\n\n[[aot]]',
        'dtype = ["half"]\n\n[[aot]]',
        ["axes.dtype", "'half'", "bf16"],
    ),
    "empty axis": (
        SCALE,
        'dtype = ["f16", "bf16", "f32"]\n\n[[aot]]',
        "dtype = []\n\n[[aot]]",
        ["axes.dtype", "non-empty list"],
    ),
    "axis value twice": (
        SCALE,
        "[axes]",
        '[axes]\nwidth = [4, "4"]',
        ["axes.width", "'4' is listed twice"],
    ),
    "axis value of no type": (
        SCALE,
        "[axes]",
        "[axes]\nwidth = [1.5]",
        ["axes.width: got 1.5", "whole numbers"],
    ),
    "axis value below zero": (
        SCALE,
        "[axes]",
        "[axes]\nwidth = [-1]",
        ["axes.width: got -1", "whole numbers"],
    ),
    "axis word": (
        SCALE,
        "[axes]",
        '[axes]\nlayout = ["N H D"]',
        ["axes.layout: got 'N H D'", "lower case"],
    ),
    "joint axis without lists": (
        SCALE,
        "[axes]",
        '[axes]\n"width,depth" = [4, 8]',
        ["axes.width,depth: got 4", "a non-empty list of [width, depth]"],
    ),
    "joint axis with a short row": (
        SCALE,
        "[axes]",
        '[axes]\n"width,depth" = [[4, 8], [4]]',
        ["axes.width,depth: got [4]", "[width, depth]"],
    ),
    "joint axis with a row twice": (
        SCALE,
        "[axes]",
        '[axes]\n"width,depth" = [[4, 8], [4, 8]]',
        ["axes.width,depth: [4, 8] is listed twice", "each value once"],
    ),
    "joint axis with a bad dtype": (
        SCALE,
        "[axes]",
        '[axes]\n"width,dtype_q" = [[4, "half"]]',
        ["axes.width,dtype_q: unknown dtype 'half'", "bf16"],
    ),
    "joint axis with a bad name": (
        SCALE,
        "[axes]",
        '[axes]\n"width, depth" = [[4, 8]]',
        ["axes.width, depth: bad axis name"],
    ),
    "axis in two keys": (
        SCALE,
        "[axes]",
        '[axes]\n"width,dtype" = [[4, "f16"]]',
        ["axes.dtype: axis 'dtype' is listed twice", "each axis in one key"],
    ),
    "bad axis name": (
        SCALE,
        "[axes]",
        "[axes]\na__b = [1]",
        ["axes.a__b: bad axis name", "one '_'"],
    ),
    "a flag of no truth": (
        SCALE,
        'exports = ["scale"]',
        'exports = ["scale"]\nexact_arch = 1',
        ["exact_arch: got 1", "true or false"],
    ),
    "aot outside its axis": (
        SCALE,
        'dtype = ["f32"]',
        'dtype = ["e4m3"]',
        ["aot[0].dtype", "'e4m3' is outside", "f16, bf16, f32"],
    ),
    "aot without an axis": (
        SCALE,
        'profiles = ["ci"]\ndtype = ["f32"]',
        'profiles = ["ci"]',
        ["aot[0].dtype: missing", "bf16"],
    ),
    "aot outside its joint axis": (
        ATTENTION,
        '[["bf16", "bf16"]]',
        '[["bf16", "f16"]]',
        ["aot[0].dtype_q,dtype_kv: ['bf16', 'f16'] is outside the axis", "['bf16', 'e4m3']"],
    ),
    "aot with the parts of a joint axis": (
        ATTENTION,
        '"dtype_q,dtype_kv" = [["bf16", "bf16"]]',
        'dtype_q = ["bf16"]',
        ["aot[0].dtype_q: unknown key", "dtype_q,dtype_kv"],
    ),
    "aot not a list": (
        SCALE,
        'dtype = ["f32"]',
        'dtype = "f32"',
        ["aot[0].dtype: got 'f32'", "a subset"],
    ),
    "aot value twice": (
        SCALE,
        'dtype = ["f32"]',
        'dtype = ["f32", "f32"]',
        ["aot[0].dtype", "is listed twice"],
    ),
    "tiles without a size": (
        ATTENTION,
        "block_m = [16, 64] # of all head dimensions\n",
        "",
        ["tiles.shapes[0].block_m: missing", "whole numbers"],
    ),
    "tile outside its axis": (
        ATTENTION,
        '"head_dim_qk,head_dim_vo" = [[256, 256]]\nmin',
        '"head_dim_qk,head_dim_vo" = [[256, 128]]\nmin',
        ["tiles.shapes[2].head_dim_qk,head_dim_vo: [256, 128] is outside", "[192, 128]"],
    ),
    "tile twice": (
        ATTENTION,
        "block_m = [16, 64] #",
        "block_m = [16, 64, 128] #",
        ["tiles.shapes[1].block_m: 128 of head_dim_qk=64 head_dim_vo=64 is listed twice"],
    ),
    "configuration without a tile": (
        ATTENTION,
        "block_m = [16, 64] #",
        "min_shared_kib = 1\nblock_m = [16, 64] #",
        ["tiles.shapes: head_dim_qk=256 head_dim_vo=256 has no tile that every target has"],
    ),
    "tile with an unknown key": (
        ATTENTION,
        "min_tiles_per_sm = 6",
        "min_tiles = 6",
        ["tiles.shapes[1].min_tiles: unknown key", "min_tiles_per_sm"],
    ),
    "tiles without a number": (
        ATTENTION,
        "max_ctas_per_sm = 2",
        'max_ctas_per_sm = "2"',
        ["tiles.max_ctas_per_sm: got '2'", "a whole number"],
    ),
    "target without shared memory": (
        BUILD,
        "shared_kib = 163\n",
        "",
        ["archs.sm80.shared_kib: missing", "a whole number"],
    ),
    "unknown profile": (SCALE, '"ci"', '"cy"', ["aot[0].profiles", "'cy'", "ci, core, full"]),
    "build.toml missing": (BUILD, None, None, ["missing file"]),
    "unknown table": (BUILD, "[tvm_ffi]", "[tvmffi]", ["tvmffi: unknown key", "tvm_ffi"]),
    "no table": (BUILD, re.compile(r"\[tvm_ffi\][^\[]*"), "", ["tvm_ffi: missing", "a table"]),
    "bad version": (
        BUILD,
        re.compile('min = "[0-9.]+"'),
        'min = "new"',
        ["tvm_ffi.min: got 'new'", "0.1.15"],
    ),
    "unknown CUDA major": (
        BUILD,
        "[flags.cuda_major.13]",
        "[flags.cuda_major.11]",
        ["flags.cuda_major.11", "12, 13"],
    ),
    "CUDA major of no number": (BUILD, "[cuda.12]", "[cuda.twelve]", ["cuda.twelve", "a number"]),
    "bad target": (
        BUILD,
        'target = "9.0a"',
        'target = "9.0b"',
        ["archs.sm90a.target: got '9.0b'", "9.0a"],
    ),
    "target of another name": (
        BUILD,
        'target = "9.0a"',
        'target = "9.0"',
        ["archs.sm90a.target", "sm90a"],
    ),
    "serves nothing": (BUILD, 'serves = ["9.0"]', "serves = []", ["archs.sm90a.serves", "9.0"]),
    "serves others only": (
        BUILD,
        'serves = ["9.0"]',
        'serves = ["8.0"]',
        ["archs.sm90a.serves", "its own 9.0"],
    ),
    "serves no capability": (
        BUILD,
        'serves = ["9.0"]',
        'serves = ["90"]',
        ["archs.sm90a.serves: got '90'", "9.0"],
    ),
    "bad least CUDA": (
        BUILD,
        'cuda = "12.9"',
        'cuda = "12"',
        ["archs.sm100f.cuda: got '12'", "12.9"],
    ),
    "profile of an unknown one": (
        BUILD,
        'include = ["ci"]',
        'include = ["cy"]',
        ["profiles.core.include", "'cy'", "ci, core, full"],
    ),
    "profile of an unknown arch": (
        BUILD,
        '["sm80", "sm90a"]',
        '["sm99"]',
        ["profiles.ci.archs", "'sm99'", "sm80"],
    ),
    "profile without words": (
        BUILD,
        'description = "every configuration an op lists"\n',
        "",
        ["profiles.full.description: missing"],
    ),
    "no version script": (
        BUILD,
        "csrc/core/exports.map",
        "csrc/none.map",
        ["flags.version_script", "csrc/none.map"],
    ),
}
