# SPDX-License-Identifier: Apache-2.0
"""What ``draft_window_reclaim`` makes of the KV cache, in the figures that vLLM logs. Needs no vLLM."""

from collections.abc import Iterable
from dataclasses import dataclass

from vllm_ascend.draft_window.config import DraftWindow, ReclaimRefused
from vllm_ascend.draft_window.layout import CacheLayout, kept_tokens
from vllm_draft_window.planner.checkpoints import Checkpoint
from vllm_draft_window.planner.deployment import Deployment


@dataclass(frozen=True, kw_only=True)
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


def plan_cache(
    target: Checkpoint, draft: Checkpoint, deployment: Deployment, window: DraftWindow, contexts: Iterable[int]
) -> CachePlan:
    """Plan what the cache keeps for ``window``, whether the user asked for reclaim or not."""
    length, block_size = deployment.max_model_len, deployment.block_sizes[0]
    layout = CacheLayout(
        target_layers=len(target.windows),
        draft_layers=len(draft.windows),
        block_size=block_size,
        kept=kept_tokens(window.size, window.min_context, block_size),
    )
    reason = _kinds(target, draft, deployment) or layout.too_little_saved(length)
    if window.sink_size:
        reason = f"draft_window_sink_size={window.sink_size} needs the first tokens"
    if reason is not None:
        return CachePlan(refused=str(ReclaimRefused(reason)))
    page = draft.layer_bytes(deployment.element_bytes, deployment.tensor_parallel_size) * block_size
    memory = deployment.kv_cache_bytes

    def fit(pages_of_one_group: int, pages: int) -> tuple[float, float] | None:
        """Requests that take so many pages without and with reclaim, as vLLM counts: in whole blocks of the pool."""
        if memory is None:
            return None
        layers = layout.target_layers + layout.draft_layers
        without, with_reclaim = memory // (layers * page), memory // (layout.group_size * page)
        return without * layers / pages_of_one_group, with_reclaim * layout.group_size / pages

    concurrency = fit(layout.pages_of_one_group(length), layout.pages(length, deployment.max_in_flight_tokens))
    return CachePlan(
        refused=None,
        groups=layout.groups,
        group_size=layout.group_size,
        costs_below=layout.costs_below(length),
        savings=tuple(
            Saving(
                context=context,
                saved=layout.saved(context),
                requests=fit(layout.pages_of_one_group(context), layout.pages(context)),
            )
            for context in contexts
        ),
        tokens=(int(concurrency[0] * length), int(concurrency[1] * length)) if concurrency else None,
        concurrency=concurrency,
    )


def _kinds(target: Checkpoint, draft: Checkpoint, deployment: Deployment) -> str | None:
    """Why these layers cannot share blocks; the engine finds out from the layers themselves."""
    for whose, checkpoint in (("target", target), ("draft", draft)):
        if checkpoint.is_mla:
            return f"the {whose} keeps its KV cache as MLAAttentionSpec, not as full attention does"
        if checkpoint.layers_without_kv or len(set(checkpoint.windows)) > 1 or len(deployment.block_sizes) > 1:
            return f"the {whose} has layers of several kinds, only one kind is supported"
        if any(checkpoint.windows):
            return f"the {whose} keeps its KV cache as SlidingWindowSpec, not as full attention does"
    pages = [
        checkpoint.layer_bytes(deployment.element_bytes, deployment.tensor_parallel_size) * deployment.block_sizes[0]
        for checkpoint in (target, draft)
    ]
    if pages[0] != pages[1]:
        return f"a block of a target layer takes {pages[0]} bytes and one of a draft layer {pages[1]}"
    return None
