# SPDX-License-Identifier: Apache-2.0
"""The published formula of Model Runner V1's draft window, as the plain sequence of torch operations that it reads as.

Start, length, gather, mask, copy, and one start per host mirror. It stands here for two things: the benchmark's
yardstick, and the list of inputs on which the shim deliberately differs from it.
"""

from typing import Any

import torch


class PublishedWindow:
    def __init__(self, window: int, block_size: int, max_num_reqs: int, lookahead: int, device: torch.device) -> None:
        self.window, self.block_size, self.lookahead = window, block_size, lookahead
        columns = -(-window // block_size) + 1
        # [max_num_reqs, columns]
        self.clone = torch.zeros(max_num_reqs, columns, dtype=torch.int32, device=device)

    def start(self, seq_lens: torch.Tensor) -> torch.Tensor:
        return (seq_lens + self.lookahead - self.window).clamp(min=0) // self.block_size * self.block_size

    def apply(self, metadata: Any) -> None:
        full, seq_lens, size = metadata.block_table_tensor, metadata.seq_lens, self.block_size
        rows = seq_lens.shape[0]
        # [num_reqs]
        start = self.start(seq_lens)
        length = seq_lens - start
        needed = (length + size - 1) // size
        # [columns]
        column = torch.arange(self.clone.shape[1], device=full.device)
        # [num_reqs, columns]
        source = (start // size).unsqueeze(1) + column
        ids = torch.gather(full, 1, source.clamp(max=full.shape[1] - 1))
        real = (column < needed.unsqueeze(1)) & (source < full.shape[1])
        self.clone[:rows].copy_(ids * real.to(ids.dtype))
        metadata.block_table_tensor, metadata.seq_lens = self.clone[:rows], length
        for name in ("seq_lens_cpu", "_seq_lens_cpu", "seq_lens_cpu_upper_bound"):
            mirror = getattr(metadata, name)
            if mirror is not None:
                setattr(metadata, name, mirror - self.start(mirror))
