# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM-Ascend project
"""Which vLLM has which interface. Every question about a version, or about what a class of upstream's has, is here."""

import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from enum import Enum
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import vllm
from packaging.version import InvalidVersion, Version

from ..config import PARALLEL_METHODS

OLDEST = (0, 26)
NEWEST_TESTED = (0, 33)

Kind = Enum("Kind", ["PARALLEL", "STANDALONE", "TARGET_DEPENDENT"])
"""How a draft proposes: in one forward; token by token, by a model of its own or from the target's hidden states."""

# By the name of a base class: vLLM has moved and renamed some of them, and not every version has each.
_KINDS = {
    "DFlashSpeculator": Kind.PARALLEL,  # and DSpark
    "AutoRegressiveSpeculator": Kind.TARGET_DEPENDENT,  # EAGLE, EAGLE3, MTP to vLLM 0.31
    "TargetDependentARSpeculator": Kind.TARGET_DEPENDENT,  # from 0.32
    "PlainDraftModelSpeculator": Kind.STANDALONE,  # vLLM 0.31
    "StandaloneARSpeculator": Kind.STANDALONE,  # from 0.32
}
# Whoever derives from those may read its context in another way. vLLM-Ascend calls its own "Ascend...".
_TESTED = frozenset(
    {
        "DFlashSpeculator",
        "DSparkSpeculator",
        "EagleSpeculator",
        "MTPSpeculator",
        "Gemma4Speculator",  # refused: it attends to the target's KV cache
        "PlainDraftModelSpeculator",
        "StandaloneARSpeculator",
    }
)
# Attention that reads its sliding window at each forward or build. FlashInfer plans with it, in builder and wrappers.
_MASKING = frozenset({"CPUAttentionBackendImpl", "FlashAttentionImpl", "TritonAttentionImpl"})
# What the seams override or call, and the parameters that they name. BASE is the class that gave the kind.
_BY_SIZES = {"DraftModelSpeculator._build_draft_attn_metadata": "num_reqs num_reqs_padded num_tokens_padded"}
_BY_DESCRIPTOR = {
    "DraftModelSpeculator._build_attn_metadata": "num_reqs batch_desc query_start_loc_np seq_lens_cpu_upper_bound step"
}
_NEEDED = {
    Kind.PARALLEL: {
        "BASE.capture": "",
        "BASE.propose": "input_batch",
        "BASE._generate_draft": "num_reqs attn_metadata",
        "DFlashCudaGraphManager.capture": "input_buffers block_tables max_model_len",
    },
    Kind.STANDALONE: {"BASE.propose": "input_batch"},
    Kind.TARGET_DEPENDENT: {
        "BASE.capture": "",
        "BASE.propose": "input_batch",
        "BASE._prefill": "num_reqs num_tokens attn_metadata",
        "SpeculatorCudaGraphManager.capture": "input_buffers block_tables attn_groups",
        "SpeculatorCudaGraphManager.run_fullgraph": "",
    },
}


def release() -> tuple[int, ...]:
    """vLLM's; a source build that nobody tagged counts as the newest tested."""
    try:
        found = Version(vllm.__version__).release[:2]
    except InvalidVersion:
        return NEWEST_TESTED
    return found if found > (0, 1) else NEWEST_TESTED


def too_old() -> str | None:
    """Why this vLLM cannot have a window."""
    oldest = ".".join(map(str, OLDEST))
    text = f"vLLM {vllm.__version__} is not supported, {oldest} or later is needed; upgrade vLLM"
    return text if release() < OLDEST else None


def untested() -> str | None:
    """What to warn of where vLLM is newer than every version that the window was tested with."""
    newest = ".".join(map(str, NEWEST_TESTED))
    text = f"vLLM {vllm.__version__} is newer than {newest}, the newest that the draft window was tested with"
    return text if release() > NEWEST_TESTED else None


