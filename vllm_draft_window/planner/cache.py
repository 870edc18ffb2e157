# SPDX-License-Identifier: Apache-2.0
"""What ``draft_window_reclaim`` makes of the KV cache, in the figures that vLLM logs. Needs no vLLM."""

from collections.abc import Iterable
from dataclasses import dataclass

from vllm_ascend.draft_window.config import DraftWindow, ReclaimRefused
from vllm_ascend.draft_window.layout import CacheLayout, kept_tokens

from .deployment import Deployment


@dataclass(frozen=True)
class Saving:
    """One request of ``context`` tokens that decodes.

    Attributes:
        saved: share of its KV cache; negative where reclaim costs.
        requests: as many fit into the memory, without and with reclaim; ``None`` where the memory is not given.
    """

    context: int
    saved: float
    requests: tuple[float, float] | None


@dataclass(frozen=True, kw_only=True)
class CachePlan:
    """The KV cache of one rank.

    Attributes:
        refused: why the engine would stop, in its words.
        costs_below: context below which a request takes more memory than without reclaim.
        tokens: "KV cache size" of vLLM's log, without and with reclaim; ``None`` where the memory is not given.
        concurrency: "Maximum concurrency" there, for requests of ``max_model_len`` in the middle of their prefill.
    """

    refused: str | None
    groups: int | None = None
    group_size: int | None = None
    costs_below: int | None = None
    savings: tuple[Saving, ...] = ()
    tokens: tuple[int, int] | None = None
    concurrency: tuple[float, float] | None = None


def refused(deployment: Deployment, window: DraftWindow) -> str | None:
    """Why the engine would stop where ``draft_window_reclaim`` is asked for, in its words."""
    reason = _kinds(deployment) or _layout(deployment, window).too_little_saved(deployment.max_model_len)
    if window.sink_size:
        reason = f"draft_window_sink_size={window.sink_size} needs the first tokens"
    return None if reason is None else str(ReclaimRefused(reason))


def plan_cache(deployment: Deployment, window: DraftWindow, contexts: Iterable[int]) -> CachePlan:
    """Plan what the cache keeps for ``window``, whether the user asked for reclaim or not."""
    if reason := refused(deployment, window):
        return CachePlan(refused=reason)
    length, memory = deployment.max_model_len, deployment.kv_cache_bytes
    layout = _layout(deployment, window)
    page = deployment.layer_bytes(deployment.draft) * layout.block_size
    layers = layout.target_layers + layout.draft_layers

    def fit(context: int, in_flight: int = 0) -> tuple[float, float] | None:
        """Requests of ``context`` tokens without and with reclaim, as vLLM counts: in whole blocks of the pool."""
        if memory is None:
            return None
        without, with_reclaim = (memory // (size * page) * size for size in (layers, layout.group_size))
        return without / layout.pages_of_one_group(context), with_reclaim / layout.pages(context, in_flight)

    concurrency = fit(length, deployment.max_in_flight_tokens)
    return CachePlan(
        refused=None,
        groups=layout.groups,
        group_size=layout.group_size,
        costs_below=layout.costs_below(length),
        savings=tuple(Saving(context, layout.saved(context), fit(context)) for context in contexts),
        tokens=(int(concurrency[0] * length), int(concurrency[1] * length)) if concurrency else None,
        concurrency=concurrency,
    )


def _layout(deployment: Deployment, window: DraftWindow) -> CacheLayout:
    block_size = deployment.block_sizes[0]
    return CacheLayout(
        target_layers=len(deployment.target.windows),
        draft_layers=len(deployment.draft.windows),
        block_size=block_size,
        kept=kept_tokens(window.size, window.min_context, block_size),
    )


def _kinds(deployment: Deployment) -> str | None:
    """Why these layers cannot share blocks; the engine finds out from the layers themselves."""
    models = {"target": deployment.target, "draft": deployment.draft}
    for whose, model in models.items():
        if model.is_mla:
            return f"the {whose} keeps its KV cache as MLAAttentionSpec, not as full attention does"
        if model.layers_without_kv or len(set(model.windows)) > 1 or len(deployment.block_sizes) > 1:
            return f"the {whose} has layers of several kinds, only one kind is supported"
        if any(model.windows):
            return f"the {whose} keeps its KV cache as SlidingWindowSpec, not as full attention does"
    target, draft = (deployment.layer_bytes(model) * deployment.block_sizes[0] for model in models.values())
    if target != draft:
        return f"a block of a target layer takes {target} bytes and one of a draft layer {draft}"
    return None
