# SPDX-License-Identifier: Apache-2.0
"""Acceptance of the demo pair, off and on, over context lengths; compared with a run on another device."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .pair import DRAFT_TOKENS, TARGET, draft_folder, pack
from .serve import Request, ServeRun
from .session import run_child

# Standard errors of the difference of two means beyond which two devices are said to differ.
_SIGMAS = 3.0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Two engines, off and on; every prompt at every context length, cut to its last bytes."""

    method: str
    contexts: tuple[int, ...]
    prompts: list[list[int]]
    max_tokens: int
    window: int
    device: str
    work: Path
    timeout_s: float = 3600.0

    def runs(self) -> list[ServeRun]:
        workloads = {
            str(context): [Request(prompt[-context:], 0, self.max_tokens) for prompt in self.prompts]
            for context in self.contexts
        }
        longest = max(self.contexts) + self.max_tokens + 64
        return [
            ServeRun(
                name="off" if window is None else f"W={window}",
                target=str(TARGET),
                draft=str(draft_folder(self.method, self.work)),
                method=self.method,
                draft_tokens=DRAFT_TOKENS[self.method],
                mode="full",
                window=window,
                max_model_len=longest,
                max_num_seqs=8,
                workloads=workloads,
                device=self.device,
                kv_cache_bytes=(2 << 30) if self.device == "cpu" else (4 << 30),
            )
            for window in (None, self.window)
        ]


def run(plan: Plan, *, say: Callable[[str], None]) -> dict[str, Any]:
    """The document that is written as JSON, and that another device's run takes as its reference."""
    plan.work.mkdir(parents=True, exist_ok=True)
    cells: dict[str, dict[str, Any]] = {}
    results = {}
    for spec, column in zip(plan.runs(), ("off", "on"), strict=True):
        results[column] = run_child(
            "vllm_draft_window.bench.serve", spec, plan.work / f"pair-{column}", timeout_s=plan.timeout_s
        )
        for context, served in results[column]["workloads"].items():
            cells.setdefault(context, {})[column] = summarize(served)
        say(f"{spec.name}: " + ", ".join(f"{c} {cells[c][column]['accepted_length']:.2f}" for c in cells))
    tokens = {column: {c: w["tokens"] for c, w in r["workloads"].items()} for column, r in results.items()}
    return {
        "method": plan.method,
        "window": plan.window,
        "max_tokens": plan.max_tokens,
        "prompts": pack(plan.prompts),
        "versions": results["off"]["versions"],
        "machine": results["off"]["machine"],
        "engine": {column: result["engine"] for column, result in results.items()},
        "contexts": cells,
        "requests_with_equal_tokens": {
            c: sum(a == b for a, b in zip(tokens["off"][c], tokens["on"][c], strict=True)) for c in cells
        },
    }


def summarize(served: dict[str, Any]) -> dict[str, Any]:
    """Mean accepted length over all decode steps of a workload, and its standard error from request to request."""
    per_request = [
        ((len(tokens) - 1), steps) for tokens, steps in zip(served["tokens"], served["decode_steps"], strict=True)
    ]
    emitted, steps = (sum(column) for column in zip(*per_request, strict=True))
    mean = emitted / steps
    # Of a ratio of sums, requests being independent.
    residuals = [e - mean * s for e, s in per_request]
    n = len(residuals)
    error = statistics.stdev(residuals) * math.sqrt(n) / steps if n > 1 else math.inf
    return {"accepted_length": mean, "standard_error": error, "requests": n, "steps": steps}


def compare(document: dict[str, Any], reference: dict[str, Any]) -> list[dict[str, Any]]:
    """One row per context and column: both means, their difference in standard errors."""
    rows = []
    for context, cells in document["contexts"].items():
        for column, cell in cells.items():
            other = reference["contexts"].get(context, {}).get(column)
            if other is None:
                continue
            error = math.hypot(cell["standard_error"], other["standard_error"])
            difference = cell["accepted_length"] - other["accepted_length"]
            sigmas = abs(difference) / error if error else (0.0 if difference == 0 else math.inf)
            rows.append(
                {
                    "context": int(context),
                    "column": column,
                    "here": cell["accepted_length"],
                    "reference": other["accepted_length"],
                    "sigmas": sigmas,
                    "within_noise": sigmas <= _SIGMAS,
                }
            )
    return rows


def print_document(console: Any, document: dict[str, Any], rows: Sequence[dict[str, Any]]) -> None:
    from rich.table import Table

    against = {(row["context"], row["column"]): row for row in rows}
    title = f"Mean accepted length, {document['method']}, {document['machine']['device']}"
    table = Table(title=f"{title} (plus or minus a standard error; in brackets the reference)")
    for heading in ("context", "off", f"W={document['window']}", "equal requests"):
        table.add_column(heading, justify="right")
    for context, cells in document["contexts"].items():
        texts = []
        for column in ("off", "on"):
            cell, row = cells[column], against.get((int(context), column))
            text = f"{cell['accepted_length']:.2f} ± {cell['standard_error']:.2f}"
            texts.append(text if row is None else f"{text} ({row['reference']:.2f}, {row['sigmas']:.1f} σ)")
        equal = f"{document['requests_with_equal_tokens'][context]} of {cells['off']['requests']}"
        table.add_row(context, *texts, equal)
    console.print(table)
