# SPDX-License-Identifier: Apache-2.0
"""What draft layers publish, how vLLM groups it, and which blocks its manager then frees. All on vLLM's own classes."""

import pickle
import random
from types import SimpleNamespace

import pytest
import torch
from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager
from vllm.v1.kv_cache_interface import (
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from tests.ut.draft_window.cache import BLOCK, Cache, K, W, decode, full, window
from vllm_ascend.draft_window import reclaim
from vllm_ascend.draft_window.config import ReclaimRefused
from vllm_ascend.draft_window.layout import CacheLayout
from vllm_ascend.draft_window.reclaim import DraftWindowSpec
from vllm_ascend.draft_window.seams import vllm as versions

grouping = versions.kv_cache_grouping()

# The layout that vLLM 0.29 and later take where nothing else is asked for.
LAYER_OUTERMOST = SimpleNamespace(get_resolved_kv_cache_layout=lambda: SimpleNamespace(is_block_outermost=False))
SHAPE = dict(num_kv_heads=2, head_size=64, dtype=torch.float32)


def mamba(**more) -> MambaSpec:
    return MambaSpec(block_size=BLOCK, shapes=((2, 64),), dtypes=(torch.float32,), **more)


def config(**parts) -> SimpleNamespace:
    """The engine's configuration as far as reclaim looks at it; ``parts`` are changes, ``section__name=value``."""
    sections = dict(
        scheduler_config=dict(disable_hybrid_kv_cache_manager=False),
        parallel_config=dict(decode_context_parallel_size=1, prefill_context_parallel_size=1, pipeline_parallel_size=1),
        model_config=dict(max_model_len=4096),
        attention_config=dict(hisparse_config=None),
    )
    for name, value in parts.items():
        section, _, key = name.partition("__")
        if key:
            sections[section][key] = value
    flat = {name: value for name, value in parts.items() if "__" not in name}
    return SimpleNamespace(
        **{name: SimpleNamespace(**values) for name, values in sections.items()},
        **({"use_v2_model_runner": True, "kv_transfer_config": None, "speculative_config": None} | flat),
        cache_config=LAYER_OUTERMOST,
    )


class TestSpec:
    def test_keeps_more_than_the_window_and_crosses_processes(self):
        spec = reclaim.windowed_spec(full(), window(size=100, min_context=0))
        assert spec.sliding_window == 116
        assert reclaim.windowed_spec(full(), window(size=64, min_context=500)).sliding_window == 516
        assert spec.page_size_bytes == full().page_size_bytes
        copy = pickle.loads(pickle.dumps(spec))
        assert copy == spec and type(copy) is DraftWindowSpec

    def test_is_managed_like_a_sliding_window_and_equal_to_none(self):
        spec = reclaim.windowed_spec(full(), window())
        assert KVCacheSpecRegistry.get_manager_class(spec) is SlidingWindowManager
        native = SlidingWindowSpec(block_size=BLOCK, sliding_window=spec.sliding_window, **SHAPE)
        assert spec != native and native != spec


class TestGroups:
    @pytest.fixture(autouse=True)
    def hooked(self, monkeypatch):
        monkeypatch.setattr(grouping, "get_kv_cache_groups", stock_grouping())
        reclaim.group_draft_layers()

    @pytest.mark.parametrize(
        ("target", "draft", "sizes"),
        [(36, 5, [6] * 6 + [5]), (10, 5, [5] * 3), (64, 5, [8] * 8 + [5]), (38, 5, [8, 8, 8, 7, 7, 5])],
    )
    def test_draft_layers_are_one_group_and_the_target_is_dealt_out(self, target, draft, sizes):
        specs = {f"layers.{i}": full() for i in range(target)}
        marked = reclaim.windowed_spec(full(), window())
        specs |= {f"draft.{i}": marked for i in range(draft)}
        groups = grouping.get_kv_cache_groups(config(), dict(specs))
        assert sorted((len(g.layer_names) for g in groups), reverse=True) == sorted(sizes, reverse=True)
        assert groups[-1].layer_names == [f"draft.{i}" for i in range(draft)]
        assert groups[-1].kv_cache_spec == marked
        assert all(group.kv_cache_spec == full() for group in groups[:-1])
        assert {name for group in groups for name in group.layer_names} == specs.keys()

    @pytest.mark.parametrize(
        "specs",
        [
            {f"layers.{i}": full() for i in range(41)},
            {f"layers.{i}": full() for i in range(6)}
            | {f"s.{i}": SlidingWindowSpec(block_size=BLOCK, sliding_window=64, **SHAPE) for i in range(3)},
            {
                "a": full(),
                "m": MambaSpec(block_size=BLOCK, shapes=((2, 64),), dtypes=(torch.float32,), page_size_padded=16384),
            },
            {},
        ],
        ids=["uniform", "sliding", "hybrid", "none"],
    )
    def test_without_marked_layers_nothing_changes(self, specs):
        assert grouping.get_kv_cache_groups.__wrapped__ is stock_grouping()
        hooked = grouping.get_kv_cache_groups(config(), dict(specs))
        assert hooked == stock_grouping()(config(), dict(specs))

    def test_the_target_can_never_be_windowed(self):
        """With the hybrid manager off, stock vLLM makes one group of target and draft, and it carries the window."""
        specs = {"layers.0": full(), "draft.0": reclaim.windowed_spec(full(), window())}
        off = config(scheduler_config__disable_hybrid_kv_cache_manager=True)
        (merged,) = stock_grouping()(off, dict(specs))
        assert merged.kv_cache_spec.sliding_window == 80
        with pytest.raises(ReclaimRefused, match="hybrid KV cache manager is off"):
            grouping.get_kv_cache_groups(off, dict(specs))

    def test_hooking_again_changes_nothing(self):
        before = grouping.get_kv_cache_groups
        reclaim.group_draft_layers()
        assert grouping.get_kv_cache_groups is before


def stock_grouping():
    current = grouping.get_kv_cache_groups
    return getattr(current, "__wrapped__", current)


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ({"use_v2_model_runner": False}, "it needs Model Runner V2"),
        ({"scheduler_config__disable_hybrid_kv_cache_manager": True}, "the hybrid KV cache manager is off"),
        ({"kv_transfer_config": SimpleNamespace(kv_connector="NixlConnector")}, "the KV connector NixlConnector"),
        ({"parallel_config__decode_context_parallel_size": 2}, "context parallelism \\(size 2\\)"),
        ({"parallel_config__prefill_context_parallel_size": 4}, "context parallelism \\(size 4\\)"),
        ({"parallel_config__pipeline_parallel_size": 2}, "of 2 pipeline stages only the last"),
        ({"model_config__supports_kv_cache_grouping": True}, "makes its KV cache groups itself"),
    ],
)
def test_engines_that_are_refused(parts, reason):
    reclaim.refuse_engine(config())
    with pytest.raises(ReclaimRefused, match=f"draft_window_reclaim=true is not possible here: .*{reason}"):
        reclaim.refuse_engine(config(**parts))


