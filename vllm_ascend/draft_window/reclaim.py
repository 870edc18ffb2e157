# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM-Ascend project
"""Keep only what the window reads: ``draft_window_reclaim``.

The draft's layers ask for a sliding-window KV cache instead of one for all tokens, so vLLM's own manager frees the
blocks that lie behind the window. Their attention stays what it was: the window's crop is what reads less.

Two processes take part. The worker publishes the specs of the draft's layers once the draft is loaded; the engine core
makes KV cache groups of all specs. What could go wrong is refused before anything is published, since from then on a
draft without its window would read blocks that belong to other requests.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, fields, replace
from functools import partial, wraps
from itertools import chain
from typing import Any

from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from .config import DraftWindow, ReclaimRefused
from .layout import CacheLayout, kept_tokens
from .seams import vllm as versions


@dataclass(frozen=True, kw_only=True)
class DraftWindowSpec(SlidingWindowSpec):
    """A windowed draft layer's cache. The class is the mark: it crosses to the engine core, and merges with no other.

    ``sliding_window`` is what the manager keeps, which is more than what the draft sees.
    """


def refuse_engine(vllm_config: Any) -> None:
    """What the engine's configuration alone rules out.

    Raises:
        ReclaimRefused: see ``docs/reclaim.md``.
    """
    from vllm.platforms import current_platform

    parallel = vllm_config.parallel_config
    if not versions.uses_v2_runner(vllm_config):
        raise ReclaimRefused("it needs Model Runner V2 (VLLM_USE_V2_MODEL_RUNNER=1)")
    if current_platform.device_type == "npu":
        raise ReclaimRefused("nobody has run it on vLLM-Ascend yet")
    if vllm_config.scheduler_config.disable_hybrid_kv_cache_manager:
        # vLLM would merge all layers into one group, and up to 0.27.1 the target's attention would be windowed too.
        raise ReclaimRefused("the hybrid KV cache manager is off, and no other frees blocks of the draft alone")
    if vllm_config.kv_transfer_config is not None:
        connector = vllm_config.kv_transfer_config.kv_connector
        raise ReclaimRefused(f"the KV connector {connector} may fill a freed block while a draft still reads it")
    if (size := versions.context_parallel_size(parallel)) > 1:
        raise ReclaimRefused(f"context parallelism (size {size}) shards blocks over ranks")
    if parallel.pipeline_parallel_size > 1:
        stages = parallel.pipeline_parallel_size
        raise ReclaimRefused(f"of {stages} pipeline stages only the last has draft layers, the others save nothing")
    if getattr(vllm_config.model_config, "supports_kv_cache_grouping", False):
        raise ReclaimRefused("this target makes its KV cache groups itself")


def publish(vllm_config: Any, window: DraftWindow, draft_layers: Collection[str]) -> CacheLayout:
    """Let the draft's layers ask for the window's share of the KV cache from now on.

    Args:
        draft_layers: names of the draft's attention layers, which are loaded.

    Raises:
        ReclaimRefused: target and draft cannot share blocks so, or it would not pay. Nothing is published then.
    """
    layers: dict[str, Any] = get_layers_from_vllm_config(vllm_config, AttentionLayerBase)  # type: ignore[type-abstract]
    specs = {
        name: spec
        for name, layer in layers.items()
        if not getattr(layer, "kv_sharing_target_layer_name", None)
        and (spec := layer.get_kv_cache_spec(vllm_config)) is not None
    }
    draft = {name: spec for name, spec in specs.items() if name in draft_layers}
    target = [spec for name, spec in specs.items() if name not in draft_layers]
    windowed = windowed_spec(_only_kind("draft", draft.values()), window)
    page_size = _only_kind("target", target).page_size_bytes
    if windowed.page_size_bytes != page_size:
        raise ReclaimRefused(
            f"a block of a target layer takes {page_size} bytes and one of a draft layer {windowed.page_size_bytes}"
        )
    layout = CacheLayout(
        target_layers=len(target),
        draft_layers=len(draft),
        block_size=windowed.block_size,
        kept=windowed.sliding_window,
    )
    if reason := layout.too_little_saved(vllm_config.model_config.max_model_len):
        raise ReclaimRefused(reason)
    for name in draft:
        layers[name].get_kv_cache_spec = partial(_published, layers[name].get_kv_cache_spec, window)
    return layout


def windowed_spec(spec: FullAttentionSpec, window: DraftWindow) -> DraftWindowSpec:
    """The same cache, of which the manager keeps what the window can read."""
    shared = {f.name for f in fields(DraftWindowSpec)} & {f.name for f in fields(spec)} - {"sliding_window"}
    return DraftWindowSpec(
        sliding_window=kept_tokens(window.size, window.min_context, spec.block_size),
        **{name: getattr(spec, name) for name in shared},
    )


def _published(get_kv_cache_spec: Callable[[Any], Any], window: DraftWindow, vllm_config: Any) -> DraftWindowSpec:
    return windowed_spec(get_kv_cache_spec(vllm_config), window)


def _only_kind(whose: str, specs: Iterable[Any]) -> FullAttentionSpec:
    kinds = list(dict.fromkeys(specs))
    if not kinds:
        raise ReclaimRefused(f"the {whose} has no KV cache of its own")
    if len(kinds) > 1:
        names = ", ".join(sorted({type(spec).__name__ for spec in kinds}))
        raise ReclaimRefused(f"the {whose} has layers of {len(kinds)} kinds ({names}), only one kind is supported")
    # Subclasses share blocks in ways of their own; a window of the layer's own is freed by vLLM already.
    if type(kinds[0]) is not FullAttentionSpec or kinds[0].sliding_window or kinds[0].attention_chunk_size:
        raise ReclaimRefused(f"the {whose} keeps its KV cache as {type(kinds[0]).__name__}, not as full attention does")
    return kinds[0]


def let_no_spec_mask(attn_groups: Iterable[Iterable[Any]]) -> None:
    """Up to vLLM 0.27.1 builders take their mask from the spec; what the manager keeps must not become one."""
    for group in chain.from_iterable(attn_groups):
        for builder in group.metadata_builders:
            if isinstance(builder.kv_cache_spec, DraftWindowSpec):
                builder.kv_cache_spec = replace(builder.kv_cache_spec, sliding_window=None)  # type: ignore[arg-type]
                if versions.keeps_window(builder):
                    builder.window_size = -1


def group_draft_layers() -> None:
    """Let vLLM make the groups of :class:`CacheLayout` where draft layers are marked; calling it again changes nothing.

    The engine core and, for its estimates, the worker call the hooked function.
    """
    module = versions.kv_cache_grouping()
    if not hasattr(module.get_kv_cache_groups, "__wrapped__"):
        module.get_kv_cache_groups = _grouping(module.get_kv_cache_groups, module.create_kv_cache_group_specs)


def _grouping(
    stock: Callable[..., list[Any]], create_kv_cache_group_specs: Callable[..., list[Any]]
) -> Callable[..., list[Any]]:
    @wraps(stock)
    def get_kv_cache_groups(vllm_config: Any, kv_cache_spec: dict[str, Any]) -> list[Any]:
        draft = [name for name, spec in kv_cache_spec.items() if isinstance(spec, DraftWindowSpec)]
        if not draft:
            return stock(vllm_config, kv_cache_spec)
        refuse_engine(vllm_config)
        target = [name for name in kv_cache_spec if name not in draft]
        first = kv_cache_spec[draft[0]]
        layout = CacheLayout(
            target_layers=len(target),
            draft_layers=len(draft),
            block_size=first.block_size,
            kept=first.sliding_window,
        )
        # As vLLM deals layers out, every i-th one, so that shards of the model get as many of each group.
        grouped = [target[i :: layout.target_groups] for i in range(layout.target_groups)]
        return create_kv_cache_group_specs(kv_cache_spec, [*grouped, draft])

    return get_kv_cache_groups
