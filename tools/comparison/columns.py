# SPDX-License-Identifier: Apache-2.0
"""What is compared: sets of draft window options, and windows on a part of a proposal's forwards only."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class Steps(str, Enum):
    """Forwards of a proposal that see the window. Anything but ``all`` is an experiment, not an option."""

    all = "all"
    first = "first"
    later = "later"


@dataclass(frozen=True)
class Column:
    """One column of the table.

    Attributes:
        options: the draft window's, as in ``additional_config``.
        steps: forwards that see the window; parallel drafters have one only.
    """

    options: dict[str, int] = field(default_factory=dict)
    steps: Steps = Steps.all

    @property
    def is_experiment(self) -> bool:
        return self.steps is not Steps.all


def columns(window: int) -> dict[str, Column]:
    """By the name that the table gives them."""
    size = {"draft_window_size": window}
    # With a gate, however low, no backend masks rows on top of the crop: all columns cut whole blocks, and the
    # experiments mask no forward that they leave alone.
    cropped = size | {"draft_window_min_context": 1}
    return {
        "off": Column(),
        "window": Column(cropped),
        "sink 4": Column(size | {"draft_window_sink_size": 4}),
        "sink 64": Column(size | {"draft_window_sink_size": 64}),
        "gate 1024": Column(size | {"draft_window_min_context": 1024}),
        "step 0 only": Column(cropped, Steps.first),
        "steps >= 1 only": Column(cropped, Steps.later),
    }


def limit_to(steps: Steps, speculator: Any) -> None:
    """Take the window away from the other forwards of an autoregressive speculator's proposals (eager mode)."""
    if steps is Steps.later:
        # Upstream's first forward reads the target's metadata.
        from vllm_ascend.draft_window.seams.autoregressive import TargetDependentSeam

        speculator._prefill = super(TargetDependentSeam, speculator)._prefill
    elif steps is Steps.first:
        windowed = speculator.window.build

        def first_only(build: Any, reader: Any, upper_bound: Any, rows: int, padded: int, step: int, *rest: Any) -> Any:
            if step:
                return build(upper_bound)
            return windowed(build, reader, upper_bound, rows, padded, step, *rest)

        speculator.window.build = first_only
