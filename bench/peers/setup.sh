#!/usr/bin/env bash
# Builds .venv-vllm: the peers that bench/tiers.py runs against (vLLM's CPU build, Mooncake's client, LMCache).
# Their own environment, because vLLM pins versions that ours must not follow. Quick when already built.
set -euo pipefail
cd "$(dirname "$0")/../.."
# shellcheck source=scripts/lib.sh
. scripts/lib.sh

venv=.venv-vllm
stamp=$venv/.kvtier-stamp
key=$(sha256sum bench/peers/setup.sh bench/peers/*.txt | sha256sum | cut -d' ' -f1)
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$key" ]; then
  echo "peers: $venv is up to date"
  exit 0
fi

python=$(find_python)
uv=$(find_uv "$python")
[ -x "$venv/bin/python" ] || "$uv" venv --quiet --seed --python "$python" "$venv"
mkdir -p .cache
install_cpu_torch_wheel "$venv/bin/python"
"$venv/bin/python" -c 'import torch' 2> /dev/null ||
  die "vLLM's CPU build needs torch 2.13.0+cpu: put its wheel into ../shared/wheels"

# vLLM asks for torch's CUDA companions, which break `import transformers` beside a CPU torch: leave them out.
"$uv" pip install --python "$venv/bin/python" --override bench/peers/overrides.txt -r bench/peers/requirements.txt
# LMCache's declared dependencies include CUDA packages; the pure ones it needs are in requirements.txt.
"$uv" pip install --python "$venv/bin/python" --no-deps -r bench/peers/requirements-nodeps.txt
echo "$key" > "$stamp"
echo "peers: $venv is ready"
