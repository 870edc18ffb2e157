# SPDX-License-Identifier: Apache-2.0
"""vLLM-Ascend's EAGLE3 speculator of Model Runner V2 with the window in front, eager and in FULL graphs."""

import pytest
import torch

from tests.ascend.engine import ascend_engine, capture_autoregressive_graphs, compared, source_code
from tests.ascend.reference import HostPlannedReference
from tests.e2e import mtp_target
from tests.parity import eagle3_draft
from vllm_ascend.draft_window.seams import speculator as seam
from vllm_ascend.worker.v2.spec_decode.autoregressive.speculator import AscendAutoRegressiveSpeculator

WINDOW = 64
MAX_TOKENS = 8
NUM_TOKENS = 3
# Below the window, inside its rounding to blocks of 128, beyond, and up to the end of max_model_len.
PROMPTS = [source_code(length) for length in (40, 150, 330, 1016)]
CHUNK = 200  # longer than the window


def draft(folder, num_tokens=NUM_TOKENS):
    return eagle3_draft.speculation(folder, num_tokens=num_tokens)


def in_chunks(engine):
    engine.llm.llm_engine.engine_core.engine_core.scheduler.max_num_scheduled_tokens = CHUNK


def run(engine, prompts=PROMPTS, **options):
    """Output tokens; every draft attention on the way equals the masked reference."""
    speculator = engine.speculator
    with compared(speculator, WINDOW, HostPlannedReference, **options) as reference:
        tokens = engine.run(prompts, max_tokens=MAX_TOKENS).tokens
    assert reference.calls > 0 and reference.windowed_rows > 0
    assert reference.steps == set(range(speculator.num_speculative_steps))
    return tokens, reference


def run_in_graphs(engine, prompts=PROMPTS, **options):
    speculator = engine.speculator
    queries = speculator.num_speculative_steps + 1
    graphs = capture_autoregressive_graphs(speculator, (queries, 4 * queries))
    tokens, reference = run(engine, prompts, **options)
    assert all(any(graph.replays for graph in of_phase) for of_phase in graphs)
    (table,) = speculator.window.inputs.block_tables
    assert reference.replayed_tables == {table.data_ptr()}
    return tokens


@pytest.fixture(scope="module")
def tokens_without_draft():
    with ascend_engine(None) as engine:
        return engine.run(PROMPTS, max_tokens=MAX_TOKENS).tokens


def test_drafts_equal_the_masked_reference_and_tokens_do_not_change(tokens_without_draft, tmp_path):
    with ascend_engine(draft(tmp_path), draft_window_size=WINDOW) as engine:
        assert type(engine.speculator).__name__ == "WindowedAscendEagleSpeculator"
        in_chunks(engine)
        assert run(engine)[0] == tokens_without_draft
        counters = engine.speculator.window._counters
        in_eager_mode = counters._totals
        engine.llm.reset_prefix_cache()  # as many prefill chunks again
        assert run_in_graphs(engine) == tokens_without_draft
        assert counters._totals == tuple(2 * total for total in in_eager_mode), "the same requests count the same"


@pytest.mark.parametrize("num_tokens", [1, 7])
def test_sink_and_length_gate(num_tokens, tokens_without_draft, tmp_path):
    options = dict(sink=100, min_context=300)
    configured = {f"draft_window_{name}": value for name, value in (("sink_size", 100), ("min_context", 300))}
    with ascend_engine(draft(tmp_path, num_tokens), draft_window_size=WINDOW, **configured) as engine:
        in_chunks(engine)
        assert run(engine, PROMPTS[:3], **options)[0] == tokens_without_draft[:3]
        assert run_in_graphs(engine, PROMPTS[:3], **options) == tokens_without_draft[:3]


def test_mtp_head(tmp_path):
    target, speculation = mtp_target.write(tmp_path), {"method": "mtp", "num_speculative_tokens": NUM_TOKENS}
    with ascend_engine(None, model=target) as engine:
        expected = engine.run(PROMPTS, max_tokens=MAX_TOKENS).tokens
    with ascend_engine(speculation, model=target, draft_window_size=WINDOW, draft_window_mtp=True) as engine:
        assert type(engine.speculator).__name__ == "WindowedAscendMTPSpeculator"
        in_chunks(engine)
        assert run(engine)[0] == expected
        assert run_in_graphs(engine) == expected


def _targets_metadata(speculator, monkeypatch):
    monkeypatch.setattr(speculator.window, "may_crop", lambda _: bool(speculator.current_draft_step))


def _longest_for_every_request(speculator, monkeypatch):
    monkeypatch.setattr(speculator.window, "host_decides", False)


def _targets_lengths(speculator, monkeypatch):
    def counted_on(reader, step, num_rows):
        lengths = AscendAutoRegressiveSpeculator._get_seq_lens_cpu(reader)[: reader.input_batch.num_reqs]
        return torch.nn.functional.pad(lengths + step, (0, num_rows - len(lengths)))

    monkeypatch.setattr(speculator.window, "host_lens", counted_on)


@pytest.mark.parametrize(
    ("upstreams", "runs"),
    [(_targets_metadata, run), (_longest_for_every_request, run), (_targets_lengths, run_in_graphs)],
)
def test_what_upstream_does_is_noticed(upstreams, runs, tmp_path, monkeypatch):
    """Negative controls."""
    with ascend_engine(draft(tmp_path), draft_window_size=WINDOW) as engine:
        upstreams(engine.speculator, monkeypatch)
        with pytest.raises(AssertionError, match=r"(request|row) \d"):
            runs(engine, PROMPTS[1:3])


def test_other_attention_is_off_with_one_line(tmp_path, monkeypatch):
    set_attn, said = AscendAutoRegressiveSpeculator.set_attn, []

    def mla(self, *args):
        set_attn(self, *args)
        self.attn_architecture = "MLA"

    monkeypatch.setattr(AscendAutoRegressiveSpeculator, "set_attn", mla)
    monkeypatch.setattr(seam, "report_off", lambda off, _: said.append(off.reason))
    monkeypatch.setattr(seam, "report_in_force", lambda *_, **__: said.append("in force"))
    with ascend_engine(draft(tmp_path), draft_window_size=WINDOW) as engine:
        assert engine.speculator.window is None
    assert said == ["AscendEagleSpeculator with MLA attention is not windowed on Model Runner V2 by this version"]
