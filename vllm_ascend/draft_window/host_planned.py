# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM-Ascend project
"""The draft window where attention takes its lengths on the host, as vLLM-Ascend's does.

A host knows lengths that may count rejected draft tokens, and asking the device would make every proposal wait for the
target. So the host decides where the window starts, early enough for whatever was rejected, and the device follows:
what is cut off goes up with the other inputs of the step, and nothing comes back.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from vllm.utils.platform_utils import is_pin_memory_available

from .geometry import WindowGeometry


class HostPlannedWindow:
    """Windows the arguments of a metadata build.

    Attributes:
        seq_lens: windowed lengths, int32, [max_num_reqs].
        block_tables: cropped tables, one per draft KV cache group, int32, [max_num_reqs, columns].
        removed: tokens that the last build took out of each request, int32, [max_num_reqs].
    """

    def __init__(
        self,
        geometry: WindowGeometry,
        group_ids: Sequence[int],
        # [max_num_reqs]
        seq_lens: torch.Tensor,
        # num_groups x [max_num_reqs, columns]
        block_tables: Sequence[torch.Tensor],
    ) -> None:
        """Keep the persistent tensors to write to.

        Args:
            geometry: with ``max_rejected``, the most tokens by which host lengths may be ahead.
            group_ids: KV cache groups that hold draft layers, in the order of ``geometry.block_sizes``.
        """
        self.geometry = geometry
        self.seq_lens, self.block_tables = seq_lens, list(block_tables)
        self._group_ids = tuple(group_ids)
        self._pin_memory = seq_lens.device.type != "cpu" and is_pin_memory_available()
        self.removed: np.ndarray = np.zeros(len(seq_lens), dtype=np.int32)

    def build(
        self,
        build_attn_metadata: Callable[..., Any],
        # [num_live]
        host_lens: np.ndarray,
        *,
        # one number, or [num_live]
        queries: int | np.ndarray = 1,
        lookahead: int = 0,
        num_reqs: int,
        seq_lens: torch.Tensor,
        block_tables: Sequence[torch.Tensor],
        max_seq_len: int,
        **kwargs: Any,
    ) -> Any:
        """Run a build with windowed lengths and tables, and with the same lengths on the host.

        Args:
            host_lens: lengths of the requests as the host knows them, this forward's query tokens counted in.
            queries: query tokens of this forward.
            lookahead: positions beyond the lengths that later forwards of the proposal read.
            num_reqs: requests and the padding rows behind them, whose ``seq_lens`` are 0.
        """
        limit = self.geometry.limit
        # [num_reqs]
        host: np.ndarray = np.zeros(num_reqs, dtype=np.int32)
        removed, live = self.removed[:num_reqs], len(host_lens)
        self.removed.fill(0)
        removed[:live] = self.geometry.removed_by_host(host_lens, queries=queries, lookahead=lookahead)
        host[:live] = np.minimum(host_lens, limit) - removed[:live]
        if self._cuts(removed):
            seq_lens, tables = self._crop(seq_lens[:num_reqs], block_tables, removed, lookahead)
            block_tables = list(block_tables)
            for group_id, table in zip(self._group_ids, tables, strict=True):
                block_tables[group_id] = table
            max_seq_len = min(max_seq_len, self.geometry.max_length)
        return build_attn_metadata(
            num_reqs=num_reqs,
            seq_lens=seq_lens,
            seq_lens_np=host,
            block_tables=block_tables,
            max_seq_len=max_seq_len,
            **kwargs,
        )

    def _cuts(self, removed: np.ndarray) -> bool:
        """Whether the windowed tensors are needed: where nothing is cut off, they would equal the originals."""
        return bool(removed.any())

    def _crop(
        self, seq_lens: torch.Tensor, block_tables: Sequence[torch.Tensor], removed: np.ndarray, lookahead: int
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        num_reqs = len(seq_lens)
        cut = torch.from_numpy(removed)
        # Without pinned memory, the copy would wait for the device.
        cut = (cut.pin_memory() if self._pin_memory else cut).to(seq_lens.device, non_blocking=True)
        # [num_reqs]
        length = self.seq_lens[:num_reqs]
        length.copy_((seq_lens.clip(max=self.geometry.limit) - cut).clip_(min=0))
        tables = []
        for group, (group_id, out) in enumerate(zip(self._group_ids, self.block_tables, strict=True)):
            full = block_tables[group_id][:num_reqs]
            out[:num_reqs].copy_(self.geometry.crop_block_table(group, full, cut, length, lookahead=lookahead))
            tables.append(out[:num_reqs])
        return length, tables
