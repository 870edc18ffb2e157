# SPDX-License-Identifier: Apache-2.0
"""What is measured for one set of options, on the engine or in the simulation."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm_draft_window.measuring.cells import Cell

# source, method, column, context
Key = tuple[str, str, str, int]


@dataclass(frozen=True, kw_only=True)
class Result(Cell):
    """One column at one context length.

    Attributes:
        source: what ran it, a version of vLLM or the simulation.
        output: digest of the output tokens, which no option may change.
    """

    source: str
    method: str
    column: str
    output: str

    @property
    def key(self) -> Key:
        return self.source, self.method, self.column, self.context


def measured(key: Key, counted: Sequence[tuple[int, int]], outputs: Any, seconds: float) -> Result:
    """From tokens and target steps of each prompt, and the output tokens of all."""
    place = dict(zip(("source", "method", "column", "context"), key, strict=True))
    output = hashlib.sha256(repr(outputs).encode()).hexdigest()[:16]
    return Result.of(counted, output=output, seconds=round(seconds, 1), **place)


def different_outputs(results: Sequence[Result]) -> list[Result]:
    """Results whose output tokens are not those of the same prompts with other options."""
    first: dict[tuple[str, int, int], str] = {}
    return [r for r in results if first.setdefault((r.source, r.context, len(r.steps)), r.output) != r.output]
