#!/usr/bin/env bash
# install_package.sh <venv> <targets>: builds and installs this checkout for the PyTorch of <venv>.
# Editable, so that `python -m moe_a2a` also finds the extension from inside the checkout.
set -euo pipefail
options=()
[ -n "$2" ] && options=(--config-settings=cmake.define.MOE_A2A_TARGETS="$2")
"$1/bin/python" -m pip install -qq --no-compile --no-build-isolation "${options[@]}" --editable '.[demo,test]'
