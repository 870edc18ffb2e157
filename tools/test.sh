#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Lint and every test: those of engines and their configuration on vLLM 0.32.0, then all of them on 0.27.1.
# From a bare clone, on two cores.
#   bash tools/test.sh [--quick] [PYTEST_ARGUMENTS...]
# --quick: lint, types, unit tests and one real engine per method, on vLLM 0.27.1.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
quick=
if [ "${1:-}" = --quick ]; then quick=1 && shift; fi
. tools/setup_env.sh
setup_env .venv-test-0.27.1 0.27.1 lint,test,tools,docs
[ "$quick" ] || setup_env .venv-test-0.32.0 0.32.0 test,tools

.venv-test-0.27.1/bin/ruff check .
.venv-test-0.27.1/bin/ruff format --check .
.venv-test-0.27.1/bin/typos
.venv-test-0.27.1/bin/mypy

run() { # VLLM_VERSION PYTEST_ARGUMENTS...
    echo "== vLLM $1"
    # The interpreter runs on one core, so each worker has one.
    OMP_NUM_THREADS=1 ".venv-test-$1/bin/python" -m pytest -q -n 2 --dist loadgroup --benchmark-disable \
        --durations 25 --durations-min 10 "${@:2}"
}
if [ "$quick" ]; then
    run 0.27.1 -m "quick or not (engine or slow)" "$@"
    exit
fi
status=0
run 0.32.0 -m "(engine or configuration) and not one_vllm" "$@" || status=1
run 0.27.1 "$@" || status=1
exit $status
