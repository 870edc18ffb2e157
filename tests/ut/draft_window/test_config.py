# SPDX-License-Identifier: Apache-2.0
"""Options and their resolution. Needs pydantic, not vLLM."""

import logging
import re
from types import SimpleNamespace

import pytest

from vllm_ascend.draft_window.config import (
    DraftFacts,
    DraftWindow,
    DraftWindowOptions,
    WindowOff,
    facts_from_config,
    native_window,
    resolve,
)


def options(**values) -> DraftWindowOptions:
    return DraftWindowOptions.from_additional_config(
        {f"draft_window_{name}": value for name, value in ({"size": 512} | values).items()}
    )


def facts(**values) -> DraftFacts:
    defaults = dict(method="dspark", num_speculative_tokens=8, queries_per_request=8, max_model_len=32768)
    return DraftFacts(**(defaults | values))


class TestOptions:
    @pytest.mark.parametrize(
        "additional_config",
        [None, {}, {"draft_window_size": None}, {"refresh": True}, SimpleNamespace(draft_window_size=1)],
    )
    def test_absent_or_null_means_off(self, additional_config):
        assert DraftWindowOptions.from_additional_config(additional_config) is None

    def test_defaults_and_keys_of_others(self):
        parsed = DraftWindowOptions.from_additional_config({"draft_window_size": 2048, "ascend_fusion_config": {}})
        assert parsed.model_dump() == {
            "draft_window_size": 2048,
            "draft_window_sink_size": 0,
            "draft_window_min_context": 0,
            "draft_window_mtp": False,
        }

    @pytest.mark.parametrize("value", ["2048", True, 0, -8, 2048.0, [2048]])
    def test_size_must_be_a_positive_integer(self, value):
        text = f"draft_window_size={value!r} is not allowed: it must be an integer greater than 0"
        with pytest.raises(ValueError, match=re.escape(text)):
            options(size=value)

    @pytest.mark.parametrize("name", ["sink_size", "min_context"])
    @pytest.mark.parametrize("value", ["4", True, -1, 4.0])
    def test_other_sizes_must_be_integers_of_at_least_zero(self, name, value):
        text = f"draft_window_{name}={value!r} is not allowed: it must be an integer of at least 0"
        with pytest.raises(ValueError, match=re.escape(text)):
            options(**{name: value})

    @pytest.mark.parametrize("value", [1, "true", 0.0])
    def test_mtp_must_be_a_boolean(self, value):
        text = f"draft_window_mtp={value!r} is not allowed: it must be true or false"
        with pytest.raises(ValueError, match=re.escape(text)):
            options(mtp=value)

    @pytest.mark.parametrize(
        ("key", "nearest"),
        [
            ("draft_window_sise", "draft_window_size"),
            ("draft_window", "draft_window_size"),
            ("draft_window_sink", "draft_window_sink_size"),
            ("draft_window_min_contxt", "draft_window_min_context"),
        ],
    )
    @pytest.mark.parametrize("more", [{}, {"draft_window_size": 512}])
    def test_unknown_key_names_the_nearest(self, key, nearest, more):
        with pytest.raises(ValueError, match=f"no option '{key}' \\(value 2048\\); did you mean '{nearest}'"):
            DraftWindowOptions.from_additional_config({key: 2048} | more)

    @pytest.mark.parametrize("key", ["draft_window_sink_size", "draft_window_min_context", "draft_window_mtp"])
    def test_option_of_the_window_without_the_window(self, key):
        value = True if key.endswith("mtp") else 4
        with pytest.raises(ValueError, match=f"{key} needs draft_window_size, an integer greater than 0"):
            DraftWindowOptions.from_additional_config({key: value})

    def test_every_mistake_is_named(self):
        with pytest.raises(ValueError, match="draft_window_size=0 .*draft_window_sink_size=-1 "):
            options(size=0, sink_size=-1)

    def test_frozen(self):
        with pytest.raises(ValueError, match="frozen"):
            options().draft_window_size = 4


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

    def test_context_parallelism(self):
        with pytest.raises(ValueError, match="draft_window_size=512 is not supported with context parallelism"):
            resolve(options(), facts(context_parallel_size=2))

    def test_window_above_the_trained_positions(self):
        with pytest.raises(ValueError, match="draft_window_size=4097 .*max_position_embeddings=4096; .*at most 4096"):
            resolve(options(size=4097), facts(max_position_embeddings=4096))

    def test_model_longer_than_the_trained_positions(self):
        (warning,) = resolve(options(size=4096), facts(max_position_embeddings=4096)).warnings
        assert "the window does not re-base positions" in warning

    def test_draft_of_a_deepseek_v4_target(self):
        (warning,) = resolve(options(), facts(deepseek_v4_target=True)).warnings
        assert "a window lowers its acceptance" in warning


class TestFacts:
    @staticmethod
    def config(method="dspark", tokens=7, parallel=None, **draft):
        return SimpleNamespace(
            speculative_config=SimpleNamespace(
                method=method,
                num_speculative_tokens=tokens,
                draft_model_config=SimpleNamespace(hf_config=SimpleNamespace(**draft)),
            ),
            model_config=SimpleNamespace(max_model_len=4096),
            parallel_config=SimpleNamespace(**({"decode_context_parallel_size": 1} | (parallel or {}))),
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

    def test_context_parallel_sizes_multiply(self):
        parallel = {"decode_context_parallel_size": 2, "prefill_context_parallel_size": 4}
        assert facts_from_config(self.config(parallel=parallel)).context_parallel_size == 8

    def test_deepseek_v4_draft(self):
        assert facts_from_config(self.config(architectures=["DSparkDraftModel"])).deepseek_v4_target
        assert not facts_from_config(self.config(architectures=["Qwen3DSparkModel"])).deepseek_v4_target

    @pytest.mark.parametrize(
        ("draft", "window"),
        [
            ({}, None),
            ({"sliding_window": None}, None),
            ({"sliding_window": 0}, None),
            ({"sliding_window": 2048}, 2048),
            ({"sliding_window": 2048, "use_sliding_window": False}, None),
            ({"sliding_window": 2048, "layer_types": ["full_attention"]}, None),
            ({"sliding_window": 2048, "layer_types": ["full_attention", "sliding_attention"]}, 2048),
            ({"dflash_config": {"use_swa": True, "swa_window_size": 4032}}, 4032),
            ({"dflash_config": {"use_swa": True}, "sliding_window": 128}, 128),
            ({"dflash_config": {"mask_token_id": 3}}, None),
        ],
    )
    def test_native_window(self, draft, window):
        assert native_window(SimpleNamespace(**draft)) == window
