# SPDX-License-Identifier: Apache-2.0
"""Intervals over prompts, and which window they recommend."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .cells import Cell

RESAMPLES = 4000
LEVEL = 95

Cells = Mapping[tuple[int | None, int], Cell]


def resample(cell: Cell) -> np.ndarray:
    """Accepted lengths of ``RESAMPLES`` draws of prompts with replacement, [RESAMPLES].

    Cells of one context length draw the same prompts, so that their difference is a paired one.
    """
    # [RESAMPLES, num_prompts]
    drawn = np.random.default_rng(cell.context).integers(0, len(cell.steps), (RESAMPLES, len(cell.steps)))
    return np.array(cell.tokens)[drawn].sum(1) / np.array(cell.steps)[drawn].sum(1)


def interval(samples: np.ndarray) -> tuple[float, float]:
    """Percentile interval of ``LEVEL`` percent."""
    low, high = np.percentile(samples, [(100 - LEVEL) / 2, (100 + LEVEL) / 2])
    return float(low), float(high)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """``window`` is ``None`` where none helps."""

    window: int | None
    reason: str


def recommend(cells: Cells, windows: Sequence[int], contexts: Sequence[int]) -> Verdict:
    """The smallest window that is not measurably worse than the best, if that one is measurably better than none.

    *Measurably*: the paired interval of the difference does not hold 0. A window's score is its accepted length, meaned
    over the context lengths.
    """
    samples = {key: resample(cell) for key, cell in cells.items()}
    # [RESAMPLES] by window
    scores = {window: np.mean([samples[window, n] for n in contexts], axis=0) for window in (None, *windows)}

    def score(window: int | None) -> float:
        return float(np.mean([cells[window, n].accepted_length for n in contexts]))

    best = max(windows, key=score)
    as_good = [w for w in windows if interval(scores[best] - scores[w])[0] <= 0]
    window = min(as_good)
    low, high = interval(scores[window] - scores[None])
    gains = {n: interval(samples[window, n] - samples[None, n]) for n in contexts}
    helps = [n for n in contexts if gains[n][0] > 0]
    hurts = [n for n in contexts if gains[n][1] < 0]
    gain = score(window) - score(None)
    measured = f"{gain:+.2f} tokens per step on average ({LEVEL} % interval {low:+.2f} to {high:+.2f})"
    if low <= 0:
        if helps:
            return Verdict(
                window=None,
                reason=f"No window helps over all of these context lengths: the best, {window}, gives {measured}. "
                f"It helps at {_list(helps)} only{_hurt(hurts)}; if that is your traffic, sweep those lengths alone.",
            )
        return Verdict(
            window=None,
            reason=f"No window helps on these prompts: the best, {window}, gives {measured}. Either the draft holds "
            f"up on these context lengths, or every window is above the length that it was trained for.",
        )
    others = [w for w in as_good if w != window]
    reason = f"It gives {measured} over no window; it helps at {_list(helps)}{_hurt(hurts)}."
    if others:
        reason += f" {_list(others)} is not measurably different; the smaller window reads less."
    worse = [w for w in windows if w not in as_good]
    if worse:
        reason += f" Measurably worse: {_list(worse)}."
    if hurts:
        reason += f" draft_window_min_context={min(helps)} keeps shorter requests as they are."
    return Verdict(window=window, reason=reason)


def _list(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def _hurt(contexts: Sequence[int]) -> str:
    return f" and costs acceptance at {_list(contexts)}" if contexts else ""
