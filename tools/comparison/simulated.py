# SPDX-License-Identifier: Apache-2.0
"""The same cells in plain torch: the prompts go through the target once, and every column drafts over them."""

import hashlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from tools.demo_pair import DEMO_PAIR, DRAFT_FOLDERS, demo_prompts
from tools.demo_pair.export import load_draft, load_target
from tools.demo_pair.modeling import Draft, visible_context
from tools.demo_pair.simulate import generate_with_features, walk

from .columns import Column, Steps
from .results import Result

SOURCE = "simulation"
BLOCK_SIZE = 32  # the engine's here
BATCH = 4


@torch.inference_mode()
def simulate(
    # method, column
    cells: Sequence[tuple[str, str]],
    columns: Mapping[str, Column],
    context: int,
    *,
    prompts: int,
    max_tokens: int,
) -> Iterator[Result]:
    """The cells of one context length."""
    target = load_target(DEMO_PAIR / "target")
    drafts = {method: load_draft(DEMO_PAIR / DRAFT_FOLDERS[method]) for method, _ in cells}
    size = max(draft.config.num_draft_tokens for draft in drafts.values())
    walked: dict[tuple[str, str], list[tuple[int, int]]] = {cell: [] for cell in cells}
    outputs: list[list[int]] = []
    started = time.perf_counter()
    for batch in torch.tensor(demo_prompts(prompts, context)).split(BATCH):
        # The prefill gives the first token without a draft, so that there are max_tokens - 1 places to draft at.
        truth, features = generate_with_features(target, batch, max_tokens - 1 + size)
        outputs += truth.tolist()
        # [P, context + max_tokens - 1]
        tokens = torch.cat([batch, truth[:, : max_tokens - 1]], dim=1)
        features = [layer[:, : tokens.shape[1] - 1] for layer in features]
        known = {name: draft.context(draft.select_features(features), tokens) for name, draft in drafts.items()}
        for name, label in cells:
            walked[name, label] += walk(_draft(drafts[name], known[name], tokens, context, columns[label]), truth)
    output = hashlib.sha256(repr(outputs).encode()).hexdigest()[:16]
    seconds = (time.perf_counter() - started) / len(cells)
    for name, label in cells:
        emitted, rounds = zip(*walked[name, label], strict=True)
        yield Result(
            source=SOURCE,
            method=name,
            column=label,
            context=context,
            max_tokens=max_tokens,
            tokens=emitted,
            steps=rounds,
            output=output,
            seconds=round(seconds, 1),
        )


def _draft(draft: Draft, known: Any, tokens: torch.Tensor, first: int, column: Column) -> torch.Tensor:
    """Greedy drafts with every position from ``first`` on as the anchor, ``[P, T - first, N]``."""
    length = tokens.shape[1]
    positions = torch.arange(first, length)[None]
    sizes = {"context_length": length - 1, "num_draft_tokens": draft.config.num_draft_tokens}
    options = column.options
    windowed = visible_context(
        positions,
        window=options.get("draft_window_size"),
        sink=options.get("draft_window_sink_size", 0),
        min_context=options.get("draft_window_min_context", 0),
        alignment=BLOCK_SIZE,
        **sizes,
    )
    if column.steps is Steps.all:
        return draft(known, tokens[:, first:, None], positions, windowed).argmax(-1)
    everything = visible_context(positions, **sizes)
    visible = (windowed, everything) if column.steps is Steps.first else (everything, windowed)
    return draft(known, tokens[:, first:, None], positions, *visible).argmax(-1)
