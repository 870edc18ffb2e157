# SPDX-License-Identifier: Apache-2.0
"""The counters of a real engine, where a user of ``vllm.LLM`` finds them."""

from tools.demo_pair import DEMO_SPECULATION, demo_prompts
from vllm_draft_window.measuring.engine import Engine

WINDOW, BLOCK, REACH_OF_DRAFTS = 128, 32, 7


def window_metrics(engine):
    metrics = {metric.name: metric.value for metric in engine.llm.get_metrics() if "draft_window" in metric.name}
    return [metrics[f"vllm:draft_window_num_{name}"] for name in ("builds", "windowed_rows", "skipped_kv_tokens")]


def test_counters_of_an_engine():
    short, (long, other) = demo_prompts(1, 64), demo_prompts(2, 480)
    with Engine(
        speculative_config=DEMO_SPECULATION,
        additional_config={"draft_window_size": WINDOW},
        served_model_name="counted",
        max_model_len=640,
    ) as engine:
        start = window_metrics(engine)
        assert start == [0, 0, 0], "starting is no proposing"
        engine.run(short, max_tokens=8)
        after_short = window_metrics(engine)
        measured = engine.run([long, other], max_tokens=12)
        after_long = window_metrics(engine)
    assert after_short[0] > start[0]
    assert after_short[1:] == start[1:], "nothing to crop in 64 tokens"

    builds, rows, tokens = (b - a for a, b in zip(after_short, after_long, strict=True))
    # One forward proposes for both requests; the prefills propose too, the last proposals are never verified.
    assert measured.drafts / 2 <= builds <= measured.drafts + 4
    assert measured.drafts <= rows <= measured.drafts + 4
    read = WINDOW + REACH_OF_DRAFTS - 1 + BLOCK - 1  # the first query row keeps its window too
    assert (480 - read) * rows <= tokens <= (480 + 12 + 3 * REACH_OF_DRAFTS - WINDOW) * rows
