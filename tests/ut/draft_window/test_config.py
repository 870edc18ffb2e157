# SPDX-License-Identifier: Apache-2.0
"""From options and facts to a window in force, or off. Needs pydantic, not vLLM."""

import logging
from types import SimpleNamespace

import numpy as np
import pytest

from vllm_ascend.draft_window.config import LADDER, DraftWindow, WindowOff, resolve
from vllm_ascend.draft_window.facts import DraftFacts, facts_from_config, native_window
from vllm_ascend.draft_window.geometry import WindowGeometry
from vllm_ascend.draft_window.options import DraftWindowOptions


def options(**values) -> DraftWindowOptions:
    return DraftWindowOptions.from_additional_config(
        {f"draft_window_{name}": value for name, value in ({"size": 512} | values).items()}
    )


def facts(**values) -> DraftFacts:
    defaults = dict(method="dspark", num_speculative_tokens=8, queries_per_request=8, max_model_len=32768)
    return DraftFacts(**(defaults | values))


class TestResolution:
    def test_in_force(self):
        window = resolve(options(sink_size=4, min_context=100), facts())
        assert window == DraftWindow(
            method="dspark", size=512, sink_size=4, min_context=100, queries_per_request=8, max_lookahead=0
        )

    @pytest.mark.parametrize(
        ("given", "engine", "level", "reason"),
        [
            ({"size": 32768}, {}, logging.INFO, "draft_window_size=32768 covers max_model_len=32768"),
            ({"min_context": 32768}, {}, logging.INFO, "draft_window_min_context=32768 covers max_model_len=32768"),
            (
                {"sink_size": 32256},
                {},
                logging.INFO,
                "draft_window_size=512 and draft_window_sink_size=32256 cover max",
            ),
            (
                {},
                {"native_window": 65536},
                logging.INFO,
                "the draft's own sliding window of 65536 tokens covers max_mo",
            ),
            *(
                ({}, {"method": method}, logging.WARNING, f"the method {method} has no draft attention")
                for method in ("ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator", "extract_hidden_states")
            ),
            *(
                ({}, {"method": method}, logging.INFO, "an MTP head is part of the target")
                for method in ("mtp", "deepseek_mtp")
            ),
        ],
    )
    def test_off(self, given, engine, level, reason):
        off = resolve(options(**given), facts(**engine))
        assert isinstance(off, WindowOff)
        assert off.reason.startswith(reason)
        assert off.level == level

    @pytest.mark.parametrize(
        ("given", "engine", "candidates", "start"),
        [
            ({}, {}, LADDER, 2048),
            ({}, {"trained_length": 4096}, LADDER, 4096),
            ({}, {"trained_length": 700}, LADDER, 512),
            ({}, {"trained_length": 100}, LADDER, 128),
            ({}, {"max_model_len": 2000}, (128, 256, 512, 1024), 1024),
            ({}, {"native_window": 1000}, (1024, 2048, 4096, 8192), 2048),
            ({"candidates": [512, 64, 512]}, {}, (64, 512), 512),
            ({"candidates": [8, 32767]}, {}, (8, 32767), 8),
        ],
    )
    def test_auto(self, given, engine, candidates, start):
        window = resolve(options(size="auto", **given), facts(**engine))
        assert (window.candidates, window.start, window.size) == (candidates, start, candidates[-1])
        assert window.warnings == ()

    def test_auto_of_one_candidate_is_that_size(self):
        for given, engine, size in (
            ({"candidates": [300]}, {}, 300),
            ({}, {"max_model_len": 200}, 128),
            ({}, {"native_window": 5000}, 8192),
        ):
            window = resolve(options(size="auto", **given), facts(**engine))
            assert (window.size, window.candidates, window.start, window.name) == (size, (), None, str(size))

    def test_auto_without_a_candidate_is_off(self):
        off = resolve(options(size="auto"), facts(max_model_len=128))
        assert off.reason == "draft_window_size='auto' has no candidate below max_model_len=128"

    def test_auto_never_goes_below_the_drafts_own_window(self):
        window = resolve(options(size="auto"), facts(native_window=10_000))
        assert (window.size, window.candidates, window.start) == (10_000, (), None)
        assert "below the draft's own sliding window of 10000 tokens" in window.warnings[0]

    @pytest.mark.parametrize(
        ("candidates", "unable", "allowed"),
        [([4, 512], "4", "8 to 32767"), ([512, 32768], "32768", "8 to 32767"), ([1, 2], "1, 2", "8 to 32767")],
    )
    def test_candidates_that_cannot_act(self, candidates, unable, allowed):
        with pytest.raises(ValueError, match=f": {unable} cannot act, each must be from {allowed}"):
            resolve(options(size="auto", candidates=candidates), facts())

    def test_auto_where_it_cannot_learn_stays_at_its_start(self):
        auto = resolve(options(size="auto"), facts(trained_length=1024))
        window = auto.fixed("of a reason")
        assert (window.size, window.candidates, window.start, window.name) == (1024, (), None, "1024")
        assert window.warnings == ("draft_window_size='auto' stays at 1024 tokens: of a reason",)
        assert window.fixed("again") == window

    def test_auto_is_in_force_where_its_smallest_candidate_is(self):
        auto = resolve(options(size="auto", sink_size=16), facts(max_model_len=2064))
        assert auto.covers(2064, block_size=16) is None
        assert auto.visible(16) == (128 + 16, 2048 + 16 + 15)

    @pytest.mark.parametrize("method", ["eagle", "eagle3", "draft_model", "mtp", "deepseek_mtp"])
    def test_autoregressive_drafts_look_ahead_to_the_end_of_the_proposal(self, method):
        window = resolve(options(mtp=True), facts(method=method, num_speculative_tokens=3, queries_per_request=1))
        assert (window.method, window.size, window.max_lookahead, window.queries_per_request) == (method, 512, 3, 1)

    @pytest.mark.parametrize("size", [1, 3])
    def test_window_that_leaves_an_autoregressive_draft_nothing_to_read(self, size):
        engine = facts(method="eagle3", num_speculative_tokens=3, queries_per_request=1)
        with pytest.raises(ValueError, match=f"draft_window_size={size} is too small for eagle3: .*at least 4"):
            resolve(options(size=size), engine)
        assert resolve(options(size=4), engine).size == 4

    @pytest.mark.parametrize("size", [1, 4, 7])
    def test_window_below_the_query_tokens(self, size):
        with pytest.raises(ValueError, match=f"draft_window_size={size} is too small for dspark: .*at least 8"):
            resolve(options(size=size), facts())

    def test_smallest_window(self):
        assert resolve(options(size=8), facts()).size == 8

    @pytest.mark.parametrize(
        ("native", "size", "in_force"), [(2048, 1024, 2048), (2048, 4096, 4096), (None, 1024, 1024), (0, 1024, 1024)]
    )
    def test_draft_is_never_shrunk_below_its_own_window(self, native, size, in_force):
        window = resolve(options(size=size), facts(native_window=native))
        assert window.size == in_force
        expected = [f"draft_window_size={size} is below the draft's own sliding window of {native} tokens"]
        assert [w.split(";")[0] for w in window.warnings] == (expected if in_force != size else [])
        assert window.widened_to(native) is window

    def test_a_window_of_the_draft_may_be_wider_than_all_that_is_needed(self):
        """Only what is in force in the end is compared, and no text names a number that the user did not write."""
        window = resolve(options(size=4), facts(native_window=2048))
        assert (window.size, window.widened_from) == (2048, 4)
        (_, again) = window.widened_to(4096).warnings
        assert again.startswith("draft_window_size=4 is below the draft's own sliding window of 4096")

    @pytest.mark.parametrize(
        ("given", "block_size", "longest", "covers"),
        [
            ({}, 1056, 1567, "draft_window_size=512, in whole blocks of 1056 tokens, covers max_model_len=1567"),
            ({}, 1056, 1568, None),
            (
                {"sink_size": 4},
                1056,
                2623,
                "draft_window_size=512 and draft_window_sink_size=4, in whole blocks of 1056",
            ),
            ({"sink_size": 4}, 1056, 2624, None),
            ({}, 16, 512, "draft_window_size=512 covers max_model_len=512"),
        ],
    )
    def test_a_window_that_no_sequence_of_the_engine_reaches_past(self, given, block_size, longest, covers):
        off = resolve(options(**given), facts()).covers(longest, block_size=block_size)
        assert off is None if covers is None else off.reason.startswith(covers)
        geometry = WindowGeometry(
            window=512,
            sink=given.get("sink_size", 0),
            block_sizes=(block_size,),
            full_columns=(100,),
            max_model_len=longest,
            max_queries=8,
        )
        removed, _ = geometry.lengths(np.arange(longest + 1, dtype=np.int32), queries=8)
        assert bool(removed.any()) == (off is None)

    def test_context_parallelism(self):
        with pytest.raises(ValueError, match="draft_window_size=512 is not supported with context parallelism"):
            resolve(options(), facts(context_parallel_size=2))

    @pytest.mark.parametrize("method", ["eagle3", "draft_model", "mtp", "dspark", "dflash"])
    def test_adaptive_verification(self, method):
        """The host would plan a first forward that only the device knows; a parallel drafter's forward is its own."""
        engine = facts(method=method, num_speculative_tokens=3, queries_per_request=4, adaptive_verification=True)
        decision = resolve(options(mtp=True), engine)
        if method in ("dspark", "dflash"):
            assert decision.size == 512
        else:
            reason = f"with adaptive verification only the device knows the tokens of {method}'s first forward"
            assert decision == WindowOff(reason, logging.WARNING)

    def test_window_above_the_trained_length(self):
        (warning,) = resolve(options(size=2048), facts(trained_length=512)).warnings
        assert warning.startswith("the window of 2048 tokens is above the 512 that the draft was trained on")
        assert not resolve(options(size=512), facts(trained_length=512)).warnings

    def test_positions_that_cannot_be_extended(self):
        refused = "draft_window_size=512 needs positions up to max_model_len=32768.* must be at most 4096"
        with pytest.raises(ValueError, match=refused):
            resolve(options(size=512), facts(fixed_positions=4096))
        assert resolve(options(size=512), facts(fixed_positions=32768)).size == 512

    def test_draft_of_a_deepseek_v4_target(self):
        (warning,) = resolve(options(), facts(deepseek_v4_target=True)).warnings
        assert "a window lowers its acceptance" in warning


