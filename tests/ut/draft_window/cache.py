# SPDX-License-Identifier: Apache-2.0
"""vLLM's own KV cache manager over target groups and the draft's, driven as its scheduler drives it."""

import random
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

from tests import oracle
from vllm_ascend.draft_window import reclaim
from vllm_ascend.draft_window.config import DraftWindow

BLOCK = 16
W, K = 64, 3
MAX_MODEL_LEN = 16384


def full(**more: Any) -> FullAttentionSpec:
    return FullAttentionSpec(
        **({"block_size": BLOCK, "num_kv_heads": 2, "head_size": 64, "dtype": torch.float32} | more)
    )


def window(size: int = W, min_context: int = 0) -> DraftWindow:
    return DraftWindow(
        method="dspark",
        size=size,
        sink_size=0,
        min_context=min_context,
        queries_per_request=8,
        max_lookahead=0,
        reclaim=True,
    )


class Cache:
    """Target layers a and b of a group each, and the draft's d; without ``size`` all of them in one group."""

    def __init__(self, num_blocks: int = 2000, *, size: int | None = W, enable_caching: bool = False) -> None:
        if size is None:
            groups = [KVCacheGroupSpec(["a", "b", "d"], full())]
        else:
            specs = {"a": full(), "b": full(), "d": reclaim.windowed_spec(full(), window(size=size))}
            groups = [KVCacheGroupSpec([name], spec) for name, spec in specs.items()]
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(BLOCK, sha256)
        self.manager = KVCacheManager(
            KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups),
            max_model_len=MAX_MODEL_LEN,
            scheduler_block_size=BLOCK,
            hash_block_size=BLOCK,
            max_in_flight_tokens=1024,
            enable_caching=enable_caching,
            use_eagle=True,
        )

    @property
    def free_blocks(self) -> int:
        return self.manager.block_pool.get_num_free_blocks()

    def request(self, name: str, prompt: Sequence[int]) -> Request:
        parameters = SamplingParams(max_tokens=10000)
        return Request(name, list(prompt), parameters, None, block_hasher=self.hasher)

    def start(self, request: Request) -> int:
        """Take what the prefix cache has; returns how many tokens that is."""
        computed, tokens = self.manager.get_computed_blocks(request)[:2]
        if tokens:
            assert self.allocate(request, 1, tokens, computed)
            request.num_computed_tokens = tokens
        return tokens

    def allocate(self, request: Request, *tokens: Any) -> bool:
        return self.manager.allocate_slots(request, *tokens, num_lookahead_tokens=K + 1) is not None

    def draft_blocks(self, request: Request) -> list[Any]:
        return self.manager.coordinator.single_type_managers[-1].req_to_blocks[request.request_id]

    def held(self, request: Request) -> int:
        return sum(not block.is_null for block in self.draft_blocks(request))

    def readable(self, request: Request, seq_len: int, queries: int) -> bool:
        """Whether every token that this forward of the draft reads is in a block that the request still owns."""
        columns = MAX_MODEL_LEN // BLOCK
        case = oracle.Case(
            window=W, block_sizes=(BLOCK,), full_columns=(columns,), max_model_len=MAX_MODEL_LEN, queries=queries
        )
        blocks = self.draft_blocks(request)
        read = set((oracle.visible_tokens(case, seq_len) // BLOCK).tolist())
        return all(not blocks[column].is_null and blocks[column].ref_cnt > 0 for column in read)


def decode(
    cache: Cache, request: Request, rng: random.Random, steps: int, *, steps_ahead: int, check: bool = True
) -> Iterator[None]:
    """Prefill in chunks, then verify K proposals a step with random acceptance, ``steps_ahead`` of them in flight.

    Yields after every scheduling, which is when blocks are freed; by then every step in flight may still read.
    """
    in_flight = []
    left = steps
    while left or in_flight:
        prefilling = request.num_computed_tokens < request.num_prompt_tokens
        if left and len(in_flight) <= steps_ahead:
            missing = request.num_prompt_tokens - request.num_computed_tokens
            scheduled = min(missing, 100) if prefilling else 1 + K
            if not prefilling:
                left -= 1
            assert cache.allocate(request, scheduled)
            in_flight.append((scheduled, prefilling))
            request.num_in_flight_tokens += scheduled
            request.num_computed_tokens += scheduled
            # What the device has committed when the oldest step in flight starts is the least that any may see.
            settled = request.num_computed_tokens - request.num_in_flight_tokens
            for first, _ in in_flight[:check]:
                for accepted in range(1 if not in_flight[0][1] else first, first + 1):
                    assert cache.readable(request, settled + accepted + K + 1, K + 1), (settled, accepted)
            yield
            if len(in_flight) <= steps_ahead and not prefilling:
                continue
        scheduled, was_prefill = in_flight.pop(0)
        request.num_in_flight_tokens -= scheduled
        if was_prefill:
            if request.num_computed_tokens >= request.num_prompt_tokens and request.num_output_tokens == 0:
                request.append_output_token_ids(rng.randrange(250))
            continue
        rejected = rng.randint(0, K)
        request.num_computed_tokens -= rejected
        for _ in range(scheduled - rejected):
            request.append_output_token_ids(rng.randrange(250))
