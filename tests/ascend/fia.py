# SPDX-License-Identifier: Apache-2.0
"""Stand-in for FIA, ``npu_fused_infer_attention_score``, that computes on a CPU and polices the operator's contract.

The device reads whatever a block table and a length say. Here everything that would be a silent wrong read, or an error
of the operator's tiling, raises :class:`ContractError`.
"""

from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from tests.ascend.graphs import device_operator


class ContractError(AssertionError):
    """A call that the operator refuses, or answers with a wrong read."""


@dataclass(frozen=True)
class Call:
    """One call that was answered.

    Attributes:
        layer: name of the layer that asked, where known.
        block_table: the table that it was given, the very tensor.
        table: what the table held, [num_reqs, columns].
        query_ends: cumulative query tokens, one entry per request.
        kv_lens: tokens read, one entry per request.
        query: [num_tokens, heads, head_size].
        output: [num_tokens, heads, head_size].
    """

    layer: str | None
    block_table: torch.Tensor | None
    table: torch.Tensor | None
    query_ends: tuple[int, ...]
    kv_lens: tuple[int, ...]
    sparse_mode: int
    sink: torch.Tensor | None
    query: torch.Tensor
    output: torch.Tensor


@dataclass
class Watch:
    """What tests ask of the stand-in.

    Attributes:
        listeners: called with every answered call.
        layers: names of layers by the address of their newest query.
        null_block: whether block 0 may be read: dummy batches have nothing but it.
    """

    listeners: list[Callable[[Call], None]] = field(default_factory=list)
    layers: dict[int, str] = field(default_factory=dict)
    null_block: bool = False

    @contextmanager
    def dummy_batches(self) -> Any:
        before, self.null_block = self.null_block, True
        try:
            yield
        finally:
            self.null_block = before


watch = Watch()


def _require(holds: bool, text: str) -> None:
    if not holds:
        raise ContractError(text)


def attention(
    # [num_tokens, heads, head_size]
    query: torch.Tensor,
    # paged: [num_blocks, block_size, kv_heads * head_size], otherwise [num_keys, kv_heads, head_size]
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    query_ends: Sequence[int],
    kv_lens: Sequence[int],
    # int32, [num_reqs, columns]
    block_table: torch.Tensor | None,
    heads: int,
    kv_heads: int,
    scale: float,
    sparse_mode: int,
    pre_tokens: int,
    next_tokens: int,
    mask: torch.Tensor | None,
    sink: torch.Tensor | None,
) -> torch.Tensor:
    """What FIA computes in TND layout; [num_tokens, heads, head_size]."""
    num_tokens, head_size = query.shape[0], query.shape[-1]
    query_ends = [int(end) for end in query_ends]
    starts = [0, *query_ends]
    _require(all(a <= b for a, b in pairwise(starts)), f"query lengths must be cumulative: {query_ends}")
    _require(starts[-1] == num_tokens, f"the last query length is {starts[-1]}, the query has {num_tokens} tokens")
    _require(len(kv_lens) == len(query_ends), f"{len(kv_lens)} kv lengths for {len(query_ends)} query lengths")
    _require(sparse_mode in (0, 3, 4), f"sparse_mode {sparse_mode} is not known here")
    _require((mask is None) == (sparse_mode == 0), f"sparse_mode {sparse_mode} with mask {mask is not None}")
    if block_table is None:  # contiguous keys: their lengths are cumulative too
        ends = [0, *map(int, kv_lens)]
        _require(ends[-1] == len(key), f"the last kv length is {ends[-1]}, there are {len(key)} keys")
        slots = [torch.arange(a, b) for a, b in pairwise(ends)]
    else:
        slots = _paged_slots(block_table, [int(n) for n in kv_lens], key.shape[1], key.shape[0])
    keys, values = key.reshape(-1, kv_heads, head_size), value.reshape(-1, kv_heads, head_size)
    output = torch.zeros_like(query)
    for row, (first, last) in enumerate(pairwise(starts)):
        queries, length = last - first, len(slots[row])
        if queries == 0 or length == 0:  # a padding row reads nothing
            continue
        _require(length >= queries, f"row {row} reads {length} tokens for {queries} query tokens")
        # [queries, length]: how far a token lies before the query, both counted from the newest
        distance = torch.arange(queries).unsqueeze(1) + length - queries - torch.arange(length)
        hidden = torch.zeros_like(distance, dtype=torch.bool)
        if sparse_mode == 3:
            hidden = distance < 0
        elif sparse_mode == 4:
            hidden = (distance > pre_tokens) | (-distance > next_tokens)
        output[first:last] = masked_attention(
            query[first:last], keys[slots[row]], values[slots[row]], scale=scale, hidden=hidden, sink=sink
        )
    return output


