# SPDX-License-Identifier: Apache-2.0
"""What the user writes: values, spellings, places, defaults. Needs pydantic, not vLLM."""

import re
from types import SimpleNamespace

import numpy as np
import pytest

from tests.option_mistakes import LOOK_ALIKES
from vllm_ascend.draft_window.options import DraftWindowOptions

read = DraftWindowOptions.from_additional_config


@pytest.mark.parametrize(
    "additional_config",
    [
        None,
        {},
        {"draft_window_size": None},
        {"refresh": True},
        SimpleNamespace(draft_window_size=1),
        {"draft_window_mtp": False},
        {"draft_window_sink_size": 0},
        {"draft_window_size": None, "draft_window_min_context": np.int64(0)},
    ],
    ids=str,
)
def test_absent_null_or_defaults_written_out_mean_off(additional_config):
    assert read(additional_config) is None


def test_defaults():
    assert read({"draft_window_size": 2048, "draft_window_mtp": False}).model_dump() == {
        "draft_window_size": 2048,
        "draft_window_sink_size": 0,
        "draft_window_min_context": 0,
        "draft_window_mtp": False,
        "draft_window_reclaim": False,
        "draft_window_candidates": [],
    }


def test_auto_and_what_it_chooses_from():
    options = read({"draft_window_size": "auto", "draft_window_candidates": [256, 512]})
    assert (options.draft_window_size, options.draft_window_candidates) == ("auto", [256, 512])
    with pytest.raises(
        ValueError, match=r"draft_window_candidates=\[256\] is what draft_window_size='auto' chooses from"
    ):
        read({"draft_window_size": 512, "draft_window_candidates": [256]})


@pytest.mark.parametrize("value", ["Auto", "AUTO", "", "dynamic"])
def test_auto_is_written_so(value):
    text = f"draft_window_size={value!r} is not allowed: it must be an integer greater than 0, or 'auto'"
    with pytest.raises(ValueError, match=f"^additional_config {re.escape(text)}$"):
        read({"draft_window_size": value})


@pytest.mark.parametrize("value", [256, "256", [0], [256, -1], [256.0], ["256"], [True], {"a": 256}])
def test_candidates_are_a_list_of_positive_integers(value):
    text = f"draft_window_candidates={value!r} is not allowed: it must be a list of integers greater than 0"
    with pytest.raises(ValueError, match=f"^additional_config {re.escape(text)}$"):
        read({"draft_window_size": "auto", "draft_window_candidates": value})


def test_integers_of_other_libraries():
    options = read({"draft_window_size": np.int64(2048), "draft_window_sink_size": np.uint8(4)})
    assert (options.draft_window_size, options.draft_window_sink_size) == (2048, 4)
    assert type(options.draft_window_size) is int


@pytest.mark.parametrize("value", ["2048", True, 0, -8, 2048.0, [2048], np.int64(-1), np.float32(8)], ids=repr)
def test_size_must_be_a_positive_integer(value):
    shown = int(value) if isinstance(value, np.int64) else value
    text = f"draft_window_size={shown!r} is not allowed: it must be an integer greater than 0"
    with pytest.raises(ValueError, match=re.escape(text)):
        read({"draft_window_size": value})


@pytest.mark.parametrize("name", ["sink_size", "min_context"])
@pytest.mark.parametrize("value", ["4", True, False, -1, 4.0, 0.0])
@pytest.mark.parametrize("size", [{}, {"draft_window_size": 512}], ids=["alone", "with size"])
def test_other_sizes_must_be_integers_of_at_least_zero(name, value, size):
    text = f"draft_window_{name}={value!r} is not allowed: it must be an integer of at least 0"
    with pytest.raises(ValueError, match=re.escape(text)):
        read({f"draft_window_{name}": value} | size)


