# SPDX-License-Identifier: Apache-2.0
"""Which rows keep their window, and how each backend's mask is set, on vLLM's own classes without an engine."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")
from vllm.v1.attention.backends import flash_attn
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl
from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl, FlashAttentionMetadataBuilder
from vllm.v1.attention.backends.triton_attn import TritonAttentionImpl
from vllm.v1.attention.ops.triton_unified_attention import unified_attention
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from tests.e2e.recorder import attention
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


def triton(window=None):
    shape = {"num_heads": 2, "num_kv_heads": 1, "head_size": 32, "scale": 32**-0.5}
    return TritonAttentionImpl(**shape, alibi_slopes=None, sliding_window=window, kv_cache_dtype="auto"), None, FULL


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
        ([triton()], window(), Rows.MASKED),
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


def test_mask_of_triton_attention_is_what_a_sliding_layer_is_built_with():
    draft, native = triton(), triton(W)
    speculator(draft).mask_rows(W)
    assert vars(draft[0]) == vars(native[0]) != vars(triton()[0])


@pytest.mark.parametrize(
    ("causal", "queries", "lengths"),
    [(True, (5, 1, 40), (200, 70, 90)), (False, (7, 7), (200, 30)), (True, (1, 1), (200, 30))],
    ids=["chunks", "non-causal", "decode"],
)
def test_triton_attention_with_a_mask_sees_exactly_the_window(causal, queries, lengths):
    """Upstream's kernel, interpreted; non-causal rows see those of their own block that come behind them, too."""
    impl, _, _ = layer = triton()
    speculator(layer).mask_rows(24)
    torch.manual_seed(0)
    columns = [-(-length // 16) for length in lengths]
    blocks = torch.randperm(sum(columns)).int().split(columns)
    table = torch.zeros(len(lengths), max(columns), dtype=torch.int32)
    for row, ids in zip(table, blocks, strict=True):
        row[: len(ids)] = ids
    keys, values = torch.randn(2, sum(columns), 16, 1, 32)
    starts = torch.tensor([0, *queries]).cumsum(0, dtype=torch.int32)
    query, out = torch.randn(2, sum(queries), 2, 32)
    segments = {} if max(queries) > 1 else {  # where upstream splits long contexts
        "seq_threshold_3D": 8, "num_par_softmax_segments": 16, "softmax_segm_output": torch.empty(8, 2, 16, 32),
        "softmax_segm_max": torch.empty(8, 2, 16), "softmax_segm_expsum": torch.empty(8, 2, 16),
    }  # fmt: skip
    unified_attention(
        q=query, k=keys, v=values, out=out, block_table=table, cu_seqlens_q=starts, max_seqlen_q=max(queries),
        seqused_k=torch.tensor(lengths, dtype=torch.int32), max_seqlen_k=max(lengths), softmax_scale=impl.scale,
        causal=causal, window_size=impl.sliding_window, softcap=0, q_descale=None, k_descale=None, v_descale=None,
        **segments,
    )  # fmt: skip
    for row, (length, ids) in enumerate(zip(lengths, blocks, strict=True)):
        own = slice(starts[row], starts[row + 1])
        key, value = (cache[ids.long()].flatten(0, 1)[:length] for cache in (keys, values))
        expected = attention(query[own], key, value, scale=impl.scale, causal=causal, sliding_window=24)
        torch.testing.assert_close(out[own], expected)
