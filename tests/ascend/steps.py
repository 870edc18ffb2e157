# SPDX-License-Identifier: Apache-2.0
"""Draft steps of batches that a test makes up, and what must hold of many of them in FULL graphs."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer

from tests.ascend.engine import BLOCK_SIZE, MAX_MODEL_LEN, capture_graphs, compared
from vllm_ascend.worker.v2.attn_utils import build_attn_metadata_wrapper

# Requests of one step after the other: few after full batches, shrinking, growing; larger than a graph are left out.
_BATCHES = (3, 8, 2, 8, 3, 20, 3, 13, 9, 8, 7, 2, 1, 4, 8, 12, 20, 1)


class ScriptedSteps:
    """Draft steps of batches that a test makes up: lengths as given, blocks and cached keys at random."""

    def __init__(self, speculator: Any, *, seed: int = 0) -> None:
        self.speculator = speculator
        self.metadata: list[dict[str, Any]] = []
        self._rng = np.random.default_rng(seed)
        layers = speculator.vllm_config.compilation_config.static_forward_context
        for name in speculator.draft_attn_layer_names:
            for cache in layers[name].kv_cache:
                cache.normal_(generator=torch.Generator().manual_seed(seed))
        self._num_blocks = min(len(layers[name].kv_cache[0]) for name in speculator.draft_attn_layer_names)

    def run(self, seq_lens: Sequence[int]) -> torch.Tensor:
        """One proposal as ``propose`` makes it once its inputs are prepared; draft tokens, [num_reqs, K]."""
        speculator, num_reqs = self.speculator, len(seq_lens)
        self.prepare(seq_lens)
        queries = speculator.num_query_per_req
        manager = speculator.query_cudagraph_manager
        desc = manager.dispatch(num_reqs, num_reqs * queries, queries, 0)
        with build_attn_metadata_wrapper():
            metadata = speculator._build_draft_attn_metadata(
                num_reqs=num_reqs,
                num_reqs_padded=desc.num_reqs,
                num_tokens_padded=desc.num_tokens,
                seq_lens_cpu_upper_bound=speculator.input_batch.seq_lens_cpu_upper_bound,
                step=queries,
                causal=speculator._group_causal,
            )
        self.metadata.append(metadata)
        if desc.cg_mode == CUDAGraphMode.FULL:
            manager.run_fullgraph(desc)
        else:
            slots = build_slot_mappings_by_layer(
                speculator.block_tables.slot_mappings[:, : desc.num_tokens], speculator.kv_cache_config
            )
            speculator._generate_draft(num_reqs, desc.num_tokens, metadata, slots, None)
        return speculator.draft_tokens[:num_reqs].clone()

    def prepare(self, lengths: Sequence[int]) -> None:
        """Fill the inputs of a step: what ``propose`` does before it builds metadata."""
        speculator, num_reqs = self.speculator, len(lengths)
        seq_lens = np.asarray(lengths, dtype=np.int32)
        buffers, tables, queries = speculator.input_buffers, speculator.block_tables, speculator.num_query_per_req
        # [num_reqs, queries]
        positions = torch.from_numpy(seq_lens[:, None] - queries + np.arange(queries))
        buffers.seq_lens.zero_()
        buffers.seq_lens[:num_reqs] = torch.from_numpy(seq_lens)
        buffers.query_start_loc[:] = (torch.arange(len(buffers.query_start_loc)).clip(max=num_reqs) * queries).int()
        buffers.positions[: positions.numel()] = positions.flatten().clip(max=speculator.max_model_len - 1)
        buffers.input_ids[: positions.numel()] = torch.from_numpy(self._rng.integers(0, 256, positions.numel())).int()
        for gid, table in enumerate(tables.input_block_tables):
            table.zero_()
            size = tables.kernel_block_sizes[gid]
            blocks = 1 + self._rng.permutation(self._num_blocks - 1).astype(np.int32)
            for row, length in enumerate(seq_lens):
                used = min(-(-int(length) // size), table.shape[1])
                table[row, :used] = torch.from_numpy(blocks[row * table.shape[1] :][:used])
            columns = (positions // size).clip(max=table.shape[1] - 1)
            slots = table[:num_reqs].gather(1, columns) * size + positions % size
            tables.slot_mappings[gid].fill_(-1)
            tables.slot_mappings[gid, : positions.numel()] = slots.flatten()
        first = speculator.num_query_per_req - speculator.num_speculative_steps
        steps = speculator.num_speculative_steps
        # [num_reqs, K]
        indices = torch.arange(num_reqs)[:, None] * queries + first + torch.arange(steps)
        speculator.sample_indices.zero_()
        speculator.sample_indices[: indices.numel()] = indices.flatten()
        bound = torch.from_numpy(seq_lens - queries)
        speculator.draft_max_seq_len = min(int(seq_lens.max()), speculator.max_model_len)
        speculator.input_batch = SimpleNamespace(
            num_reqs=num_reqs,
            seq_lens_cpu_upper_bound=bound,
            seq_lens_np=bound.numpy(),
            is_prefilling_np=np.zeros(num_reqs, dtype=np.bool_),
        )


def draw_lengths(rng: np.random.Generator, num_reqs: int, *, queries: int, window: int) -> list[int]:
    """From the shortest to beyond the longest, edges of blocks and of the window among them.

    The device's lengths are not clamped: near ``max_model_len`` they run past the block table.
    """
    beyond, longest = window + BLOCK_SIZE, MAX_MODEL_LEN + queries - 1
    edges = [queries, BLOCK_SIZE, BLOCK_SIZE + 1, window, beyond - 1, beyond, MAX_MODEL_LEN, longest]
    drawn = rng.integers(queries, MAX_MODEL_LEN, num_reqs)
    return np.where(rng.random(num_reqs) < 0.4, rng.choice(edges, num_reqs), drawn).tolist()


def check_padded_graph(speculator: Any, window: int, size: int, *, num_steps: int = 100) -> None:
    """What the operator is handed by a graph of ``size`` requests, replayed for batches that shrink and grow."""
    capture_graphs(speculator, (size,))
    steps, rng = ScriptedSteps(speculator), np.random.default_rng(0)
    (columns,), queries = speculator.window.geometry.columns, speculator.num_query_per_req
    batches = [num_reqs for num_reqs in _BATCHES if num_reqs <= size]
    with compared(speculator, window) as reference:
        for step in range(num_steps):
            num_reqs = batches[step % len(batches)]
            steps.run(draw_lengths(rng, num_reqs, queries=queries, window=window))
            for metadata in steps.metadata[-1].values():
                lengths, table = metadata.seq_lens_list, metadata.block_tables
                assert len(lengths) == len(metadata.seq_lens) == len(table) == size
                assert table.shape[1] == columns and max(lengths) <= columns * BLOCK_SIZE
                assert not any(lengths[num_reqs:]) and not table[num_reqs:].any()
    assert reference.windowed_rows > num_steps
    (graph,) = speculator.query_cudagraph_manager.graphs.values()
    assert graph.replays == num_steps
    built = [metadata for of_step in steps.metadata for metadata in of_step.values()]
    assert len({metadata.block_tables.data_ptr() for metadata in built}) == 1
    assert len({metadata.seq_lens.data_ptr() for metadata in built}) == 1
    assert all(len(addresses) == 1 for addresses in reference.tables.values()), "tables that the operator was given"
