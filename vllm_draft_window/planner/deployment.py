# SPDX-License-Identifier: Apache-2.0
"""A target and its draft, and what the engine is started with, as the planner needs it."""

import re
from dataclasses import dataclass, fields, replace
from functools import cached_property
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from vllm_ascend.draft_window.config import PARALLEL_METHODS, DraftWindow
from vllm_ascend.draft_window.facts import DraftFacts, facts_from_config
from vllm_ascend.draft_window.geometry import Rows, WindowGeometry
from vllm_ascend.draft_window.window import rows_kept

from .checkpoints import Checkpoint

_UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}


def parse_length(text: str) -> int | None:
    """``--max-model-len`` as vLLM reads it: ``1k`` is 1000, ``1K`` 1024; ``None`` for ``auto`` and ``-1``.

    Raises:
        ValueError: vLLM would refuse it too.
    """
    if text.lower() in ("auto", "-1"):
        return None
    number = re.fullmatch(r"(\d+)(\.\d+(?=[kmg]))?([kmgKMG]?)", text)
    if number is None or not float(text.rstrip("kmgKMG")):
        raise ValueError(f"--max-model-len {text} is none of 32768, 32k, 25.6k, 32K (times 1024), 1M, auto")
    whole, fraction, unit = number.groups()
    return int(float(whole + (fraction or "")) * _UNITS.get(unit, 1))


class Forward(NamedTuple):
    """One draft forward of a decode step.

    Attributes:
        tokens: what a request has beyond its context by then, query tokens included.
        queries: query tokens of the request.
        lookahead: K of the window arithmetic, positions that later forwards of the proposal write.
    """

    tokens: int
    queries: int
    lookahead: int


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """Two checkpoints, and what the engine is started with.

    Attributes:
        block_sizes: tokens per block-table column, one entry per draft KV cache group.
        element_bytes: bytes of one KV cache element.
        batch: requests in a step; weights are read once for all of them.
        trained_length: tokens that the draft was trained on, where the user knows better than the config.
        kv_cache_bytes: memory of one rank for the KV cache, where it is known.
        batches_in_flight: 2 with async scheduling, else 1.
        can_mask: the attention backend can show each query row its own window.
    """

    target: Checkpoint
    draft: Checkpoint
    method: str
    num_speculative_tokens: int
    max_model_len: int
    max_num_seqs: int
    block_sizes: tuple[int, ...]
    element_bytes: int
    max_num_batched_tokens: int = 8192
    tensor_parallel_size: int = 1
    batch: int = 1
    with_weights: bool = False
    trained_length: int | None = None
    kv_cache_bytes: int | None = None
    batches_in_flight: int = 2
    can_mask: bool = True

    def arguments(self) -> dict[str, Any]:
        """All but the checkpoints, for JSON."""
        return {field.name: getattr(self, field.name) for field in fields(self)[2:]}

    @property
    def max_in_flight_tokens(self) -> int:
        return self.batches_in_flight * self.max_num_batched_tokens

    @property
    def full_columns(self) -> tuple[int, ...]:
        """vLLM allocates whole rows of 128 tokens."""
        tokens = -(-self.max_model_len // 128) * 128
        return tuple(-(-tokens // size) for size in self.block_sizes)

    @cached_property
    def facts(self) -> DraftFacts:
        """As the engine reads them, from an object with the shape of its ``VllmConfig``; ``trained_length`` wins."""
        known = facts_from_config(
            SimpleNamespace(
                model_config=SimpleNamespace(max_model_len=self.max_model_len),
                speculative_config=SimpleNamespace(
                    method=self.method,
                    num_speculative_tokens=self.num_speculative_tokens,
                    draft_model_config=SimpleNamespace(hf_config=self.draft.config),
                ),
            )
        )
        return replace(known, trained_length=self.trained_length or known.trained_length)

    @cached_property
    def forwards(self) -> tuple[Forward, ...]:
        """The draft's forwards of one step, as if the target had accepted everything.

        A parallel drafter takes one. An autoregressive draft first follows the target over the verified tokens, then
        takes one token at a time.
        """
        tokens, queries = self.num_speculative_tokens, self.facts.queries_per_request
        if self.method in PARALLEL_METHODS:
            return (Forward(tokens=queries, queries=queries, lookahead=0),)
        return tuple(
            Forward(tokens=tokens + 1 + step, queries=1 if step else tokens + 1, lookahead=tokens - step)
            for step in range(tokens)
        )

    def layer_bytes(self, model: Checkpoint) -> int:
        """Keys and values of one token in one layer, on one rank."""
        return model.layer_bytes(self.element_bytes, self.tensor_parallel_size)

    def bytes_read(self, model: Checkpoint, tokens: int) -> int:
        """What one forward over ``tokens`` tokens reads on one rank; sliding-window layers read their window."""
        return self.layer_bytes(model) * sum(min(tokens, window or tokens) for window in model.windows)

    def geometry(self, window: DraftWindow) -> WindowGeometry:
        """The engine's arithmetic."""
        # The first forward of an autoregressive draft runs over prefill chunks; a draft model adds the newest token.
        chunk = min(self.max_num_batched_tokens, self.max_model_len) + (window.method == "draft_model")
        return WindowGeometry(
            window=window.size,
            sink=window.sink_size,
            min_context=window.min_context,
            block_sizes=self.block_sizes,
            full_columns=self.full_columns,
            max_model_len=self.max_model_len,
            max_queries=window.queries_per_request if window.method in PARALLEL_METHODS else chunk,
            max_lookahead=window.max_lookahead,
            rows=rows_kept(window, layers=len(self.draft.windows), can_mask=self.can_mask),
        )

    def tokens_seen(self, geometry: WindowGeometry, *, causal: bool) -> tuple[tuple[int, int], tuple[int, int]]:
        """Fewest and most tokens that a proposal's first and last query row see, over every place in a block.

        Where no sequence is long enough to be cropped, the longest one counts.
        """
        first, last = self.forwards[0], self.forwards[-1]
        rows_after = first.queries - 1
        if geometry.rows is Rows.MASKED:  # where not causal, a row sees those behind it in its block, too
            of_first = min(geometry.window + (0 if causal else rows_after), geometry.limit)
            of_last = min(geometry.window, geometry.limit)
            return (of_first, of_first), (of_last, of_last)
        start = geometry.first_cropped(queries=first.queries, lookahead=first.lookahead)
        # [alignment] or fewer
        seq_lens = np.arange(start, start + geometry.alignment, dtype=np.int32)
        seq_lens = seq_lens[seq_lens <= geometry.limit] if start <= geometry.limit else np.array([geometry.limit])
        in_first = windowed(geometry, first, seq_lens) - (rows_after if causal else 0)
        in_last = windowed(geometry, last, seq_lens + last.tokens - first.tokens)
        return (int(in_first.min()), int(in_first.max())), (int(in_last.min()), int(in_last.max()))


def windowed(geometry: WindowGeometry, forward: Forward, seq_lens: np.ndarray) -> np.ndarray:
    """What ``forward`` reads of requests of ``seq_lens`` tokens, int32, [num_reqs]."""
    return geometry.lengths(seq_lens, queries=forward.queries, lookahead=forward.lookahead)[1]
