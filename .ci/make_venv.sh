#!/usr/bin/env bash
# make_venv.sh <folder>: a Python environment with PyTorch and the package's build requirements.
set -euo pipefail
venv=$1
python=${PYTHON:-python3}
packages_of() { "$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }

if "$python" -c 'import torch' 2>/dev/null; then
  # This machine's own PyTorch supports its GPUs: use it, never replace it.
  packages=$(packages_of "$python")  # before .venv is made: it may be first in PATH
  "$python" -m venv --system-site-packages "$venv"
  if ! "$venv/bin/python" -c 'import torch' 2>/dev/null; then
    # $python belongs to a virtual environment itself, and one does not see another's packages.
    echo "$packages" > "$(packages_of "$venv/bin/python")/made_from.pth"
  fi
  torch=()
else
  "$python" -m venv "$venv"
  torch=("torch==2.13.0") # small where pip offers a CPU build; a newer one pulls gigabytes of GPU libraries
fi
"$venv/bin/python" -m pip install -qq --no-compile scikit-build-core nlohmann_json cmake ninja "${torch[@]}"
