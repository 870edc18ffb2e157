# SPDX-License-Identifier: Apache-2.0
"""The point of it all, on the demo pair: acceptance collapses on a long context, and the window brings it back."""

from tools.measure import DEMO_SPECULATION, Engine, demo_prompts

NUM_PROMPTS = 16
MAX_TOKENS = 48


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