class Layer:
    """An attention layer, as far as its specification goes."""

    def __init__(self, spec, **more):
        self.__dict__ |= more
        self._spec = spec

    def get_kv_cache_spec(self, vllm_config):
        return self._spec


class TestPublishing:
    def publish(self, monkeypatch, target, draft, **parts):
        self.layers = {f"layers.{i}": spec if isinstance(spec, Layer) else Layer(spec) for i, spec in enumerate(target)}
        self.layers |= {f"draft.{i}": Layer(spec) for i, spec in enumerate(draft)}
        monkeypatch.setattr(reclaim, "get_layers_from_vllm_config", lambda *_: self.layers)
        return reclaim.publish(config(**parts), window(), [name for name in self.layers if name.startswith("draft")])

    def specs(self):
        return {name: layer.get_kv_cache_spec(None) for name, layer in self.layers.items()}

    def test_draft_layers_alone_publish_the_window(self, monkeypatch):
        layout = self.publish(monkeypatch, [full()] * 10, [full()] * 5)
        assert layout == CacheLayout(target_layers=10, draft_layers=5, block_size=BLOCK, kept=80)
        marked = reclaim.windowed_spec(full(), window())
        assert self.specs() == {f"layers.{i}": full() for i in range(10)} | {f"draft.{i}": marked for i in range(5)}

    def test_layers_that_share_a_cache_or_have_none_do_not_count(self, monkeypatch):
        target = [Layer(full()) for _ in range(10)] + [Layer(None)]
        target.append(Layer(full(num_kv_heads=1), kv_sharing_target_layer_name="layers.0"))
        assert self.publish(monkeypatch, target, [full()] * 5).target_layers == 10

    @pytest.mark.parametrize(
        ("target", "draft", "reason"),
        [
            (
                [full()] * 36,
                [full()],
                r"draft layers: 1, target layers: 36; that would save 2.\d% .*=131072 and make 7 KV",
            ),
            ([full(), full(num_kv_heads=4)], [full()] * 5, "the target has layers of 2 kinds"),
            (
                [full(), mamba()],
                [full()] * 5,
                r"the target has layers of 2 kinds \(FullAttentionSpec, MambaSpec\)",
            ),
            ([full(head_size=128)] * 10, [full()] * 5, "a block of a target layer takes 32768 bytes and .* 16384"),
            (
                [SlidingWindowSpec(block_size=BLOCK, sliding_window=64, **SHAPE)] * 10,
                [full()] * 5,
                "the target keeps its KV cache as SlidingWindowSpec",
            ),
            (
                [full()] * 10,
                [full()] * 5 + [SlidingWindowSpec(block_size=BLOCK, sliding_window=48, **SHAPE)],
                "the draft has layers of 2 kinds",
            ),
            (
                [full()] * 10,
                [MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=256, dtype=torch.float32)] * 5,
                "the draft keeps its KV cache as MLAAttentionSpec",
            ),
            ([full()] * 10, [], "the draft has no KV cache of its own"),
        ],
    )
    def test_refused_before_anything_is_published(self, monkeypatch, target, draft, reason):
        with pytest.raises(ReclaimRefused, match=reason):
            self.publish(monkeypatch, target, draft, model_config__max_model_len=131072)
        assert list(self.specs().values()) == [*target, *draft]


