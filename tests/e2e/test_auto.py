# SPDX-License-Identifier: Apache-2.0
"""``draft_window_size: "auto"`` in real engines: the target's tokens, what each draw sees, what is learned from it."""

import logging

import numpy as np
import pytest
import torch
from prometheus_client import generate_latest
from scipy import stats

from tests.e2e.recorder import Recorder
from tools.demo_pair import demo_prompts, demo_speculation
from vllm_draft_window.measuring.engine import Engine

CANDIDATES = [64, 128, 256]
AUTO = {"draft_window_size": "auto", "draft_window_candidates": CANDIDATES}
METHODS = pytest.mark.parametrize("method", ["dspark", "eagle3"])


def mixed_prompts() -> list[list[int]]:
    return [prompt[-n:] for prompt, n in zip(demo_prompts(5, 700), (5, 62, 150, 331, 700), strict=True)]


@pytest.mark.parametrize("options", [{}, {"draft_window_sink_size": 32, "draft_window_min_context": 100}])
@METHODS
def test_each_request_sees_the_window_that_was_drawn_for_it(method, options, without_speculation, caplog):
    prompts = mixed_prompts()
    with Engine(
        speculative_config=demo_speculation(method), additional_config=AUTO | options, max_model_len=1024
    ) as engine:
        chooser = engine.speculator.window.chooser
        drawn, types = set(), set()
        choose = chooser.choose

        def choose_and_tell(**batch):
            # What a launch takes for granted that is only told where they are.
            tensors = [value for value in batch.values() if torch.is_tensor(value)]
            types.add(tuple(tensor.dtype for tensor in tensors))
            assert all(tensor.is_contiguous() for tensor in tensors) and len(types) == 1
            choose(**batch)
            drawn.update(chooser.windows[: batch["num_reqs"]].tolist())

        chooser.choose = choose_and_tell
        recorder = Recorder(
            engine.speculator,
            window=max(CANDIDATES),
            sink=options.get("draft_window_sink_size", 0),
            min_context=options.get("draft_window_min_context", 0),
        )
        measured = engine.run(prompts, max_tokens=20)
    assert measured.tokens == without_speculation(prompts, max_tokens=20, max_model_len=1024)
    assert recorder.windowed_rows > 50
    assert drawn == set(CANDIDATES)
    # Nothing is lost: each proposal that the target verified is credited with what the target kept of it.
    kept, proposals = chooser.history.sum((0, 1)).tolist()
    assert proposals == measured.drafts
    assert kept == measured.drafts + sum(measured.accepted_per_position)


def test_two_runs_draw_alike_and_say_what_they_learned(caplog):
    histories = []
    caplog.set_level(logging.INFO)
    for _ in range(2):
        with Engine(
            speculative_config=demo_speculation("dspark"), additional_config=AUTO, max_model_len=1024
        ) as engine:
            engine.run(mixed_prompts(), max_tokens=40)
            window = engine.speculator.window
            window.chooser.seen.copy_(window.chooser.history)
            window._counters.log()
            histories.append(window.chooser.history.tolist())
    assert histories[0] == histories[1]
    assert "W=auto (64, 128, 256; first 256)" in caplog.text
    assert "Draft windows drawn: to 256 tokens W=" in caplog.text
    exposed = generate_latest().decode()
    assert 'vllm:draft_window_num_arm_proposals_total{arm="64",context="1024"' in exposed


@pytest.mark.slow
@pytest.mark.one_vllm
def test_sampled_tokens_have_the_targets_distribution():
    """Second and third token of 240 samples, which drafts propose, against the target alone."""
    prompt = demo_prompts(1, 300)[0]
    counts = []
    for speculation in (None, demo_speculation("dspark") | {"draft_sample_method": "probabilistic"}):
        with Engine(
            **({"speculative_config": speculation, "additional_config": AUTO} if speculation else {}),
            max_model_len=512,
            max_num_seqs=64,
        ) as engine:
            tokens = np.array(engine.run([prompt] * 240, max_tokens=3, temperature=1.0).tokens)
            if speculation:
                assert engine.speculator.window.chooser.history.sum() > 0
        counts.append([np.bincount(tokens[:, position], minlength=512) for position in (1, 2)])
    for alone, drafted in zip(*counts, strict=True):
        common = alone + drafted >= 10
        table = np.stack([np.append(row[common], row[~common].sum()) for row in (alone, drafted)])
        assert stats.chi2_contingency(table[:, table.sum(0) > 0]).pvalue > 0.001


def test_stays_at_its_start_where_candidates_hardly_differ(caplog):
    """Blocks of 128 tokens and a draft of 512 positions are fine; candidates below four blocks are not."""
    caplog.set_level(logging.INFO)
    with Engine(
        speculative_config=demo_speculation("dspark"), additional_config=AUTO, max_model_len=1024, block_size=128
    ) as engine:
        window = engine.speculator.window
        assert (window.chooser, window.window.size) == (None, 256)
    assert "draft_window_size='auto' stays at 256 tokens: in whole blocks of 128 tokens" in caplog.text
    assert "W=256" in caplog.text
