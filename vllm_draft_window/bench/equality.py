# SPDX-License-Identifier: Apache-2.0
"""The same tokens from every method, graph mode and window, while requests come and go."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from .pair import DRAFT_TOKENS, TARGET, draft_folder, texts
from .serve import Request, ServeRun
from .session import ChildFailed, run_child
from .summary import address_failures

MAX_NUM_SEQS = 8
MAX_MODEL_LEN = 512
# A difference of logits that bfloat16 cannot be held to: its unit is 2^-8 of a value, and errors of layers add up.
_TIE = 2.0**-5


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """What is run: every method in every mode, with the window off and on."""

    methods: tuple[str, ...]
    modes: tuple[str, ...]
    window: int
    requests: int
    device: str
    work: Path
    jobs: int
    timeout_s: float = 600.0

    def runs(self) -> list[ServeRun]:
        workload = {"churn": churn(self.requests)}
        return [
            ServeRun(
                name=f"{method} {mode} {'off' if window is None else f'W={window}'}",
                target=str(TARGET),
                draft=str(draft_folder(method, self.work)),
                method=method,
                draft_tokens=DRAFT_TOKENS[method],
                mode=mode,
                window=window,
                max_model_len=MAX_MODEL_LEN,
                max_num_seqs=MAX_NUM_SEQS,
                workloads=workload,
                device=self.device,
                kv_cache_bytes=64 << 20,
                one_split=True,
            )
            for method, mode, window in product(self.methods, self.modes, (None, self.window))
        ]


def churn(count: int) -> list[Request]:
    """Requests of different lengths whose batch fills up, empties to one, and fills up again.

    They stay below :data:`MAX_MODEL_LEN`, where attention does not split the context even when free to.
    """
    rng = random.Random(0)
    prompts = texts(count, MAX_MODEL_LEN)
    requests = []
    for i, prompt in enumerate(prompts):
        length, max_tokens = rng.randint(20, 380), rng.randint(16, 96)
        # The second half arrives when the first is nearly done.
        arrival = 2 * i + (60 if i >= count // 2 else 0)
        requests.append(Request(prompt[-length:], arrival, max_tokens))
    return requests


def run(matrix: Matrix, *, say: Callable[[str], None]) -> tuple[list[dict[str, Any]], list[str]]:
    """Run the matrix, several engines at a time; returns their results and a line for each that is missing."""
    matrix.work.mkdir(parents=True, exist_ok=True)

    def one(spec: ServeRun) -> dict[str, Any] | str:
        stem = matrix.work / spec.name.replace(" ", "-").replace("=", "")
        try:
            result = run_child("vllm_draft_window.bench.serve", spec, stem, timeout_s=matrix.timeout_s)
        except ChildFailed as error:
            say(f"{spec.name}: failed")
            return f"{spec.name}: {error}"
        say(f"{spec.name}: done")
        return result

    with ThreadPoolExecutor(matrix.jobs) as pool:
        outcomes = list(pool.map(one, matrix.runs()))
    return [o for o in outcomes if isinstance(o, dict)], [o for o in outcomes if isinstance(o, str)]


def compare(results: Sequence[dict[str, Any]], requests: Sequence[Request], device: str) -> list[dict[str, Any]]:
    """One row per result: tokens equal to the first result's, and each first difference with the logits behind it."""
    reference = results[0]["workloads"]["churn"]["tokens"]
    rows = []
    for result in results:
        measured = result["workloads"]["churn"]
        differences = []
        equal = 0
        for i, (expected, got) in enumerate(zip(reference, measured["tokens"], strict=True)):
            first = next((t for t, pair in enumerate(zip(expected, got, strict=True)) if pair[0] != pair[1]), None)
            equal += len(expected) if first is None else first
            if first is not None:
                context = requests[i].prompt + expected[:first]
                gap = logit_gap(context, expected[first], got[first], device)
                differences.append({"request": i, "token": first, "relative_gap": gap, "tie": gap <= _TIE})
        steps = sum(measured["decode_steps"])
        emitted = sum(map(len, measured["tokens"])) - len(measured["tokens"])
        rows.append(
            {
                "name": result["name"],
                "equal_tokens": equal,
                "tokens": sum(map(len, reference)),
                "differences": differences,
                "accepted_length": emitted / steps if steps else None,
                "batch_sizes": measured["batch_sizes"],
                "addresses": result["addresses"],
                "sync": result["sync"],
                "engine": result["engine"],
            }
        )
    return rows


def logit_gap(context: list[int], expected: int, got: int, device: str) -> float:
    """How far apart the target itself, in float32, sees two next tokens; relative to the larger logit."""
    import torch
    from transformers import AutoModelForCausalLM

    if device not in _reference:
        model: Any = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
        _reference[device] = model.to(device).eval()
    with torch.inference_mode():
        logits = _reference[device](torch.tensor([context], device=device)).logits[0, -1]
    a, b = logits[expected].item(), logits[got].item()
    return abs(a - b) / max(abs(a), abs(b), 1.0)


_reference: dict[str, Any] = {}


def failures(results: Sequence[dict[str, Any]], rows: Sequence[dict[str, Any]]) -> list[str]:
    """A line per broken promise. Differences that the target sees as ties are none."""
    lines = []
    for result, row in zip(results, rows, strict=True):
        name, addresses, sync = row["name"], row["addresses"], row["sync"]
        lines += [f"{name}: {d}" for d in row["differences"] if not d["tie"]]
        if max(row["batch_sizes"]) < 3 or row["batch_sizes"] == sorted(row["batch_sizes"]):
            lines.append(f"{name}: the batch did not grow and shrink: {row['batch_sizes']}")
        if sync is not None:
            if not sync["detector_works"]:
                lines.append(f"{name}: CUDA's synchronization check does not detect anything")
            if result["window"] is not None:
                lines += [f"{name}: synchronizes in {violation}" for violation in sync["violations"]]
        if result["window"] is None:
            continue
        if row["engine"]["window_columns"] is None:
            lines.append(f"{name}: the window is not in force")
        elif result["mode"] == "full" and "FULL" in row["engine"]["cudagraph_mode"]:
            lines += [f"{name}: {line}" for line in address_failures(addresses)]
        # Without graphs, builds from which nothing is cut read the originals.
        elif not addresses["builds_on_twins"] or addresses["distinct_pairs"] > 2:
            lines.append(f"{name}: {addresses['distinct_pairs']} address pairs, {addresses}")
    return lines


def print_rows(console: Any, rows: Sequence[dict[str, Any]]) -> None:
    from rich.table import Table

    table = Table(title=f"Tokens against {rows[0]['name']}, {rows[0]['tokens']} in all; requests come and go")
    for title in ("run", "accepted", "equal", "ties", "differ", "batch", "builds on twins", "replays", "syncs"):
        table.add_column(title, justify="left" if title == "run" else "right")
    for row in rows:
        ties = sum(d["tie"] for d in row["differences"])
        addresses, sync, sizes = row["addresses"], row["sync"], row["batch_sizes"]
        accepted = row["accepted_length"]
        table.add_row(
            row["name"],
            "-" if accepted is None else f"{accepted:.2f}",
            str(row["equal_tokens"]),
            str(ties),
            str(len(row["differences"]) - ties),
            f"{min(sizes)}-{max(sizes)}, {len(sizes) - 1} changes",
            "-" if addresses["builds_on_twins"] is None else f"{addresses['builds_on_twins']} of {addresses['builds']}",
            str(addresses["replays"]),
            "-" if sync is None else str(sync["violating_calls"]),
        )
    console.print(table)
