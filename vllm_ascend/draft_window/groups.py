# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM-Ascend project
"""Which KV cache groups hold draft layers, and whether cropping their block tables is sound."""

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .config import WindowOff

# Specs whose layers read nothing but "the newest tokens of one block table". Subclasses are not assumed to: chunked
# local and prefix-sharing attention derive chunk borders from absolute lengths.
_CROPPABLE_SPECS = frozenset(
    {
        "FullAttentionSpec",
        "TQFullAttentionSpec",
        "MLAAttentionSpec",
        "SlidingWindowSpec",
        "SlidingWindowMLASpec",
        "AscendMLAAttentionSpec",
        "AscendSFAIndexerCacheSpec",
        "DraftWindowSpec",
    }
)


@dataclass(frozen=True, kw_only=True)
class DraftGroups:
    """Draft KV cache groups; the three tuples have one entry per group."""

    group_ids: tuple[int, ...]
    # tokens per block-table column
    block_sizes: tuple[int, ...]
    full_columns: tuple[int, ...]
    native_window: int | None


def inspect_draft_groups(
    attn_groups: Sequence[Sequence[Any]], block_sizes: Sequence[int], tables: Sequence[torch.Tensor]
) -> DraftGroups | WindowOff:
    """Describe the draft's KV cache groups.

    Args:
        attn_groups: the speculator's attention groups, one list per KV cache group, empty where no draft layer lives.
        block_sizes: tokens per block-table column, one entry per KV cache group.
        tables: full block tables, one [max_num_reqs, columns] per KV cache group.

    Raises:
        ValueError: see :func:`inspect_draft_layers`.
    """
    group_ids = tuple(i for i, groups in enumerate(attn_groups) if groups)
    if not group_ids:
        return WindowOff("the draft has no attention layers")
    native = inspect_draft_layers(group for i in group_ids for group in attn_groups[i])
    if isinstance(native, WindowOff):
        return native
    return DraftGroups(
        group_ids=group_ids,
        block_sizes=tuple(block_sizes[i] for i in group_ids),
        full_columns=tuple(tables[i].shape[1] for i in group_ids),
        native_window=native or None,
    )


def inspect_draft_layers(groups: Iterable[Any]) -> int | WindowOff:
    """The widest sliding window of any draft layer, 0 where there is none, or why their tables cannot be cropped.

    Args:
        groups: the draft's attention groups.

    Raises:
        ValueError: a draft layer keeps something else than an attention KV cache that cropping can bound.
    """
    widest = 0
    for group in groups:
        backend = group.backend.get_name()
        for spec in _specs(group.kv_cache_spec):
            if "DSA" in backend or getattr(spec, "model_version", None) == "deepseek_v4":
                return WindowOff(
                    f"the sparse backend {backend} derives positions from seq_lens; a DSpark draft trained with a "
                    f"DeepSeek-V4 target is stable on long contexts without a window",
                    logging.WARNING,
                )
            if type(spec).__name__ not in _CROPPABLE_SPECS:
                raise ValueError(
                    f"draft_window_size does not support the draft's KV cache of type {type(spec).__name__} "
                    f"(layers {', '.join(group.layer_names)}); supported are {', '.join(sorted(_CROPPABLE_SPECS))}"
                )
            widest = max(widest, own_window(spec))
    return widest


def own_window(spec: Any) -> int:
    """Sliding window that a layer was built with, 0 for none. What the cache keeps for ours is not that."""
    return 0 if type(spec).__name__ == "DraftWindowSpec" else getattr(spec, "sliding_window", None) or 0


def _specs(spec: Any) -> Iterator[Any]:
    """A group of layers of one type but different sizes carries one spec per layer."""
    yield from getattr(spec, "kv_cache_specs", {"all": spec}).values()
