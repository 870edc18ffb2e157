# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM-Ascend project
"""From the user's options and the engine's facts to one frozen window in force, or to *off, because ...*."""

import logging
from dataclasses import dataclass, replace

from .facts import DraftFacts
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
