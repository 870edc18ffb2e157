# SPDX-License-Identifier: Apache-2.0
"""Spoils KV cache blocks the moment they are freed, so that whoever still reads them is found out."""

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch


class Poison(ExitStack):
    """Fill freed blocks with ``value`` in every layer, and reallocated ones with zeros, as fresh memory would be.

    A block that keeps its hash may be found again by a request with the same prefix, and stays as it is until it is
    given away.

    Attributes:
        pool: the engine's blocks.
        freed: blocks that were spoiled.
    """

    def __init__(self, engine: Any, value: float) -> None:
        super().__init__()
        pool = self.pool = engine.scheduler.kv_cache_manager.block_pool
        layers = engine.runner.vllm_config.compilation_config.static_forward_context.values()
        # num_layers x [num_blocks, ...]
        self._caches: list[torch.Tensor] = [layer.kv_cache for layer in layers if hasattr(layer, "kv_cache")]
        self.freed = 0
        free_blocks, get_new_blocks = pool.free_blocks, pool.get_new_blocks

        def free_and_spoil(blocks: Iterable[Any], *args: Any, **kwargs: Any) -> Any:
            blocks = list(blocks)
            result = free_blocks(blocks, *args, **kwargs)
            dead = [b.block_id for b in blocks if b.ref_cnt == 0 and b.block_hash is None and not b.is_null]
            self._fill(dead, value)
            self.freed += len(dead)
            return result

        def get_clean_blocks(*args: Any, **kwargs: Any) -> Any:
            blocks = get_new_blocks(*args, **kwargs)
            self._fill([block.block_id for block in blocks], 0.0)
            return blocks

        self.enter_context(patch.object(pool, "free_blocks", free_and_spoil))
        self.enter_context(patch.object(pool, "get_new_blocks", get_clean_blocks))

    def _fill(self, block_ids: list[int], value: float) -> None:
        if block_ids:
            # [len(block_ids)]
            indices = torch.tensor(block_ids, device=self._caches[0].device)
            for cache in self._caches:
                cache.index_fill_(0, indices, value)