@pytest.mark.parametrize("name", ["mtp", "reclaim"])
@pytest.mark.parametrize("value", [1, 0, "true", 0.0])
def test_switches_must_be_booleans(value, name):
    text = f"draft_window_{name}={value!r} is not allowed: it must be true or false"
    with pytest.raises(ValueError, match=re.escape(text)):
        read({"draft_window_size": 512, f"draft_window_{name}": value})


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("draft_window_sise", "draft_window_size"),
        ("draft_window", "draft_window_size"),
        ("draft_window_sink", "draft_window_sink_size"),
        ("draft_window_min_contxt", "draft_window_min_context"),
        ("draft-window-size", "draft_window_size"),
        ("DRAFT_WINDOW_SIZE", "draft_window_size"),
        ("draftWindowSize", "draft_window_size"),
        ("draftWindowMinContext", "draft_window_min_context"),
        (" draft_window_size", "draft_window_size"),
        ("draft window sink-size", "draft_window_sink_size"),
        ("draftwindowsize", "draft_window_size"),
        ("draft_attention_window", "draft_window_size"),
        ("speculative_draft_window_size", "draft_window_size"),
        ("--draft-window-mtp", "draft_window_mtp"),
        ("window_size", "draft_window_size"),
        ("window-sink-size", "draft_window_sink_size"),
    ],
)
@pytest.mark.parametrize("more", [{}, {"draft_window_size": 512}], ids=["alone", "with size"])
def test_a_key_that_looks_like_an_option(key, nearest, more):
    text = f"additional_config has no option {key!r} (value 2048); did you mean {nearest!r}?"
    with pytest.raises(ValueError, match=re.escape(text)):
        read({key: 2048} | more)


@pytest.mark.parametrize("additional_config", LOOK_ALIKES, ids=str)
def test_no_look_alike_passes(additional_config):
    with pytest.raises(ValueError, match="did you mean 'draft_window_size'"):
        read(additional_config)


def test_a_key_with_the_options_below_it():
    with pytest.raises(ValueError, match="no option 'draft_window' .*did you mean 'draft_window_size'"):
        read({"draft_window": {"size": 2048}})


@pytest.mark.parametrize("key", ["draft_window_size", "draft-window-size", "draftWindowSize"])
def test_an_option_one_level_too_deep(key):
    text = f"{key!r} (value 2048) inside 'ascend', where nothing reads it; did you mean 'draft_window_size' beside"
    with pytest.raises(ValueError, match=re.escape(text)):
        read({"ascend": {key: 2048}, "refresh": True})


@pytest.mark.parametrize(
    "others",
    [
        {"ascend_fusion_config": {"window_size": 8}},
        {"sliding_window": 4096},
        {"attention_window": 4096},
        {"draft_tensor_parallel_size": 2},
        {"torchair_graph_config": {"enabled": False, 3: 4}},
        {3: 4, None: 5, ("draft_window_size",): 6},
    ],
    ids=str,
)
def test_keys_of_others_are_left_alone(others):
    assert read(others) is None
    assert read(others | {"draft_window_size": 512}) == read({"draft_window_size": 512})


@pytest.mark.parametrize("name", ["sink_size", "min_context", "mtp", "reclaim"])
def test_option_of_the_window_without_the_window(name):
    key, value = f"draft_window_{name}", True if name in ("mtp", "reclaim") else 4
    with pytest.raises(ValueError, match=f"{key} needs draft_window_size, an integer greater than 0"):
        read({key: value})


def test_every_mistake_is_named():
    with pytest.raises(ValueError, match="draft_window_size=0 .*draft_window_sink_size=-1 "):
        read({"draft_window_size": 0, "draft_window_sink_size": -1})
    with pytest.raises(ValueError, match="no option 'draft-window-size'.*; .*no option 'draftWindowSink'"):
        read({"draft-window-size": 512, "draftWindowSink": 4})


def test_frozen():
    with pytest.raises(ValueError, match="frozen"):
        read({"draft_window_size": 512}).draft_window_size = 4
