#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
set -euo pipefail
usage() {
    cat <<'TEXT'
Serve the demo pair with vLLM (Model Runner V2) on a CPU: an OpenAI-compatible server, with the draft window on.

    bash tools/serve_demo.sh [--window N | --no-window] [--port PORT] [-- OPTIONS OF vllm serve]

    --window N     draft_window_size in tokens; default 512
    --no-window    speculate without the window, to compare
    --port PORT    default 8000; the server listens on 127.0.0.1
    -- ...         passed on, for example: -- --max-num-seqs 4

Ready once it says "Application startup complete" (half a minute). Then, for example:

    curl -s localhost:8000/v1/completions -H 'Content-Type: application/json' \
        -d '{"model": "demo", "prompt": "import os\n\ndef main(", "max_tokens": 40, "temperature": 0}'
    curl -s localhost:8000/metrics | grep -E 'spec_decode|draft_window'

The first run makes an environment in .venv (a few minutes). SERVE_PYTHON=/path/to/python uses that one's vLLM instead.
TEXT
}

window=512 port=8000 more=()
while [ $# -gt 0 ]; do
    case $1 in
        --window) window=${2:?--window needs a number of tokens}; shift 2 ;;
        --no-window) window=; shift ;;
        --port) port=${2:?--port needs a number}; shift 2 ;;
        --) shift; more=("$@"); break ;;
        -h | --help) usage; exit 0 ;;
        *) echo "serve_demo.sh: unknown option $1 (see --help)" >&2; exit 2 ;;
    esac
done

cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${SERVE_PYTHON:-}
if [ -z "$python" ]; then
    . tools/setup_env.sh
    setup_env .venv 0.27.1 tools >&2
    python=.venv/bin/python
fi

# The API server and the engine core are processes of their own; this keeps a third one, for the worker, out.
export VLLM_ENABLE_V1_MULTIPROCESSING=0
# Every process of the server makes itself ready for the CPU.
export PYTHONPATH="$PWD/vllm_draft_window/cpu_engine/site${PYTHONPATH:+:$PYTHONPATH}"
# Counters of the engine's process reach the API server's /metrics through files in this folder.
metrics=$(mktemp -d)
export PROMETHEUS_MULTIPROC_DIR=$metrics
trap 'rm -rf "$metrics"' EXIT

pair=checkpoints/demo-pair
[ -z "$window" ] || more=(--additional-config "{\"draft_window_size\": $window}" "${more[@]}")
"$python" -m vllm.entrypoints.cli.main serve "$pair/target" --served-model-name demo --host 127.0.0.1 --port "$port" \
    --dtype float32 --enforce-eager --block-size 32 --kv-cache-memory-bytes 512M --max-model-len 4608 \
    --max-num-seqs 8 \
    --speculative-config "{\"method\": \"dspark\", \"model\": \"$pair/draft\", \"num_speculative_tokens\": 7}" \
    "${more[@]}" &
server=$!
trap 'kill -TERM "$server" 2>/dev/null || true' INT TERM
# A signal ends the first wait, and only the second one sees how the server ended.
wait "$server" || true
wait "$server"
