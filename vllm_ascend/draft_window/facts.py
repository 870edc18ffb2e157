# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM-Ascend project
"""What an engine's configuration and a draft's checkpoint say that decides about the window."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class DraftFacts:
    """What the resolution needs to know about the engine; :func:`facts_from_config` reads most of it.

    Attributes:
        method: ``speculative_config.method``.
        num_speculative_tokens: tokens per proposal.
        queries_per_request: query tokens of one draft forward (parallel drafters); 1 for autoregressive drafts.
        max_model_len: longest sequence that the engine serves.
        trained_length: longest sequence that the draft's checkpoint was trained on, if its config tells.
        fixed_positions: where the draft's positions end for good, if a longer table would change the ones it has.
        native_window: sliding window that the draft was built with; ``None`` or 0 means none.
        context_parallel_size: ranks over which the draft's KV cache is sharded by tokens.
        deepseek_v4_target: a DSpark draft that was trained with a DeepSeek-V4 target.
        adaptive_verification: the device decides how many drafts of each request are verified.
    """

    method: str
    num_speculative_tokens: int
    queries_per_request: int
    max_model_len: int
    trained_length: int | None = None
    fixed_positions: int | None = None
    native_window: int | None = None
    context_parallel_size: int = 1
    deepseek_v4_target: bool = False
    adaptive_verification: bool = False


def facts_from_config(vllm_config: Any) -> DraftFacts:
    """Read :class:`DraftFacts` from a ``VllmConfig`` that has a ``speculative_config``."""
    speculative = vllm_config.speculative_config
    tokens = speculative.num_speculative_tokens or 0
    draft_model = speculative.draft_model_config
    draft = getattr(draft_model, "hf_config", None)
    if speculative.method == "dflash":
        queries = tokens + 1
    elif speculative.method == "dspark":
        queries = tokens if getattr(draft, "sample_from_anchor", True) else tokens + 1
    else:
        queries = 1
    return DraftFacts(
        method=speculative.method,
        num_speculative_tokens=tokens,
        queries_per_request=queries,
        max_model_len=vllm_config.model_config.max_model_len,
        # vLLM writes the target's length into an EAGLE draft's config, after it has derived this one.
        trained_length=trained_length(draft, getattr(draft_model, "max_model_len", None)),
        fixed_positions=_fixed_positions(draft),
        native_window=native_window(draft),
        # Such a draft has the target's config. Its class is called as some converters call that of Qwen3 drafts.
        deepseek_v4_target=speculative.method == "dspark"
        and str(getattr(draft, "model_type", "")).startswith("deepseek_v4"),
        adaptive_verification=getattr(speculative, "enable_adaptive_verification", False),  # vLLM 0.28 and later
    )


def max_rejected(vllm_config: Any) -> int:
    """R: most tokens by which the host's optimistic lengths can be ahead of the device's.

    The host may count proposals that the device has rejected: those of this batch, of the one in flight while it was
    scheduled, and of one more per further pipeline stage.
    """
    stages = vllm_config.parallel_config.pipeline_parallel_size
    return vllm_config.speculative_config.num_speculative_tokens * (1 + stages)


def language_config(config: Any) -> Any:
    """The decoder's part of a HF config, which multimodal models nest."""
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def rope_parameters(config: Any) -> list[dict[str, Any]]:
    """RoPE as a HF config describes it, once or for each kind of layer; empty for other position embeddings."""
    given = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    nested = [value for value in given.values() if isinstance(value, dict)]
    kinds = nested or ([given] if given else [])
    return [{"rope_type": kind.get("type", "default"), **kind} for kind in kinds]


def trained_length(config: Any, derived: int | None = None) -> int | None:
    """Tokens that a draft's checkpoint was trained on, scaled RoPE counted with its factor; ``None`` if unknown.

    Args:
        config: HF config of the draft.
        derived: what vLLM has derived from the checkpoint, where ``config`` was changed since.
    """
    config = language_config(config)
    length = derived or getattr(config, "max_position_embeddings", None)
    for rope in rope_parameters(config):
        factor = rope.get("factor") or 1
        if "yarn" in rope["rope_type"]:
            return int(factor * (rope.get("original_max_position_embeddings") or length or 0)) or None
        if rope["rope_type"] in ("linear", "dynamic", "ntk") and length and not derived:
            return int(factor * length)
    return length


def _fixed_positions(config: Any) -> int | None:
    config = language_config(config)
    fixed = any("max_trained_positions" in rope or rope.get("use_fope") for rope in rope_parameters(config))
    return getattr(config, "max_position_embeddings", None) if fixed else None


def native_window(config: Any) -> int | None:
    """Sliding window that a draft's layers really have, as far as its HF config tells; KV cache specs tell the rest.

    Args:
        config: HF config; ``sliding_window`` alone says nothing, since many models never read it.
    """
    language = language_config(config)
    window = getattr(language, "sliding_window", None) or None
    dflash = getattr(config, "dflash_config", None) or {}
    if dflash.get("use_swa"):
        return dflash.get("swa_window_size") or window
    return window if "sliding_attention" in (getattr(language, "layer_types", None) or ()) else None
