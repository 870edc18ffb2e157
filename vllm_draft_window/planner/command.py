# SPDX-License-Identifier: Apache-2.0
"""Plans a draft window from two checkpoints' configs: what the draft sees, what it costs, what it saves.

Loads no weights and needs no accelerator and no vLLM.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from vllm_draft_window.planner.cache import CachePlan
    from vllm_draft_window.planner.deployment import Deployment
    from vllm_draft_window.planner.plan import Plan

ELEMENT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "int8": 1}
METHODS = ("dspark", "dflash", "eagle3", "eagle", "draft_model")


def main(
    target: Annotated[Path, typer.Option(help="Folder of the target's checkpoint (its config.json is read).")],
    draft: Annotated[Path, typer.Option(help="Folder of the draft's checkpoint.")],
    num_speculative_tokens: Annotated[
        int, typer.Option("--num-speculative-tokens", "-k", min=1, help="K, tokens per proposal.")
    ],
    window: Annotated[
        int | None,
        typer.Option(
            "--window",
            "-w",
            help="draft_window_size (auto: in --additional-config); left out, the suggested one is planned.",
        ),
    ] = None,
    sink: Annotated[int | None, typer.Option(help="draft_window_sink_size.")] = None,
    min_context: Annotated[int | None, typer.Option(help="draft_window_min_context.")] = None,
    reclaim: Annotated[bool | None, typer.Option("--reclaim", help="draft_window_reclaim.")] = None,
    additional_config: Annotated[
        str | None, typer.Option(help="JSON as given to vLLM, instead of the four options before.")
    ] = None,
    max_model_len: Annotated[
        str, typer.Option(help="As given to vLLM: 32768, 32k, 1M; auto is the target's max_position_embeddings.")
    ] = "auto",
    max_num_seqs: Annotated[int, typer.Option(min=1, help="As given to vLLM: rows of the block table.")] = 256,
    max_num_batched_tokens: Annotated[
        int, typer.Option(min=1, help="As given to vLLM: longest prefill chunk, which an autoregressive draft follows.")
    ] = 8192,
    block_size: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Tokens per KV cache block; once per KV cache group of the draft. Default 16."),
    ] = None,
    method: Annotated[str | None, typer.Option(help=f"{', '.join(METHODS)}; by default from the draft.")] = None,
    dtype: Annotated[str, typer.Option(help="As given to vLLM; auto is the target's own.")] = "auto",
    kv_cache_dtype: Annotated[str, typer.Option(help="As given to vLLM; auto is --dtype.")] = "auto",
    tensor_parallel_size: Annotated[int, typer.Option(min=1, help="Ranks; figures are those of one.")] = 1,
    context: Annotated[
        list[int] | None, typer.Option(min=1, help="Context length to give reads for; repeat for more.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Requests in a step, all of the same context.")] = 1,
    with_weights: Annotated[bool, typer.Option("--with-weights", help="Count the weight files as read too.")] = False,
    trained_length: Annotated[
        int | None, typer.Option(min=1, help="Tokens that the draft was trained on, if you know it.")
    ] = None,
    kv_cache_gib: Annotated[
        float | None, typer.Option("--kv-cache-gib", min=0, help="One rank's memory for the KV cache, as vLLM logs it.")
    ] = None,
    async_scheduling: Annotated[
        bool, typer.Option(help="As given to vLLM: it then reserves cache for two steps in flight.")
    ] = True,
    mask: Annotated[
        bool,
        typer.Option(help="The attention backend masks rows: FlashAttention, Triton and the CPU's; not vLLM-Ascend's."),
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    r"""Plan the draft window of a target and its draft, from their configs alone.

    For example, the pair that comes with this repository:

        draft-window plan --target checkpoints/demo-pair/target \
          --draft checkpoints/demo-pair/draft \
          -k 7 --window 512 --max-model-len 8192

    Exit status: 0, also where the window would be off (the output says why); 2 for bad input.
    """
    from vllm_draft_window.parameters import json_object
    from vllm_draft_window.planner.checkpoints import Checkpoint
    from vllm_draft_window.planner.deployment import Deployment, parse_length
    from vllm_draft_window.planner.plan import make_plan

    try:
        pair = Checkpoint.read(target), Checkpoint.read(draft)
        if method is not None and method not in METHODS:
            raise ValueError(f"--method {method} is none of {', '.join(METHODS)}: only these have a draft checkpoint")
        length = parse_length(max_model_len) or getattr(pair[0].config, "max_position_embeddings", None)
        if length is None:
            raise ValueError(f"{target / 'config.json'} has no max_position_embeddings; give --max-model-len")
        deployment = Deployment(
            method=method or pair[1].method,
            num_speculative_tokens=num_speculative_tokens,
            max_model_len=length,
            max_num_seqs=max_num_seqs,
            block_sizes=tuple(block_size or (16,)),
            element_bytes=_element_bytes(kv_cache_dtype, dtype, pair[0].dtype),
            max_num_batched_tokens=max_num_batched_tokens,
            tensor_parallel_size=tensor_parallel_size,
            batch=batch,
            with_weights=with_weights,
            trained_length=trained_length,
            kv_cache_bytes=None if kv_cache_gib is None else int(kv_cache_gib * (1 << 30)),
            batches_in_flight=2 if async_scheduling else 1,
            can_mask=mask,
        )
        single = {"size": window, "sink_size": sink, "min_context": min_context, "reclaim": reclaim}
        options = json_object("--additional-config", additional_config)
        options |= {f"draft_window_{name}": value for name, value in single.items() if value is not None}
        plan = make_plan(*pair, deployment, options, context or _contexts(length))
    except ValueError as error:
        Console(stderr=True).print(f"[bold red]Error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        raise typer.Exit(2) from None
    if as_json:
        print(json.dumps(to_json(plan, deployment), indent=2))
    else:
        show(plan, deployment, Console())


def _element_bytes(kv_cache_dtype: str, dtype: str, config_dtype: str) -> int:
    name = next(name for name in (kv_cache_dtype, dtype, config_dtype) if name != "auto")
    if kv_cache_dtype == dtype == "auto" and config_dtype == "float32":
        name = "float16"  # what vLLM makes of it
    if name not in ELEMENT_BYTES:
        raise ValueError(f"the KV cache type {name!r} is none of {', '.join(ELEMENT_BYTES)}; give --kv-cache-dtype")
    return ELEMENT_BYTES[name]


def _contexts(max_model_len: int) -> list[int]:
    """Powers of four from 1k on, and the longest."""
    powers = [4**n for n in range(5, 11) if 4**n < max_model_len]
    return [*powers, max_model_len]


def to_json(plan: "Plan", deployment: "Deployment") -> dict[str, Any]:
    return {
        "deployment": asdict(deployment),
        "window": asdict(plan.window) if plan.window else None,
        "off_because": plan.off_reason,
        "masked": plan.masked,
        "tokens_seen": {"first_query": plan.first_query, "last_query": plan.last_query},
        "columns": list(plan.columns),
        "full_columns": list(deployment.full_columns),
        "windowed_bytes": plan.windowed_bytes,
        "draft_kv_bytes_per_token": plan.draft_kv_bytes_per_token,
        "target_kv_bytes_per_token": plan.target_kv_bytes_per_token,
        "reads": [
            asdict(read) | {"share_off": round(read.share_off, 4), "share_on": round(read.share_on, 4)}
            for read in plan.reads
        ],
        "warnings": list(plan.warnings),
        "suggestion": asdict(plan.suggestion),
        "reclaim": asdict(plan.reclaim) if plan.reclaim else None,
    }


def show(plan: "Plan", deployment: "Deployment", console: Console) -> None:
    from vllm_draft_window.reporting import table

    facts = Table(show_header=False, title="Draft window", title_justify="left")
    facts.add_row("method, K", f"{deployment.method}, {deployment.num_speculative_tokens}")
    if plan.window:
        facts.add_row("window, sink, gate", f"{plan.window.name}, {plan.window.sink_size}, {plan.window.min_context}")
        facts.add_row("mask per query row", "yes" if plan.masked else "no: whole blocks")
        facts.add_row("first query row sees", _tokens(plan.first_query))
        facts.add_row("last query row sees", _tokens(plan.last_query))
        columns = zip(deployment.block_sizes, plan.columns, deployment.full_columns, strict=True)
        for size, cropped, full in columns:
            facts.add_row(f"table columns, blocks of {size}", f"{cropped} of {full}")
        facts.add_row("windowed lengths and tables", _bytes(plan.windowed_bytes))
    else:
        facts.add_row("[yellow]off, because", escape(str(plan.off_reason)))
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


def show_reclaim(cache: "CachePlan", deployment: "Deployment", console: Console) -> None:
    from vllm_draft_window.reporting import table

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
