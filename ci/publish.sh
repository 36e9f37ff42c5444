#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Publish a checked set of wheels as one GitHub release, whole or not at all.
#
#   ci/publish.sh draft TAG FOLDER   upload wheels and SHA256SUMS to a draft release
#   ci/publish.sh show TAG           compare the uploaded files with SHA256SUMS, then publish
#   ci/publish.sh index OUT URL      write the package index of all published releases
#
# Needs gh with a token that may write releases. URL is the address of the repository.
set -euo pipefail
cd "$(dirname "$0")/.."
usage() {
  sed -n '5,7s/^# *//p' "$0" >&2
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
  *) usage ;;
esac