@pytest.mark.parametrize("steps_ahead", [0, 1], ids=["sync", "async"])
def test_blocks_stay_few_over_four_thousand_tokens_and_are_there_when_read(steps_ahead):
    cache, rng = Cache(), random.Random(0)
    request = cache.request("r", [rng.randrange(250) for _ in range(700)])
    held = []
    for _ in decode(cache, request, rng, 1700, steps_ahead=steps_ahead):
        held.append(cache.held(request))
    assert request.num_output_tokens > 4000
    # The window, a block for what is kept beyond it, one for either end, and what the steps in flight write.
    bound = W // BLOCK + 1 + 2 + -(-(steps_ahead + 1) * (2 * K + 2) // BLOCK)
    assert max(held[20:]) <= bound < len(cache.draft_blocks(request)) / 20
    cache.manager.free(request)
    assert cache.free_blocks == 1999


@pytest.mark.parametrize("missing", [1, 2])
def test_a_spec_that_is_blocks_too_small_is_noticed(missing):
    """The negative control of the check above. One block is the rounding that is kept for good measure."""
    cache, rng = Cache(size=W - missing * BLOCK), random.Random(0)
    request = cache.request("r", [rng.randrange(250) for _ in range(700)])
    steps = decode(cache, request, rng, 100, steps_ahead=0)
    if missing == 1:
        assert sum(1 for _ in steps) > 100
    else:
        with pytest.raises(AssertionError):
            list(steps)


def test_nothing_leaks_over_two_hundred_requests():
    """Arriving, finishing, aborted at any time, with prefix-cache hits in between."""
    cache, rng = Cache(num_blocks=600, enable_caching=True), random.Random(1)
    shared = [rng.randrange(250) for _ in range(400)]
    free = cache.free_blocks
    hits = 0
    for i in range(200):
        prompt = shared[: rng.choice([0, 200, 400])] + [rng.randrange(250) for _ in range(rng.randint(1, 300))]
        request = cache.request(f"r{i}", prompt)
        if tokens := cache.start(request):
            hits += 1
            # The first proposal after the hit reads what an earlier request wrote.
            assert cache.readable(request, tokens, 1)
        steps = decode(cache, request, rng, 60, steps_ahead=rng.randint(0, 1))
        for _ in range(rng.randint(1, 70)):
            next(steps, None)
        cache.manager.free(request)
        assert cache.free_blocks == free
    assert hits > 50
