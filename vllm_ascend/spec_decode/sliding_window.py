# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM-Ascend project
"""Model Runner V1's draft window: crops block tables and lengths on the metadata that its proposers build from.

The contract is that of vLLM-Ascend's ``SlidingWindowAdapter``; the arithmetic is Model Runner V2's.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from vllm_ascend.draft_window.geometry import WindowGeometry

_OPTIMISTIC_MIRROR = "seq_lens_cpu_upper_bound"
_MIRRORS = ("seq_lens_cpu", "_seq_lens_cpu", _OPTIMISTIC_MIRROR)


@dataclass(eq=False)
class _Step:
    """One proposal: its lengths before and after, by attribute name, and the tables cropped so far.

    ``seq_lens`` tells steps apart: Model Runner V1 makes a new tensor for every proposal, and copies of one metadata
    object, which differ in their KV group only, share it.
    """

    full: dict[str, torch.Tensor]
    windowed: dict[str, torch.Tensor]
    # [num_reqs], tokens taken out behind the sink
    removed: torch.Tensor
    # Longest length that may be read.
    limit: int
    # Whether some chunk of the batch does not fit the persistent clones' width.
    wide: bool
    # One entry per KV group: the full table and the cropped one.
    tables: list[tuple[torch.Tensor, torch.Tensor]]

    def full_table_behind(self, table: torch.Tensor) -> torch.Tensor | None:
        """The full table that ``table`` was cropped from in this step, if it was."""
        return next((full for full, cropped in self.tables if table.data_ptr() == cropped.data_ptr()), None)


class SlidingWindowAdapter:
    """Limits a draft to the newest ``window_size`` tokens by rebinding tensors of its attention metadata.

    Slot mappings are untouched and keep addressing the whole KV cache, through :attr:`full_block_table`.

    Attributes:
        full_block_table: the table of the KV group that :meth:`apply` saw last, uncropped, the very tensor.
        window_blocks: block-table columns of the window itself.
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
        sink_size: int = 0,
        min_context: int = 0,
        max_model_len: int | None = None,
        max_rejected: int | None = None,
    ) -> None:
        """Allocate the persistent table of the first KV group.

        Args:
            window_size: W, newest tokens that stay visible.
            block_size: tokens to which the window's start is rounded down: those of one block-table column, or with
                several draft KV groups the least common multiple over the groups.
            max_num_reqs: most requests of a batch; a larger batch makes the tables grow.
            future_offset: K, positions beyond ``seq_lens`` that later steps of the same proposal read; 0 where
                ``seq_lens`` already counts the query tokens (DFlash, DSpark).
            sink_size: S, first tokens that stay visible.
            min_context: requests shorter than this are not windowed.
            max_model_len: longest sequence that the engine serves; ``None`` leaves it to the block table's width.
            max_rejected: most tokens by which ``seq_lens_cpu_upper_bound`` may be ahead of ``seq_lens``; ``None``
                means K, or without look-ahead any number.

        Raises:
            ValueError: the window leaves nothing to read before the last position of a proposal, or a size is not
                positive.
        """
        if window_size <= future_offset:
            raise ValueError(
                f"draft_window_size={window_size} is too small for {future_offset} draft tokens: "
                f"it must be at least {future_offset + 1}"
            )
        if block_size < 1 or max_num_reqs < 1:
            raise ValueError(f"block_size={block_size} and max_num_reqs={max_num_reqs} must be at least 1")
        self.window_size = window_size
        self.block_size = block_size
        self.full_block_table: torch.Tensor | None = None
        self._future_offset = future_offset
        self._sink_size = sink_size
        self._min_context = min_context
        self._max_model_len = max_model_len
        # Without look-ahead, one block of doubt finds the largest length below any upper bound.
        self._max_rejected = max_rejected if max_rejected is not None else future_offset or block_size
        # One forward verifies at most K + 1 tokens per request; only chunked prefill brings more than the window.
        self._clone_queries = max(window_size - future_offset, future_offset + 1)
        self._geometries: dict[tuple[int, int, bool], WindowGeometry] = {}

        unbounded = self._make_geometry(block_size, full_columns=2**31 // block_size, wide=False)
        self.window_blocks = -(-window_size // block_size)
        self.max_window_blocks = max(self.window_blocks + 1, unbounded.columns[0])
        # [max_num_reqs + 1, max_window_blocks]; padding for a full graph adds a row to a full batch.
        self._block_table_clone = torch.zeros(
            max_num_reqs + 1, self.max_window_blocks, dtype=torch.int32, device=device
        )
        # One per KV group of a step, in the order of their application; wide ones by themselves.
        self._clones: dict[tuple[int, bool], torch.Tensor] = {(0, False): self._block_table_clone}
        self._step: _Step | None = None

    def apply(self, common_attn_metadata: Any) -> None:
        """Rebind the block table, ``seq_lens`` and every host mirror that is set to their windowed twins.

        The tensors themselves are not written. Metadata that is windowed already keeps its lengths: a further KV
        group's table is cropped at the same start, and the same group's table is left as it is.

        Args:
            common_attn_metadata: object with ``block_table_tensor`` [>= num_reqs, columns] and ``seq_lens``
                [num_reqs], and optionally host mirrors, ``max_query_len`` and ``query_start_loc`` with its host copy.
        """
        # Not getattr: vLLM's own metadata computes seq_lens_cpu on access, by a device synchronisation.
        fields = vars(common_attn_metadata)
        table, seq_lens = fields["block_table_tensor"], fields["seq_lens"]
        step = self._step
        if step is None or seq_lens is not step.windowed["seq_lens"]:
            full_table = None if step is None else step.full_table_behind(table)
            if full_table is None:
                tables = step.tables if step is not None and seq_lens is step.full["seq_lens"] else []
                step = self._step = self._window_lengths(fields, table.shape[1], tables)
            else:
                # Cropped already, and the lengths moved to another tensor: windowing them again changes nothing.
                step = self._window_lengths(fields, full_table.shape[1], [])
        common_attn_metadata.block_table_tensor = self.crop_group(table)
        for name, windowed in step.windowed.items():
            if fields.get(name) is step.full[name]:
                setattr(common_attn_metadata, name, windowed)

    def crop_group(self, full_table: torch.Tensor, block_size: int | None = None) -> torch.Tensor:
        """Crop the table of one KV group at the start of the step that :meth:`apply` saw last.

        Args:
            full_table: [>= num_reqs, columns]; a table cropped before in this step answers itself.
            block_size: tokens per column of this group, a divisor of the adapter's block size, its default.

        Returns:
            int32, [num_reqs, columns of the window]; a slice of the group's persistent clone.

        Raises:
            ValueError: the window's start would fall into a block of this group.
            RuntimeError: no lengths were windowed yet.
        """
        size = self.block_size if block_size is None else block_size
        if self.block_size % size:
            raise ValueError(f"block_size={size} must divide the alignment of the draft window, {self.block_size}")
        step = self._step
        if step is None:
            raise RuntimeError("apply() has to window the lengths of a step before a table can be cropped")
        group = len(step.tables)
        for i, (full, cropped) in enumerate(step.tables):
            if full_table.data_ptr() == cropped.data_ptr():
                self.full_block_table = full
                return cropped
            if full_table is full or (full_table.data_ptr(), full_table.shape) == (full.data_ptr(), full.shape):
                group = i
        cropped = self._crop(step, group, full_table, size)
        step.tables[group : group + 1] = [(full_table, cropped)]
        self.full_block_table = full_table
        return cropped

    def before_next_step(self, common_attn_metadata: Any, max_model_len: int) -> None:
        """Let a proposer that lengthens windowed lengths by one compare the real ones with ``max_model_len``.

        Such a proposer gives requests past the limit the length 1; a length of 0 here becomes that 1.
        """
        step = self._step
        fields = vars(common_attn_metadata)
        longest = fields.get("max_seq_len")
        if step is None or (longest is not None and longest + self._future_offset <= max_model_len):
            return
        for name, full in step.full.items():
            current = fields.get(name)
            if current is None or name == _OPTIMISTIC_MIRROR:
                continue
            rows = min(len(full), len(current))
            removed = full[:rows].clip(max=step.limit) - step.windowed[name][:rows]
            past = current.new_zeros(len(current), dtype=torch.bool)
            past[:rows] = current[:rows] + removed >= max_model_len
            setattr(common_attn_metadata, name, current.masked_fill(past, 0))

    def _window_lengths(
        self, fields: dict[str, Any], full_columns: int, tables: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> _Step:
        """Window the device lengths and their host mirrors, each by its own arithmetic: nothing is copied between."""
        # [num_reqs]
        seq_lens = fields["seq_lens"]
        lookahead = self._future_offset
        longest_query = fields.get("max_query_len", 1)
        wide = longest_query > self._clone_queries
        geometry = self._geometry(self.block_size, full_columns, wide)
        on_device, on_host = self._queries(fields, longest_query, len(seq_lens))
        removed, length = geometry.lengths(seq_lens, queries=on_device, lookahead=lookahead)
        step = _Step(
            full={"seq_lens": seq_lens},
            windowed={"seq_lens": length},
            removed=removed,
            limit=geometry.limit,
            wide=wide,
            tables=tables,
        )
        mirrors = {name: fields[name] for name in _MIRRORS if fields.get(name) is not None}
        step.full |= mirrors
        for name, windowed in self._window_mirrors(geometry, mirrors, on_host).items():
            step.windowed[name] = torch.from_numpy(windowed)
        return step

    def _window_mirrors(
        self, geometry: WindowGeometry, mirrors: dict[str, torch.Tensor], queries: int | np.ndarray
    ) -> dict[str, np.ndarray]:
        """Window the host lengths: in one go where they are alike, since a call costs more than a row."""
        # [num_reqs]
        full = {name: mirror.numpy() for name, mirror in mirrors.items()}
        if len({(array.shape, array.dtype) for array in full.values()}) > 1:
            return {
                name: windowed
                for name, mirror in mirrors.items()
                for windowed in self._window_mirrors(geometry, {name: mirror}, queries).values()
            }
        if not full:
            return {}
        # [num_mirrors, num_reqs]
        stacked = np.array(list(full.values()))
        # [num_mirrors, 1]
        max_rejected = np.array([[self._max_rejected if name == _OPTIMISTIC_MIRROR else 0] for name in full])
        if not isinstance(queries, int):
            queries = queries[: stacked.shape[1]].astype(stacked.dtype, copy=False)
        windowed = geometry.host_bound(
            stacked,
            max_rejected=max_rejected.astype(stacked.dtype),
            queries=queries,
            lookahead=self._future_offset,
        )
        return dict(zip(full, windowed, strict=True))

    def _queries(
        self, fields: dict[str, Any], longest: int, num_rows: int
    ) -> tuple[int | torch.Tensor, int | np.ndarray]:
        """Query tokens per request, for the device and for the host; one number where the window exceeds them all."""
        if longest <= self.window_size - self._future_offset:
            return 1, 1
        # [num_rows + 1]
        starts, starts_cpu = fields.get("query_start_loc"), fields.get("query_start_loc_cpu")
        if starts is None or starts_cpu is None:
            return longest, longest
        on_device = starts[1 : num_rows + 1] - starts[:num_rows]
        return on_device.to(fields["seq_lens"].dtype), np.diff(starts_cpu.numpy())

    def _crop(self, step: _Step, group: int, full_table: torch.Tensor, block_size: int) -> torch.Tensor:
        """Write the cropped table into the group's clone."""
        geometry = self._geometry(block_size, full_table.shape[1], step.wide)
        # [num_reqs]
        removed, length = step.removed, step.windowed["seq_lens"]
        rows, rows_with_table = len(length), min(len(length), len(full_table))
        if rows_with_table < rows:
            removed, length = removed[:rows_with_table], length[:rows_with_table]
        # [rows_with_table, columns]
        cropped = geometry.crop_block_table(
            len(geometry.block_sizes) - 1, full_table, removed, length, lookahead=self._future_offset
        )
        columns = cropped.shape[1]
        clone = self._clone(group, step.wide, rows, columns)
        if columns < clone.shape[1] or rows_with_table < rows:
            clone[:rows].zero_()
        clone[:rows_with_table, :columns].copy_(cropped)
        return clone[:rows]

    def _clone(self, group: int, wide: bool, rows: int, columns: int) -> torch.Tensor:
        """The persistent table of a group, int32, [>= rows, >= columns]; addresses change only where it must grow."""
        clone = self._clones.get((group, wide))
        if clone is None or clone.shape[0] < rows or clone.shape[1] < columns:
            first = self._block_table_clone
            shape = (max(rows, first.shape[0]), columns if wide else max(columns, first.shape[1]))
            clone = self._clones[group, wide] = first.new_zeros(shape)
            if (group, wide) == (0, False):
                self._block_table_clone = clone
        return clone

    def _geometry(self, block_size: int, full_columns: int, wide: bool) -> WindowGeometry:
        key = (block_size, full_columns, wide)
        if key not in self._geometries:
            self._geometries[key] = self._make_geometry(block_size, full_columns, wide)
        return self._geometries[key]

    def _make_geometry(self, block_size: int, full_columns: int, wide: bool) -> WindowGeometry:
        capacity = block_size * full_columns
        # The alignment goes first: a group's own blocks may be smaller.
        sizes = (self.block_size,) if block_size == self.block_size else (self.block_size, block_size)
        return WindowGeometry(
            window=self.window_size,
            sink=self._sink_size,
            min_context=self._min_context,
            block_sizes=sizes,
            full_columns=tuple(-(-capacity // size) for size in sizes),
            max_model_len=capacity if self._max_model_len is None else min(capacity, self._max_model_len),
            max_queries=capacity if wide else self._clone_queries,
            max_lookahead=self._future_offset,
        )
