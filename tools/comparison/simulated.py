# SPDX-License-Identifier: Apache-2.0
"""The same cells in plain torch: the prompts go through the target once, and every column drafts over them."""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from tools.demo_pair import DEMO_PAIR, DRAFT_FOLDERS, demo_prompts
from tools.demo_pair.export import load_draft, load_target
from tools.demo_pair.simulate import Sight, sight
from tools.demo_pair.simulate import simulate as simulate_columns

from .columns import Column, Steps
from .results import Result, measured

SOURCE = "simulation"
BLOCK_SIZE = 32  # the engine's here
BATCH = 4


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
    started = time.perf_counter()
    drafts = {method: load_draft(DEMO_PAIR / DRAFT_FOLDERS[method]) for method, _ in cells}
    walked, outputs = simulate_columns(
        load_target(DEMO_PAIR / "target"),
        torch.tensor(demo_prompts(prompts, context)),
        {(method, label): (drafts[method], _sight(columns[label])) for method, label in cells},
        # The prefill gives the first token without a draft.
        num_tokens=max_tokens - 1,
        batch=BATCH,
    )
    seconds = (time.perf_counter() - started) / len(cells)
    for (method, label), rounds in walked.items():
        yield measured((SOURCE, method, label, context), rounds, outputs, seconds)


def _sight(column: Column) -> Sight:
    names = {"window": "size", "sink": "sink_size", "min_context": "min_context"}
    given = {name: column.options.get(f"draft_window_{key}", 0) for name, key in names.items()}
    windowed, everything = sight(**given | {"window": given["window"] or None}, alignment=BLOCK_SIZE), sight()

    def seen(positions: torch.Tensor, **sizes: Any) -> tuple[torch.Tensor, ...]:
        parts = {Steps.all: (windowed,), Steps.first: (windowed, everything), Steps.later: (everything, windowed)}
        return tuple(mask for part in parts[column.steps] for mask in part(positions, **sizes))

    return seen
