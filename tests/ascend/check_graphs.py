# SPDX-License-Identifier: Apache-2.0
"""FULL graphs whose task updates bring the table and the lengths: public case 06, over 100 steps."""

import pytest
import torch

from tests.ascend.engine import ascend_engine, capture_graphs, source_code
from tests.ascend.steps import ScriptedSteps, check_padded_graph
from tests.e2e.drafts import speculation

WINDOW = 256


@pytest.fixture(scope="module")
def speculator(tmp_path_factory):
    layout = speculation("dspark-anchor", tmp_path_factory.mktemp("draft"))
    with ascend_engine(layout, draft_window_size=WINDOW) as engine:
        engine.run([source_code(50)], max_tokens=2)  # the runner's own state of a step
        yield engine.speculator


@pytest.mark.parametrize(("size", "fused"), [(8, True), (20, False)])
def test_case_06_padded_graphs(speculator, size, fused, monkeypatch):
    if not fused:  # the launch's plain-torch twin: faster than Triton's interpreter
        monkeypatch.setattr(speculator.window.inputs, "_launch", None)
    check_padded_graph(speculator, WINDOW, size)


def test_graph_eager_and_off_agree_where_the_window_hides_nothing(speculator, monkeypatch):
    capture_graphs(speculator, (8,))
    drafts = []
    for in_graph, window in ((True, True), (False, True), (False, False)):
        with monkeypatch.context() as changed:
            changed.setattr(speculator.query_cudagraph_manager, "_graphs_captured", in_graph)
            if not window:
                changed.setattr(speculator, "window", None)
            drafts.append(ScriptedSteps(speculator).run([30, 100, WINDOW]))
    assert torch.equal(drafts[0], drafts[1]) and torch.equal(drafts[1], drafts[2])