class TestFacts:
    @staticmethod
    def config(method="dspark", tokens=7, **draft):
        return SimpleNamespace(
            speculative_config=SimpleNamespace(
                method=method,
                num_speculative_tokens=tokens,
                draft_model_config=SimpleNamespace(hf_config=SimpleNamespace(**draft)),
            ),
            model_config=SimpleNamespace(max_model_len=4096),
        )

    @pytest.mark.parametrize(
        ("method", "draft", "queries"),
        [
            ("dspark", {}, 7),
            ("dspark", {"sample_from_anchor": True}, 7),
            ("dspark", {"sample_from_anchor": False}, 8),
            ("dflash", {}, 8),
        ],
    )
    def test_queries_of_one_forward(self, method, draft, queries):
        assert facts_from_config(self.config(method, **draft)).queries_per_request == queries

    def test_deepseek_v4_draft(self):
        for model_type in ("deepseek_v4", "deepseek_v41"):
            assert facts_from_config(self.config(model_type=model_type)).deepseek_v4_target
        converted = self.config(model_type="qwen3", architectures=["DSparkDraftModel"])
        assert not facts_from_config(converted).deepseek_v4_target
        assert not facts_from_config(self.config("mtp", model_type="deepseek_v4")).deepseek_v4_target

    @pytest.mark.parametrize(
        ("draft", "window"),
        [
            ({}, None),
            ({"sliding_window": None}, None),
            ({"sliding_window": 0}, None),
            # keys that the model class never reads
            ({"model_type": "qwen3", "sliding_window": 2048}, None),
            ({"model_type": "llama", "sliding_window": 4096}, None),
            ({"sliding_window": 2048, "use_sliding_window": True}, None),
            ({"sliding_window": 2048, "layer_types": ["full_attention"]}, None),
            ({"sliding_window": 2048, "layer_types": ["full_attention", "sliding_attention"]}, 2048),
            ({"dflash_config": {"use_swa": True, "swa_window_size": 4032}}, 4032),
            ({"dflash_config": {"use_swa": True}, "sliding_window": 128}, 128),
            ({"dflash_config": {"mask_token_id": 3}}, None),
        ],
    )
    def test_native_window(self, draft, window):
        assert native_window(SimpleNamespace(**draft)) == window
        assert facts_from_config(self.config(**draft)).native_window == window

    @pytest.mark.parametrize(
        ("draft", "length"),
        [
            ({}, None),
            ({"max_position_embeddings": 2048}, 2048),
            ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "max_position_embeddings": 2048}, 2048),
            ({"rope_scaling": {"type": "linear", "factor": 4.0}, "max_position_embeddings": 2048}, 8192),
            ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}, "max_position_embeddings": 2048}, 4096),
            ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}, "max_position_embeddings": 131072}, 131072),
            ({"rope_parameters": {"rope_type": "longrope", "factor": 32.0}, "max_position_embeddings": 131072}, 131072),
            (
                # YaRN counts from its own original length, whether or not the key was scaled with it
                {
                    "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
                    "max_position_embeddings": 32768,
                },
                131072,
            ),
            (
                {
                    "rope_scaling": {"type": "deepseek_yarn", "factor": 40, "original_max_position_embeddings": 4096},
                    "max_position_embeddings": 163840,
                },
                163840,
            ),
            (
                {
                    "rope_parameters": {
                        "full_attention": {"rope_type": "linear", "factor": 8.0},
                        "sliding_attention": {"rope_type": "default"},
                    },
                    "max_position_embeddings": 4096,
                },
                32768,
            ),
        ],
    )
    def test_trained_length(self, draft, length):
        assert facts_from_config(self.config(**draft)).trained_length == length

    def test_trained_length_is_the_checkpoints(self):
        """vLLM writes the target's length into an EAGLE draft's config, and derives the draft's own before."""
        config = self.config("eagle3", max_position_embeddings=4096)
        config.speculative_config.draft_model_config.max_model_len = 2048
        assert facts_from_config(config).trained_length == 2048

    def test_nested_language_config(self):
        language = SimpleNamespace(
            max_position_embeddings=2048, sliding_window=128, layer_types=["sliding_attention"], rope_scaling=None
        )
        nested = facts_from_config(self.config(get_text_config=lambda: language))
        assert (nested.trained_length, nested.native_window) == (2048, 128)

    def test_positions_that_cannot_be_extended(self):
        dynamic = {"rope_type": "dynamic", "factor": 2.0}
        draft = {"max_position_embeddings": 2048, "rope_parameters": dynamic}
        assert facts_from_config(self.config(**draft)).fixed_positions is None
        draft["rope_parameters"] = dynamic | {"max_trained_positions": 1024}
        assert facts_from_config(self.config(**draft)).fixed_positions == 2048
