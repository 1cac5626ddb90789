#!/usr/bin/env bash
# Installs what building, testing and the demo need and is missing: a C compiler and make, Open MPI, libclang (for the MPI
# bindings), Fashion-MNIST, and a Rust toolchain. For Debian and its relatives, as root or with sudo. Does nothing, and takes
# no time, where all of it is there.
set -euo pipefail

as_root() {
  if [ "$(id -u)" = 0 ]; then "$@"
  elif command -v sudo > /dev/null; then sudo "$@"
  else echo "setup: '$*' must be run as root, and there is no sudo" >&2; exit 1
  fi
}

have_libclang() { ls /usr/lib/llvm-*/lib/libclang*.so* > /dev/null 2>&1; }
# The headers of the compiler itself, such as stddef.h, which libclang does not bring along.
have_clang_headers() { ls /usr/lib/llvm-*/lib/clang/*/include/stddef.h > /dev/null 2>&1; }

missing=()
command -v cc > /dev/null || missing+=(gcc libc6-dev)
command -v make > /dev/null || missing+=(make)
command -v mpirun > /dev/null || missing+=(openmpi-bin)
command -v mpicc > /dev/null || missing+=(libopenmpi-dev)
have_libclang && have_clang_headers || missing+=(LIBCLANG)
[ -e /usr/share/datasets/fashion-mnist/train-images-idx3-ubyte.gz ] || missing+=(dataset-fashion-mnist)
export PATH="$HOME/.cargo/bin:$PATH"
command -v cargo > /dev/null || command -v curl > /dev/null || missing+=(curl ca-certificates)

if [ ${#missing[@]} -gt 0 ]; then
  command -v apt-get > /dev/null || { echo "setup: please install ${missing[*]} (apt-get, which would do it, is not here)" >&2; exit 1; }
  export DEBIAN_FRONTEND=noninteractive
  as_root apt-get update -qq
  packages=()
  for p in "${missing[@]}"; do
    if [ "$p" != LIBCLANG ]; then packages+=("$p"); continue; fi
    # The release's own version of both packages, which must match.
    version=$(apt-cache depends libclang-dev | sed -n 's/.*Depends: libclang-\([0-9]*\)-dev.*/\1/p' | head -n 1)
    [ -n "$version" ] || { echo "setup: this release has no libclang package" >&2; exit 1; }
    packages+=("libclang1-$version" "libclang-common-$version-dev")
  done
  echo "setup: installing ${packages[*]}"
  as_root apt-get install -y -qq --no-install-recommends "${packages[@]}" > /dev/null
fi

if ! command -v cargo > /dev/null; then
  echo "setup: installing Rust with rustup"
  curl --proto '=https' --tlsv1.2 -sSf https://sh.rustup.rs | sh -s -- -y --profile minimal -c rustfmt -c clippy
fi
