# SPDX-License-Identifier: Apache-2.0
"""Real vLLM, Model Runner V2: the window changes what the draft sees and never what comes out."""

import pytest

from tests.e2e.drafts import LAYOUTS, speculation
from tests.e2e.recorder import Recorder
from tools.demo_pair import DEMO_SPECULATION, demo_prompts
from vllm_draft_window.measuring.engine import Engine

WINDOW = {"draft_window_size": 64}
MAX_TOKENS = 20


def mixed_prompts() -> list[list[int]]:
    """Shorter than the window, across it by a token, and far beyond it, in one batch."""
    return [prompt[-n:] for prompt, n in zip(demo_prompts(5, 700), (5, 62, 150, 331, 700), strict=True)]


QUICK = ("dspark-anchor", "dflash")


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=pytest.mark.quick if name in QUICK else ()) for name in LAYOUTS]
)
def test_every_layout(layout, tmp_path, without_speculation):
    prompts = mixed_prompts()
    with Engine(
        speculative_config=speculation(layout, tmp_path), additional_config=WINDOW, max_model_len=1024
    ) as engine:
        recorder = Recorder(engine.speculator, window=64)
        windowed = engine.run(prompts, max_tokens=MAX_TOKENS)
    assert windowed.tokens == without_speculation(prompts, max_tokens=MAX_TOKENS, max_model_len=1024)
    assert windowed.drafts > 0
    assert recorder.windowed_rows > 100 and recorder.rows > recorder.windowed_rows
    assert len(recorder.windowed_addresses) == len(recorder.case.block_sizes)


@pytest.mark.parametrize("layout", ["dspark-anchor", "dflash"])
def test_sink_and_length_gate(layout, tmp_path, without_speculation):
    """The gate lies a few tokens past the fourth prompt, which crosses it while it is decoded."""
    prompts = mixed_prompts()
    options = WINDOW | {"draft_window_sink_size": 40, "draft_window_min_context": 345}
    with Engine(
        speculative_config=speculation(layout, tmp_path), additional_config=options, max_model_len=1024
    ) as engine:
        recorder = Recorder(engine.speculator, window=64, sink=40, min_context=345)
        windowed = engine.run(prompts, max_tokens=MAX_TOKENS)
    assert windowed.tokens == without_speculation(prompts, max_tokens=MAX_TOKENS, max_model_len=1024)
    assert recorder.windowed_rows > 50 and recorder.rows > recorder.windowed_rows


@pytest.mark.parametrize("index", [0, 1, 2])
def test_block_sizes(index, block_sizes, without_speculation):
    prompts = mixed_prompts()
    with Engine(
        speculative_config=DEMO_SPECULATION,
        additional_config=WINDOW,
        max_model_len=1024,
        block_size=block_sizes[index],
    ) as engine:
        recorder = Recorder(engine.speculator, window=64)
        windowed = engine.run(prompts, max_tokens=MAX_TOKENS)
    assert windowed.tokens == without_speculation(prompts, max_tokens=MAX_TOKENS, max_model_len=1024)
    assert recorder.windowed_rows > 100


def test_bfloat16(without_speculation):
    """The reference rounds less than the engine does, hence the tolerance; a wrong block is off by about one."""
    engine_args = dict(max_model_len=1024, dtype="bfloat16")
    prompts = mixed_prompts()
    with Engine(speculative_config=DEMO_SPECULATION, additional_config=WINDOW, **engine_args) as engine:
        recorder = Recorder(engine.speculator, window=64, tolerance=0.05)
        windowed = engine.run(prompts, max_tokens=MAX_TOKENS)
    assert windowed.tokens == without_speculation(prompts, max_tokens=MAX_TOKENS, **engine_args)
    assert recorder.windowed_rows > 100


