# SPDX-License-Identifier: Apache-2.0
"""A vLLM-Ascend that validates ``additional_config``: every option works, and its own adapter stays away.

The class here is shaped like ``AscendConfig`` from 2026-08-30 on: a pydantic dataclass that forbids unknown keys,
coerces values, and declares one of the window's options.
"""

import sys
from types import ModuleType, SimpleNamespace

import pydantic
import pytest
from pydantic.dataclasses import dataclass

from vllm_ascend.draft_window.options import DraftWindowOptions
from vllm_ascend.draft_window.strict_config import hide_options

ALL = {
    "draft_window_size": "auto",
    "draft_window_sink_size": 4,
    "draft_window_min_context": 4096,
    "draft_window_mtp": True,
    "draft_window_reclaim": True,
    "draft_window_candidates": [256, 512],
}


@pytest.fixture
def ascend(monkeypatch):
    @dataclass(config=pydantic.ConfigDict(extra="forbid"))
    class AscendConfig:
        enable_cpu_binding: bool = True
        draft_window_size: int | None = None

    def init_ascend_config(vllm_config):
        user_input = {k: v for k, v in vllm_config.additional_config.items() if k != "refresh"}
        module.ascend_config = module.AscendConfig(**user_input)
        return module.ascend_config

    module = ModuleType("vllm_ascend.ascend_config")
    module.AscendConfig, module.init_ascend_config = AscendConfig, init_ascend_config
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def vllm_config(**additional_config):
    return SimpleNamespace(additional_config=additional_config)


def test_it_refuses_them_by_itself(ascend):
    for key in ALL.keys() - {"draft_window_size"}:
        with pytest.raises(pydantic.ValidationError, match=key):
            ascend.init_ascend_config(vllm_config(**{key: ALL[key]}))
    assert ascend.init_ascend_config(vllm_config(draft_window_size="2048")).draft_window_size == 2048


def test_every_option_reaches_the_product_and_none_its_adapter(ascend):
    hide_options()
    config = vllm_config(**ALL, enable_cpu_binding="false", refresh=True)
    ascend_config = ascend.init_ascend_config(config)
    assert ascend_config.draft_window_size is None and ascend_config.enable_cpu_binding is False
    assert DraftWindowOptions.from_additional_config(config.additional_config).model_dump() == ALL
    assert ALL.keys() == DraftWindowOptions.model_fields.keys()


@pytest.mark.parametrize("value", ["2048", -5])
def test_values_are_judged_by_the_product(ascend, value):
    hide_options()
    config = vllm_config(draft_window_size=value)
    ascend.init_ascend_config(config)
    with pytest.raises(ValueError, match="must be an integer greater than 0"):
        DraftWindowOptions.from_additional_config(config.additional_config)


@pytest.mark.parametrize("key", ["enable_cpu_bindings", "draft_window_sise", "draft-window-size"])
def test_its_strictness_stays_as_it_is(ascend, key):
    hide_options()
    with pytest.raises(pydantic.ValidationError, match=key):
        ascend.init_ascend_config(vllm_config(**{key: 1}))


def test_hooked_once(ascend):
    hide_options()
    hooked = ascend.AscendConfig.__init__
    hide_options()
    assert ascend.AscendConfig.__init__ is hooked


def test_without_vllm_ascend_there_is_nothing_to_hook():
    assert "vllm_ascend.ascend_config" not in sys.modules
    hide_options()
