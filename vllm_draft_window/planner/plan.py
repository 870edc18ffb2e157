# SPDX-License-Identifier: Apache-2.0
"""What a draft window costs and saves, from two checkpoints' configs; loads no model and needs no vLLM.

Which window is in force comes from the product's ``resolve``, every length and column from its ``WindowGeometry``, and
the size of the windowed tensors from ``WindowedInputs`` itself, allocated on torch's ``meta`` device.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from vllm_ascend.draft_window.config import DraftWindow, WindowOff, resolve
from vllm_ascend.draft_window.facts import DraftFacts
from vllm_ascend.draft_window.geometry import Rows, WindowGeometry
from vllm_ascend.draft_window.inputs import WindowedInputs
from vllm_ascend.draft_window.options import DraftWindowOptions
from vllm_draft_window.planner.advice import Suggestion, suggest, warnings
from vllm_draft_window.planner.cache import CachePlan, plan_cache
from vllm_draft_window.planner.checkpoints import Checkpoint
from vllm_draft_window.planner.deployment import Deployment, facts, forwards, geometry_of, tokens_seen


@dataclass(frozen=True, kw_only=True)
class Read:
    """Bytes of one step on one rank, all requests of the batch at the same context.

    ``tokens_off`` and ``tokens_on`` are what the last draft forward reads of one request.
    """

    context: int
    tokens_off: int
    tokens_on: int
    draft_off: int
    draft_on: int
    target: int
    weights: int

    @property
    def share_off(self) -> float:
        return self.draft_off / (self.draft_off + self.target + self.weights)

    @property
    def share_on(self) -> float:
        return self.draft_on / (self.draft_on + self.target + self.weights)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """``first_query`` and ``last_query``: fewest and most tokens that those rows of a proposal see; one number where
    the backend masks (``masked``).

    ``reclaim`` is what ``draft_window_reclaim`` does or would do.
    """

    window: DraftWindow | None
    off_reason: str | None
    masked: bool
    columns: tuple[int, ...]
    draft_kv_bytes_per_token: int
    target_kv_bytes_per_token: int
    first_query: tuple[int, int] | None
    last_query: tuple[int, int] | None
    windowed_bytes: int
    reads: tuple[Read, ...]
    warnings: tuple[str, ...]
    suggestion: Suggestion
    reclaim: CachePlan | None


def make_plan(
    target: Checkpoint,
    draft: Checkpoint,
    deployment: Deployment,
    options: dict[str, Any],
    contexts: Iterable[int],
) -> Plan:
    """Plan ``options``, the window's part of ``additional_config``; without ``draft_window_size`` the suggested one.

    Raises:
        ValueError: what the engine would refuse at start-up, in its words.
    """
    contexts = tuple(contexts)
    if over := [context for context in contexts if context > deployment.max_model_len]:
        raise ValueError(f"the context of {over[0]} tokens is above max_model_len={deployment.max_model_len}")
    known = facts(draft, deployment)
    layers = len(draft.windows)
    suggestion = suggest(target, deployment, known, layers=layers)
    options = {key: value for key, value in options.items() if value is not None}
    # Where no size is given or suggested, the other options are checked all the same.
    given = DraftWindowOptions.from_additional_config({"draft_window_size": suggestion.window or 1, **options})
    assert given is not None
    decision: DraftWindow | WindowOff = WindowOff(suggestion.reason)
    if "draft_window_size" in options or suggestion.window is not None:
        decision = resolve(given, known)

    geometry = geometry_of(decision, deployment, layers=layers) if isinstance(decision, DraftWindow) else None
    if geometry and isinstance(decision, DraftWindow):  # as the engine does once it knows its blocks
        whole_blocks = 1 if geometry.rows is Rows.MASKED else geometry.alignment
        decision = decision.covers(geometry.limit, block_size=whole_blocks) or decision
    window = decision if isinstance(decision, DraftWindow) else None
    cache = plan_cache(target, draft, deployment, window, contexts) if window else None
    if window and window.reclaim and cache and cache.refused:
        raise ValueError(cache.refused)
    if window is None:
        geometry = None
    first = last = None
    if geometry:
        first, last = tokens_seen(geometry, known, causal=draft.causal)
    return Plan(
        window=window,
        off_reason=decision.reason if isinstance(decision, WindowOff) else None,
        masked=geometry is not None and geometry.rows is Rows.MASKED,
        columns=geometry.columns if geometry else deployment.full_columns,
        draft_kv_bytes_per_token=draft.kv_bytes_per_token(deployment.element_bytes, deployment.tensor_parallel_size),
        target_kv_bytes_per_token=target.kv_bytes_per_token(deployment.element_bytes, deployment.tensor_parallel_size),
        first_query=first,
        last_query=last,
        windowed_bytes=windowed_bytes(geometry, deployment) if geometry else 0,
        reads=tuple(read(target, draft, deployment, known, geometry, context) for context in contexts),
        warnings=tuple(warnings(target, draft, deployment, window)),
        suggestion=suggestion,
        reclaim=cache,
    )


def windowed_bytes(geometry: WindowGeometry, deployment: Deployment) -> int:
    """What the windowed lengths and block tables take on one device."""

    def int32(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device="meta")

    rows = deployment.max_num_seqs
    buffers = SimpleNamespace(seq_lens=int32(rows), query_start_loc=int32(rows + 1))
    tables = SimpleNamespace(input_block_tables=[int32(rows, columns) for columns in deployment.full_columns])
    return WindowedInputs(geometry, buffers, tables, range(len(deployment.full_columns)), fused=False).num_bytes


def read(
    target: Checkpoint,
    draft: Checkpoint,
    deployment: Deployment,
    known: DraftFacts,
    geometry: WindowGeometry | None,
    context: int,
) -> Read:
    """One step at ``context`` tokens: the target verifies, then the draft proposes."""
    element, tp, limit = deployment.element_bytes, deployment.tensor_parallel_size, deployment.max_model_len
    steps = forwards(known)
    seq_lens = [min(context + forward.tokens, limit) for forward in steps]
    windowed = seq_lens
    if geometry:
        windowed = [
            int(geometry.lengths(np.array([s]), queries=forward.queries, lookahead=forward.lookahead)[1][0])
            for s, forward in zip(seq_lens, steps, strict=True)
        ]

    def draft_bytes(lengths: list[int]) -> int:
        return deployment.batch * sum(draft.kv_bytes_read(length, element, tp) for length in lengths)

    verified = min(context + known.num_speculative_tokens + 1, limit)
    weights = target.weight_bytes + draft.weight_bytes * len(steps) if deployment.with_weights else 0
    return Read(
        context=context,
        tokens_off=seq_lens[-1],
        tokens_on=windowed[-1],
        draft_off=draft_bytes(seq_lens),
        draft_on=draft_bytes(windowed),
        target=deployment.batch * target.kv_bytes_read(verified, element, tp),
        weights=weights // tp,
    )
