# SPDX-License-Identifier: Apache-2.0
"""What a draft window costs and saves, from two checkpoints' configs; loads no model and needs no vLLM.

Which window is in force comes from the product's ``resolve``, every length and column from its ``WindowGeometry``, and
the size of the windowed tensors from ``WindowedInputs`` itself, allocated on torch's ``meta`` device.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from vllm_ascend.draft_window.config import DraftWindow, WindowOff, resolve
from vllm_ascend.draft_window.geometry import Rows, WindowGeometry
from vllm_ascend.draft_window.inputs import WindowedInputs
from vllm_ascend.draft_window.options import DraftWindowOptions

from .advice import Suggestion, suggest, warnings
from .cache import CachePlan, plan_cache
from .deployment import Deployment, windowed


@dataclass(frozen=True, kw_only=True)
class Read:
    """Bytes of one step on one rank, all requests of the batch at the same context.

    ``tokens_off`` and ``tokens_on`` are what the last draft forward reads of one request, the shares what the draft's
    keys and values are of all that is read.
    """

    context: int
    tokens_off: int
    tokens_on: int
    draft_off: int
    draft_on: int
    target: int
    weights: int
    share_off: float
    share_on: float


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What ``--json`` prints, field by field.

    Attributes:
        masked: the backend shows each query row its own window.
        tokens_seen: fewest and most tokens that the ``first_query`` and the ``last_query`` row of a proposal see; one
            number where rows are masked.
        reclaim: what ``draft_window_reclaim`` does or would do.
    """

    window: DraftWindow | None
    off_because: str | None
    masked: bool
    tokens_seen: dict[str, tuple[int, int] | None]
    columns: tuple[int, ...]
    full_columns: tuple[int, ...]
    windowed_bytes: int
    draft_kv_bytes_per_token: int
    target_kv_bytes_per_token: int
    reads: tuple[Read, ...]
    warnings: tuple[str, ...]
    suggestion: Suggestion
    reclaim: CachePlan | None


def make_plan(deployment: Deployment, options: dict[str, Any], contexts: Sequence[int]) -> Plan:
    """Plan ``options``, the window's part of ``additional_config``; without ``draft_window_size`` the suggested one.

    Raises:
        ValueError: what the engine would refuse at start-up, in its words.
    """
    if over := [context for context in contexts if context > deployment.max_model_len]:
        raise ValueError(f"the context of {over[0]} tokens is above max_model_len={deployment.max_model_len}")
    target, draft = deployment.target, deployment.draft
    suggestion = suggest(deployment)
    options = {key: value for key, value in options.items() if value is not None}
    # Where no size is given or suggested, the other options are checked all the same.
    given = DraftWindowOptions.from_additional_config({"draft_window_size": suggestion.window or 1, **options})
    assert given is not None
    decision: DraftWindow | WindowOff = WindowOff(suggestion.reason)
    if "draft_window_size" in options or suggestion.window is not None:
        decision = resolve(given, deployment.facts)
    if isinstance(decision, DraftWindow):  # as the engine does once it knows its blocks
        asked = deployment.geometry(decision)
        whole_blocks = 1 if asked.rows is Rows.MASKED else asked.alignment
        decision = decision.covers(asked.limit, block_size=whole_blocks) or decision
    window = geometry = first = last = cache = None
    if isinstance(decision, DraftWindow):
        window, geometry = decision, deployment.geometry(decision)
        first, last = deployment.tokens_seen(geometry, causal=draft.causal)
        cache = plan_cache(deployment, window, contexts)
        if window.reclaim and cache.refused:
            raise ValueError(cache.refused)
    return Plan(
        window=window,
        off_because=decision.reason if isinstance(decision, WindowOff) else None,
        masked=geometry is not None and geometry.rows is Rows.MASKED,
        tokens_seen={"first_query": first, "last_query": last},
        columns=geometry.columns if geometry else deployment.full_columns,
        full_columns=deployment.full_columns,
        windowed_bytes=windowed_bytes(geometry, deployment) if geometry else 0,
        draft_kv_bytes_per_token=len(draft.windows) * deployment.layer_bytes(draft),
        target_kv_bytes_per_token=len(target.windows) * deployment.layer_bytes(target),
        reads=tuple(read(deployment, geometry, context) for context in contexts),
        warnings=tuple(warnings(deployment, window)),
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


def read(deployment: Deployment, geometry: WindowGeometry | None, context: int) -> Read:
    """One step at ``context`` tokens: the target verifies, then the draft proposes."""
    target, draft, steps = deployment.target, deployment.draft, deployment.forwards
    limit = deployment.max_model_len
    off = on = [min(context + forward.tokens, limit) for forward in steps]
    if geometry:
        on = [int(windowed(geometry, forward, np.array([s]))[0]) for s, forward in zip(off, steps, strict=True)]
    draft_off, draft_on = (deployment.batch * sum(deployment.bytes_read(draft, s) for s in lens) for lens in (off, on))
    verified = min(context + deployment.num_speculative_tokens + 1, limit)
    of_target = deployment.batch * deployment.bytes_read(target, verified)
    weights = target.weight_bytes + draft.weight_bytes * len(steps) if deployment.with_weights else 0
    weights //= deployment.tensor_parallel_size
    return Read(
        context=context,
        tokens_off=off[-1],
        tokens_on=on[-1],
        draft_off=draft_off,
        draft_on=draft_on,
        target=of_target,
        weights=weights,
        share_off=draft_off / (draft_off + of_target + weights),
        share_on=draft_on / (draft_on + of_target + weights),
    )
