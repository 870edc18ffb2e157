# SPDX-License-Identifier: Apache-2.0
"""vLLM-Ascend's DSpark and DFlash speculators with the window in front, eager and in FULL graphs."""

import pytest

from tests.ascend.engine import ascend_engine, capture_graphs, compared, source_code
from tests.ascend.steps import ScriptedSteps
from tests.e2e.drafts import speculation

WINDOW = 64
MAX_TOKENS = 6
# Below the window, inside its rounding to blocks of 128, and beyond.
PROMPTS = [source_code(length) for length in (40, 150, 330)]
# The last has a full-attention layer and a causal sliding-window layer, in KV cache groups of their own.
LAYOUTS = ("dspark-anchor", "dflash", "dspark-two-groups")


@pytest.fixture(scope="module", params=LAYOUTS)
def engine(request, tmp_path_factory):
    layout = speculation(request.param, tmp_path_factory.mktemp(request.param))
    with ascend_engine(layout, draft_window_size=WINDOW) as running:
        yield running


def test_drafts_equal_the_masked_reference_and_tokens_do_not_change(engine, monkeypatch):
    speculator = engine.speculator
    assert type(speculator).__name__.startswith("WindowedAscend")
    with compared(speculator, WINDOW) as on:
        tokens_on = engine.run(PROMPTS, max_tokens=MAX_TOKENS).tokens
    assert on.calls > 0 and on.windowed_rows > 0
    with monkeypatch.context() as off_in_here, compared(speculator, None) as off:
        off_in_here.setattr(speculator, "window", None)
        tokens_off = engine.run(PROMPTS, max_tokens=MAX_TOKENS).tokens
    assert off.calls > 0 and off.windowed_rows == 0
    capture_graphs(speculator, (4,))
    with compared(speculator, WINDOW) as graph:
        tokens_graph = engine.run(PROMPTS, max_tokens=MAX_TOKENS).tokens
    assert graph.calls > 0 and graph.windowed_rows > 0
    assert all(captured.replays for captured in speculator.query_cudagraph_manager.graphs.values())
    assert all(len(addresses) == 1 for addresses in graph.tables.values())
    assert tokens_on == tokens_off == tokens_graph
    for name, causal in graph.causal.items():
        masked = {3, 4} if causal else {0}
        assert on.modes[name] <= masked and graph.modes[name] <= masked, "causality is the group's"


def test_sink_and_length_gate(tmp_path):
    options = dict(draft_window_sink_size=100, draft_window_min_context=600)
    with ascend_engine(speculation("dflash", tmp_path), draft_window_size=WINDOW, **options) as engine:
        speculator = engine.speculator
        with compared(speculator, WINDOW, sink=100, min_context=600) as reference:
            ScriptedSteps(speculator).run([50, 599, 600, 1000])
    layers = len(speculator.draft_attn_layer_names)
    assert (reference.calls, reference.windowed_rows) == (layers, 2 * layers)


def test_without_the_option_the_speculator_is_upstreams(tmp_path):
    with ascend_engine(speculation("dflash", tmp_path)) as engine:
        assert type(engine.speculator).__name__ == "AscendDFlashSpeculator"