def _paged_slots(
    block_table: torch.Tensor, kv_lens: Sequence[int], block_size: int, num_blocks: int
) -> list[torch.Tensor]:
    _require(block_table.dtype == torch.int32, f"the block table is {block_table.dtype}")
    _require(len(block_table) == len(kv_lens), f"{len(block_table)} table rows for {len(kv_lens)} kv lengths")
    columns = block_table.shape[1]
    slots = []
    for row, length in enumerate(kv_lens):
        _require(0 <= length <= columns * block_size, f"row {row} reads {length} tokens of {columns * block_size}")
        ids = block_table[row, : -(-length // block_size)].long()
        _require(bool(((ids >= 0) & (ids < num_blocks)).all()), f"row {row} reads blocks {ids.tolist()}")
        _require(watch.null_block or bool((ids != 0).all()), f"row {row} reads the null block: {ids.tolist()}")
        position = torch.arange(length)
        slots.append(ids[position // block_size] * block_size + position % block_size)
    return slots


def masked_attention(
    # [queries, heads, head_size]
    query: torch.Tensor,
    # [tokens, kv_heads, head_size]
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
    # bool, [queries, tokens]
    hidden: torch.Tensor,
    # [heads], a learned logit that takes its share of the softmax and has no value
    sink: torch.Tensor | None = None,
) -> torch.Tensor:
    repeat = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeat, dim=1), value.repeat_interleave(repeat, dim=1)
    scores = torch.einsum("qhd,khd->hqk", query.float(), key.float()) * scale
    scores = scores.masked_fill(hidden, float("-inf"))
    if sink is not None:
        scores = torch.cat([scores, sink.float().view(-1, 1, 1).expand(-1, len(query), 1)], dim=-1)
    shares = scores.softmax(-1)[..., : key.shape[0]]
    return torch.einsum("hqk,khd->qhd", shares, value.float()).to(query.dtype)


def _answer(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **call: Any) -> torch.Tensor:
    output = attention(query, key, value, **call)
    table = call["block_table"]
    for listener in watch.listeners:
        listener(
            Call(
                layer=watch.layers.get(query.data_ptr()),
                block_table=table,
                table=None if table is None else table.clone(),
                query_ends=tuple(map(int, call["query_ends"])),
                kv_lens=tuple(map(int, call["kv_lens"])),
                sparse_mode=call["sparse_mode"],
                sink=call["sink"],
                query=query,
                output=output,
            )
        )
    return output


def _check_layout(key: torch.Tensor, layout: str, block_table: torch.Tensor | None, block_size: int) -> None:
    _require(layout == "TND", f"layout {layout}")
    if block_table is not None:
        _require(block_size == key.shape[1], f"block_size {block_size} of a cache with blocks of {key.shape[1]}")


def _score(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    actual_seq_lengths: list[int],
    actual_seq_lengths_kv: list[int],
    num_heads: int,
    num_key_value_heads: int,
    scale: float,
    input_layout: str,
    sparse_mode: int = 0,
    atten_mask: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    block_size: int = 0,
    pre_tokens: int = 2**31 - 1,
    next_tokens: int = 2**31 - 1,
    workspace: torch.Tensor | None = None,
) -> torch.Tensor:
    """The first version: lengths are host lists."""
    _check_layout(key, input_layout, block_table, block_size)
    for lengths in (actual_seq_lengths, actual_seq_lengths_kv):
        _require(isinstance(lengths, list), f"lengths must be a host list, not {type(lengths).__name__}")
    return _answer(
        query,
        key,
        value,
        query_ends=actual_seq_lengths,
        kv_lens=actual_seq_lengths_kv,
        block_table=block_table,
        heads=num_heads,
        kv_heads=num_key_value_heads,
        scale=scale,
        sparse_mode=sparse_mode,
        pre_tokens=pre_tokens,
        next_tokens=next_tokens,
        mask=atten_mask,
        sink=None,
    )


def _score_v2(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    actual_seq_qlen: Any,
    actual_seq_kvlen: Any,
    num_query_heads: int,
    num_key_value_heads: int,
    softmax_scale: float,
    input_layout: str,
    sparse_mode: int = 0,
    atten_mask: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    block_size: int = 0,
    pre_tokens: int = 2**31 - 1,
    next_tokens: int = 2**31 - 1,
    learnable_sink: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> torch.Tensor:
    """The second version: other names, learnable sinks, and lengths that may be tensors."""
    _check_layout(key, input_layout, block_table, block_size)
    return _answer(
        query,
        key,
        value,
        query_ends=actual_seq_qlen,
        kv_lens=actual_seq_kvlen,
        block_table=block_table,
        heads=num_query_heads,
        kv_heads=num_key_value_heads,
        scale=softmax_scale,
        sparse_mode=sparse_mode,
        pre_tokens=pre_tokens,
        next_tokens=next_tokens,
        mask=atten_mask,
        sink=learnable_sink,
    )


class _Operator:
    """A torch operator: callable, and with an ``out`` variant."""

    def __init__(self, score: Callable[..., torch.Tensor]) -> None:
        def out(*args: Any, out: list[torch.Tensor], **kwargs: Any) -> None:
            out[0].copy_(score(*args, **kwargs).view_as(out[0]))

        def call(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
            return score(*args, **kwargs), torch.zeros(1)

        self.out, self._call = device_operator(out), device_operator(call)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)


@device_operator
def _write_cache(
    # [num_tokens, kv_heads, head_size]
    key: torch.Tensor,
    value: torch.Tensor,
    # [num_blocks, block_size, kv_heads, head_size]
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    # int32, [<= num_tokens]; negative: not written
    slot_mapping: torch.Tensor,
    cache_mode: str,
) -> None:
    _require(slot_mapping.dtype == torch.int32, f"slot mapping is {slot_mapping.dtype}")
    real = slot_mapping >= 0
    slots = slot_mapping[real].long()
    for new, cache in ((key, key_cache), (value, value_cache)):
        cache.view(-1, *cache.shape[2:])[slots] = new[: len(slot_mapping)][real].to(cache.dtype)


def _workspace(*_: Any, **__: Any) -> torch.Tensor:
    return torch.empty(1)


ENTRY_POINTS: dict[str, Any] = {
    "npu_fused_infer_attention_score": _Operator(_score),
    "npu_fused_infer_attention_score_v2": _Operator(_score_v2),
    "_npu_fused_infer_attention_score_get_max_workspace": _workspace,
    "_npu_fused_infer_attention_score_v2_get_max_workspace": _workspace,
    "npu_scatter_pa_kv_cache": _write_cache,
}
