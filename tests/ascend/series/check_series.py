# SPDX-License-Identifier: Apache-2.0
"""The branches that ``draft-window upstream-pr`` writes, on both model runners, with nothing of ours beside them.

``tests/ut/program/test_upstream_pr.py`` runs this on a checkout that the last branch is checked out in.
"""

import pytest
import torch

from tests.ascend.engine import (
    ascend_engine,
    capture_autoregressive_graphs,
    capture_graphs,
    compared,
    source_code,
)
from tests.ascend.fia import watch
from tests.ascend.reference import HostPlannedParallelReference, HostPlannedReference, ProposerReference
from tests.e2e import mtp_target
from tests.e2e.drafts import speculation
from tests.parity import eagle3_draft

WINDOW = 64
MAX_TOKENS = 8
# Below the window, inside its rounding to blocks of 128, beyond, and up to the end of max_model_len.
PROMPTS = [source_code(length) for length in (40, 150, 330, 1016)]
CHUNK = 200  # longer than the window


def draft(layout, folder, num_tokens=3):
    return (
        eagle3_draft.speculation(folder, num_tokens=num_tokens) if layout == "eagle3" else speculation(layout, folder)
    )


def in_chunks(engine):
    engine.llm.llm_engine.engine_core.engine_core.scheduler.max_num_scheduled_tokens = CHUNK


def run(engine, reference, num_prompts=None):
    tokens = engine.run(PROMPTS[:num_prompts], max_tokens=MAX_TOKENS).tokens
    assert reference.calls > 0 and reference.windowed_rows > 0
    return tokens


@pytest.fixture(scope="module")
def tokens_without_draft():
    with ascend_engine(None) as engine:
        return engine.run(PROMPTS, max_tokens=MAX_TOKENS).tokens


@pytest.mark.parametrize("layout", ["dspark-anchor", "dflash", "dspark-two-groups"])
def test_parallel_drafts_of_model_runner_v2(layout, tokens_without_draft, tmp_path):
    with ascend_engine(draft(layout, tmp_path), draft_window_size=WINDOW) as engine:
        speculator = engine.speculator
        assert type(speculator).__module__.startswith("vllm_ascend.worker.v2") and speculator.draft_window is not None
        with compared(speculator, WINDOW, HostPlannedParallelReference) as reference:
            assert run(engine, reference) == tokens_without_draft
        # vLLM-Ascend 0.26 gives a padded batch query lengths without padding, window or not.
        pads = hasattr(speculator, "_update_draft_attn_metadata")
        capture_graphs(speculator, (4,) if pads else (1, 2, 3, 4))
        with compared(speculator, WINDOW, HostPlannedParallelReference) as reference:
            assert run(engine, reference) == tokens_without_draft
        assert any(captured.replays for captured in speculator.query_cudagraph_manager.graphs.values())


def check_autoregressive(engine, expected):
    speculator, queries = engine.speculator, engine.speculator.num_speculative_steps + 1
    in_chunks(engine)
    with compared(speculator, WINDOW, HostPlannedReference) as reference:
        assert run(engine, reference, len(expected)) == expected
    assert reference.steps == set(range(queries - 1))
    # As in an engine whose graphs were on from the start.
    speculator.input_buffers.draft_seq_lens_cpus = [
        torch.zeros(speculator.max_num_reqs, dtype=torch.int32) for _ in range(speculator.num_speculative_steps - 1)
    ]
    graphs = capture_autoregressive_graphs(speculator, (queries, 4 * queries))
    with compared(speculator, WINDOW, HostPlannedReference) as reference:
        assert run(engine, reference, len(expected)) == expected
    assert all(any(graph.replays for graph in of_phase) for of_phase in graphs)


@pytest.mark.parametrize(("num_tokens", "num_prompts"), [(1, 4), (3, 4), (7, 3)])
def test_eagle3_of_model_runner_v2(num_tokens, num_prompts, tokens_without_draft, tmp_path):
    with ascend_engine(draft("eagle3", tmp_path, num_tokens), draft_window_size=WINDOW) as engine:
        check_autoregressive(engine, tokens_without_draft[:num_prompts])


@pytest.mark.parametrize(
    ("method", "upstreams"), [("_window_first_step", lambda *_: {}), ("_windowed_build", lambda *_: None)]
)
def test_a_forward_without_the_window_is_noticed(method, upstreams, tmp_path, monkeypatch):
    """Negative controls."""
    with ascend_engine(draft("eagle3", tmp_path), draft_window_size=WINDOW) as engine:
        monkeypatch.setattr(engine.speculator, method, upstreams)
        with (
            pytest.raises(AssertionError, match=r"(request|row) \d"),
            compared(engine.speculator, WINDOW, HostPlannedReference) as reference,
        ):
            run(engine, reference)


def test_an_mtp_head_of_model_runner_v2(tmp_path):
    target = mtp_target.write(tmp_path)
    with ascend_engine(None, model=target) as engine:
        expected = engine.run(PROMPTS, max_tokens=MAX_TOKENS).tokens
    heads = {"method": "mtp", "num_speculative_tokens": 3}
    with ascend_engine(heads, model=target, draft_window_size=WINDOW) as engine:
        check_autoregressive(engine, expected)


@pytest.mark.parametrize("layout", ["dspark-anchor", "dspark-causal", "dflash", "eagle3"])
def test_drafts_of_model_runner_v1(layout, tokens_without_draft, tmp_path):
    with ascend_engine(draft(layout, tmp_path), runner=1, draft_window_size=WINDOW) as engine:
        reference = ProposerReference(engine.runner, WINDOW)
        watch.listeners.append(reference)
        try:
            assert run(engine, reference) == tokens_without_draft
        finally:
            watch.listeners.remove(reference)
            reference.close()
