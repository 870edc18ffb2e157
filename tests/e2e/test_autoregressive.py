# SPDX-License-Identifier: Apache-2.0
"""EAGLE3, draft models and MTP on real vLLM: every forward of a proposal, the first included, sees the window."""

import pytest
import torch

from tests.e2e import mtp_target
from tests.e2e.conftest import VLLM_VERSION
from tests.e2e.recorder import Recorder
from tests.parity import eagle3_draft
from tools.demo_pair import DEMO_PAIR, demo_prompts
from vllm_draft_window.measuring.engine import Engine

WINDOW = {"draft_window_size": 64}
MAX_TOKENS = 10


def mixed_prompts() -> list[list[int]]:
    """Shorter than the window, across it by a token, and far beyond it, in one batch."""
    return [prompt[-n:] for prompt, n in zip(demo_prompts(4, 700), (5, 62, 331, 700), strict=True)]


def record(engine: Engine, options: dict[str, int], **kwargs) -> Recorder:
    return Recorder(
        engine.speculator,
        window=options.get("draft_window_size"),
        sink=options.get("draft_window_sink_size", 0),
        min_context=options.get("draft_window_min_context", 0),
        **kwargs,
    )


@pytest.mark.parametrize(
    ("num_tokens", "options"),
    [
        (1, {}),
        (2, {"draft_window_sink_size": 4}),
        pytest.param(3, {}, marks=pytest.mark.quick),
        (7, {"draft_window_sink_size": 40, "draft_window_min_context": 333}),
    ],
)
def test_eagle3(num_tokens, options, tmp_path, without_speculation):
    """The gate lies a few tokens past the third prompt, which crosses it while it is decoded."""
    options, prompts = WINDOW | options, mixed_prompts()
    with Engine(
        speculative_config=eagle3_draft.speculation(tmp_path, num_tokens=num_tokens),
        additional_config=options,
        max_model_len=1024,
    ) as engine:
        recorder = record(engine, options)
        windowed = engine.run(prompts, max_tokens=MAX_TOKENS)
    assert windowed.tokens == without_speculation(prompts, max_tokens=MAX_TOKENS, max_model_len=1024)
    assert windowed.drafts > 0
    assert recorder.windowed_rows > 20 and recorder.rows > recorder.windowed_rows
    assert len(recorder.windowed_addresses) == 1


def test_chunks_longer_than_the_window_and_prefix_caching(tmp_path, without_speculation):
    """A chunk's query rows all keep themselves in sight; the second round finds the draft's keys in the cache."""
    prompts = mixed_prompts()
    with Engine(
        speculative_config=eagle3_draft.speculation(tmp_path, num_tokens=3),
        additional_config=WINDOW,
        max_model_len=1024,
        max_num_batched_tokens=200,
        max_num_seqs=4,
        enable_prefix_caching=True,
    ) as engine:
        recorder = record(engine, WINDOW)
        first, second = (engine.run(prompts, max_tokens=MAX_TOKENS) for _ in range(2))
    assert first.tokens == second.tokens == without_speculation(prompts, max_tokens=MAX_TOKENS, max_model_len=1024)
    assert first.accepted_per_position == second.accepted_per_position
    assert max(int(snapshot["query_start_loc"].diff().max()) for snapshot in recorder.metadata) > 150
    assert recorder.windowed_rows > 300


def test_near_max_model_len(tmp_path, without_speculation):
    prompts = [prompt[-n:] for prompt, n in zip(demo_prompts(3, 1015), (990, 1005, 1015), strict=True)]
    with Engine(
        speculative_config=eagle3_draft.speculation(tmp_path, num_tokens=7),
        additional_config=WINDOW,
        max_model_len=1024,
    ) as engine:
        recorder = record(engine, WINDOW)
        windowed = engine.run(prompts, max_tokens=60)
    assert windowed.tokens == without_speculation(prompts, max_tokens=60, max_model_len=1024)
    assert [len(tokens) for tokens in windowed.tokens] == [34, 19, 9]
    assert recorder.windowed_rows > 50


