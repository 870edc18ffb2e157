#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The draft window at work, from a bare clone:
# bash tools/demo.sh [--method dspark|eagle3] [--full] [--window N] [--json PATH] (see --help)
set -euo pipefail
json=()
cwd=$PWD
# --json is relative to where the user stands, everything else to the repository.
args=()
while [ $# -gt 0 ]; do
    case $1 in
        --json) json=(--json "$(cd "$cwd" && realpath -m -- "${2:?--json needs a path}")"); shift 2 ;;
        --json=*) json=(--json "$(cd "$cwd" && realpath -m -- "${1#--json=}")"); shift ;;
        *) args+=("$1"); shift ;;
    esac
done
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. tools/setup_env.sh
setup_env .venv 0.27.1 tools >&2
exec .venv/bin/python -m tools.demo "${args[@]}" "${json[@]}"
