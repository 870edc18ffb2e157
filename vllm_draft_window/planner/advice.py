# SPDX-License-Identifier: Apache-2.0
"""Which window to try first, and what to say about one."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from vllm_ascend.draft_window import config, facts
from vllm_ascend.draft_window.config import DraftWindow, WindowOff, resolve
from vllm_ascend.draft_window.options import DraftWindowOptions

from .deployment import Deployment


@dataclass(frozen=True)
class Suggestion:
    window: int | None
    reason: str


def trained_length(deployment: Deployment) -> tuple[int | None, str]:
    """Tokens that the draft was trained on, as far as anything tells, and what told it."""
    if deployment.trained_length is not None:
        return deployment.trained_length, "--trained-length"
    trained = deployment.facts.trained_length
    # A value copied from the target says nothing about the draft's own training.
    if trained not in (None, facts.trained_length(deployment.target.config)):
        return trained, "the draft's config"
    return None, "the draft's config does not tell what it was trained on"


def suggest(deployment: Deployment) -> Suggestion:
    """Rule of thumb: the longest window of whole blocks that shows no query more than the draft was trained on."""
    known, longest = deployment.facts, deployment.max_model_len
    if native := known.native_window:
        return Suggestion(None, f"the draft has a sliding window of its own, {native} tokens; none needed")
    trained, source = trained_length(deployment)
    if trained is not None and trained >= longest:
        reason = f"the draft was trained on {trained} tokens ({source}), max_model_len is {longest}; no window needed"
        return Suggestion(None, reason)
    alignment = math.lcm(*deployment.block_sizes)
    if trained is None:
        size = max(config.DEFAULT_START // alignment, 1) * alignment
        decision = resolve(DraftWindowOptions(draft_window_size=size), known)
        if isinstance(decision, WindowOff):
            return Suggestion(None, f"{source}, and {decision.reason}")
        reason = f"{source}; {size} is a place to start from. Measure smaller and larger ones on your own texts"
        return Suggestion(size, f"{reason}, or give --trained-length")
    # No method needs more than its query tokens and its look-ahead.
    smallest = max(known.queries_per_request, known.num_speculative_tokens + 1)
    for size in range(trained // alignment * alignment, smallest - 1, -alignment):
        decision = resolve(DraftWindowOptions(draft_window_size=size), known)
        if isinstance(decision, WindowOff):
            return Suggestion(None, decision.reason)
        _, (_, most) = deployment.tokens_seen(deployment.geometry(decision), causal=True)
        if most <= trained:
            return Suggestion(
                size,
                f"the draft was trained on {trained} tokens ({source}); a longer window does not help, and with {size} "
                f"in blocks of {alignment} a query sees at most {most}",
            )
    reason = f"no window of whole blocks of {alignment} stays within the draft's trained {trained} tokens ({source})"
    return Suggestion(None, reason)


def warnings(deployment: Deployment, window: DraftWindow | None) -> Iterator[str]:
    for name, checkpoint in ("target", deployment.target), ("draft", deployment.draft):
        if checkpoint.layers_without_kv:
            yield f"{checkpoint.layers_without_kv} layers of the {name} keep no KV cache per token and are not counted"
    if window is None:
        return
    yield from window.warnings

    def columns(size: int) -> list[int]:
        return list(deployment.geometry(replace(window, size=size)).columns)

    alignment = math.lcm(*deployment.block_sizes)
    if over := window.size % alignment:
        below, above = window.size - over, window.size - over + alignment
        yield (
            f"the window of {window.size} is not a multiple of the {alignment}-token alignment: it takes "
            f"{columns(window.size)} table columns, as {above} takes {columns(above)}"
            + (f" and {below} {columns(below)}" if below else "")
        )