@pytest.mark.skipif(VLLM_VERSION < (0, 32), reason="vLLM takes a schedule of drafts on Model Runner V2 from 0.32 on")
def test_fewer_drafts_in_larger_batches(tmp_path, without_speculation):
    """Each proposal has as many forwards as the scheduler asks for; all of them share the start that K gives."""
    prompts, limits = [*mixed_prompts(), *mixed_prompts()[2:]], [4, 6, 30, 12, 10, 14]
    schedule = [[1, 1, 7], [2, 3, 3], [4, 16, 0]]
    speculation = eagle3_draft.speculation(tmp_path, num_tokens=7) | {"num_speculative_tokens_per_batch_size": schedule}
    with Engine(speculative_config=speculation, additional_config=WINDOW, max_model_len=1024) as engine:
        recorder, counted, asked = record(engine, WINDOW), engine.speculator.window._counters, set()
        propose = engine.speculator.propose

        def remembering(*args, num_speculative_tokens, **kwargs):
            asked.add(num_speculative_tokens)
            return propose(*args, num_speculative_tokens=num_speculative_tokens, **kwargs)

        engine.speculator.propose = remembering
        windowed = engine.run(prompts, max_tokens=limits, arrivals=[0, 0, 1, 3, 4, 6])
        assert counted.builds == len(recorder.metadata)
    assert windowed.tokens == without_speculation(prompts, max_tokens=limits, max_model_len=1024)
    assert asked == {0, 3, 7}
    assert recorder.windowed_rows > 50
    assert len(recorder.windowed_addresses) == 1


