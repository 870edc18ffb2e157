# SPDX-License-Identifier: Apache-2.0
"""Compares the draft window's options on the demo pair: ``python -m tools.compare_options --help``."""

import importlib.metadata
import itertools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from tools.comparison.columns import Column, columns, limit_to
from tools.comparison.plot import plot
from tools.comparison.results import Key, Result, different_outputs, measured
from tools.demo_pair import DRAFT_FOLDERS, NUM_SPECULATIVE_TOKENS, demo_prompts, demo_speculation
from vllm_draft_window.measuring.cells import CellFile
from vllm_draft_window.parameters import names, numbers
from vllm_draft_window.reporting import acceptance_table

# What the drafts were trained on.
WINDOW = 512
COLUMNS = columns(WINDOW)


def main(
    method: Annotated[str, typer.Option(help=f"One or more of {', '.join(DRAFT_FOLDERS)}.")] = ",".join(DRAFT_FOLDERS),
    contexts: Annotated[str, typer.Option(help="Prompt lengths, tokens.")] = "512,1024,2048,4096,8192",
    only: Annotated[str, typer.Option(help=f"Some of the columns {', '.join(COLUMNS)}.")] = ",".join(COLUMNS),
    prompts: Annotated[int, typer.Option(min=1, help="Prompts per cell.")] = 16,
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens per prompt before which a target step counts.")] = 24,
    json_path: Annotated[Path, typer.Option("--json", help="One result a line; those already there are kept.")] = Path(
        "comparison.jsonl"
    ),
    simulation: Annotated[
        bool, typer.Option("--simulation", help="In plain torch: minutes instead of an hour for the whole table.")
    ] = False,
    plot_path: Annotated[
        Path | None,
        typer.Option("--plot", help="Draw all results of the file: the first source's lines, others' rings."),
    ] = None,
    log_level: Annotated[str, typer.Option(help="vLLM's log level.")] = "ERROR",
) -> None:
    """Measure acceptance for every set of options, on real vLLM on a CPU: no window, a window, with sink, with gate.

    For autoregressive drafts it also measures what a window on a part of a proposal's forwards would give. Every
    finished cell is kept, so that the same command goes on where it was stopped.
    """
    os.environ["VLLM_LOGGING_LEVEL"] = log_level
    from vllm_draft_window.cpu_engine import activate

    activate()
    console = Console()
    try:
        lengths = sorted(set(numbers("--contexts", contexts)))
        chosen = {name: COLUMNS[name] for name in names("--only", only, COLUMNS)}
        methods = names("--method", method, DRAFT_FOLDERS)
        file = CellFile(json_path, Result, {"max_tokens": max_tokens}, option="--json")
    except ValueError as error:
        console.print(f"[bold red]error:[/] {error}", highlight=False)
        raise typer.Exit(2) from None
    source = "simulation" if simulation else f"vLLM {importlib.metadata.version('vllm')}"
    wanted = [
        (source, name, label, n)
        for name in methods
        for label, column in chosen.items()
        for n in lengths
        if not (column.is_experiment and name == "dspark")
    ]
    run = _simulate if simulation else run_engines
    for result in run(console, [key for key in wanted if key not in file.cells], chosen, prompts, max_tokens):
        file.add(result)
        console.print(f"{result.method}, {result.column}, {result.context}: {result.accepted_length:.2f}")
    shown = [file.cells[key] for key in wanted]
    for name in methods:
        results = {(r.column, r.context): r for r in shown if r.method == name}
        headings = {column: column for column, _ in results}
        console.print(acceptance_table(results, headings, title=f"{name}, W={WINDOW} · {source}"))
    if plot_path is not None:
        plot(plot_path, file.cells.values())
    if different := different_outputs(shown):
        console.print(f"[bold red]Output tokens differ: {', '.join(f'{r.column} at {r.context}' for r in different)}")
        raise typer.Exit(1)


def _simulate(
    console: Console, missing: Sequence[Key], chosen: dict[str, Column], prompts: int, max_tokens: int
) -> Iterator[Result]:
    from tools.comparison.simulated import simulate

    for context in sorted({context for *_, context in missing}):
        cells = [(name, label) for _, name, label, n in missing if n == context]
        yield from simulate(cells, chosen, context, prompts=prompts, max_tokens=max_tokens)


def run_engines(
    console: Console, missing: Sequence[Key], chosen: dict[str, Column], prompts: int, max_tokens: int
) -> Iterator[Result]:
    """One engine for each draft and column, every context length through it."""
    from vllm_draft_window.measuring.columns import Measure, measure_columns
    from vllm_draft_window.measuring.engine import Engine, Measurement

    contexts = {key[:3]: [key[3] for key in keys] for key, keys in itertools.groupby(missing, key=lambda key: key[:3])}

    @contextmanager
    def opened(key: tuple[str, str, str]) -> Iterator[Measure[Measurement]]:
        _, method, label = key
        with Engine(
            speculative_config=demo_speculation(method),
            additional_config=chosen[label].options,
            max_model_len=max(contexts[key]) + 256,
            max_num_seqs=min(prompts, 16),
            kv_cache_memory_bytes=1 << 30,
        ) as engine:
            limit_to(chosen[label].steps, engine.speculator)
            # The last step that counts may go on beyond ``max_tokens``.
            total = max_tokens + NUM_SPECULATIVE_TOKENS
            yield lambda context, on_finished: engine.run(
                demo_prompts(prompts, context), max_tokens=total, on_finished=on_finished
            )

    columns = measure_columns(console, contexts, opened, prompts=prompts, name=lambda key: f"{key[1]}, {key[2]}")
    for key, context, run, seconds in columns:
        yield measured((*key, context), run.target_steps(max_tokens), run.tokens, seconds)


if __name__ == "__main__":
    typer.run(main)
