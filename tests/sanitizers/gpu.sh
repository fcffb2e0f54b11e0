#!/usr/bin/env bash
# gpu.sh [python]: the kernels under compute-sanitizer, on one GPU and on two. The last line says what was found.
#
#   memcheck   every access of the kernels, with 1 and 2 ranks. PyTorch allocates without its cache, so that an access
#              past a tensor is an access past an allocation. API errors are not reported: "peer access is already enabled"
#              is one, and harmless.
#   racecheck  shared memory, 1 rank, of our kernels that synchronise by barriers alone, which are all that it understands.
#              Left out: dispatch and combine, whose SignalQueue releases and acquires its cells by flags. In their place
#              ThreadSanitizer runs them on the CPU, and the explorer the queue's orderings.
set -uo pipefail
cd "$(dirname "$0")/../.."
python=${1:-python3}
tool=${COMPUTE_SANITIZER:-$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)}

if [ ! -x "$tool" ]; then
  echo "sanitize-gpu: no compute-sanitizer on this machine (COMPUTE_SANITIZER=path names one)"
  exit 1
fi
gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())')
if [ "$gpus" -eq 0 ]; then
  echo "sanitize-gpu: PyTorch finds no GPU"
  exit 1
fi

export MOE_A2A_DEVICE=cuda PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
results=()
status=0

# under <name of the tool> <number of ranks> <further options>...
under() {
  local name="$1, $2 rank(s)" ranks=$2 result=clean
  if [ "$ranks" -gt "$gpus" ]; then
    results+=("$name: left out, $gpus GPU(s)")
    return
  fi
  printf '\n==== %s\n' "$name"
  timeout --kill-after=10 300 "$tool" --tool "$1" --target-processes all --error-exitcode 97 "${@:3}" \
    "$python" tests/sanitizers/gpu_ranks.py "$ranks" || { result="FAILED ($?)"; status=1; }
  results+=("$name: $result")
}

PYTORCH_NO_CUDA_MEMORY_CACHING=1 under memcheck 1 --report-api-errors no
PYTORCH_NO_CUDA_MEMORY_CACHING=1 under memcheck 2 --report-api-errors no
under racecheck 1 --kernel-name kns=moe_a2a --kernel-name-exclude kns=Dispatch --kernel-name-exclude kns=Combine

printf '\n'
(IFS=';'; echo "sanitize-gpu: ${results[*]}")
exit $status
