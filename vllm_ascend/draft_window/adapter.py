# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM-Ascend project
"""Model Runner V1's plain draft window: crops tables and lengths on the metadata that its proposers build from."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from vllm.utils.platform_utils import is_pin_memory_available

from vllm_ascend.draft_window.crop import WindowCrop

# Copies of seq_lens on the host; the last counts rejected draft tokens always.
_HOST_COPIES = ("_seq_lens_cpu", "seq_lens_cpu", "seq_lens_cpu_upper_bound")


class WindowAdapter:
    """Limits a draft to the newest ``window_size`` tokens by rebinding tensors of its attention metadata.

    Slot mappings are untouched and keep addressing the whole KV cache, through :attr:`full_block_table`.

    Attributes:
        full_block_table: the table that was cropped last, uncropped, the very tensor.
        max_window_blocks: columns of the cropped table; a window that starts inside a block needs one more.
    """

    def __init__(
        self,
        window_size: int,
        block_size: int,
        max_num_reqs: int,
        future_offset: int,
        device: torch.device,
        *,
        max_model_len: int = 2**31 - 1,
        max_rejected: int = 0,
        read_from: str = "seq_lens",
    ) -> None:
        """Allocate the persistent table of one KV group.

        Args:
            window_size: W, newest tokens that stay visible.
            block_size: tokens per block-table column, over several KV groups their least common multiple.
            future_offset: K, positions beyond ``seq_lens`` that later steps of the same proposal read; 0 where
                ``seq_lens`` already counts the query tokens (DFlash, DSpark).
            max_rejected: most tokens by which the host may be ahead of ``seq_lens``.
            read_from: attribute from which attention takes its lengths, if it is set, and by which the window's start
                is decided. One on the host keeps ``max_rejected`` tokens more.
        """
        self.window_size, self.block_size = window_size, block_size
        self.full_block_table: torch.Tensor | None = None
        self._future_offset, self._max_rejected = future_offset, max_rejected
        self._max_model_len, self._read_from = max_model_len, read_from
        self._pin_memory = device.type != "cpu" and is_pin_memory_available()
        # One forward verifies at most K + 1 tokens per request; only a chunk of prefill brings more than the window.
        self._most_queries = max(window_size - future_offset, future_offset + 1)
        self._long_chunk = False
        self._geometries: dict[tuple[int, int, bool], WindowCrop] = {}
        columns = self._geometry(block_size, 2**31 // block_size).columns[-1]
        self.max_window_blocks = max(-(-window_size // block_size) + 1, columns)
        # By KV group; padding for a full graph adds a row to a full batch.
        self._clones = {0: torch.zeros(max_num_reqs + 1, self.max_window_blocks, dtype=torch.int32, device=device)}
        # Of this step, by attribute: lengths before and after, and the tokens taken out in front.
        self._full: dict[str, torch.Tensor] = {}
        self._windowed: dict[str, torch.Tensor] = {}
        self._removed: dict[str, torch.Tensor] = {}
        # Longest of its lengths, where the host knows them; max_seq_len of the metadata is not always set.
        self._longest: int | None = None

    def apply(self, common_attn_metadata: Any) -> None:
        """Rebind the block table, ``seq_lens`` and every host copy of it that is set; their tensors are not written.

        Its host lengths, ``max_query_len`` and ``query_start_loc_cpu`` may be missing.
        """
        # Not getattr: vLLM's own metadata computes seq_lens_cpu on access, by a device synchronisation.
        self._window_lengths(vars(common_attn_metadata))
        common_attn_metadata.block_table_tensor = self.crop_group(common_attn_metadata.block_table_tensor)
        for name, windowed in self._windowed.items():
            setattr(common_attn_metadata, name, windowed)

    def crop_group(self, full_table: torch.Tensor, group: int = 0, block_size: int | None = None) -> torch.Tensor:
        """Crop the table of one KV group at the start of the step that :meth:`apply` saw last.

        Args:
            full_table: [>= num_reqs, columns].
            block_size: tokens per column of this group, a divisor of the adapter's block size, its default.

        Returns:
            int32, [num_reqs, columns of the window]; a slice of the group's persistent table. A step with a chunk of
            prefill that is longer than the window gets a wider table of its own.
        """
        self.full_block_table = full_table
        removed, length = self._removed["seq_lens"], self._windowed["seq_lens"]
        num_reqs, num_rows = len(length), min(len(length), len(full_table))
        # [num_rows, columns]
        cropped = self._geometry(block_size or self.block_size, full_table.shape[1]).crop_block_table(
            -1, full_table[:num_rows], removed[:num_rows], length[:num_rows], lookahead=self._future_offset
        )
        if self._long_chunk:
            return cropped
        clone = self._clone(group, num_reqs, cropped.shape[1])
        clone[:num_reqs].zero_()
        clone[:num_rows, : cropped.shape[1]].copy_(cropped)
        return clone[:num_reqs]

    def before_next_step(self, common_attn_metadata: Any, max_model_len: int) -> None:
        """Let a proposer that lengthens windowed lengths by one compare the real ones with ``max_model_len``.

        Such a proposer gives requests past the limit the length 1; a length of 0 here becomes that 1.
        """
        if self._longest is not None and self._longest + self._future_offset <= max_model_len:
            return
        fields = vars(common_attn_metadata)
        for name, removed in self._removed.items():
            current = fields.get(name)
            if current is not None and name != _HOST_COPIES[-1]:
                past = current + _fit(removed, len(current)) >= max_model_len
                setattr(common_attn_metadata, name, current.masked_fill(past, 0))

    def _window_lengths(self, fields: dict[str, Any]) -> None:
        """Window ``seq_lens`` and its host copies; nothing is read back from the device."""
        # [num_reqs]
        seq_lens, longest = fields["seq_lens"], fields.get("max_query_len", 1)
        # [num_reqs + 1]; the window is longer than any request's queries otherwise
        starts = fields.get("query_start_loc_cpu") if longest > self.window_size - self._future_offset else None
        queries = longest if starts is None else np.diff(starts.numpy()).astype(np.int32, copy=False)
        self._long_chunk = longest > self._most_queries
        geometry = self._geometry(self.block_size, fields["block_table_tensor"].shape[1])
        on_host = {self._read_from, *_HOST_COPIES} - {"seq_lens"}
        host = {name: fields[name] for name in on_host if fields.get(name) is not None}

        def computed(compute: Callable[..., np.ndarray], lengths: torch.Tensor, **more: int) -> torch.Tensor:
            of_rows = queries if isinstance(queries, int) else queries[: len(lengths)]
            values = compute(lengths.numpy(), queries=of_rows, lookahead=self._future_offset, **more)
            return torch.from_numpy(values).to(lengths.dtype)

        if self._read_from in host:
            removed = computed(geometry.removed_by_host, host[self._read_from])
            self._removed = dict.fromkeys(host, removed)
            self._removed["seq_lens"] = self._to_device(_fit(removed, len(seq_lens)), seq_lens)
        else:
            self._removed = {}
            for name, full in host.items():
                ahead = self._max_rejected if name == _HOST_COPIES[-1] else 0
                bound = computed(geometry.host_bound, full, max_rejected=ahead)
                self._removed[name] = full.clip(max=geometry.limit) - bound
            of_rows = queries if isinstance(queries, int) else self._to_device(torch.from_numpy(queries), seq_lens)
            self._removed["seq_lens"], _ = geometry.lengths(seq_lens, queries=of_rows, lookahead=self._future_offset)
        self._longest = max((int(full.max()) for full in host.values() if len(full)), default=None)
        self._full = {"seq_lens": seq_lens, **host}
        self._windowed = {
            name: (full.clip(max=geometry.limit) - _fit(self._removed[name], len(full))).clip_(min=0)
            for name, full in self._full.items()
        }

    def _to_device(self, values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Without waiting for the device, as a copy from memory that is not pinned would."""
        return (values.pin_memory() if self._pin_memory else values).to(like.device, like.dtype, non_blocking=True)

    def _clone(self, group: int, num_reqs: int, columns: int) -> torch.Tensor:
        """The persistent table of a group, [>= num_reqs, >= columns]; its address changes only where it must grow."""
        rows, width = self._clones[0].shape
        clone = self._clones.get(group, self._clones[0][:0])
        if clone.shape[0] < num_reqs or clone.shape[1] < columns:
            clone = self._clones[group] = clone.new_zeros(max(rows, num_reqs), max(width, columns))
        return clone

    def _geometry(self, block_size: int, full_columns: int) -> WindowCrop:
        """For a table of ``full_columns`` columns of ``block_size`` tokens, cut at multiples of the alignment."""
        key = block_size, full_columns, self._long_chunk
        if key not in self._geometries:
            capacity = block_size * full_columns
            self._geometries[key] = WindowCrop(
                block_sizes=(self.block_size, block_size),
                full_columns=(-(-capacity // self.block_size), full_columns),
                max_model_len=min(capacity, self._max_model_len),
                max_queries=capacity if self._long_chunk else self._most_queries,
                window=self.window_size,
                max_lookahead=self._future_offset,
                max_rejected=0 if self._read_from == "seq_lens" else self._max_rejected,
            )
        return self._geometries[key]


def _fit(values: torch.Tensor, num_reqs: int) -> torch.Tensor:
    """Padding rows of a batch come and go between host and device; they are 0."""
    return values if len(values) == num_reqs else F.pad(values, (0, num_reqs - len(values)))
