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

# The interpreter runs on one core, so three runs share the machine.
export OMP_NUM_THREADS=1
logs=$(mktemp -d)
names=() pids=()
start() { # NAME VENV PYTEST_ARGUMENTS...
    "$2/bin/python" -m pytest -q "${@:3}" > "$logs/$1" 2>&1 &
    names+=("$1") pids+=($!)
}
trap 'kill "${pids[@]}" 2>/dev/null || true; rm -rf "$logs"' EXIT
start engine-0.27.1 .venv-test-0.27.1 -m engine "$@"
start others-0.27.1 .venv-test-0.27.1 -m "not engine" "$@"
# What takes minutes and depends on the draft's weights or on servers starting, not on vLLM's seams, runs on one version.
start engine-0.32.0 .venv-test-0.32.0 -m engine --ignore tests/e2e/test_serving.py \
    --ignore tests/e2e/test_acceptance.py --ignore tests/e2e/test_compare_options.py "$@"

status=0
for i in "${!pids[@]}"; do
    code=0
    wait "${pids[$i]}" || code=$?
    echo "== ${names[$i]}: exit status $code"
    tail -n 60 "$logs/${names[$i]}"
    [ "$code" = 0 ] || status=1
done
exit $status
