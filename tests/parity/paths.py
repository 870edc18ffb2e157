# SPDX-License-Identifier: Apache-2.0
"""Three ways from one batch to what draft attention reads: Model Runner V1, Model Runner V2, and the oracle."""

import dataclasses
from dataclasses import dataclass

import numpy as np
import torch

from tests import oracle
from tests.cases import full_tables
from tests.parity.batches import ParityBatch
from tests.ut.spec_decode.metadata import make_metadata
from tests.vllm_inputs import Batch
from vllm_ascend.spec_decode.sliding_window import SlidingWindowAdapter

CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Windowed:
    """What one way makes of a batch.

    Attributes:
        start: tokens taken out in front, [num_rows].
        length: windowed device lengths, [num_rows].
        exact_host: windowed exact host lengths, [num_rows].
        host_bound: windowed optimistic host lengths, [num_rows].
        tables: one per group, [num_rows, columns]; empty for the oracle, which has :func:`oracle.check_table_row`.
    """

    start: np.ndarray
    length: np.ndarray
    exact_host: np.ndarray
    host_bound: np.ndarray
    tables: tuple[np.ndarray, ...] = ()


def tables_of(batch: ParityBatch) -> list[np.ndarray]:
    return full_tables(batch.case, len(batch.seq_lens), seed=len(batch.seq_lens))


def through_v1(batch: ParityBatch) -> Windowed:
    """The shim on real metadata; groups beside the first as the proposers of vLLM-Ascend ask for them."""
    case, tables = batch.case, [torch.from_numpy(t) for t in tables_of(batch)]
    alignment = int(np.lcm.reduce(case.block_sizes))
    # The group whose blocks are as long as the alignment goes through apply, if there is one.
    first = case.block_sizes.index(alignment) if alignment in case.block_sizes else 0
    adapter = SlidingWindowAdapter(
        case.window,
        alignment,
        len(batch.seq_lens),
        case.lookahead,
        CPU,
        max_model_len=case.max_model_len,
        max_rejected=batch.max_rejected,
    )
    metadata = make_metadata(
        np.array(batch.seq_lens), tables[first], queries=list(batch.queries), rejected=list(batch.rejected)
    )
    full = metadata.seq_lens.clamp(max=case.limit)
    adapter.apply(metadata)
    cropped = [
        metadata.block_table_tensor if size == alignment and i == first else adapter.crop_group(table, block_size=size)
        for i, (table, size) in enumerate(zip(tables, case.block_sizes, strict=True))
    ]
    return Windowed(
        start=(full - metadata.seq_lens).numpy(),
        length=metadata.seq_lens.numpy(),
        exact_host=metadata._seq_lens_cpu.numpy(),
        host_bound=metadata.seq_lens_cpu_upper_bound.numpy(),
        tables=tuple(table.numpy() for table in cropped),
    )


def through_v2(batch: ParityBatch, *, fused: bool) -> Windowed:
    """The builder's inputs of Model Runner V2, in vLLM's own buffers."""
    case, rows = batch.case, len(batch.seq_lens)
    seq_lens = np.array(batch.seq_lens, dtype=np.int32)
    upper = seq_lens + np.array(batch.rejected, dtype=np.int32)
    inputs = Batch(case, seq_lens, fused=fused)
    geometry = inputs.windowed.geometry
    for table, ids in zip(inputs.block_tables.input_block_tables, tables_of(batch), strict=True):
        table[:rows] = torch.from_numpy(ids)
    queries = np.array(batch.queries, dtype=np.int32)
    inputs.set_queries(queries)
    uniform = int(queries[0]) if len(set(batch.queries)) == 1 else None
    inputs.windowed.refresh(num_reqs=batch.num_reqs, num_rows=rows, queries=uniform, lookahead=case.lookahead)
    length = inputs.windowed.seq_lens[:rows].numpy()
    tables = [table[:rows].numpy() for table in inputs.windowed.block_tables]
    exact, bound = (
        geometry.host_bound(values, max_rejected=ahead, queries=queries, lookahead=case.lookahead)
        for values, ahead in ((seq_lens, 0), (upper, batch.max_rejected))
    )
    live = np.arange(rows) < batch.num_reqs
    full = np.where(live, np.minimum(seq_lens, case.limit), 0)
    return Windowed(start=full - length, length=length, exact_host=exact, host_bound=bound, tables=tuple(tables))


def through_oracle(batch: ParityBatch) -> Windowed:
    """Token by token."""
    rows = []
    for s, q, ahead in zip(batch.seq_lens, batch.queries, batch.rejected, strict=True):
        of_row = dataclasses.replace(batch.case, queries=q)
        visible = oracle.visible_tokens(of_row, s)
        bound = oracle.host_bound(of_row, s + ahead, batch.max_rejected)
        rows.append((visible[0] if len(visible) else 0, len(visible), len(visible), bound))
    start, length, exact, bound = np.array(rows, dtype=np.int32).T
    return Windowed(start=start, length=length, exact_host=exact, host_bound=bound)
