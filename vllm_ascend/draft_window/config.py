# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM-Ascend project
"""From the user's options and the engine's facts to one frozen window in force, or to *off, because ...*."""

import logging
from dataclasses import dataclass, replace
from typing import Any

from .options import DraftWindowOptions

LADDER = (128, 256, 512, 1024, 2048, 4096, 8192)
"""Sizes that ``auto`` chooses from unless the user gives others. Fewer are learned faster, and a window of fewer tokens
than one tile of an attention kernel saves nothing."""
DEFAULT_START = 2048
"""Size that ``auto`` begins with where the draft's checkpoint does not tell the length that it was trained on."""
PARALLEL_METHODS = frozenset({"dflash", "dspark"})
"""Methods that draft all tokens in one forward over a KV cache of their own."""
AUTOREGRESSIVE_METHODS = frozenset({"draft_model", "eagle", "eagle3"})
"""Methods that draft token by token over a KV cache of their own."""


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


@dataclass(frozen=True, kw_only=True)
class DraftWindow:
    """A window in force, in tokens.

    Attributes:
        size: W; of ``auto``, the largest candidate.
        reclaim: the KV cache keeps only what the window reads.
        candidates: sizes that ``auto`` chooses from, ascending, at least two; empty for a fixed window.
        start: the candidate that it begins with; ``None`` for a fixed window.
        widened_from: the size that the user wrote, where the draft's own window is wider.
        warnings: for the log, once.
    """

    method: str
    size: int
    sink_size: int
    min_context: int
    queries_per_request: int
    max_lookahead: int
    reclaim: bool = False
    candidates: tuple[int, ...] = ()
    start: int | None = None
    widened_from: int | None = None
    warnings: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """W as the start-up line says it."""
        if not self.candidates:
            return str(self.size)
        return f"auto ({', '.join(map(str, self.candidates))}; first {self.start})"

    def fixed(self, reason: str) -> "DraftWindow":
        """``auto`` where it cannot learn: the size that it would begin with."""
        if self.start is None:
            return self
        warning = f"draft_window_size='auto' stays at {self.start} tokens: {reason}"
        return replace(self, size=self.start, candidates=(), start=None, warnings=(*self.warnings, warning))

    def widened_to(self, native_window: int | None) -> "DraftWindow":
        """A draft is never shrunk below the window that it was trained with: that costs acceptance."""
        if not native_window or native_window <= min(self.candidates, default=self.size):
            return self
        if wide_enough := tuple(size for size in self.candidates if size >= native_window):
            start = max(self.start or 0, wide_enough[0])
            several = len(wide_enough) > 1
            return replace(self, candidates=wide_enough * several, start=start if several else None)
        asked_for = self.size if self.widened_from is None else self.widened_from
        warning = (
            f"draft_window_size={asked_for} is below the draft's own sliding window of {native_window} tokens; "
            f"using {native_window}"
        )
        warnings = (*self.warnings, warning)
        return replace(self, size=native_window, candidates=(), start=None, widened_from=asked_for, warnings=warnings)

    def visible(self, block_size: int) -> tuple[int, int]:
        """Fewest and most tokens that a query of a long request sees, in whole blocks, the sink included."""
        sink = -(-self.sink_size // block_size) * block_size
        return min(self.candidates, default=self.size) + sink, self.size + sink + block_size - 1

    def covers(self, max_model_len: int, *, block_size: int = 1) -> "WindowOff | None":
        """Why no sequence of at most ``max_model_len`` tokens is ever cropped in whole blocks, if none is."""
        if self.min_context >= max_model_len:
            return WindowOff(f"draft_window_min_context={self.min_context} covers max_model_len={max_model_len}")
        size = min(self.candidates, default=self.size)
        covering = [f"draft_window_size={size}"]
        if self.widened_from is not None:
            covering = [f"the draft's own sliding window of {size} tokens"]
        if self.sink_size and size < max_model_len:
            covering.append(f"draft_window_sink_size={self.sink_size}")
        what = " and ".join(covering)
        verb = "covers" if len(covering) == 1 else "cover"
        if size + self.sink_size >= max_model_len:
            return WindowOff(f"{what} {verb} max_model_len={max_model_len}")
        sink = -(-self.sink_size // block_size) * block_size
        if size - self.max_lookahead + sink + block_size > max_model_len:
            return WindowOff(f"{what}, in whole blocks of {block_size} tokens, {verb} max_model_len={max_model_len}")
        return None


@dataclass(frozen=True)
class WindowOff:
    """Why the option cannot act, and the :mod:`logging` level at which to say so."""

    reason: str
    level: int = logging.INFO


class ReclaimRefused(ValueError):
    """``draft_window_reclaim`` cannot work here, or would not pay."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"draft_window_reclaim=true is not possible here: {reason}; leave the option out")


def resolve(options: DraftWindowOptions, facts: DraftFacts) -> DraftWindow | WindowOff:
    """Decide which window is in force, or why none is.

    Raises:
        ValueError: the options cannot work with this engine; names the option, its value and the allowed range.
    """
    size, method = options.draft_window_size, facts.method
    is_mtp = method == "mtp" or method.endswith("_mtp")
    if is_mtp and not options.draft_window_mtp:
        return WindowOff("an MTP head is part of the target; set draft_window_mtp to window it all the same")
    autoregressive = is_mtp or method in AUTOREGRESSIVE_METHODS
    if not autoregressive and method not in PARALLEL_METHODS:
        return WindowOff(f"the method {method} has no draft attention over the context", logging.WARNING)
    lookahead = facts.num_speculative_tokens if autoregressive else 0
    candidates: tuple[int, ...] = ()
    if size == "auto":
        candidates = _candidates(options, max(lookahead + 1, facts.queries_per_request), facts.max_model_len)
        if not candidates:
            return WindowOff(f"draft_window_size='auto' has no candidate below max_model_len={facts.max_model_len}")
        if len(candidates) == 1:
            size, candidates = candidates[0], ()
    known_good = facts.trained_length or DEFAULT_START
    window = DraftWindow(
        method=method,
        size=candidates[-1] if size == "auto" else size,
        candidates=candidates,
        start=max((c for c in candidates if c <= known_good), default=min(candidates, default=None)),
        sink_size=options.draft_window_sink_size,
        min_context=options.draft_window_min_context,
        queries_per_request=facts.queries_per_request,
        max_lookahead=lookahead,
        reclaim=options.draft_window_reclaim,
    ).widened_to(facts.native_window)
    if covered := window.covers(facts.max_model_len):
        return covered

    if facts.adaptive_verification and autoregressive:
        return WindowOff(
            f"with adaptive verification only the device knows the tokens of {method}'s first forward", logging.WARNING
        )
    if facts.context_parallel_size > 1:
        raise ValueError(
            f"draft_window_size={size!r} is not supported with context parallelism (size "
            f"{facts.context_parallel_size}) that shards the draft's KV cache; the decode and prefill context parallel "
            f"sizes must be 1"
        )
    if window.reclaim and is_mtp:
        raise ReclaimRefused(f"an MTP head ({method}) is one more layer of the target")
    if window.reclaim and window.sink_size:
        raise ReclaimRefused(
            f"the KV cache is freed from the first token on, draft_window_sink_size={window.sink_size} needs the first"
        )
    if window.size <= lookahead:
        raise ValueError(
            f"draft_window_size={size!r} is too small for {method}: it must be at least {lookahead + 1}, "
            f"one more than num_speculative_tokens"
        )
    if window.size < facts.queries_per_request:
        raise ValueError(
            f"draft_window_size={size!r} is too small for {method}: it must be at least {facts.queries_per_request}, "
            f"the query tokens of one draft forward"
        )

    fixed = facts.fixed_positions
    if fixed is not None and fixed < facts.max_model_len:
        raise ValueError(
            f"draft_window_size={size!r} needs positions up to max_model_len={facts.max_model_len}, but the draft's "
            f"RoPE depends on its length of {fixed} and cannot be extended; max_model_len must be at most {fixed}"
        )
    warnings = list(window.warnings)
    if facts.trained_length is not None and not candidates and window.size > facts.trained_length:
        warnings.append(
            f"the window of {window.size} tokens is above the {facts.trained_length} that the draft was trained on; "
            f"what lies beyond them does not help"
        )
    if facts.deepseek_v4_target:
        warnings.append(
            "this DSpark draft was trained with a DeepSeek-V4 target and is stable on long contexts; "
            "a window lowers its acceptance"
        )
    return replace(window, warnings=tuple(warnings))


def _candidates(options: DraftWindowOptions, smallest: int, max_model_len: int) -> tuple[int, ...]:
    """The sizes that can act, ascending, each once.

    Raises:
        ValueError: the user has named some that cannot.
    """
    given = options.draft_window_candidates
    able = tuple(sorted({size for size in given or LADDER if smallest <= size < max_model_len}))
    if unable := sorted({*given} - {*able}):
        raise ValueError(
            f"draft_window_candidates={given} is not allowed: {', '.join(map(str, unable))} cannot act, each must be "
            f"from {smallest} to {max_model_len - 1}, which is below max_model_len"
        )
    return able


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