@pytest.mark.parametrize("refreshed", [False, True], ids=["skipped", "refreshed"])
def test_window_that_covers_every_context_changes_nothing(refreshed, tmp_path):
    def run(options):
        with Engine(
            speculative_config=eagle3_draft.speculation(tmp_path, num_tokens=3),
            additional_config=options,
            max_model_len=1024,
        ) as engine:
            if refreshed and options:
                engine.speculator.window.may_crop = lambda max_seq_len: True
            recorder = record(engine, options, compare=False)
            return recorder, engine.run(mixed_prompts()[:3], max_tokens=4).tokens

    off, tokens_off = run({})
    on, tokens_on = run({"draft_window_size": 992})
    assert tokens_on == tokens_off
    assert bool(on.windowed_addresses) == refreshed
    assert len(on.metadata) == len(off.metadata) > 0
    assert all(torch.equal(a, b) for a, b in zip(on.slots, off.slots, strict=True))
    for a, b in zip(on.metadata, off.metadata, strict=True):
        for row, length in enumerate(b["seq_lens"].tolist()):
            columns = -(-length // 32)
            assert torch.equal(a["block_table"][row, :columns], b["block_table"][row, :columns])
        for key in ("seq_lens", "slot_mapping", "query_start_loc"):
            assert torch.equal(a[key], b[key]), key


@pytest.mark.skipif(VLLM_VERSION < (0, 31), reason="vLLM runs draft models on Model Runner V2 from 0.31 on")
def test_draft_model(without_speculation):
    """The target drafts for itself: without a window every token would be accepted."""
    prompts = mixed_prompts()
    options = WINDOW | {"draft_window_sink_size": 4}
    speculation = {"method": "draft_model", "model": str(DEMO_PAIR / "target"), "num_speculative_tokens": 3}
    with Engine(speculative_config=speculation, additional_config=options, max_model_len=1024) as engine:
        recorder = record(engine, options)
        windowed = engine.run(prompts, max_tokens=MAX_TOKENS)
    assert windowed.tokens == without_speculation(prompts, max_tokens=MAX_TOKENS, max_model_len=1024)
    assert windowed.accepted_per_position[0] > 0
    assert recorder.windowed_rows > 50


class TestMtp:
    SPECULATION = {"method": "mtp", "num_speculative_tokens": 3}

    @staticmethod
    def target_metadata(engine: Engine) -> list[tuple[torch.Tensor, ...]]:
        """What each attention call of the target is given; filled while the engine runs."""
        layers = engine.speculator.vllm_config.compilation_config.static_forward_context
        seen: list[tuple[torch.Tensor, ...]] = []
        for name in sorted(set(layers) - engine.speculator.draft_attn_layer_names):
            impl = layers[name].impl
            forward = impl.forward

            def recording(layer, query, key, value, cache, metadata, *args, _forward=forward, **kwargs):
                if metadata is not None:
                    fields = metadata.seq_lens, metadata.block_table, metadata.slot_mapping, metadata.query_start_loc
                    seen.append(tuple(field.clone() for field in fields))
                return _forward(layer, query, key, value, cache, metadata, *args, **kwargs)

            impl.forward = recording
        return seen

    @pytest.mark.quick
    def test_windowed_on_demand_and_the_target_does_not_notice(self, tmp_path):
        options = WINDOW | {
            "draft_window_mtp": True,
            "draft_window_sink_size": 4,
            "draft_window_min_context": 100,
        }
        prompts = mixed_prompts()
        target = mtp_target.write(tmp_path)
        runs = {}
        for name, additional_config in (("off", {}), ("on", options)):
            with Engine(
                target, speculative_config=self.SPECULATION, additional_config=additional_config, max_model_len=1024
            ) as engine:
                metadata = self.target_metadata(engine)
                recorder = record(engine, additional_config)
                runs[name] = engine.run(prompts, max_tokens=4), metadata
        assert recorder.windowed_rows > 20
        assert runs["on"][0].tokens == runs["off"][0].tokens
        # Nothing of random weights is accepted, so that both runs have the same steps.
        assert len(runs["on"][1]) == len(runs["off"][1]) > 0
        for on, off in zip(runs["on"][1], runs["off"][1], strict=True):
            assert all(torch.equal(a, b) for a, b in zip(on, off, strict=True))
        with Engine(target, max_model_len=1024) as engine:
            assert engine.run(prompts, max_tokens=4).tokens == runs["on"][0].tokens

    def test_off_by_default(self, tmp_path, window_lines):
        with Engine(
            mtp_target.write(tmp_path),
            speculative_config=self.SPECULATION,
            additional_config=WINDOW,
            max_model_len=1024,
        ) as engine:
            assert type(engine.speculator).__name__ == "MTPSpeculator"
        ((level, line),) = window_lines
        assert level == "INFO" and line.startswith("Draft window off: an MTP head is part of the target;")


class TestNegativeControls:
    @staticmethod
    def run_with_fault(break_it, folder) -> Recorder:
        # With a gate, however low, there is no mask, which would make up for some of these faults.
        options = WINDOW | {"draft_window_min_context": 1}
        with Engine(
            speculative_config=eagle3_draft.speculation(folder, num_tokens=3),
            additional_config=options,
            max_model_len=1024,
        ) as engine:
            recorder = record(engine, options)
            break_it(engine.speculator)
            engine.run(mixed_prompts()[2:], max_tokens=8)
        return recorder

    def test_first_step_with_the_targets_metadata(self, tmp_path):
        def break_it(speculator):
            batch_metadata = {}
            propose = speculator.propose

            def remembering(batch, attn_metadata, *args, **kwargs):
                batch_metadata["of the target"] = attn_metadata
                return propose(batch, attn_metadata, *args, **kwargs)

            speculator.propose = remembering
            speculator.build_first_step = lambda *_: batch_metadata["of the target"]

        with pytest.raises(AssertionError, match="away from the masked reference"):
            self.run_with_fault(break_it, tmp_path)

    def test_later_steps_without_look_ahead(self, tmp_path):
        """The start then moves on within a proposal."""

        def break_it(speculator):
            speculator.window.lookahead = lambda step: 0

        with pytest.raises(AssertionError, match="away from the masked reference"):
            self.run_with_fault(break_it, tmp_path)
