# SPDX-License-Identifier: Apache-2.0
"""How target and draft share blocks, against counting pages one by one."""

import pytest

from vllm_ascend.draft_window.layout import CacheLayout, kept_tokens


def layout(target, draft, *, block_size=16, kept=2048 + 16) -> CacheLayout:
    return CacheLayout(target_layers=target, draft_layers=draft, block_size=block_size, kept=kept)


@pytest.mark.parametrize(
    ("target", "draft", "group_size", "groups"),
    [
        (36, 5, 6, 7),
        (10, 5, 5, 3),
        (64, 5, 8, 9),
        (48, 8, 8, 7),
        (36, 1, 6, 7),
        (4, 2, 2, 3),
        (4, 1, 2, 3),
        (2, 5, 5, 2),
    ],
)
def test_group_sizes(target, draft, group_size, groups):
    found = layout(target, draft)
    assert (found.group_size, found.groups) == (group_size, groups)


@pytest.mark.parametrize("tokens", [1, 16, 17, 2048, 2064, 2080, 5000, 131072])
@pytest.mark.parametrize(("target", "draft"), [(36, 5), (10, 5), (64, 5), (36, 1)])
def test_pages_are_those_of_the_blocks_of_each_group(target, draft, tokens):
    found = layout(target, draft)
    groups = [range(i, target, found.target_groups) for i in range(found.target_groups)]
    assert sorted(layer for group in groups for layer in group) == list(range(target))
    assert max(len(group) for group in groups) <= found.group_size
    blocks = {position // 16 for position in range(tokens)}
    # Whatever the oldest token is that is kept, at most this many blocks hold the draft's.
    kept = max(
        len({position // 16 for position in range(max(newest - found.kept, 0), newest)})
        for newest in range(max(tokens - 16, 1), tokens + 1)
    )
    assert found.blocks(tokens) == len(groups) * len(blocks) + kept + (tokens <= found.kept)
    assert found.pages(tokens) == found.group_size * found.blocks(tokens)
    assert found.pages_of_one_group(tokens) == (target + draft) * len(blocks)


# Percent of a request's KV cache: A.2 of the study of vLLM's groups, W = 2048, blocks of 16.
@pytest.mark.parametrize(
    ("target", "draft", "context", "percent"),
    [
        (36, 5, 2048, -2.4),
        (36, 5, 8192, 8.5),
        (36, 5, 32768, 11.3),
        (36, 5, 131072, 12.0),
        (10, 5, 8192, 24.9),
        (10, 5, 131072, 32.8),
        (64, 5, 32768, 6.5),
        (36, 1, 8192, -1.4),
        (36, 1, 131072, 2.4),
    ],
)
def test_savings(target, draft, context, percent):
    assert 100 * layout(target, draft).saved(context) == pytest.approx(percent, abs=0.3)


def test_costs_below():
    found = layout(36, 5)
    context = found.costs_below(131072)
    assert found.saved(context) >= 0 > found.saved(context - 16)
    assert 2048 < context < 4096
    assert layout(36, 1).costs_below(4096) is None


def test_tokens_in_flight_count_until_the_whole_request_does():
    found = layout(36, 5)
    assert found.blocks(131072, 16384) - found.blocks(131072) == 16384 // 16
    assert found.blocks(1000, 16384) == found.blocks(1000)


def test_kept_tokens():
    assert kept_tokens(2048, 0, 16) == 2064
    assert kept_tokens(512, 4096, 128) == 4224


def test_what_does_not_pay_says_so_with_the_figure():
    assert layout(36, 5).too_little_saved(131072) is None
    assert layout(36, 5).too_little_saved(2048).startswith("draft layers: 5, target layers: 36; that would save -2.")
    assert "save 2.4% of the KV cache at max_model_len=131072 and make 7 KV" in layout(36, 1).too_little_saved(131072)
