# SPDX-License-Identifier: Apache-2.0
"""``draft_window_reclaim`` in real engines: what is freed is never read, so nothing but the memory changes."""

import math

import pytest
from vllm import SamplingParams

from tools.demo_pair import demo_prompts, demo_speculation
from tools.poison import Poison
from vllm_ascend.draft_window import reclaim
from vllm_draft_window.measuring.engine import Engine

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("reclaim")]

WINDOW = {"draft_window_size": 128}
RECLAIM = WINDOW | {"draft_window_reclaim": True}
BLOCK = 32
MAX_TOKENS = 24


def engine(method: str, options: dict, **more) -> Engine:
    # Prompts are prefilled in chunks longer than the window.
    defaults = dict(max_model_len=1024, max_num_batched_tokens=320, enable_prefix_caching=False, block_size=BLOCK)
    return Engine(speculative_config=demo_speculation(method), additional_config=options, **(defaults | more))


def eventful_run(engine: Engine, prompts: list[list[int]]):
    """Run the prompts while all requests are preempted once, and one more request arrives and is aborted."""
    llm_engine = engine.llm.llm_engine
    step, steps = llm_engine.step, 0
    parameters = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True, detokenize=False)
    (intruder,) = demo_prompts(1, 500)

    def step_and_interfere():
        nonlocal steps
        steps += 1
        if steps == 3:
            llm_engine.add_request("intruder", {"prompt_token_ids": intruder}, parameters)
        if steps == 10:
            assert engine.llm.reset_prefix_cache(reset_running_requests=True)
        if steps == 16:
            llm_engine.abort_request(["intruder"])
        return step()

    llm_engine.step = step_and_interfere
    try:
        return engine.run(prompts, max_tokens=MAX_TOKENS)
    finally:
        llm_engine.step = step


def prompts() -> list[list[int]]:
    return [prompt[-n:] for prompt, n in zip(demo_prompts(4, 900), (60, 300, 650, 900), strict=True)]


@pytest.fixture(scope="module")
def window_alone():
    """What an engine without reclaim makes of the eventful run, by method."""
    known = {}

    def run(method: str):
        if method not in known:
            with engine(method, WINDOW) as without:
                known[method] = eventful_run(without, prompts())
        return known[method]

    return run


@pytest.mark.parametrize("method", ["dspark", "eagle3"])
def test_freed_blocks_are_never_read(method, window_alone, without_speculation):
    """Chunked prefill, preemption and resumption, an abort; blocks spoiled as soon as they are freed."""
    expected = window_alone(method)
    assert expected.preemptions > 0
    assert expected.tokens == without_speculation(prompts(), max_tokens=MAX_TOKENS, max_model_len=1024)
    with engine(method, RECLAIM) as engine_with_reclaim:
        for value in (1e4, math.nan):
            with Poison(engine_with_reclaim, value) as poison:
                measured = eventful_run(engine_with_reclaim, prompts())
            assert poison.freed > 100
            assert measured.preemptions == expected.preemptions
            assert measured.tokens == expected.tokens
            assert measured.accepted_per_position == expected.accepted_per_position
        assert poison.pool.get_num_free_blocks() == poison.pool.num_gpu_blocks - 1


@pytest.mark.parametrize("kept", [128 - BLOCK, 64], ids=["one-block-too-small", "half"])
def test_a_cache_that_keeps_too_little_is_noticed(kept, window_alone, monkeypatch):
    """The negative control of the test above: verification protects the tokens, acceptance tells."""
    monkeypatch.setattr(reclaim, "kept_tokens", lambda *_: kept)
    with engine("dspark", RECLAIM) as too_small, Poison(too_small, 1e4):
        measured = eventful_run(too_small, prompts())
    assert measured.tokens == window_alone("dspark").tokens
    assert measured.accepted_length < 0.8 * window_alone("dspark").accepted_length


@pytest.mark.parametrize("method", ["dspark", "eagle3"])
def test_prefix_cache_hits(method):
    """A second round finds the draft's newest blocks too, so it accepts the same; blocks given away are spoiled."""
    rounds = {}
    for options in (WINDOW, RECLAIM):
        with engine(method, options, enable_prefix_caching=True) as caching, Poison(caching, 1e4):
            rounds[len(options)] = [caching.run(prompts(), max_tokens=MAX_TOKENS) for _ in range(2)]
    assert rounds[2][1].cached == rounds[1][1].cached > 1000
    for with_reclaim, without in zip(rounds[2], rounds[1], strict=True):
        assert with_reclaim.tokens == without.tokens
        assert with_reclaim.accepted_per_position == without.accepted_per_position


def test_with_reclaim_off_the_cache_is_stock():
    configs = []
    for options in ({}, WINDOW):
        with engine("dspark", options) as stock:
            configs.append(stock.scheduler.kv_cache_config)
    assert configs[0] == configs[1]


@pytest.mark.parametrize(
    ("options", "engine_args", "reason"),
    [
        ({"draft_window_sink_size": 16}, {}, "draft_window_sink_size=16 needs the first"),
        ({}, {"disable_hybrid_kv_cache_manager": True}, "the hybrid KV cache manager is off"),
        ({"draft_window_size": 900}, {}, "draft layers: 2, target layers: 4; that would save"),
    ],
    ids=["sink", "no-hybrid-manager", "does-not-pay"],
)
def test_refused_at_start(options, engine_args, reason):
    with pytest.raises(ValueError, match=f"draft_window_reclaim=true is not possible .*{reason}"):
        engine("dspark", RECLAIM | options, **engine_args)
