#!/usr/bin/env bash
# hip_prefix.sh stable|new <folder>: HIP and rocPRIM headers and device libraries for Debian's clang-22, in a separate folder.
#
# No Debian release has a HIP that supports gfx950. A compiler of one release can read the headers and device bitcode
# of another, so we unpack only those, unconfigured and never executed, from the machine's own mirror:
#   stable  a released suite, trixie. Its device libraries predate gfx950: four constants are generated.
#   new     the development suite, experimental. Complete, but it disappears when rebuilt with a newer LLVM.
# Prints nothing on success; <folder>/flags then holds clang's flags, one per line.
set -euo pipefail
kind=$1
prefix=$(realpath -m "$2")

case $kind in
  stable)
    suite=trixie
    packages="libamdhip64-dev librocprim-dev rocm-device-libs-17" ;;
  new)
    suite=experimental
    packages="libamdhip64-dev libamdhip64-7 librocprim-dev rocm-device-libs-22" ;;
  *)
    echo "usage: $0 stable|new <folder>" >&2
    exit 2 ;;
esac

rm -rf "$prefix"
mkdir -p "$prefix/bitcode"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# The mirror this machine already uses for Debian itself.
debian_mirror() {
  apt-get indextargets --format '$(ORIGIN) $(SITE) $(REPO_URI)' 'Created-By: Packages' |
    awk '$1 == "Debian" && $3 !~ /security/ { print $3; exit }' | sed 's#/dists/.*##; s#/$##'
}

# apt with its own lists, cache and status: the machine's are neither read nor changed.
private_apt() {
  "$@" -qq \
    -o Dir::Etc::sourcelist="$work/sources.list" -o Dir::Etc::sourceparts=/dev/null \
    -o Dir::Etc::preferencesparts=/dev/null -o Dir::State::lists="$work/lists" \
    -o Dir::State::status="$work/status" -o Dir::Cache="$work/cache" \
    -o Acquire::Check-Valid-Until=false -o Acquire::Retries=3 -o APT::Sandbox::User=root
}

unpack_packages() {
  local mirror
  mirror=$(debian_mirror)
  [ -n "$mirror" ] || { echo "hip_prefix: no Debian mirror in apt's sources" >&2; exit 1; }
  mkdir -p "$work/lists/partial" "$work/cache/archives/partial" "$work/packages"
  : > "$work/status"
  echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror $suite main" > "$work/sources.list"
  private_apt apt-get update
  # shellcheck disable=SC2086 # a list of words
  (cd "$work/packages" && private_apt apt-get download $packages)
  for package in "$work"/packages/*.deb; do dpkg-deb -x "$package" "$prefix"; done
  cp "$prefix"/usr/lib/llvm-*/lib/clang/*/amdgcn/bitcode/*.bc "$prefix/bitcode/"
}

# constant_bitcode <file> <name:type:value>...: the device library `file` as clang looks for it.
constant_bitcode() {
  local file=$1 layout constant name type value
  shift
  layout=$(llvm-dis-22 -o - "$prefix/bitcode/oclc_isa_version_900.bc" | grep '^target datalayout')
  {
    printf '%s\ntarget triple = "amdgcn-amd-amdhsa"\n' "$layout"
    for constant in "$@"; do
      IFS=: read -r name type value <<< "$constant"
      echo "@$name = linkonce_odr hidden local_unnamed_addr addrspace(4) constant $type $value, align 4"
    done
  } | llvm-as-22 -o "$prefix/bitcode/$file.bc" -
}

unpack_packages
flags=(--rocm-path="$prefix/usr" --rocm-device-lib-path="$prefix/bitcode" -isystem "$prefix/usr/include")
if [ "$kind" = stable ]; then
  # clang 22 no longer links a denormal-mode library that device libraries of that age keep separate, so it is merged in.
  for version in 90a:9010 942:9402 950:9500; do
    constant_bitcode "oclc_isa_version_${version%:*}" "__oclc_ISA_version:i32:${version#*:}" __oclc_daz_opt:i8:0
  done
  constant_bitcode oclc_abi_version_600 __oclc_ABI_version:i32:600
  flags+=(-D__AMDGCN_WAVEFRONT_SIZE=64) # clang no longer defines it, HIP before 7 asks for it
fi
printf '%s\n' "${flags[@]}" > "$prefix/flags"
