# SPDX-License-Identifier: Apache-2.0
"""Causal layers with learnable sinks, whose FULL graphs bake the block table in: public case 06, over 100 steps."""

import pytest
import torch

from tests.ascend.engine import ascend_engine, capture_graphs, compared, source_code
from tests.ascend.steps import ScriptedSteps, check_padded_graph
from tests.e2e.drafts import speculation
from vllm_ascend.ascend_forward_context import _EXTRA_CTX
from vllm_ascend.worker.v2.spec_decode.dflash import aclgraph

WINDOW = 256


@pytest.fixture(scope="module")
def speculator(tmp_path_factory):
    layout = speculation("dspark-causal", tmp_path_factory.mktemp("draft"))
    with ascend_engine(layout, draft_window_size=WINDOW) as engine:
        engine.run([source_code(50)], max_tokens=2)  # the runner's own state of a step
        speculator = engine.speculator
        layers = speculator.vllm_config.compilation_config.static_forward_context
        for i, name in enumerate(sorted(speculator.draft_attn_layer_names)):
            impl = layers[name].impl
            impl.sinks = torch.randn(impl.num_heads, generator=torch.Generator().manual_seed(i))
        speculator.window.inputs._launch = None  # plain torch: faster than Triton's interpreter
        yield speculator


@pytest.fixture(autouse=True)
def sinks_in_forward_context(monkeypatch):
    """vLLM-Ascend's Model Runner V2 does not set this flag, and its graphs with sinks cannot be updated without."""
    update = aclgraph.update_full_graph_params

    def with_flag(*args, **kwargs):
        _EXTRA_CTX.sinks = True
        update(*args, **kwargs)

    monkeypatch.setattr(aclgraph, "update_full_graph_params", with_flag)


def test_eager(speculator):
    with compared(speculator, WINDOW) as reference:
        ScriptedSteps(speculator).run([300, 1000, 100])
    assert reference.calls == len(speculator.draft_attn_layer_names) and reference.windowed_rows > 0


@pytest.mark.parametrize("size", [8, 20])
def test_case_06_padded_graphs(speculator, size):
    check_padded_graph(speculator, WINDOW, size)


def test_a_capture_on_the_full_tables_is_noticed(speculator, monkeypatch):
    """Negative control, and the last test here: a graph that reads other tensors than the steps write."""
    with monkeypatch.context() as off:
        off.setattr(speculator, "window", None)
        capture_graphs(speculator, (8,))
    with compared(speculator, WINDOW), pytest.raises(AssertionError):
        ScriptedSteps(speculator).run([300, 1000, 100])
