# SPDX-License-Identifier: Apache-2.0
"""Engines of several workers, each a process on this CPU: one speaks and counts, and the tokens are the same.

The engine cores run in processes of their own, as in serving, so each finds the CPU engine and the plugin by itself.
"""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from tests.e2e.conftest import VLLM_VERSION
from tools.demo_pair import demo_prompts
from vllm_draft_window.cpu_engine import SITE_DIR

MAX_TOKENS = 12
FIXED, LEARNED = {"draft_window_size": 64}, {"draft_window_size": "auto", "draft_window_candidates": [64, 128]}
ROOT = Path(__file__).parents[2]
# One prompt below the window and one above, each a request of its own data parallel engine where there are two.
PROGRAM = """
    import asyncio, json, sys, time
    from tools.demo_pair import DEMO_SPECULATION
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm_draft_window.clone import DEMO_PAIR

    async def generate(engine, name, prompt, rank):
        greedy = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True, detokenize=False)
        async for output in engine.generate({"prompt_token_ids": prompt}, greedy, name, data_parallel_rank=rank):
            tokens = output.outputs[0].token_ids
        return list(tokens)

    def learned(worker):
        return worker.model_runner.speculator.window.chooser.history.tolist()

    async def main():
        prompts, parallel, window = map(json.loads, sys.argv[1:4])
        engine = AsyncLLM.from_engine_args(
            AsyncEngineArgs(
                model=str(DEMO_PAIR / "target"),
                speculative_config=DEMO_SPECULATION,
                additional_config=window,
                skip_tokenizer_init=True,
                enforce_eager=True,
                dtype="float32",
                max_model_len=1024,
                block_size=32,
                kv_cache_memory_bytes=64 << 20,
                max_num_seqs=4,
                distributed_executor_backend="mp",
                **parallel,
            )
        )
        ranks = range(parallel.get("data_parallel_size", 1))
        requests = [(f"{rank}-{i}", p, rank) for rank in ranks for i, p in enumerate(prompts)]
        tokens = await asyncio.gather(*(generate(engine, *request) for request in requests))
        histories = await engine.collective_rpc(learned) if window["draft_window_size"] == "auto" else []
        await asyncio.sleep(2)  # for the last line of the counters
        engine.shutdown()
        json.dump([tokens, histories], open(sys.argv[4], "w"))

    if __name__ == "__main__":
        asyncio.run(main())
"""


def run(prompts, parallel, folder, window=FIXED):
    """Tokens of every request, what each rank learned, and the log, each line of which names its process."""
    program, output = folder / "program.py", folder / "tokens.json"
    program.write_text(textwrap.dedent(PROGRAM).replace("MAX_TOKENS", str(MAX_TOKENS)))
    result = subprocess.run(
        [sys.executable, program, *map(json.dumps, ([list(p) for p in prompts], parallel, window)), output],
        env=os.environ
        | {
            "PYTHONPATH": f"{SITE_DIR}{os.pathsep}{ROOT}",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
            "VLLM_LOG_STATS_INTERVAL": "1",
            "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # to ask each worker what it has learned
            # Vocabulary-parallel embedding wants a compiled function, which trips over the stand-in Triton backend.
            "TORCHDYNAMO_DISABLE": "1",
        },
        capture_output=True,
        text=True,
        timeout=540,
    )
    log = result.stdout + result.stderr
    assert result.returncode == 0, log[-3000:]
    tokens, histories = json.loads(output.read_text())
    return [tuple(of_request) for of_request in tokens], histories, log.splitlines()


def processes_that_say(text, log):
    return [line.split(")")[0] for line in log if text in line]


IN_FORCE = "Draft window in force: method=dspark, W="


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parallel", "window"),
    [({"tensor_parallel_size": 2}, LEARNED), ({"data_parallel_size": 2}, FIXED)],
    ids=["TP 2", "DP 2"],
)
def test_one_worker_of_each_engine_speaks_and_tokens_are_those_of_one_device(
    parallel, window, tmp_path, without_speculation
):
    prompts = [prompt[-n:] for prompt, n in zip(demo_prompts(2, 200), (30, 200), strict=True)]
    expected = without_speculation(prompts, max_tokens=MAX_TOKENS, max_model_len=1024)
    tokens, histories, log = run(prompts, parallel, tmp_path, window)
    engines = parallel.get("data_parallel_size", 1)
    assert tokens == list(expected) * engines
    spoke, counted = (processes_that_say(text, log) for text in (IN_FORCE, "Draft window metrics: Builds:"))
    assert len(spoke) == len(set(spoke)) == engines
    assert set(counted) == set(spoke)
    behind_a_window = [line for line in log if "Windowed rows: " in line and "Windowed rows: 0," not in line]
    assert set(processes_that_say("Windowed rows", behind_a_window)) == set(spoke)
    if window is LEARNED:  # both ranks have drawn and credited the same
        assert histories[0] == histories[1] and np.any(histories[0])


@pytest.mark.slow
@pytest.mark.skipif(VLLM_VERSION < (0, 32), reason="vLLM 0.27 refuses: DSpark does not support pipeline parallelism")
def test_the_last_pipeline_stage_speaks(tmp_path):
    """It starts: at the first step with drafts vLLM 0.32.0 itself stops on a CPU, without a window too."""
    _, _, log = run([], {"pipeline_parallel_size": 2}, tmp_path)
    (spoke,) = processes_that_say(IN_FORCE, log)
    assert spoke.startswith("(Worker_PP1 ")
