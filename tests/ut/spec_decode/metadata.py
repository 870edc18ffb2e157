# SPDX-License-Identifier: Apache-2.0
"""Model Runner V1 metadata as vLLM and vLLM-Ascend build it."""

import dataclasses
from dataclasses import dataclass

import numpy as np
import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

MIRRORS = ("seq_lens_cpu", "_seq_lens_cpu", "seq_lens_cpu_upper_bound")


@dataclass
class AscendMetadata(CommonAttentionMetadata):
    """vLLM-Ascend turns vLLM's property ``seq_lens_cpu`` into a field; newer versions of vLLM dropped both names."""

    seq_lens_cpu: torch.Tensor | None = None  # type: ignore[assignment]
    _seq_lens_cpu: torch.Tensor | None = None


def make_metadata(
    # [num_reqs]
    seq_lens: list[int] | np.ndarray,
    # [>= num_reqs, columns]
    table: torch.Tensor,
    *,
    # [num_reqs], or one number for all
    queries: list[int] | int = 1,
    # [num_reqs], how far the optimistic mirror is ahead
    rejected: list[int] | int = 0,
    dtype: torch.dtype = torch.int32,
    cls: type = AscendMetadata,
) -> CommonAttentionMetadata:
    """Metadata of one batch; every mirror is a tensor of its own."""
    lengths = torch.tensor(np.asarray(seq_lens), dtype=torch.int32)
    num_reqs = len(lengths)
    of_row = torch.tensor(queries, dtype=torch.int32).expand(num_reqs)
    starts = torch.cat([torch.zeros(1, dtype=torch.int32), of_row.cumsum(0).int()])
    ahead = torch.tensor(rejected, dtype=torch.int32).expand(num_reqs)
    exact = {field.name for field in dataclasses.fields(cls)} & {"seq_lens_cpu", "_seq_lens_cpu"}
    return cls(
        query_start_loc=starts.clone(),
        query_start_loc_cpu=starts,
        seq_lens=lengths.clone(),
        num_reqs=num_reqs,
        num_actual_tokens=int(starts[-1]),
        max_query_len=int(of_row.max()) if num_reqs else 0,
        max_seq_len=int(lengths.max()) if num_reqs else 0,
        block_table_tensor=table,
        slot_mapping=torch.arange(int(starts[-1])),
        seq_lens_cpu_upper_bound=(lengths + ahead).to(dtype),
        **{name: lengths.to(dtype, copy=True) for name in exact},
    )


def make_table(rows: int, columns: int, *, seed: int = 0, high: int = 2**31 - 1) -> torch.Tensor:
    """Block ids over the whole range, none of them 0; int32, [rows, columns]."""
    ids = np.random.default_rng(seed).integers(1, high, (rows, columns), dtype=np.int32, endpoint=True)
    return torch.from_numpy(ids)
