# SPDX-License-Identifier: Apache-2.0
"""Blocks as large as those of a hybrid target, far beyond the window, leave a draft what it has with small ones."""

import pytest

from tools.demo_pair import DRAFT_FOLDERS, demo_prompts, demo_speculation
from vllm_draft_window.measuring.engine import Engine


@pytest.mark.parametrize("method", DRAFT_FOLDERS)
def test_block_size_does_not_matter(method, window_lines):
    def run(block_size):
        with Engine(
            speculative_config=demo_speculation(method),
            additional_config={"draft_window_size": 256},
            max_model_len=2112,
            block_size=block_size,
        ) as engine:
            assert f"block alignment={block_size}, tokens seen=256, " in window_lines[-1][1]
            return engine.run(demo_prompts(4, 2000), max_tokens=16)

    large, small = run(1056), run(32)
    assert large.tokens == small.tokens
    assert large.accepted_per_position == small.accepted_per_position
    assert small.accepted_length > 2
