#!/usr/bin/env bash
# Provides the system packages for one purpose: system_packages.sh build|test|kernels
# As root on Debian or Ubuntu it installs missing ones; otherwise it says what to install.
set -euo pipefail

missing=()
useful=()
need() {  # need <package> <command that succeeds when it is here>
  "${@:2}" >/dev/null 2>&1 || missing+=("$1")
}
want() {  # the same for a package without which the build does less
  "${@:2}" >/dev/null 2>&1 || useful+=("$1")
}

python=${PYTHON:-python3}
case $1 in
  build)
    need g++ command -v g++
    need make command -v make
    need python3-venv "$python" -c 'import ensurepip, venv'
    need python3-dev "$python" -c 'import os, sysconfig; os.stat(sysconfig.get_path("include") + "/Python.h")'
    want libprotozero-dev test -e /usr/include/protozero/pbf_writer.hpp # for .pftrace files
    ;;
  test)
    need libgtest-dev test -e /usr/include/gtest/gtest.h
    want chromium command -v chromium # for the test that opens a trace in Perfetto's UI
    ;;
  kernels)
    need clang-22 command -v clang++-22
    need lld-22 command -v ld.lld-22
    need llvm-22 command -v llvm-as-22
    need clang-tools-22 command -v clang-offload-bundler-22
    ;;
  *)
    echo "usage: $0 build|test|kernels" >&2
    exit 2
    ;;
esac

[ $((${#missing[@]} + ${#useful[@]})) -eq 0 ] && exit 0
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
  [ ${#missing[@]} -eq 0 ] && exit 0
  echo "Missing on this machine: ${missing[*]}. Please install (Debian, Ubuntu: sudo apt-get install ${missing[*]})" >&2
  exit 1
fi
missing+=("${useful[@]}")
echo "Installing with apt-get: ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
