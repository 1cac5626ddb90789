#!/usr/bin/env bash
# Installs what building, testing and the demo need and is missing: a C compiler and make, Open MPI, libclang (for the MPI
# bindings), jq (to read results), Fashion-MNIST, and a Rust toolchain. For Debian and its relatives, as root or with sudo.
# Does nothing, and takes no time, where all of it is there.
set -euo pipefail
cd "$(dirname "$0")/.."

fail() { echo "setup: $*" >&2; exit 1; }

as_root() {
  if [ "$(id -u)" = 0 ]; then "$@"
  elif command -v sudo > /dev/null; then sudo "$@"
  else fail "'$*' must be run as root, and there is no sudo"
  fi
}

updated=
# Installs Debian packages, after one look for their newest versions.
apt_install() {
  command -v apt-get > /dev/null || fail "please install $* by hand: there is no apt-get here to do it"
  export DEBIAN_FRONTEND=noninteractive
  if [ -z "$updated" ]; then
    as_root apt-get update -qq || fail "apt-get update failed: is there a network, and are the sources in /etc/apt right?"
    updated=yes
  fi
  local packages=() p version
  for p in "$@"; do
    if [ "$p" != LIBCLANG ]; then packages+=("$p"); continue; fi
    # The release's own version of both packages, which must match.
    version=$(apt-cache depends libclang-dev | sed -n 's/.*Depends: libclang-\([0-9]*\)-dev.*/\1/p' | head -n 1)
    if [ -n "$version" ]; then packages+=("libclang1-$version" "libclang-common-$version-dev")
    else packages+=(libclang-dev)
    fi
  done
  echo "setup: installing ${packages[*]}"
  as_root apt-get install -y -qq --no-install-recommends "${packages[@]}" > /dev/null || fail "could not install ${packages[*]}"
}

have_libclang() { compgen -G '/usr/lib/llvm-*/lib/libclang*.so*' > /dev/null; }
# The headers of the compiler itself, such as stddef.h, which libclang does not bring along.
have_clang_headers() { compgen -G '/usr/lib/llvm-*/lib/clang/*/include/stddef.h' > /dev/null; }
have_fashion_mnist() {
  [ -n "${PIPEWRIGHT_DATA:-}" ] && [ -d "$PIPEWRIGHT_DATA/fashion-mnist" ] || [ -e /usr/share/datasets/fashion-mnist/train-images-idx3-ubyte.gz ]
}

export PATH="${CARGO_HOME:-$HOME/.cargo}/bin:$PATH"
missing=()
command -v cc > /dev/null || missing+=(gcc libc6-dev)
command -v make > /dev/null || missing+=(make)
command -v mpirun > /dev/null || missing+=(openmpi-bin)
command -v mpicc > /dev/null || missing+=(libopenmpi-dev)
have_libclang && have_clang_headers || missing+=(LIBCLANG)
command -v jq > /dev/null || missing+=(jq)
have_fashion_mnist || missing+=(dataset-fashion-mnist)
command -v cargo > /dev/null || command -v curl > /dev/null || missing+=(curl)
# Without them neither curl nor cargo gets anything over the network.
[ -e /etc/ssl/certs/ca-certificates.crt ] || missing+=(ca-certificates)
[ ${#missing[@]} = 0 ] || apt_install "${missing[@]}"

need=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)
# Whether version $1 is $need or newer.
suffices() { [ "$(printf '%s\n' "$need" "$1" | sort -V | head -n 1)" = "$need" ]; }

if ! command -v cargo > /dev/null; then
  echo "setup: installing Rust with rustup"
  if ! curl --proto '=https' --tlsv1.2 -sSf https://sh.rustup.rs | sh -s -- -y -q --profile minimal -c rustfmt -c clippy; then
    # Where rustup cannot be fetched, the release's own compiler does if it is new enough.
    command -v apt-cache > /dev/null || fail "rustup could not be fetched; install Rust $need or newer by hand"
    theirs=$(apt-cache policy rustc | sed -n 's/.*Candidate: \([0-9.]*\).*/\1/p')
    suffices "${theirs:-0}" || fail "rustup could not be fetched, and this release has Rust ${theirs:-not at all}; $need or newer is needed"
    apt_install cargo rustc rustfmt rust-clippy
  fi
fi

have=$(rustc --version | cut -d' ' -f2)
suffices "$have" || fail "Rust $have is too old, $need or newer is needed: try 'rustup update'"
for tool in rustfmt clippy; do
  case $tool in rustfmt) program=cargo-fmt ;; clippy) program=cargo-clippy ;; esac
  command -v $program > /dev/null && continue
  # Only 'make lint' and 'make test' want them.
  command -v rustup > /dev/null && rustup component add $tool || echo "setup: $tool is missing; 'make lint' will fail" >&2
done
