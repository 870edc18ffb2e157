# SPDX-License-Identifier: Apache-2.0
"""Which window to try first, and what to say about one."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from vllm_ascend.draft_window import config, facts
from vllm_ascend.draft_window.config import DraftWindow, WindowOff, resolve
from vllm_ascend.draft_window.facts import DraftFacts
from vllm_ascend.draft_window.options import DraftWindowOptions
from vllm_draft_window.planner.checkpoints import Checkpoint
from vllm_draft_window.planner.deployment import Deployment, geometry_of, tokens_seen


@dataclass(frozen=True, kw_only=True)
class Suggestion:
    window: int | None
    reason: str


def trained_length(target: Checkpoint, deployment: Deployment, known: DraftFacts) -> tuple[int | None, str]:
    """Tokens that the draft was trained on, as far as anything tells, and what told it."""
    if deployment.trained_length is not None:
        return deployment.trained_length, "--trained-length"
    # A value copied from the target says nothing about the draft's own training.
    if known.trained_length not in (None, facts.trained_length(target.config)):
        return known.trained_length, "the draft's config"
    return None, "the draft's config does not tell what it was trained on"


def suggest(target: Checkpoint, deployment: Deployment, known: DraftFacts, *, layers: int) -> Suggestion:
    """Rule of thumb: the longest window of whole blocks that shows no query more than the draft was trained on.

    Args:
        layers: attention layers of the draft.
    """
    if known.native_window:
        return Suggestion(
            window=None, reason=f"the draft has a sliding window of its own, {known.native_window} tokens; none needed"
        )
    trained, source = trained_length(target, deployment, known)
    if trained is not None and trained >= deployment.max_model_len:
        return Suggestion(
            window=None,
            reason=f"the draft was trained on {trained} tokens ({source}), max_model_len is "
            f"{deployment.max_model_len}; no window needed",
        )
    alignment = math.lcm(*deployment.block_sizes)
    if trained is None:
        size = max(config.DEFAULT_START // alignment, 1) * alignment
        decision = resolve(DraftWindowOptions(draft_window_size=size), known)
        if isinstance(decision, WindowOff):
            return Suggestion(window=None, reason=f"{source}, and {decision.reason}")
        return Suggestion(
            window=size,
            reason=f"{source}; {size} is a place to start from. Measure smaller and larger ones on your own texts, "
            f"or give --trained-length",
        )
    # No method needs more than its query tokens and its look-ahead.
    smallest = max(known.queries_per_request, known.num_speculative_tokens + 1)
    for size in range(trained // alignment * alignment, smallest - 1, -alignment):
        decision = resolve(DraftWindowOptions(draft_window_size=size), known)
        if isinstance(decision, WindowOff):
            return Suggestion(window=None, reason=decision.reason)
        geometry = geometry_of(decision, deployment, layers=layers)
        longest = tokens_seen(geometry, known, causal=True)[1][1]
        if longest <= trained:
            return Suggestion(
                window=size,
                reason=f"the draft was trained on {trained} tokens ({source}); a longer window does not help, and "
                f"with {size} in blocks of {alignment} a query sees at most {longest}",
            )
    return Suggestion(
        window=None,
        reason=f"no window of whole blocks of {alignment} stays within the draft's trained {trained} tokens ({source})",
    )


def warnings(
    target: Checkpoint, draft: Checkpoint, deployment: Deployment, window: DraftWindow | None
) -> Iterator[str]:
    for name, checkpoint in ("target", target), ("draft", draft):
        if checkpoint.layers_without_kv:
            yield f"{checkpoint.layers_without_kv} layers of the {name} keep no KV cache per token and are not counted"
    if window is None:
        return
    yield from window.warnings

    def columns(size: int) -> list[int]:
        return list(geometry_of(replace(window, size=size), deployment, layers=len(draft.windows)).columns)

    alignment = math.lcm(*deployment.block_sizes)
    if over := window.size % alignment:
        below, above = window.size - over, window.size - over + alignment
        yield (
            f"the window of {window.size} is not a multiple of the {alignment}-token alignment: it takes "
            f"{columns(window.size)} table columns, as {above} takes {columns(above)}"
            + (f" and {below} {columns(below)}" if below else "")
        )
