#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Publish a checked set of wheels as one GitHub release, whole or not at all.
#
#   ci/publish.sh draft TAG FOLDER   upload wheels and SHA256SUMS to a draft release
#   ci/publish.sh show TAG           compare the uploaded files with SHA256SUMS, then publish
#   ci/publish.sh index OUT URL      write the package index of all published releases
#   ci/publish.sh reserve [--upload] list the names on PyPI; --upload registers those that are free
#
# Needs gh with a token that may write releases. URL is the address of the repository.
#
# `reserve --upload` must run once before the repository becomes public, and again when a CUDA major or
# a target is added: the errors of precast say `pip install "precast[cu13-sm90a]"`, so that whoever has
# the names runs code on the machines of our users. It uploads empty wheels of version 0.0.0 and needs
# build, twine and a token of PyPI (TWINE_USERNAME=__token__, TWINE_PASSWORD). It stops at a name that
# somebody else has. Without --upload it needs no network and changes nothing.
set -euo pipefail
cd "$(dirname "$0")/.."
usage() {
  sed -n '5,8s/^# *//p' "$0" >&2
  exit 2
}

case ${1:-} in
  draft)
    [ $# -eq 3 ] || usage
    (cd "$3" && sha256sum --check --strict SHA256SUMS)
    case $(gh release view "$2" --json isDraft --jq .isDraft 2>/dev/null) in
      true) gh release delete "$2" --yes ;; # an earlier attempt left it
      false)
        echo "error: $2 is published. Fix: release another version" >&2
        exit 1
        ;;
    esac
    gh release create "$2" --draft --verify-tag --title "$2" --generate-notes
    gh release upload "$2" "$3"/*.whl "$3"/SHA256SUMS
    ;;
  show)
    [ $# -eq 2 ] || usage
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    gh release download "$2" --dir "$work" --pattern '*.whl' --pattern SHA256SUMS
    (cd "$work" && sha256sum --check --strict SHA256SUMS)
    gh release edit "$2" --draft=false
    ;;
  index)
    [ $# -eq 3 ] || usage
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    arguments=()
    while read -r tag; do
      gh release download "$tag" --dir "$work/$tag" --pattern SHA256SUMS
      arguments+=(--release "$3/releases/download/$tag" "$work/$tag/SHA256SUMS")
    done < <(gh release list --exclude-drafts --limit 1000 --json tagName --jq '.[].tagName')
    python3 ci/make_index.py -o "$2" "${arguments[@]}"
    ;;
  reserve)
    [ $# -eq 1 ] || [ "$*" = "reserve --upload" ] || usage
    names=(precast precast-jit-cache)
    while read -r name; do names+=("$name"); done < <(python3 ci/matrix.py --names)
    [ ${#names[@]} -gt 2 ]
    printf '%s\n' "${names[@]}"
    if [ $# -eq 1 ]; then
      echo "nothing was uploaded. Fix: ci/publish.sh reserve --upload" >&2
      exit 0
    fi
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    for name in "${names[@]}"; do
      mkdir "$work/$name"
      cat >"$work/$name/pyproject.toml" <<EOF
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "$name"
version = "0.0.0"
description = "Reserved for the CUDA kernel library precast; there is no release yet."
license = "Apache-2.0"

[tool.setuptools]
packages = []
EOF
      python3 -m build --wheel --outdir "$work/dist" "$work/$name"
    done
    # One at a time, so that an error names the wheel whose name is taken.
    for wheel in "$work"/dist/*.whl; do
      python3 -m twine upload --non-interactive --skip-existing "$wheel"
    done
    ;;
  *) usage ;;
esac
