# Shared by the set-up scripts: find Python and uv, use a torch wheel that lies at hand, install Debian packages.
# Sourced with `set -euo pipefail` and the repository root as working directory.

say() { printf '%s\n' "kvtier: $*" >&2; }
die() { say "$*"; exit 1; }

# A Python >= 3.11 that starts; $KVTIER_PYTHON goes first.
find_python() {
  local candidate
  for candidate in "${KVTIER_PYTHON:-}" python3 python3.13 python3.12 python3.11; do
    [ -n "$candidate" ] || continue
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' > /dev/null 2>&1; then
      "$candidate" -c 'import sys; print(sys.executable)'
      return
    fi
  done
  die "no Python 3.11 or newer. Install one: apt-get install -y python3 python3-venv   (or set KVTIER_PYTHON)"
}

# uv from the PATH, or the one in .venv, which is made with Python's own venv first. $1 = python.
find_uv() {
  if [ "${KVTIER_NO_SYSTEM_UV:-}" != 1 ] && uv --version > /dev/null 2>&1; then
    command -v uv
    return
  fi
  if ! .venv/bin/uv --version > /dev/null 2>&1; then
    say "uv is not installed: putting it into .venv"
    # Debian splits ensurepip off, and without it venv leaves half an environment behind.
    "$1" -c 'import ensurepip, venv' > /dev/null 2>&1 || apt_install python3-venv
    [ -x .venv/bin/pip ] || "$1" -m venv --clear .venv >&2
    .venv/bin/pip install --quiet uv >&2
  fi
  printf '%s\n' "$PWD/.venv/bin/uv"
}

# Install Debian packages now if we may, else name the command and fail. $@ = packages.
apt_install() {
  local as_root=()
  command -v apt-get > /dev/null || die "this machine lacks $* and has no apt-get; install their equivalents"
  if [ "$(id -u)" != 0 ]; then
    if sudo -n true > /dev/null 2>&1; then
      as_root=(sudo -n)
    else
      die "this machine lacks $*. Run: sudo apt-get install -y --no-install-recommends $*"
    fi
  fi
  say "apt-get install $*"
  # RUNLEVEL=1 keeps Debian from starting the etcd service it installs: the tests start their own.
  local install=("${as_root[@]}" env DEBIAN_FRONTEND=noninteractive RUNLEVEL=1
    apt-get install -y -qq --no-install-recommends "$@")
  "${install[@]}" > .cache/apt.log 2>&1 && return
  "${as_root[@]}" apt-get update -qq >> .cache/apt.log 2>&1 || true
  "${install[@]}" >> .cache/apt.log 2>&1 || { tail -5 .cache/apt.log >&2; die "apt-get install $* failed"; }
}

# If a CPU build of torch lies at hand and fits this interpreter, install it: that saves a large download.
# pip, not uv: uv refuses the compression of that wheel. Installed first, it satisfies uv's resolver afterwards.
# $1 = python of the virtual environment.
install_cpu_torch_wheel() {
  local wheel
  "$1" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)' && return
  "$1" -m pip --version > /dev/null 2>&1 || return 0
  for wheel in ../shared/wheels/torch-*.whl; do
    [ -f "$wheel" ] || continue
    # --no-index: only this file, so that a wheel for another interpreter fails at once and costs nothing.
    if "$1" -m pip install --quiet --no-deps --no-index "$wheel" > /dev/null 2>&1; then
      say "torch from $wheel"
      return
    fi
    say "$wheel does not fit this Python; taking torch from the package index"
  done
}
