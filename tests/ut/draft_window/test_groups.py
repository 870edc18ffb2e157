# SPDX-License-Identifier: Apache-2.0
"""Which KV cache groups can be windowed; real vLLM specs and attention groups."""

import logging

import pytest
import torch
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.worker.utils import AttentionGroup

from tests.vllm_inputs import make_block_tables
from vllm_ascend.draft_window.config import WindowOff
from vllm_ascend.draft_window.groups import inspect_draft_groups

SHAPE = dict(num_kv_heads=2, head_size=64, dtype=torch.float32)


def full(block_size=16, **more):
    return FullAttentionSpec(block_size=block_size, **SHAPE, **more)


def group(spec, gid=0, backend=CPUAttentionBackend):
    return AttentionGroup(backend, [f"draft.{gid}"], spec, gid)


def inspect(*specs, backend=CPUAttentionBackend, columns=None):
    """One KV cache group per spec; ``None`` is a group of the target alone."""
    sizes = tuple(16 if spec is None else spec.block_size for spec in specs)
    tables = make_block_tables(sizes, columns or (8,) * len(specs), max_num_reqs=2)
    groups = [[] if spec is None else [group(spec, gid, backend)] for gid, spec in enumerate(specs)]
    return inspect_draft_groups(groups, sizes, tables.input_block_tables)


def test_draft_groups_among_those_of_the_target():
    found = inspect(None, full(16), None, full(32), columns=(8, 64, 8, 32))
    assert found.group_ids == (1, 3)
    assert found.block_sizes == (16, 32)
    assert found.full_columns == (64, 32)
    assert found.native_window is None


def test_native_window_is_the_widest_of_any_layer():
    sliding = SlidingWindowSpec(block_size=16, sliding_window=48, **SHAPE)
    wide = SlidingWindowSpec(block_size=16, sliding_window=96, **SHAPE)
    assert inspect(full(), sliding, wide).native_window == 96
    assert inspect(full(sliding_window=128), sliding).native_window == 128


def test_mla_and_layers_of_different_sizes():
    mla = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, dtype=torch.float32)
    assert inspect(mla).block_sizes == (16,)
    uniform = UniformTypeKVCacheSpecs(
        block_size=16, kv_cache_specs={"a": full(sliding_window=32), "b": full(sliding_window=64)}
    )
    assert inspect(uniform).native_window == 64


@pytest.mark.parametrize(
    "spec",
    [
        ChunkedLocalAttentionSpec(block_size=16, attention_chunk_size=64, **SHAPE),
        MambaSpec(block_size=16, shapes=((2, 64),), dtypes=(torch.float32,)),
    ],
    ids=lambda spec: type(spec).__name__,
)
def test_other_kinds_of_cache_are_refused(spec):
    with pytest.raises(ValueError, match=f"draft_window_size does not support .*{type(spec).__name__} .*draft.1"):
        inspect(full(), spec)


def test_sparse_backend_that_derives_positions_from_lengths_is_off():
    class DSABackend(CPUAttentionBackend):
        @staticmethod
        def get_name():
            return "ASCEND_DSA"

    off = inspect(full(), backend=DSABackend)
    assert isinstance(off, WindowOff) and off.level == logging.WARNING
    assert off.reason.startswith(
        "the sparse backend ASCEND_DSA derives positions from seq_lens; a DSpark draft trained"
    )


def test_draft_without_attention_is_off():
    assert inspect(None, None) == WindowOff("the draft has no attention layers")
