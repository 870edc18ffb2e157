# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM-Ascend project
"""Model Runner V1's draft window with vLLM-Ascend's own contract, and with all options."""

from dataclasses import fields
from functools import cache
from typing import Any

import torch

from vllm_ascend.draft_window.adapter import WindowAdapter
from vllm_ascend.draft_window.crop import WindowCrop
from vllm_ascend.draft_window.geometry import WindowGeometry


class SlidingWindowAdapter(WindowAdapter):
    """A :class:`WindowAdapter` that may spare a sink, and requests below a length, and that may be applied again.

    Attributes:
        window_blocks: block-table columns of the window itself.
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
        read_from: str = "seq_lens",
    ) -> None:
        """Take more than :class:`WindowAdapter` does.

        Args:
            sink_size: S, first tokens that stay visible.
            min_context: requests shorter than this are not windowed.
            max_model_len: ``None`` leaves it to the block table's width.
            max_rejected: by default K, or without look-ahead any number.

        Raises:
            ValueError: the window leaves nothing to read before the last position of a proposal.
        """
        if window_size <= future_offset:
            raise ValueError(f"draft_window_size={window_size} is too small, it must be at least {future_offset + 1}")
        self._sink_size, self._min_context = sink_size, min_context
        if max_rejected is None:  # without look-ahead, one block of doubt finds the largest length below any bound
            max_rejected = future_offset or block_size
        super().__init__(
            window_size,
            block_size,
            max_num_reqs,
            future_offset,
            device,
            max_model_len=max_model_len or 2**31 - 1,
            max_rejected=max_rejected,
            read_from=read_from,
        )
        self.window_blocks = -(-window_size // block_size)
        # Of this step, by address: the group of each full table, and the full table of each cropped one.
        self._groups: dict[int, int] = {}
        self._full_tables: dict[int, torch.Tensor] = {}

    @property
    def _block_table_clone(self) -> torch.Tensor:
        return self._clones[0]

    def apply(self, common_attn_metadata: Any) -> None:
        """Metadata of a further KV group gets the start of the first; what is windowed already stays as it is."""
        of_metadata = vars(common_attn_metadata)
        table, seq_lens = of_metadata["block_table_tensor"], of_metadata["seq_lens"]
        if table.data_ptr() in self._full_tables:
            self.full_block_table = self._full_tables[table.data_ptr()]
            return
        further_group = seq_lens is self._full.get("seq_lens") and table.data_ptr() not in self._groups
        if seq_lens is self._windowed.get("seq_lens") or further_group:
            common_attn_metadata.block_table_tensor = self.crop_group(table)
            for name, windowed in self._windowed.items():
                if of_metadata.get(name) is self._full[name]:
                    setattr(common_attn_metadata, name, windowed)
            return
        self._groups.clear()
        self._full_tables.clear()
        super().apply(common_attn_metadata)

    def crop_group(
        self, full_table: torch.Tensor, group: int | None = None, block_size: int | None = None
    ) -> torch.Tensor:
        """Groups that are not numbered are told apart by the address of their table."""
        if group is None:
            group = self._groups.setdefault(full_table.data_ptr(), len(self._groups))
        cropped = super().crop_group(full_table, group, block_size)
        self._full_tables[cropped.data_ptr()] = full_table
        return cropped

    def _geometry(self, block_size: int, full_columns: int) -> WindowCrop:
        return _with_options(super()._geometry(block_size, full_columns), self._sink_size, self._min_context)


@cache
def _with_options(plain: WindowCrop, sink: int, min_context: int) -> WindowGeometry:
    shape = {field.name: getattr(plain, field.name) for field in fields(plain)}
    return WindowGeometry(**shape, sink=sink, min_context=min_context)
