#!/usr/bin/env bash
# The static checks, all of them even if one fails, so that one run shows everything.
set -uo pipefail
cd "$(dirname "$0")/.."
bin=.venv/bin
failed=()

run() {
  local name=$1 started=$SECONDS
  shift
  if "$@"; then
    echo "check: $name ok ($((SECONDS - started)) s)"
  else
    echo "check: $name FAILED" >&2
    failed+=("$name")
  fi
}

run format "$bin/ruff" format --check --quiet .
run lint "$bin/ruff" check --quiet .
run types "$bin/mypy" --no-error-summary
run imports "$bin/lint-imports" --no-logo
run flags "$bin/python" scripts/render_flags.py --check
run metrics "$bin/python" scripts/render_metrics.py --check
run crd "$bin/python" scripts/render_crd.py --check
if [ ${#failed[@]} -gt 0 ]; then
  echo "check: failed: ${failed[*]}" >&2
  exit 1
fi