def test_chunked_prefill_and_prefix_caching(without_speculation):
    """The second round finds its prompts in the cache, draft keys and values included."""
    engine_args = dict(max_model_len=1024, max_num_batched_tokens=256, max_num_seqs=8, enable_prefix_caching=True)
    prompts = mixed_prompts()
    expected = without_speculation(prompts, max_tokens=MAX_TOKENS, max_model_len=1024)
    with Engine(speculative_config=DEMO_SPECULATION, additional_config=WINDOW, **engine_args) as engine:
        recorder = Recorder(engine.speculator, window=64)
        first, second = (engine.run(prompts, max_tokens=MAX_TOKENS) for _ in range(2))
    assert first.tokens == second.tokens == expected
    # Cached draft keys and values give the same proposals.
    assert second.accepted_per_position == first.accepted_per_position
    assert recorder.windowed_rows > 200


def test_preemption(without_speculation):
    """A cache too small for the batch: requests lose their blocks and get others later."""
    prompts = demo_prompts(4, 300)
    engine_args = dict(max_model_len=512, num_gpu_blocks_override=36)
    expected = without_speculation(prompts, max_tokens=60, max_model_len=512)
    with Engine(
        speculative_config=DEMO_SPECULATION, additional_config=WINDOW, enable_prefix_caching=False, **engine_args
    ) as engine:
        recorder = Recorder(engine.speculator, window=64)
        windowed = engine.run(prompts, max_tokens=60)
    assert windowed.preemptions > 0
    assert windowed.tokens == expected
    assert recorder.windowed_rows > 100


def test_abort_frees_rows_for_shorter_requests(shared_engine, without_speculation):
    from vllm import SamplingParams

    prompts = mixed_prompts()
    expected = without_speculation(prompts, max_tokens=MAX_TOKENS, max_model_len=1024)
    with (
        shared_engine(speculative_config=DEMO_SPECULATION, additional_config=WINDOW, max_model_len=1024) as engine,
        Recorder(engine.speculator, window=64) as recorder,
    ):
        llm_engine = engine.llm.llm_engine
        parameters = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True, detokenize=False)
        long_ones = [
            llm_engine.add_request(f"long-{i}", {"prompt_token_ids": prompt}, parameters)
            for i, prompt in enumerate(demo_prompts(3, 800))
        ]
        for _ in range(4):
            llm_engine.step()
        llm_engine.abort_request(long_ones[:2], internal=True)
        engine_tokens = engine.run(prompts, max_tokens=MAX_TOKENS).tokens
    assert engine_tokens == expected
    assert recorder.windowed_rows > 100


def test_sampling_with_temperature_runs_and_is_reproducible():
    prompts = mixed_prompts()
    with Engine(
        speculative_config=DEMO_SPECULATION | {"draft_sample_method": "probabilistic"},
        additional_config=WINDOW,
        max_model_len=1024,
    ) as engine:
        recorder = Recorder(engine.speculator, window=64)
        first, second = (engine.run(prompts, max_tokens=MAX_TOKENS, temperature=0.8, seed=3).tokens for _ in range(2))
    assert first == second
    assert recorder.windowed_rows > 100


@pytest.mark.parametrize("window", [64, 1016], ids=["crops", "covers-all-but-a-block"])
def test_near_max_model_len(window, block_sizes, without_speculation):
    """Stock 0.27.1 reads past the block table here and may crash; the windowed lengths stop at its end."""
    engine_args = dict(max_model_len=1024, block_size=block_sizes[0])
    prompts = [prompt[-n:] for prompt, n in zip(demo_prompts(4, 1015), (990, 1000, 1010, 1015), strict=True)]
    expected = without_speculation(prompts, max_tokens=60, **engine_args)
    with Engine(
        speculative_config=DEMO_SPECULATION, additional_config={"draft_window_size": window}, **engine_args
    ) as engine:
        recorder = Recorder(engine.speculator, window=window)
        windowed = engine.run(prompts, max_tokens=60)
    assert windowed.tokens == expected
    assert [len(tokens) for tokens in windowed.tokens] == [34, 24, 14, 9]
    # The mask hides what lies behind W even where no whole block can be cropped.
    assert recorder.windowed_rows > 20
