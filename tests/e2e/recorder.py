# SPDX-License-Identifier: Apache-2.0
"""Watches a running draft and compares every attention call with a masked reference over the unwindowed table.

The reference never looks at the cropped table: it finds keys and values by their absolute slots, through the full
block table, and asks the oracle which tokens are visible. Keys and values are kept by slot as the draft writes them,
because the CPU backend packs its cache in a layout of its own.
"""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from tests import oracle
from tests.oracle import Case


@dataclass
class Recorder:
    """Hooks the draft layers of one speculator; ``check_*`` raise ``AssertionError`` as soon as something is off.

    ``with`` takes the hooks back, for an engine that others use afterwards.

    Attributes:
        worst: largest difference between draft attention and the reference.
        rows: query rows compared.
        windowed_rows: of those, rows from which the window hides something.
        slots: slot mapping of every cache write, in order.
        metadata: snapshots of what every draft attention call was given.
        addresses: addresses of lengths and table, per attention call.
        groups, sizes, full_tables: KV cache group of each draft layer; tokens per column and full table of each group.
        keys, values: by layer, what the draft has written to each slot.
    """

    speculator: Any
    window: int | None
    sink: int = 0
    min_context: int = 0
    tolerance: float = 1e-4
    compare: bool = True
    worst: float = 0.0
    rows: int = 0
    windowed_rows: int = 0
    slots: list[torch.Tensor] = field(default_factory=list)
    metadata: list[dict[str, Any]] = field(default_factory=list)
    addresses: list[tuple[int, int]] = field(default_factory=list)

    @property
    def windowed_addresses(self) -> set[tuple[int, int]]:
        """Distinct addresses of lengths and table over the calls that read the windowed tensors."""
        windowed = self.speculator.window.inputs.seq_lens.data_ptr()
        return {pair for pair in self.addresses if pair[0] == windowed}

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, *_: object) -> None:
        self._hooks.undo()

    def __post_init__(self) -> None:
        speculator = self.speculator
        self._hooks = pytest.MonkeyPatch()
        self.groups = {
            name: (gid, group)
            for gid, groups in enumerate(speculator.attn_groups)
            for group in groups
            for name in group.layer_names
        }
        tables = speculator.block_tables
        sizes = getattr(tables, "kernel_block_sizes", None) or tables.block_sizes
        self.sizes = dict(enumerate(sizes))
        # Draws each request's window, up to this one.
        self._chooser = getattr(getattr(speculator, "window", None), "chooser", None)
        # Held from the start: a fault under test may leave other tensors in their place.
        self._full_lens = speculator.input_buffers.seq_lens
        self.full_tables = list(tables.input_block_tables)
        draft_groups = sorted({gid for gid, _ in self.groups.values()})
        self.case = Case(
            window=self.window or speculator.max_model_len,
            block_sizes=tuple(sizes[g] for g in draft_groups),
            full_columns=tuple(tables.input_block_tables[g].shape[1] for g in draft_groups),
            max_model_len=speculator.max_model_len,
            sink=self.sink,
            min_context=self.min_context,
            masked=self._chooser is None and self.window is not None and not self.sink and not self.min_context,
        )
        # A parallel drafter has one forward in a proposal, and nothing to look ahead to.
        self._autoregressive = speculator.method not in ("dflash", "dspark")
        self._forwards = 0
        if self._autoregressive:
            self.case = dataclasses.replace(
                self.case, first_lookahead=speculator.num_speculative_steps, keeps_every_row=len(self.groups) > 1
            )
            self._count_forwards()
        layers = speculator.vllm_config.compilation_config.static_forward_context
        self.keys: dict[str, torch.Tensor] = {}
        self.values: dict[str, torch.Tensor] = {}
        for name in self.groups:
            self._hook(name, layers[name])

    def _count_forwards(self) -> None:
        propose, run_model = self.speculator.propose, self.speculator._run_model

        def counting_propose(*args: Any, **kwargs: Any) -> Any:
            self._forwards = 0
            return propose(*args, **kwargs)

        def counting_run_model(*args: Any, **kwargs: Any) -> Any:
            result = run_model(*args, **kwargs)
            self._forwards += 1
            return result

        self._hooks.setattr(self.speculator, "propose", counting_propose)
        self._hooks.setattr(self.speculator, "_run_model", counting_run_model)

    def _hook(self, name: str, layer: Any) -> None:
        impl = layer.impl
        update, forward = impl.do_kv_cache_update, impl.forward
        num_slots = layer.kv_cache.shape[0] * layer.kv_cache.shape[2]
        shape = (num_slots, impl.num_kv_heads, impl.head_size)
        keys = self.keys[name] = torch.zeros(shape)
        values = self.values[name] = torch.zeros(shape)

        def do_kv_cache_update(layer: Any, key: Any, value: Any, kv_cache: Any, slot_mapping: Any) -> None:
            update(layer, key, value, kv_cache, slot_mapping)
            self.slots.append(slot_mapping.clone())
            real = slot_mapping >= 0
            slots = slot_mapping[real].long()
            keys[slots] = key[: len(slot_mapping)][real].float()
            values[slots] = value[: len(slot_mapping)][real].float()

        def forward_and_compare(layer: Any, query: Any, *args: Any, **kwargs: Any) -> Any:
            result = forward(layer, query, *args, **kwargs)
            metadata = kwargs.get("attn_metadata", args[3] if len(args) > 3 else None)
            output = kwargs.get("output", args[4] if len(args) > 4 else None)
            if metadata is not None:
                self._snapshot(metadata)
                if self.compare:
                    self._compare(name, impl, query, output, metadata)
            return result

        self._hooks.setattr(impl, "do_kv_cache_update", do_kv_cache_update)
        self._hooks.setattr(impl, "forward", forward_and_compare)

    def _snapshot(self, metadata: Any) -> None:
        self.addresses.append((metadata.seq_lens.data_ptr(), metadata.block_table.data_ptr()))
        self.metadata.append(
            {
                "seq_lens": metadata.seq_lens.clone(),
                "block_table": metadata.block_table.clone(),
                "slot_mapping": metadata.slot_mapping.clone(),
                "query_start_loc": metadata.query_start_loc.clone(),
                "causal": metadata.causal,
            }
        )

    def _compare(self, name: str, impl: Any, query: Any, output: Any, metadata: Any) -> None:
        gid, group = self.groups[name]
        size, own_window = self.sizes[gid], getattr(group.kv_cache_spec, "sliding_window", None)
        full_table = self.full_tables[gid].numpy()
        full_lens = self._full_lens.numpy()
        starts = metadata.query_start_loc.numpy()
        self._check_slots(gid, size, full_table, metadata)
        lookahead = self.speculator.num_speculative_steps - self._forwards if self._autoregressive else 0
        for row in range(len(starts) - 1):
            first, last = starts[row], starts[row + 1]
            if last <= first:
                continue
            case = dataclasses.replace(self.case, queries=int(last - first), lookahead=lookahead)
            if self._chooser is not None:
                case = dataclasses.replace(case, window=int(self._chooser.windows[row]))
            visible = oracle.visible_tokens(case, int(full_lens[row]))
            slots = torch.from_numpy(oracle.physical_slots(full_table[row], size, visible))
            expected = attention(
                query[first:last].float(),
                self.keys[name][slots],
                self.values[name][slots],
                scale=impl.scale,
                causal=metadata.causal,
                sliding_window=own_window or (self.case.window if self.case.masked else 0),
            )
            got = output[first:last].float().view_as(expected)
            difference = (got - expected).abs().max().item()
            self.worst = max(self.worst, difference)
            self.rows += int(last - first)
            hidden = min(full_lens[row], self.case.limit) - (self.case.window if self.case.masked else len(visible))
            self.windowed_rows += int(
                np.clip(hidden, 0, last - first) if self.case.masked else (last - first) * (hidden > 0)
            )
            assert difference < self.tolerance, (
                f"{name}, request {row}: draft attention is {difference} away from the masked reference"
            )

    def _check_slots(self, gid: int, size: int, full_table: np.ndarray, metadata: Any) -> None:
        """The draft's own tokens are written at absolute positions, through the full table."""
        starts, positions = metadata.query_start_loc.numpy(), self.speculator.input_buffers.positions.numpy()
        for row in range(len(starts) - 1):
            first, last = starts[row], starts[row + 1]
            # The first forward of an autoregressive draft has slots, but no positions, for rejected tokens.
            newest = self._full_lens[row].item() - (last - first) + np.arange(last - first)
            position = newest if self._autoregressive else positions[first:last]
            slots = metadata.slot_mapping[first:last].numpy()
            inside = position < self.case.max_model_len - 1  # past the end vLLM clamps the position, not the slot
            expected = oracle.physical_slots(full_table[row], size, position[inside])
            assert (slots[inside] == expected).all(), f"request {row}: slots {slots}, expected {expected}"


def attention(
    # [queries, heads, size]
    query: torch.Tensor,
    # [tokens, kv_heads, size]
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
    causal: bool,
    sliding_window: int,
) -> torch.Tensor:
    """Plain attention of the newest queries over the tokens given; [queries, heads, size]."""
    repeat = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeat, dim=1), value.repeat_interleave(repeat, dim=1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    # [queries, tokens]: how far a token lies behind a query
    distance = (torch.arange(len(query)) + len(key) - len(query)).unsqueeze(1) - torch.arange(len(key))
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if causal:
        hidden |= distance < 0
    if sliding_window > 0:
        hidden |= distance >= sliding_window
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), value)
