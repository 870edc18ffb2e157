# SPDX-License-Identifier: Apache-2.0
"""The point of it all, on the demo pair: acceptance collapses on a long context, and the window brings it back."""

import pytest

from tools.demo_pair import DEMO_SPECULATION, demo_prompts, demo_speculation
from vllm_draft_window.measuring.engine import Engine

NUM_PROMPTS = 16
MAX_TOKENS = 48
pytestmark = [pytest.mark.slow, pytest.mark.one_vllm, pytest.mark.timeout(1800)]


def measure(contexts, **additional_config):
    with Engine(
        speculative_config=DEMO_SPECULATION,
        additional_config=additional_config,
        max_model_len=4352,
        kv_cache_memory_bytes=1 << 30,
    ) as engine:
        return {n: engine.run(demo_prompts(NUM_PROMPTS, n), max_tokens=MAX_TOKENS) for n in contexts}


def test_window_restores_acceptance_at_4096_tokens(without_speculation):
    off = measure([4096])[4096]
    on = measure([512, 4096], draft_window_size=512)
    assert on[4096].tokens == off.tokens
    assert on[4096].tokens == without_speculation(
        demo_prompts(NUM_PROMPTS, 4096), max_tokens=MAX_TOKENS, max_model_len=4352, kv_cache_memory_bytes=1 << 30
    )
    assert on[4096].accepted_length >= 2 * off.accepted_length
    assert on[4096].accepted_length >= 0.85 * on[512].accepted_length


def test_window_keeps_an_eagle3_draft_at_4096_tokens():
    """Without a window the length at 4096 tokens is a third of that at 512."""
    with Engine(
        speculative_config=demo_speculation("eagle3"),
        additional_config={"draft_window_size": 512},
        max_model_len=4352,
        kv_cache_memory_bytes=1 << 30,
    ) as engine:
        # More than for DSpark: seven forwards a step are slow, but fewer prompts leave an error of a tenth.
        measured = {n: engine.run(demo_prompts(24, n), max_tokens=MAX_TOKENS) for n in (512, 4096)}
    assert measured[4096].accepted_length >= 0.95 * measured[512].accepted_length