def without(seam: str) -> str:
    """Why there is no window: this vLLM misses a seam."""
    return f"{untested() or f'vLLM {vllm.__version__} is not as it was released'}, and has no {seam}"


def kind_of(speculator_class: type) -> Kind | str:
    """How a speculator class proposes, or why it cannot be windowed."""
    base = next((base for base in speculator_class.__mro__ if base.__name__ in _KINDS), None)
    if base is None or speculator_class.__name__.removeprefix("Ascend") not in _TESTED:
        return f"{speculator_class.__name__} is not windowed by this version"
    kind, scope = _KINDS[base.__name__], vars(sys.modules[base.__module__])
    for seam, parameters in ((_BY_DESCRIPTOR if builds_by_descriptor() else _BY_SIZES) | _NEEDED[kind]).items():
        seam = seam.replace("BASE", base.__name__)
        owner, method = seam.split(".")
        found = getattr(scope.get(owner), method, None)
        if found is None or not set(parameters.split()) <= inspect.signature(found).parameters.keys():
            return without(f"{seam}({', '.join(parameters.split())})")
    if kind is Kind.TARGET_DEPENDENT and not (builds_by_descriptor() or first_step_by_sizes()):
        return "it needs vLLM 0.27 or newer for this method"
    return kind


def _builds(name: str) -> Callable[..., Any] | None:
    from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

    return getattr(DraftModelSpeculator, name, None)


@cache
def builds_by_descriptor() -> bool:
    """vLLM 0.30 and later: ``_build_attn_metadata`` with a batch descriptor. Before, ``_build_draft_attn_metadata``."""
    return _builds("_build_attn_metadata") is not None


@cache
def first_step_by_sizes() -> bool:
    """vLLM 0.27 to 0.29: that build takes requests with different numbers of query tokens."""
    build = _builds("_build_draft_attn_metadata")
    return build is not None and "query_start_loc_np" in inspect.signature(build).parameters


@cache
def records_refresh() -> bool:
    """vLLM 0.32 and later: FULL graphs of parallel drafters record upstream's own refresh of metadata."""
    return _builds("_update_draft_decode_metadata") is not None


def refers_only(builder: Any) -> bool:
    """Whether all that a metadata builder computes from lengths is a schedule that it can do without."""
    return type(builder).__name__ == "FlashAttentionMetadataBuilder" and hasattr(builder, "aot_schedule")


def keeps_window(builder: Any) -> bool:
    """A metadata builder that reads the window of its spec once, as the CPU's does."""
    return hasattr(builder, "window_size")


def kv_cache_grouping() -> Any:
    """The module whose ``get_kv_cache_groups`` makes KV cache groups of layers; of its own from vLLM 0.33 on.

    Raises:
        ImportError: it lacks what is hooked or called.
    """
    name = "vllm.v1.core.kv_cache_planning"
    module = import_module(name if find_spec(name) else "vllm.v1.core.kv_cache_utils")
    for needed in ("get_kv_cache_groups", "create_kv_cache_group_specs"):
        if not hasattr(module, needed):
            raise ImportError(f"cannot import {needed}", name=f"{module.__name__}.{needed}")
    return module


def can_mask(layer: Any, spec: Any) -> bool:
    """Whether a draft layer's attention can be given a sliding window after it was built, or has one."""
    return type(layer.impl).__name__ in _MASKING and not hasattr(spec, "kv_cache_specs")


def mask(layer: Any, builder: Any, window: int) -> None:
    """Let each query row of a draft layer see its newest ``window`` tokens, and those behind it where not causal.

    vLLM 0.26 and 0.27: FlashAttention takes its window from the KV cache spec of the builder. Later from the layer.
    """
    if type(layer.impl).__name__ == "CPUAttentionBackendImpl":
        layer.impl.sliding_window = builder.window_size = window
        return
    if type(layer.impl).__name__ == "TritonAttentionImpl":
        layer.impl.sliding_window = (window - 1, 0)
        return
    builder.aot_schedule = False  # it would be made for full attention; a windowed draft has no long contexts
    if release() < (0, 28):
        builder.kv_cache_spec = replace(builder.kv_cache_spec, sliding_window=window)
    else:
        layer.impl.sliding_window = (window - 1, 0)


