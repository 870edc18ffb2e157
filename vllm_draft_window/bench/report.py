# SPDX-License-Identifier: Apache-2.0
"""Tables on the terminal and the plot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

_COLOURS = {"off": "#444444", "on": "#d62728", "native": "#1f77b4", "tiny": "#ff7f0e"}


def print_summary(console: Console, results: Sequence[dict[str, Any]], entries: Sequence[dict[str, Any]]) -> None:
    """Step cost and ratios, then acceptance and checks."""
    first = results[0]
    configs = list(dict.fromkeys(r["config"] for r in results))
    bandwidths = [r["copy_bandwidth"] / 1e12 for r in results]
    versions = ", ".join(f"{name} {version}" for name, version in first["versions"].items() if version)
    console.print(f"{first['machine']['device']}: {versions}")
    console.print(f"copy bandwidth {min(bandwidths):.2f} to {max(bandwidths):.2f} TB/s (read plus written)")

    table = Table(title="Decode step, ms: median of the rounds' medians (median of their 10th percentiles)")
    table.add_column("workload")
    for config in configs:
        table.add_column(config, justify="right")
    others = [c for c in configs if c != "off"] if "off" in configs else []
    for config in others:
        table.add_column(f"off/{config}", justify="right")
    for side in ("off", "on"):
        table.add_column(f"floor {side}", justify="right")
    for entry in entries:
        cells = [_step_cell(entry["configs"].get(config)) for config in configs]
        cells += [f"{r:.3f}" if (r := entry["ratios"].get(f"off/{c}")) else "-" for c in others]
        cells += [f"{entry['floor_ms'][side]:.2f}" for side in ("off", "on")]
        table.add_row(entry["workload"], *cells)
    console.print(table)

    table = Table(title="Accepted length per step (random weights: about 1); greedy tokens against off")
    table.add_column("workload")
    for config in configs:
        table.add_column(config, justify="right")
    for entry in entries:
        table.add_row(entry["workload"], *(_token_cell(entry, config) for config in configs))
    console.print(table)
    for result in results:
        _print_checks(console, result)


def _step_cell(figures: dict[str, Any] | None) -> str:
    return "-" if figures is None else f"{figures['median_ms']:.2f} ({figures['p10_ms']:.2f})"


def _token_cell(entry: dict[str, Any], config: str) -> str:
    figures = entry["configs"].get(config)
    if figures is None:
        return "-"
    compared = entry["tokens"].get(config)
    verdict = ""
    if compared is not None and compared["equal"]:
        verdict = f", {compared['compared']} equal"
    elif compared is not None:
        first = min(d["first_difference"] for d in compared["differences"])
        verdict = f", differ from token {first}"
    return f"{figures['accepted_length']:.2f}{verdict}"


def _print_checks(console: Console, result: dict[str, Any]) -> None:
    addresses, engine, sync = result["addresses"], result["engine"], result["sync"]
    line = (
        f"round {result['round']} {result['config']}: {engine['speculator']}, {engine['kv_cache_groups']}, "
        f"{addresses['builds']} draft builds, {addresses['replays']} replays, "
        f"{addresses['distinct_pairs']} address pair(s)"
    )
    if sync is not None:
        line += f", guarded calls {sync['calls']}, synchronizing {sync['violating_calls']}"
    if result.get("host_us"):
        line += ", host us per call (calls per step): " + ", ".join(
            f"{name} {figures['median_us']:.0f} ({figures['calls_per_step']:.1f})"
            for name, figures in result["host_us"]["methods"].items()
        )
    console.print(line, markup=False, highlight=False)


def plot(
    path: Path, results: Sequence[dict[str, Any]], entries: Sequence[dict[str, Any]], *, window: int, tiny: int
) -> None:
    """Step cost against context for single requests; bars span the rounds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    single = [e for e in entries if len(e["contexts"]) == 1]
    if not single:
        raise ValueError("--plot shows workloads of one request, and there is none")
    single.sort(key=lambda e: e["contexts"][0])
    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    labels = {
        "off": "no window",
        "on": f"window of {window}",
        "native": f"native SWA of {window}",
        "tiny": f"window of {tiny}",
    }
    for config in dict.fromkeys(r["config"] for r in results):
        shown = [e for e in single if config in e["configs"]]
        x = [e["contexts"][0] for e in shown]
        y = [e["configs"][config]["median_ms"] for e in shown]
        rounds = [e["configs"][config]["round_medians_ms"] for e in shown]
        below = [m - min(r) for m, r in zip(y, rounds, strict=True)]
        above = [max(r) - m for m, r in zip(y, rounds, strict=True)]
        axes.errorbar(
            x, y, yerr=[below, above], marker="o", capsize=3, label=labels[config], color=_COLOURS[config], lw=1.5
        )
    x = [e["contexts"][0] for e in single]
    for side, what in (("off", "KV of target and draft"), ("on", "KV of target, draft's window")):
        floor = [e["floor_ms"][side] for e in single]
        axes.plot(x, floor, ls="--", lw=1, color=_COLOURS[side], label=f"bytes-bound floor: {what}")
    axes.set_xscale("log", base=2)
    axes.set_xticks(x, [_short(c) for c in x])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel("context, tokens")
    axes.set_ylabel("decode step, ms (median)")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    first = results[0]
    axes.set_title(f"{first['machine']['device']}, vLLM {first['versions']['vllm']}, one request", fontsize=10)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _short(tokens: int) -> str:
    if tokens >= 1_000_000:
        return f"{tokens / 1e6:.2g}M"
    return f"{tokens // 1000}k" if tokens >= 1000 else str(tokens)
