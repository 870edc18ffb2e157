# SPDX-License-Identifier: Apache-2.0
"""Model Runner V1: vLLM-Ascend's EAGLE3, DFlash and DSpark proposers with the shim in place of its own adapter."""

import pytest

from tests.ascend.engine import ascend_engine, source_code
from tests.ascend.fia import watch
from tests.ascend.reference import ProposerReference
from tests.e2e.drafts import speculation
from tests.parity import eagle3_draft
from vllm_ascend.draft_window import mrv1
from vllm_ascend.spec_decode import llm_base_proposer, utils
from vllm_ascend.spec_decode.sliding_window import SlidingWindowAdapter

WINDOW = 64
MAX_TOKENS = 6
PROMPTS = [source_code(length) for length in (40, 150, 330)]
UPSTREAM_ADAPTER = utils.SlidingWindowAdapter


def draft(layout, folder):
    return eagle3_draft.speculation(folder, num_tokens=3) if layout == "eagle3" else speculation(layout, folder)


def run(engine, window):
    """Output tokens; every draft attention on the way equals the masked reference."""
    reference = ProposerReference(engine.runner, window)
    watch.listeners.append(reference)
    try:
        return engine.run(PROMPTS, max_tokens=MAX_TOKENS).tokens, reference
    finally:
        watch.listeners.remove(reference)
        reference.close()


def test_upstreams_adapter_windows_the_wrong_tokens_for_dspark(tmp_path, monkeypatch):
    """Negative control, and the fault that the shim is there for. Runs first: the shim stays in place once it is."""
    monkeypatch.setattr(mrv1, "install", lambda: False)
    with ascend_engine(draft("dspark-anchor", tmp_path), runner=1, draft_window_size=WINDOW) as engine:
        assert type(engine.runner.drafter.sliding_window) is UPSTREAM_ADAPTER
        with pytest.raises(AssertionError, match=r"request \d"):
            run(engine, WINDOW)


@pytest.mark.parametrize("layout", ["dspark-anchor", "dspark-causal", "dflash", "eagle3"])
def test_drafts_equal_the_masked_reference_and_tokens_do_not_change(layout, tmp_path, monkeypatch):
    with ascend_engine(draft(layout, tmp_path), runner=1, draft_window_size=WINDOW) as engine:
        proposer = engine.runner.drafter
        assert type(proposer.sliding_window) is SlidingWindowAdapter is llm_base_proposer.SlidingWindowAdapter
        tokens_on, on = run(engine, WINDOW)
        monkeypatch.setattr(proposer, "draft_window_size", None)
        monkeypatch.setattr(proposer, "sliding_window", None)
        tokens_off, off = run(engine, None)
    assert on.calls > 0 and on.windowed_rows > 0
    assert off.calls > 0 and off.windowed_rows == 0
    assert set(on.steps) == set(range(3 if layout == "eagle3" else 1))
    assert tokens_on == tokens_off