def schedule_without(target_builders: Iterable[Any], vllm_config: Any) -> None:
    """Let FlashAttention decide on the target's ahead-of-time schedules before draft layers have windows of their own.

    It does so at the first build, by whether all layers of the engine have one window.
    """
    for builder in target_builders:
        if getattr(builder, "aot_sliding_window", ()) is None:
            from vllm.v1.attention.backends.flash_attn import _get_sliding_window_configs

            windows = _get_sliding_window_configs(vllm_config)
            if len(windows) == 1:
                builder.aot_sliding_window = windows.pop() or (-1, -1)


def block_sizes(block_tables: Any) -> Sequence[int]:
    """Tokens per column: kernel blocks to vLLM 0.31; from 0.32 on each attention group splits blocks by itself."""
    return getattr(block_tables, "kernel_block_sizes", None) or block_tables.block_sizes


def splits_blocks(group: Any) -> bool:
    """vLLM 0.32 and later: an attention group with smaller blocks, whose builder reads a persistent mapping."""
    return getattr(group, "kernel_block_size", None) is not None


def queries_per_request(speculator: Any) -> int:
    """Query tokens of a forward whose requests all bring as many."""
    return getattr(speculator, "num_query_per_req", 1)


def extra_queries(speculator: Any) -> int:
    """vLLM 0.31 and later: tokens of a first forward beyond the target's (a draft model adds the newest token)."""
    return getattr(speculator, "num_extra_query_per_req", 0)


def refusal(speculator: Any) -> str | None:
    """Why a draft's attention cannot be windowed, whatever the window."""
    if not getattr(speculator, "advance_draft_positions", True):
        return "this draft attends to the target's KV cache and has none of its own"
    if getattr(speculator, "share_mtp_topk_indices", False):  # vLLM 0.28 and later
        return "its later steps reuse the first one's sparse token indices, which count from that one's window start"
    return None


def attention_of(speculator: Any) -> str | None:
    """vLLM-Ascend's name for the kind of a draft's attention; ``None`` where it is too old to say."""
    return getattr(speculator, "attn_architecture", None)


def prefill_context_parallel_size(parallel_config: Any) -> int:
    """Not every vLLM has it."""
    return getattr(parallel_config, "prefill_context_parallel_size", 1)


def context_parallel_size(parallel_config: Any) -> int:
    """Ranks over which the target's KV cache is sharded by tokens."""
    return parallel_config.decode_context_parallel_size * prefill_context_parallel_size(parallel_config)


def draft_context_parallel_size(vllm_config: Any) -> int:
    """Ranks over which the draft's is.

    vLLM 0.31 and later: decode context parallelism leaves dense parallel drafters whole, on each rank. Other drafts are
    sharded as the target is.
    """
    speculative, parallel = vllm_config.speculative_config, vllm_config.parallel_config
    size = context_parallel_size(parallel)
    if size == 1 or release() < (0, 31) or prefill_context_parallel_size(parallel) > 1:
        return size
    dense_and_parallel = speculative.method in PARALLEL_METHODS and not speculative.draft_model_config.use_mla
    return 1 if dense_and_parallel else size


def uses_v2_runner(vllm_config: Any) -> bool:
    """A vLLM that does not say has no other runner left."""
    return getattr(vllm_config, "use_v2_model_runner", True)


def call_with(function: Callable[..., Any], args: Any, kwargs: Any, **replaced: Any) -> None:
    """Call with other values for some parameters, of those that the function has, wherever a version has put them."""
    parameters = inspect.signature(function)
    bound = parameters.bind(*args, **kwargs)
    bound.arguments.update((name, value) for name, value in replaced.items() if name in parameters.parameters)
    function(*bound.args, **bound.kwargs)
