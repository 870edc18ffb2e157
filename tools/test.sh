#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Lint and every test, on vLLM 0.27.1; the engine tests again on 0.32.0. From a bare clone, on two cores.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. tools/setup_env.sh
setup_env .venv-test-0.27.1 0.27.1 lint,test,tools,docs
setup_env .venv-test-0.32.0 0.32.0 test,tools

.venv-test-0.27.1/bin/ruff check .
.venv-test-0.27.1/bin/ruff format --check .
.venv-test-0.27.1/bin/mypy

# The interpreter runs on one core, so the two versions share the machine. Three servers at once are left to one of them:
# the serving test passes on 0.32.0 too, but spends its time on starting.
export OMP_NUM_THREADS=1
log=$(mktemp)
.venv-test-0.32.0/bin/python -m pytest -q -m engine --ignore tests/e2e/test_serving.py > "$log" 2>&1 &
newer=$!
trap 'kill $newer 2>/dev/null || true; rm -f "$log"' EXIT
status=0
.venv-test-0.27.1/bin/python -m pytest -q "$@" || status=$?
wait $newer || status=$?
echo "== engine tests on vLLM 0.32.0"
tail -n 40 "$log"
exit $status
