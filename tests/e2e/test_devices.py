# SPDX-License-Identifier: Apache-2.0
"""Engines of several workers, each a process on this CPU: one speaks and counts, and the tokens are the same."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.e2e.conftest import VLLM_VERSION
from tools.demo_pair import demo_prompts
from vllm_draft_window.cpu_engine import SITE_DIR

MAX_TOKENS = 12
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

    async def main():
        prompts, parallel = json.loads(sys.argv[1]), json.loads(sys.argv[2])
        engine = AsyncLLM.from_engine_args(
            AsyncEngineArgs(
                model=str(DEMO_PAIR / "target"),
                speculative_config=DEMO_SPECULATION,
                additional_config={"draft_window_size": 64},
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
        await asyncio.sleep(2)  # for the last line of the counters
        engine.shutdown()
        json.dump(tokens, open(sys.argv[3], "w"))

    if __name__ == "__main__":
        asyncio.run(main())
"""


def run(prompts, parallel, folder):
    """Tokens of every request, and the log, each line of which begins with the process that wrote it."""
    program, output = folder / "program.py", folder / "tokens.json"
    program.write_text(textwrap.dedent(PROGRAM).replace("MAX_TOKENS", str(MAX_TOKENS)))
    result = subprocess.run(
        [sys.executable, program, json.dumps([list(prompt) for prompt in prompts]), json.dumps(parallel), output],
        env=os.environ
        | {
            "PYTHONPATH": f"{SITE_DIR}{os.pathsep}{ROOT}",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
            "VLLM_LOG_STATS_INTERVAL": "1",
            # Vocabulary-parallel embedding wants a compiled function, which trips over the stand-in Triton backend.
            "TORCHDYNAMO_DISABLE": "1",
        },
        capture_output=True,
        text=True,
        timeout=540,
    )
    log = result.stdout + result.stderr
    assert result.returncode == 0, log[-3000:]
    return [tuple(tokens) for tokens in json.loads(output.read_text())], log.splitlines()


def processes_that_say(text, log):
    return [line.split(")")[0] for line in log if text in line]


IN_FORCE = "Draft window in force: method=dspark, W=64"


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [{"tensor_parallel_size": 2}, {"data_parallel_size": 2}], ids=["TP 2", "DP 2"])
def test_one_worker_of_each_engine_speaks_and_tokens_are_those_of_one_device(parallel, tmp_path, without_speculation):
    prompts = [prompt[-n:] for prompt, n in zip(demo_prompts(2, 200), (30, 200), strict=True)]
    expected = without_speculation(prompts, max_tokens=MAX_TOKENS, max_model_len=1024)
    tokens, log = run(prompts, parallel, tmp_path)
    engines = parallel.get("data_parallel_size", 1)
    assert tokens == list(expected) * engines
    spoke, counted = (processes_that_say(text, log) for text in (IN_FORCE, "Draft window metrics: Builds:"))
    assert len(spoke) == len(set(spoke)) == engines
    assert set(counted) == set(spoke)


@pytest.mark.slow
@pytest.mark.skipif(VLLM_VERSION < (0, 32), reason="vLLM 0.27 refuses: DSpark does not support pipeline parallelism")
def test_the_last_pipeline_stage_speaks(tmp_path):
    """It starts: at the first step with drafts vLLM 0.32.0 itself stops on a CPU, without a window too."""
    _, log = run([], {"pipeline_parallel_size": 2}, tmp_path)
    (spoke,) = processes_that_say(IN_FORCE, log)
    assert spoke.startswith("(Worker_PP1 ")
