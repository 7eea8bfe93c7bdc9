#!/usr/bin/env bash
# Everything `make demo` and `make test` need: .venv, kvtier (editable), the demo model's package, Debian libraries.
# Idempotent: a stamp makes the second run return at once.
set -euo pipefail
cd "$(dirname "$0")/.."
mkdir -p .cache
# shellcheck source=scripts/lib.sh
. scripts/lib.sh

stamp=.venv/.kvtier-stamp
key=$(cat pyproject.toml scripts/setup.sh scripts/lib.sh scripts/requirements-nodeps.txt | sha256sum | cut -d' ' -f1)

# Libraries the Mooncake wheel links to, and etcd for the tests. Package, then how to see that it is there.
missing_packages() {
  local loaded
  # Not every user has /sbin on the PATH.
  loaded=$(PATH=$PATH:/sbin:/usr/sbin ldconfig -p)
  [[ $loaded == *libibverbs.so.1* ]] || echo libibverbs1
  [[ $loaded == *libnuma.so.1* ]] || echo libnuma1
  [[ $loaded == *libcurl.so.4* ]] || echo libcurl4
  command -v etcd > /dev/null || echo etcd-server
  command -v etcdctl > /dev/null || echo etcd-client
}

missing=$(missing_packages)
if [ -z "$missing" ] && [ -x .venv/bin/kvtier ] && [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$key" ]; then
  exit 0
fi

# shellcheck disable=SC2086 # one word per package
[ -z "$missing" ] || apt_install $missing

python=$(find_python)
uv=$(find_uv "$python")
# --seed: pip is needed for the torch wheel below.
[ -x .venv/bin/python ] || "$uv" venv --quiet --seed --python "$python" .venv
install_cpu_torch_wheel .venv/bin/python
say "installing kvtier into .venv"
"$uv" pip install --quiet --python .venv/bin/python -e ".[worker,operator,demo,dev]"
"$uv" pip install --quiet --python .venv/bin/python --no-deps -r scripts/requirements-nodeps.txt
[ -x .venv/bin/kvtier ] || die ".venv/bin/kvtier is missing after the installation"
echo "$key" > "$stamp"
say "ready: .venv/bin/kvtier"
