# SPDX-License-Identifier: Apache-2.0
"""Which rows keep their window, and how each backend's mask is set, on vLLM's own classes without an engine."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")
from vllm.v1.attention.backends import flash_attn
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl
from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl, FlashAttentionMetadataBuilder
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from vllm_ascend.draft_window.config import DraftWindow
from vllm_ascend.draft_window.geometry import Rows
from vllm_ascend.draft_window.seams import vllm as versions
from vllm_ascend.draft_window.seams.speculator import SpeculatorSeam

SHAPE = {"block_size": 16, "num_kv_heads": 1, "head_size": 64, "dtype": torch.float32}
FULL, SLIDING = FullAttentionSpec(**SHAPE), SlidingWindowSpec(**SHAPE, sliding_window=48)
W = 64


class AnotherImpl:
    """Of a backend that nobody has read."""


def bare(cls, **attributes):
    """An object of a real class, whose constructor wants a whole engine."""
    made = object.__new__(cls)
    vars(made).update(attributes)
    return made


def flash(window=(-1, -1)):
    impl = bare(FlashAttentionImpl, sliding_window=window)
    spec = FULL if window == (-1, -1) else SLIDING
    builder = bare(FlashAttentionMetadataBuilder, aot_schedule=True, aot_sliding_window=None, kv_cache_spec=spec)
    return impl, builder, spec


def on_cpu():
    return bare(CPUAttentionBackendImpl, sliding_window=-1), SimpleNamespace(window_size=-1), FULL


def speculator(*draft, target=()):
    """A seam over attention groups of one layer each."""

    def groups(layers, kind):
        return [
            SimpleNamespace(layer_names=[f"{kind}.{i}"], kv_cache_spec=spec, metadata_builders=[builder])
            for i, (_, builder, spec) in enumerate(layers)
        ]

    layers = {
        f"{kind}.{i}": SimpleNamespace(impl=impl)
        for kind, of in (("draft", draft), ("target", target))
        for i, (impl, _, _) in enumerate(of)
    }
    found = object.__new__(SpeculatorSeam)
    found.vllm_config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers))
    found.attn_groups, found.target_attn_groups = [groups(draft, "draft")], [groups(target, "target")]
    return found


def window(*, lookahead=0, sink=0, gate=0):
    return DraftWindow(
        method="any", size=W, sink_size=sink, min_context=gate, queries_per_request=1, max_lookahead=lookahead
    )


@pytest.mark.parametrize(
    ("layers", "in_force", "rows"),
    [
        ([on_cpu()], window(), Rows.MASKED),
        ([flash(), flash()], window(lookahead=3), Rows.MASKED),
        ([flash(), flash((47, 0))], window(), Rows.MASKED),
        ([flash()], window(sink=4), Rows.NEWEST),
        ([flash()], window(gate=1), Rows.NEWEST),
        ([flash(), (AnotherImpl(), None, FULL)], window(), Rows.NEWEST),
        ([(AnotherImpl(), None, FULL)], window(lookahead=3), Rows.NEWEST),
        # what several layers computed for a row is in the cache of all but the first
        ([flash(), flash()], window(lookahead=3, sink=4), Rows.EVERY),
        ([(AnotherImpl(), None, FULL)] * 2, window(lookahead=3), Rows.EVERY),
        # a parallel drafter's keys and values come from the target
        ([(AnotherImpl(), None, FULL)] * 2, window(), Rows.NEWEST),
    ],
)
def test_rows(layers, in_force, rows):
    assert speculator(*layers).rows_with(in_force) is rows


def test_mask_of_the_cpu_backend():
    impl, builder, spec = on_cpu()
    speculator((impl, builder, spec)).mask_rows(W)
    assert impl.sliding_window == builder.window_size == W


@pytest.fixture
def layers_of_the_engine(monkeypatch):
    """What upstream finds when it looks for the windows of all layers."""
    layers = {}
    monkeypatch.setattr(flash_attn, "get_layers_from_vllm_config", lambda *_: layers)
    monkeypatch.setattr(FlashAttentionImpl, "get_impl_variants", lambda self: (self,), raising=False)
    monkeypatch.setattr(flash_attn, "Attention", object, raising=False)
    return layers


def test_mask_of_flash_attention(layers_of_the_engine):
    draft, native, target = flash(), flash((47, 0)), flash()
    found = speculator(draft, native, target=[target])
    layers_of_the_engine |= {"draft": SimpleNamespace(impl=draft[0]), "target": SimpleNamespace(impl=target[0])}
    found.mask_rows(W)
    window_of = {
        True: draft[1].kv_cache_spec.sliding_window == W and draft[0].sliding_window == (-1, -1),
        False: draft[0].sliding_window == (W - 1, 0) and draft[1].kv_cache_spec is FULL,
    }
    assert window_of[versions.release() < (0, 28)]
    assert not draft[1].aot_schedule
    # The block's own queries see each other: upstream makes the window symmetric where attention is not causal.
    assert flash_attn._maybe_symmetrize_window((W - 1, 0), False) == (W - 1, W - 1)
    # Layers that slide anyway keep their window, the target its schedule.
    assert native[0].sliding_window == (47, 0) and native[1].kv_cache_spec is SLIDING and native[1].aot_schedule
    assert target[0].sliding_window == (-1, -1) and target[1].kv_cache_spec is FULL
    assert target[1].aot_schedule and target[1].aot_sliding_window == (-1, -1)
    found.mask_rows(W)  # again, as after a profiling run
    assert target[1].aot_sliding_window == (-1, -1)
