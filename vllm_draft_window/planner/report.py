# SPDX-License-Identifier: Apache-2.0
"""A plan as tables."""

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vllm_draft_window.reporting import table

from .cache import CachePlan
from .deployment import Deployment
from .plan import Plan


def show(plan: Plan, deployment: Deployment, console: Console) -> None:
    facts = Table(show_header=False, title="Draft window", title_justify="left")
    facts.add_row("method, K", f"{deployment.method}, {deployment.num_speculative_tokens}")
    if plan.window:
        facts.add_row("window, sink, gate", f"{plan.window.name}, {plan.window.sink_size}, {plan.window.min_context}")
        facts.add_row("mask per query row", "yes" if plan.masked else "no: whole blocks")
        for row, seen in plan.tokens_seen.items():
            facts.add_row(f"{row.replace('_', ' ')} row sees", _tokens(seen))
        for size, cropped, full in zip(deployment.block_sizes, plan.columns, plan.full_columns, strict=True):
            facts.add_row(f"table columns, blocks of {size}", f"{cropped} of {full}")
        facts.add_row("windowed lengths and tables", _bytes(plan.windowed_bytes))
    else:
        facts.add_row("[yellow]off, because", escape(str(plan.off_because)))
    kept = "the window's tokens only" if plan.window and plan.window.reclaim else "all tokens"
    facts.add_row("draft KV cache", f"{_bytes(plan.draft_kv_bytes_per_token)} per token, kept for {kept}")
    facts.add_row("target KV cache", f"{_bytes(plan.target_kv_bytes_per_token)} per token")
    console.print(facts)

    weights = ", weights included" if deployment.with_weights else ""
    headings = ("context", "draft tokens off", "on", "draft KV off", "on", "target KV", "share off", "share on")
    reads = [
        [
            *(f"{tokens:,}" for tokens in (read.context, read.tokens_off, read.tokens_on)),
            *map(_bytes, (read.draft_off, read.draft_on, read.target)),
            *(f"{share:.1%}" for share in (read.share_off, read.share_on)),
        ]
        for read in plan.reads
    ]
    title = f"Read per step on one rank, {deployment.batch} request(s){weights}"
    caption = "share: of everything that the step reads, target and draft"
    console.print(table(headings, reads, title=title, title_justify="left", caption=caption))
    if plan.reclaim:
        show_reclaim(plan.reclaim, deployment, console)
    for warning in plan.warnings:
        console.print(f"[yellow]Warning:[/] {escape(warning)}.", highlight=False)
    suggested = "none" if plan.suggestion.window is None else plan.suggestion.window
    console.print(f"[bold]Suggested window: {suggested}[/], because {escape(plan.suggestion.reason)}.", highlight=False)


def show_reclaim(cache: CachePlan, deployment: Deployment, console: Console) -> None:
    """What ``draft_window_reclaim`` saves, whether it is asked for or not."""
    if cache.refused is not None:
        console.print(f"[yellow]No reclaim:[/] {escape(cache.refused)}.", highlight=False)
        return
    console.print(
        f"KV cache with draft_window_reclaim: {cache.groups} groups of up to {cache.group_size} layers; a request that "
        f"decodes takes more than without below {cache.costs_below:,} tokens",
        style="italic",
        highlight=False,
    )
    headings = ("context", "saved", *(("requests at once without", "with") if cache.tokens else ()))
    rows = [
        [f"{saving.context:,}", f"{saving.saved:.1%}", *(f"{count:,.2f}" for count in saving.requests or ())]
        for saving in cache.savings
    ]
    console.print(table(headings, rows))
    if cache.tokens and cache.concurrency:
        console.print(
            f"vLLM will log a KV cache of {cache.tokens[0]:,} tokens without and {cache.tokens[1]:,} with, and a "
            f"concurrency of {cache.concurrency[0]:.2f}x and {cache.concurrency[1]:.2f}x for "
            f"{deployment.max_model_len:,} tokens: it counts prefill chunks of {deployment.max_in_flight_tokens:,} in.",
            highlight=False,
        )


def _tokens(seen: tuple[int, int] | None) -> str:
    if seen is None:
        return "-"
    return f"{seen[0]:,} to {seen[1]:,} tokens" if seen[0] != seen[1] else f"{seen[0]:,} tokens"


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            break
        count /= 1024
    return f"{count:,.0f} {unit}" if count >= 100 or unit == "B" else f"{count:,.1f} {unit}"
