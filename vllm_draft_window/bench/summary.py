# SPDX-License-Identifier: Apache-2.0
"""From the children's results to the figures that are reported, and to pass or fail."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from .bandwidth import floor_ms
from .spec import PairSizes

Results = Sequence[dict[str, Any]]


def summarize(results: Results, sizes: PairSizes, *, window: int) -> list[dict[str, Any]]:
    """One entry per workload: per configuration the rounds and their median, ratios, floors, token comparison."""
    bandwidth = median(r["copy_bandwidth"] for r in results)
    block_size = results[0]["engine"]["block_size"]
    entries = []
    for name, workload in results[0]["workloads"].items():
        contexts = workload["contexts"]
        configs = {}
        for config in dict.fromkeys(r["config"] for r in results):
            rounds = [r["workloads"][name] for r in results if r["config"] == config]
            rounds = [r for r in rounds if "skipped" not in r]
            if rounds:
                configs[config] = _over_rounds(rounds)
        floors = {
            key: floor_ms(sizes, contexts, bandwidth, window=cut, block_size=block_size)
            for key, cut in (("off", None), ("on", window))
        }
        ratios = {
            figure: {
                f"off/{config}": configs["off"][figure] / figures[figure]
                for config, figures in configs.items()
                if config != "off" and "off" in configs
            }
            for figure in ("median_ms", "p10_ms")
        }
        entries.append(
            {
                "workload": name,
                "contexts": contexts,
                "configs": configs,
                "ratios": ratios["median_ms"],
                "ratios_of_p10": ratios["p10_ms"],
                "floor_ms": floors,
                "tokens": {config: _compare(results, name, config) for config in configs if config != "off"},
            }
        )
    return entries


def _over_rounds(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {
        "median_ms": median(r["median_ms"] for r in rounds),
        "p10_ms": median(r["p10_ms"] for r in rounds),
        "round_medians_ms": [r["median_ms"] for r in rounds],
        "round_p10s_ms": [r["p10_ms"] for r in rounds],
        "accepted_length": median(r["accepted_length"] for r in rounds),
    }


def _compare(results: Results, workload: str, config: str) -> dict[str, Any] | None:
    """Greedy tokens against ``off``: speculation must not change them."""
    by_config: dict[str, list[list[list[int]]]] = {}
    for result in results:
        measured = result["workloads"][workload]
        if "skipped" not in measured:
            by_config.setdefault(result["config"], []).append(measured["tokens"])
    if not by_config.get("off") or not by_config.get(config):
        return None
    reference = by_config["off"][0]
    compared, differences = 0, []
    for number, batch in enumerate(by_config[config], start=1):
        for request, (expected, got) in enumerate(zip(reference, batch, strict=True)):
            shared = min(len(expected), len(got))
            first = next((i for i in range(shared) if expected[i] != got[i]), None)
            compared += shared if first is None else first
            if first is not None:
                differences.append({"round": number, "request": request, "first_difference": first})
    return {"equal": not differences, "compared": compared, "differences": differences}


def failed_checks(results: Results, entries: Sequence[dict[str, Any]]) -> list[str]:
    """A line per broken promise of the window; native attention is another kernel and may round differently."""
    failures = []
    for result in results:
        where = f"round {result['round']} {result['config']}"
        windowed = result["config"] in ("on", "tiny")
        addresses, engine, sync = result["addresses"], result["engine"], result["sync"]
        if windowed != (engine["window_columns"] is not None):
            failures.append(f"{where}: the window is {'not ' if windowed else ''}in force")
        # Without graphs, builds from which nothing is cut read the originals.
        if windowed and "FULL" in engine["cudagraph_mode"]:
            failures += [f"{where}: {line}" for line in address_failures(addresses)]
        if sync is not None and windowed:
            if not sync["detector_works"]:
                failures.append(f"{where}: CUDA's synchronization check does not detect anything")
            if not sync["calls"].get("refresh"):
                failures.append(f"{where}: the window was not refreshed during the synchronization check")
            failures += [f"{where}: synchronizes in {violation}" for violation in sync["violations"]]
    for entry in entries:
        for config in ("on", "tiny"):
            compared = entry["tokens"].get(config)
            if compared is not None and not compared["equal"]:
                failures.append(f"{entry['workload']}: tokens differ off and {config}: {compared['differences'][:3]}")
    return failures


def address_failures(addresses: dict[str, Any]) -> list[str]:
    """What is wrong with the addresses that a windowed engine with FULL graphs read its lengths and tables from."""
    lines = []
    if addresses["distinct_pairs"] > 1 or addresses["builds_on_twins"] != addresses["builds"]:
        lines.append(f"{addresses['distinct_pairs']} address pairs, {addresses}")
    if addresses["seen_at_capture"] is False or not addresses["captured_on_twins"]:
        lines.append(f"graphs were captured on other addresses: {addresses}")
    if not addresses["builds"] and not addresses["replays"]:
        lines.append("the draft neither built metadata nor replayed a graph")
    return lines
