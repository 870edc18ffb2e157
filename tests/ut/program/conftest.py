# SPDX-License-Identifier: Apache-2.0
"""Commands of the program run within this process."""

import sys

import pytest


@pytest.fixture(autouse=True)
def environment_of_its_own(monkeypatch):
    """An engine that ran here before may have frozen what vLLM reads of it; the doctor's logging level would stay."""
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")
    if "vllm" in sys.modules:
        from vllm import envs

        envs.disable_envs_cache()
