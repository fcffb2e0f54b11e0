#!/usr/bin/env bash
# stubs.sh <venv> write|check: moe_a2a/_core.pyi, the stub of the compiled extension, for type checkers and editors.
# `check` compares the committed file with pybind11-stubgen's output for the extension in <venv>.
set -euo pipefail
bin=$(realpath "$1/bin")
stub=moe_a2a/_core.pyi
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

# The errors concern three numpy record types without a Python name, in the trace writers; they become Any.
"$bin/python" -m pybind11_stubgen moe_a2a._core --output-dir "$folder" --ignore-invalid-expressions 'moe_a2a::.*' \
  --enum-class-locations '.*:moe_a2a._core' 2>"$folder/log" || { cat "$folder/log" >&2; exit 1; }
{
  echo "# Written by \`make stubs\`."
  cat "$folder/moe_a2a/_core.pyi"
} >"$folder/stub.pyi"
"$bin/ruff" format -q --config pyproject.toml --stdin-filename _core.pyi - <"$folder/stub.pyi" >"$folder/formatted.pyi"

case $2 in
  write) cp "$folder/formatted.pyi" "$stub" ;;
  check)
    if ! diff -u "$stub" "$folder/formatted.pyi"; then
      echo "$stub is not what the extension says; run: make stubs" >&2
      exit 1
    fi
    ;;
  *) echo "usage: $0 <venv> write|check" >&2; exit 2 ;;
esac
