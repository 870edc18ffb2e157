# SPDX-License-Identifier: Apache-2.0
"""Which window the measured cells recommend."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from vllm_draft_window.measuring.cells import LEVEL, Cell, interval

Window = int | Literal["auto"] | None
"""In tokens; ``None`` is without a window."""


@dataclass(frozen=True, kw_only=True)
class WindowCell(Cell):
    window: Window

    @property
    def key(self) -> tuple[Window, int]:
        return self.window, self.context


Cells = Mapping[tuple[Window, int], WindowCell]
"""By window and context length."""


class Verdict(NamedTuple):
    """``window`` is ``None`` where none helps."""

    window: int | None
    reason: str


def recommend(cells: Cells, windows: Sequence[int], contexts: Sequence[int]) -> Verdict:
    """The smallest window that is not measurably worse than the best, if that one is measurably better than none.

    *Measurably*: the paired interval of the difference does not hold 0. A window's score is its accepted length,
    averaged over the context lengths.
    """
    samples = {key: cell.resampled for key, cell in cells.items()}
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
    costs = f" and costs acceptance at {_list(hurts)}" if hurts else ""
    if low <= 0 and helps:
        return Verdict(
            None,
            f"No window helps over all of these context lengths: the best, {window}, gives {measured}. It helps at "
            f"{_list(helps)} only{costs}; if that is your traffic, sweep those lengths alone.",
        )
    if low <= 0:
        return Verdict(
            None,
            f"No window helps on these prompts: the best, {window}, gives {measured}. Either the draft holds up on "
            f"these context lengths, or every window is above the length that it was trained for.",
        )
    reason = f"It gives {measured} over no window; it helps at {_list(helps)}{costs}."
    if others := [w for w in as_good if w != window]:
        reason += f" {_list(others)} is not measurably different; the smaller window reads less."
    if worse := [w for w in windows if w not in as_good]:
        reason += f" Measurably worse: {_list(worse)}."
    if hurts:
        reason += f" draft_window_min_context={min(helps)} keeps shorter requests as they are."
    return Verdict(window, reason)


def differences(here: Cells, there: Cells) -> Iterator[tuple[WindowCell, WindowCell, float]]:
    """Cells of both sweeps, which had the same prompts, and their difference in its standard errors over prompts."""
    for key, cell in here.items():
        if other := there.get(key):
            # The draws are of the same prompts on both sides.
            error = float((cell.resampled - other.resampled).std())
            difference = abs(cell.accepted_length - other.accepted_length)
            yield cell, other, difference / error if error else 0.0


def _list(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
