# SPDX-License-Identifier: Apache-2.0
"""Greedy speculative decoding of the demo models, simulated exactly and without an engine.

Greedy verification never changes the output, so the target's own continuation is generated once; the draft is then
asked at *every* position of it in one batched pass, and the rounds are walked over those answers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

import torch

from .modeling import Draft, Target, visible_context

K = TypeVar("K", bound=Hashable)
Sight = Callable[..., tuple[torch.Tensor, ...]]
"""Anchors' positions, context length and draft tokens -> what they see, once, or for first and later forwards apart."""


@torch.inference_mode()
def nats_per_byte(target: Target, stream: torch.Tensor, *, context: int, max_windows: int) -> dict[str, float]:
    """Cross-entropy on a held-out stream: overall, and by position to show that long contexts hold up."""
    count = min(max_windows, (stream.numel() - 1) // context)
    losses = []
    for index in range(count):
        tokens = stream[index * context : (index + 1) * context + 1].long()[None]
        logits = target(tokens[:, :-1]).logits
        losses.append(torch.nn.functional.cross_entropy(logits[0], tokens[0, 1:], reduction="none"))
    # [context], averaged over the windows
    by_position = torch.stack(losses).mean(0)
    result = {"all": by_position.mean().item()}
    edge = 256
    while edge < context:
        result[f"{edge}-{2 * edge}"] = by_position[edge : 2 * edge].mean().item()
        edge *= 2
    return result


def accepted_lengths(
    target: Target,
    draft: Draft,
    # [P, T]
    prompts: torch.Tensor,
    windows: list[int | None],
    **sizes: int,
) -> dict[int | None, float]:
    """Mean tokens per round (accepted drafts plus the bonus token) by window; ``sizes`` are :func:`simulate`'s."""
    walked, _ = simulate(target, prompts, {window: (draft, sight(window=window)) for window in windows}, **sizes)
    totals = {window: torch.tensor(rounds).sum(0).tolist() for window, rounds in walked.items()}
    return {window: emitted / rounds for window, (emitted, rounds) in totals.items()}


def sight(**options: Any) -> Sight:
    """One part of the context for all forwards of a proposal; ``options`` are those of :func:`visible_context`."""
    return lambda positions, **sizes: (visible_context(positions, **sizes, **options),)


@torch.inference_mode()
def simulate(
    target: Target,
    # [P, T]
    prompts: torch.Tensor,
    columns: Mapping[K, tuple[Draft, Sight]],
    *,
    num_tokens: int,
    batch: int,
) -> tuple[dict[K, list[tuple[int, int]]], list[list[int]]]:
    """Emitted tokens and rounds of each prompt by column, and the target's tokens, which are the same for all.

    Args:
        num_tokens: anchors per prompt, the first of them the prompt's newest token.
    """
    size = max(draft.num_draft_tokens for draft, _ in columns.values())
    walked: dict[K, list[tuple[int, int]]] = {key: [] for key in columns}
    outputs: list[list[int]] = []
    for chunk in prompts.split(batch):
        truth, features = generate(target, chunk, num_tokens + size)
        outputs += truth.tolist()
        # [P, T + num_tokens]
        tokens = torch.cat([chunk, truth[:, :num_tokens]], dim=1)
        features = [layer[:, : tokens.shape[1] - 1] for layer in features]
        known: dict[Draft, Any] = {}
        for key, (draft, seen) in columns.items():
            if draft not in known:
                known[draft] = draft.context(draft.select_features(features), tokens)
            walked[key] += walk(draft_everywhere(draft, known[draft], tokens, first=chunk.shape[1], seen=seen), truth)
    return walked, outputs


@torch.inference_mode()
def draft_everywhere(
    draft: Draft,
    # of all tokens but the last
    context: Any,
    # [P, T]
    tokens: torch.Tensor,
    *,
    first: int,
    seen: Sight,
) -> torch.Tensor:
    """Greedy drafts with every position from ``first`` on as the anchor, ``[P, T - first, N]``."""
    length = tokens.shape[1]
    positions = torch.arange(first, length, device=tokens.device)[None]
    visible = seen(positions, context_length=length - 1, num_draft_tokens=draft.num_draft_tokens)
    return draft(context, tokens[:, first:, None], positions, *visible).argmax(-1)


@torch.inference_mode()
def generate(target: Target, prompts: torch.Tensor, num_tokens: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Greedy continuation, ``[P, num_tokens]``, and the hidden states of every token but the last one.

    One tensor ``[P, T, hidden]`` for the embedding and one for each layer.
    """
    generated: Any = target.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=None,
        output_hidden_states=True,
        return_dict_in_generate=True,
    )
    hidden_states = [torch.cat(pieces, dim=1) for pieces in zip(*generated.hidden_states, strict=True)]
    return generated.sequences[:, prompts.shape[1] :], hidden_states


def walk(drafted: torch.Tensor, truth: torch.Tensor) -> list[tuple[int, int]]:
    """Emitted tokens and rounds of each prompt, when it moves on by accepted + 1."""
    # [P, A, N]: what the target says after each anchor
    expected = truth[:, 1:].unfold(1, drafted.shape[-1], 1)
    # [P][A]
    accepted = (drafted == expected).int().cumprod(-1).sum(-1).tolist()
    walked = []
    for row in accepted:
        rounds = position = 0
        while position < len(row):
            rounds += 1
            position += row[position] + 1
        walked.append((position, rounds))
    return walked
