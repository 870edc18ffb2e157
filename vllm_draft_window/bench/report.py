# SPDX-License-Identifier: Apache-2.0
"""Tables on the terminal and the plot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from vllm_draft_window.reporting import figure_and_axes, table

Entries = Sequence[dict[str, Any]]


def print_steps(console: Console, results: Sequence[dict[str, Any]], entries: Entries) -> None:
    """Step cost and ratios, acceptance and tokens, then a line for each engine."""
    bandwidths = [r["copy_bandwidth"] / 1e12 for r in results]
    console.print(
        f"{machine(results[0])}; copy {min(bandwidths):.2f} to {max(bandwidths):.2f} TB/s (read plus written)"
    )
    configs = list(dict.fromkeys(r["config"] for r in results))
    ratios = [("off", config) for config in configs if config != "off"] if "off" in configs else []
    # The same with the window of another checkout.
    ratios += [(config, config.partition("@")[0]) for config in configs if "@" in config]
    title = "Decode step, ms, and ratios: median of the turns' medians (median of their 10th percentiles)"
    headings = ["workload", *configs, *(f"{a}/{b}" for a, b in ratios), "floor off", "floor on"]
    rows = []
    for entry in entries:
        measured = entry["configs"]
        cells = [f"{m['median_ms']:.2f} ({m['p10_ms']:.2f})" if (m := measured.get(c)) else "-" for c in configs]
        cells += [_ratio(measured.get(a), measured.get(b)) for a, b in ratios]
        rows.append([entry["workload"], *cells, *(f"{entry['floor_ms'][side]:.2f}" for side in ("off", "on"))])
    console.print(table(headings, rows, title=title, first="left"))
    title = "Accepted length per step (random weights: about 1); greedy tokens against off"
    rows = [[entry["workload"], *(_tokens(entry, config) for config in configs)] for entry in entries]
    console.print(table(["workload", *configs], rows, title=title, first="left"))
    for result in results:
        console.print(_engine(result), markup=False, highlight=False)


def machine(result: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items() if version)
    return f"{result['machine']['device']}: {versions}"


def _ratio(a: dict[str, Any] | None, b: dict[str, Any] | None) -> str:
    return f"{a['median_ms'] / b['median_ms']:.3f} ({a['p10_ms'] / b['p10_ms']:.3f})" if a and b else "-"


def _tokens(entry: dict[str, Any], config: str) -> str:
    if (figures := entry["configs"].get(config)) is None:
        return "-"
    compared, verdict = entry["tokens"].get(config), ""
    if compared is not None:
        first = min((d["first_difference"] for d in compared["differences"]), default=None)
        verdict = f", {compared['compared']} equal" if first is None else f", differ from token {first}"
    return f"{figures['accepted_length']:.2f}{verdict}"


def _engine(result: dict[str, Any]) -> str:
    (addresses, *_), engine, sync = result["addresses"], result["engine"], result["sync"]
    line = (
        f"round {result['round']} {result['config']}: {engine['speculator']}, {engine['kv_cache_groups']}, started in "
        f"{result['startup_s']:.0f} s, {addresses['builds']} draft builds, {addresses['replays']} replays, "
        f"{addresses['distinct_pairs']} address pair(s)"
    )
    if sync is not None:
        line += f", guarded calls {sync['calls']}, synchronizing {sync['synchronizations']}"
    if (host := result["host"]) is not None:
        per_call = [f"{k} {us:.0f} ({host['calls'][k] / host['steps']:.1f})" for k, us in host["median_us"].items()]
        line += ", host us per call (calls per step): " + ", ".join(per_call)
    return line


def saturation(results: Sequence[dict[str, Any]]) -> Table:
    """What the KV cache holds, and decode when it is full: a line for each engine, relative to the first one."""

    def figure(value: float, first: float, digits: int = 2) -> str:
        return f"{value:.{digits}f} ({value / first:.3f})"

    capacity, full = (results[0].get(name, [{}])[0] for name in ("capacity", "saturate"))
    headings = ["engine", "KV cache groups", *(f"requests of {short(n)}" for n in capacity)]
    headings += ["when full", "step, ms", "tokens/s"] if full else []
    rows = []
    for result in results:
        row = [f"{result['config']} ({result['round']})", ", ".join(result["engine"]["kv_cache_groups"])]
        row += [figure(result["capacity"][0][n], first) for n, first in capacity.items()]
        for own in result.get("saturate", []):
            row += [f"{len(own['tokens'])} requests", figure(own["median_ms"], full["median_ms"])]
            row += [figure(own["tokens_per_s"], full["tokens_per_s"], 0)]
        rows.append(row)
    title = "What the KV cache holds, and decode when it is full (in brackets: to the first)"
    return table(headings, rows, title=title, first="left")


def plot_steps(path: Path, title: str, entries: Entries, *, window: int) -> None:
    """Step cost against context for single requests; bars span the turns.

    Raises:
        ValueError: there is no workload of one request.
    """
    single = sorted((e for e in entries if len(e["contexts"]) == 1), key=lambda e: e["contexts"][0])
    if not single:
        raise ValueError("--plot shows workloads of one request, and there is none")
    x = [entry["contexts"][0] for entry in single]
    figure, (axes,) = figure_and_axes(x, width=8, titles=[title])
    for config in dict.fromkeys(config for entry in single for config in entry["configs"]):
        shown = [(e["contexts"][0], e["configs"][config]) for e in single if config in e["configs"]]
        y = [figures["median_ms"] for _, figures in shown]
        # [2, contexts]
        edges = np.transpose([(min(figures["all_median_ms"]), max(figures["all_median_ms"])) for _, figures in shown])
        label = "no window" if config == "off" else f"{config}, {window} tokens"
        axes.errorbar([x for x, _ in shown], y, yerr=abs(edges - y), marker="o", capsize=3, label=label, lw=1.5)
    for side, colour in (("off", "0.3"), ("on", "tab:red")):
        floor = [entry["floor_ms"][side] for entry in single]
        axes.plot(x, floor, ls="--", lw=1, color=colour, label=f"bytes-bound floor, window {side}")
    axes.set_ylim(bottom=0)
    axes.set_ylabel("decode step, ms (median)")
    axes.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def short(tokens: int) -> str:
    if tokens >= 1_000_000:
        return f"{tokens / 1e6:.2g}M"
    return f"{tokens // 1000}k" if tokens >= 1000 else str(tokens)
