# SPDX-License-Identifier: Apache-2.0
"""From the engines' results to the figures that are reported, and to pass or fail."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from .models import PairSizes

Results = Sequence[dict[str, Any]]


def summarize(results: Results, sizes: PairSizes, *, window: int) -> list[dict[str, Any]]:
    """One entry per workload: per configuration its turns and their median, floors, token comparison."""
    bandwidth = median(r["copy_bandwidth"] for r in results)
    block_size = results[0]["engine"]["block_size"]
    entries = []
    cuts = {"off": None, "on": window}
    for name, contexts in {step["workload"]: step["contexts"] for step in results[0]["time_steps"]}.items():
        turns: dict[str, list[dict[str, Any]]] = {}
        for result in results:
            for step in result["time_steps"]:
                if step["workload"] == name and "skipped" not in step:
                    turns.setdefault(result["config"], []).append(step)
        entries.append(
            {
                "workload": name,
                "contexts": contexts,
                "configs": {config: _over_turns(measured) for config, measured in turns.items()},
                "floor_ms": {
                    side: floor_ms(sizes, contexts, bandwidth, window=cut, block_size=block_size)
                    for side, cut in cuts.items()
                },
                "tokens": {
                    c: compare_tokens(turns["off"], t) for c, t in turns.items() if c != "off" and "off" in turns
                },
            }
        )
    return entries


def _over_turns(turns: Sequence[dict[str, Any]]) -> dict[str, Any]:
    figures: dict[str, Any] = {
        key: median(turn[key] for turn in turns) for key in ("median_ms", "p10_ms", "accepted_length")
    }
    return figures | {f"all_{key}": [turn[key] for turn in turns] for key in ("median_ms", "p10_ms")}


def compare_tokens(reference: Sequence[dict[str, Any]], turns: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Greedy tokens against ``off``: speculation must not change them."""
    compared, differences = 0, []
    for number, turn in enumerate(turns, start=1):
        equal, found = first_differences(reference[0]["tokens"], turn["tokens"])
        compared += equal
        differences += [{"turn": number, "request": request, "first_difference": at} for request, at in found.items()]
    return {"equal": not differences, "compared": compared, "differences": differences}


def first_differences(
    reference: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]]
) -> tuple[int, dict[int, int]]:
    """Equal tokens in all, and by request where the first other one is; later ones follow from it."""
    equal, differences = 0, {}
    for request, (expected, got) in enumerate(zip(reference, tokens, strict=True)):
        both = min(len(expected), len(got))
        same = next((i for i in range(both) if expected[i] != got[i]), both)
        equal += same
        if same < both:
            differences[request] = same
    return equal, differences


def floor_ms(
    sizes: PairSizes, contexts: Sequence[int], bandwidth: float, *, window: int | None, block_size: int
) -> float:
    """Time to read the KV cache once: all target layers, and what the draft may see of its own layers.

    Weights are left out: they cost the same in every configuration and fit a fraction of a millisecond.
    """
    visible = contexts if window is None else [min(c, window + block_size) for c in contexts]
    layer_tokens = sizes.layers * sum(contexts) + sizes.draft_layers * sum(visible)
    return layer_tokens * sizes.kv_bytes_per_layer / bandwidth * 1e3


def failed_checks(results: Results, entries: Sequence[dict[str, Any]]) -> list[str]:
    """A line per broken promise of the window; native attention is another kernel and may round differently."""
    failures = []
    for result in results:
        failures += [f"round {result['round']} {result['config']}: {line}" for line in engine_failures(result)]
    for entry in entries:
        for config, compared in entry["tokens"].items():
            if not config.startswith("native") and not compared["equal"]:
                failures.append(f"{entry['workload']}: tokens differ off and {config}: {compared['differences'][:3]}")
    return failures


def engine_failures(result: dict[str, Any]) -> list[str]:
    """What is wrong with one engine: the window's effect, the addresses that it read, and synchronization."""
    engine, sync = result["engine"], result["sync"]
    wanted, windowed = bool(engine["additional_config"]), engine["window_columns"] is not None
    lines = [] if wanted == windowed else [f"the window is {'not ' if wanted else ''}in force"]
    if windowed and sync is not None:
        if not sync["detector_works"]:
            lines.append("CUDA's synchronization check does not detect anything")
        if not sync["calls"].get("refresh"):
            lines.append("the window was not refreshed during the synchronization check")
        lines += [f"synchronizes {count} times in {name}" for name, count in sync["synchronizations"].items()]
    # Without graphs, builds from which nothing is cut read the originals.
    if windowed and "FULL" in engine["cudagraph_mode"]:
        for rank, addresses in enumerate(result["addresses"]):
            lines += [f"rank {rank}: {line}" for line in _address_failures(addresses)]
    return lines


def _address_failures(addresses: dict[str, Any]) -> list[str]:
    lines = []
    if addresses["distinct_pairs"] > 1 or addresses["builds_on_window"] != addresses["builds"]:
        lines.append(f"{addresses['distinct_pairs']} address pairs, {addresses}")
    if addresses["seen_at_capture"] is False or not addresses["captured_on_window"]:
        lines.append(f"graphs were captured on other addresses: {addresses}")
    if not addresses["builds"] and not addresses["replays"]:
        lines.append("the draft neither built metadata nor replayed a graph")
    return lines
