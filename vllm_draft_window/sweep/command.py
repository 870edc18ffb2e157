# SPDX-License-Identifier: Apache-2.0
"""Finds the draft window for a model and its traffic."""

import hashlib
import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

if TYPE_CHECKING:
    from .verdict import WindowCell

MIN_PROMPTS = 16
"""Fewer prompts than this say nothing about acceptance."""
MAX_SIGMAS = 3.0
"""Standard errors of a difference beyond which two devices are said to differ."""
DEMO_TEXT = f"the demo pair's held-out text, Python {platform.python_version()}"


def main(
    windows: Annotated[
        str, typer.Option(help="draft_window_size values to try, tokens. No window is always measured too.")
    ] = "256,512,1024",
    with_auto: Annotated[
        bool, typer.Option("--with-auto", help='Measure draft_window_size "auto" too, choosing from --windows.')
    ] = False,
    contexts: Annotated[
        str, typer.Option(help="Prompt lengths, tokens: those of your traffic.")
    ] = "512,1024,2048,4096",
    prompts_file: Annotated[
        Path | None,
        typer.Option(
            help='Your prompts: *.jsonl with {"prompt": TEXT} a line, or one long text that is cut. '
            "Default: Python source, for the demo pair only."
        ),
    ] = None,
    prompts: Annotated[int, typer.Option(min=MIN_PROMPTS, help="Prompts per cell.")] = MIN_PROMPTS,
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens to generate per prompt.")] = 64,
    model: Annotated[str | None, typer.Option(help="Target to load in this process. Default: the demo pair.")] = None,
    speculative_config: Annotated[str | None, typer.Option(help="JSON, as for vllm serve.")] = None,
    engine_args: Annotated[
        str, typer.Option(help='More arguments of vllm.LLM as JSON, e.g. \'{"dtype": "bfloat16"}\'.')
    ] = "{}",
    server: Annotated[
        list[str] | None,
        typer.Option(help="WINDOW=URL of a running server, once for each window (or auto) and once with off=URL."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for results and for the state to resume from.")] = Path("sweep"),
    reference: Annotated[
        Path | None, typer.Option(help="Folder of a sweep of the same prompts on another device, to compare with.")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Begin again instead of resuming.")] = False,
    log_level: Annotated[str, typer.Option(help="vLLM's log level.")] = "ERROR",
) -> None:
    r"""Measure acceptance for draft windows at context lengths, and recommend a window or none.

    Without arguments it sweeps the demo pair on the CPU. In this process it starts one engine per window:

        draft-window sweep --model TARGET --prompts-file traffic.jsonl \
          --speculative-config '{"method": "dspark", "model": "DRAFT",
                                 "num_speculative_tokens": 7}'

    Against running servers, each started with its own --additional-config:

        draft-window sweep --prompts-file traffic.jsonl \
          --server off=http://host:8000 --server 2048=http://host:8001

    Ctrl-C is safe: the same command goes on behind the last finished cell. Writes sweep.json, sweep.csv and sweep.png.
    The exit status is 1 where acceptance is not that of --reference within three standard errors.
    """
    os.environ["VLLM_LOGGING_LEVEL"] = log_level
    from vllm_draft_window.measuring.cells import CellFile
    from vllm_draft_window.measuring.columns import measure_columns
    from vllm_draft_window.parameters import numbers
    from vllm_draft_window.reporting import acceptance_table

    from .engines import Engines
    from .report import heading, name, write
    from .servers import Servers
    from .verdict import WindowCell, differences, recommend

    console = Console()
    try:
        lengths = sorted(set(numbers("--contexts", contexts)))
        if server:
            sweep: Servers | Engines = Servers(server, max_tokens)
        else:
            sweep = Engines(windows, model, speculative_config, engine_args, lengths, max_tokens, with_auto)
        if prompts_file is None and not sweep.is_demo:
            raise ValueError("--prompts-file is needed: acceptance depends on the text, so sweep your own traffic")
        settings = {"prompts": _prompts_key(prompts_file, lengths), "per_cell": prompts, "max_tokens": max_tokens}
        elsewhere = _read_reference(reference, settings) if reference else {}
        finished = CellFile(out / "cells.jsonl", WindowCell, settings | sweep.settings, option="--out", fresh=fresh)
        unfinished = {window: [n for n in lengths if (window, n) not in finished.cells] for window in sweep.columns}
        if missing := {window: rest for window, rest in unfinished.items() if rest}:
            texts = sweep.prompts(prompts_file, lengths, prompts)
            for window, context, counted, seconds in measure_columns(
                console,
                missing,
                lambda window: sweep.measuring(window, texts),
                prompts=prompts,
                name=lambda window: f"window {name(window)}",
            ):
                finished.add(WindowCell.of(counted, window=window, context=context, seconds=seconds))
    except ValueError as error:
        console.print(f"[bold red]error:[/] {escape(str(error))}", highlight=False)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        console.print(f"Interrupted; the finished cells are in {out}, and the same command goes on from there.")
        raise typer.Exit(130) from None
    verdict = recommend(finished.cells, [size for size in sweep.columns if isinstance(size, int)], lengths)
    shown = {key: cell for key, cell in finished.cells.items() if key[1] in lengths}
    headings = {window: heading(window) for window in sweep.columns}
    console.print(acceptance_table(shown, headings, title=f"Mean accepted length · {sweep.title}"))
    console.print(f"[bold]Recommended: {verdict.window or 'no window'}.[/] {verdict.reason}")
    paths = write(out, finished.cells, sweep.columns, lengths, settings=settings | sweep.settings, verdict=verdict)
    console.print(f"Written: {', '.join(map(str, paths))}", highlight=False)
    apart = 0
    for cell, other, sigmas in differences(shown, elsewhere):
        apart += sigmas > MAX_SIGMAS
        console.print(f"{heading(cell.window)}, {cell.context} tokens: {cell}, there {other}: {sigmas:.1f} σ apart")
    raise typer.Exit(1 if apart else 0)


def _read_reference(folder: Path, settings: dict[str, Any]) -> "dict[Any, WindowCell]":
    from vllm_draft_window.measuring.cells import read_cells

    from .verdict import WindowCell

    try:
        there, cells = read_cells((folder / "cells.jsonl").read_text().splitlines(), WindowCell)
    except (OSError, ValueError) as error:
        raise ValueError(f"--reference {folder} holds no sweep: {error}") from None
    if different := [key for key, value in settings.items() if there.get(key) != value]:
        raise ValueError(f"--reference {folder} is of another {', '.join(different)}")
    return cells


def _prompts_key(path: Path | None, contexts: list[int]) -> str:
    """What makes prompts the same; a text is cut at places that depend on the longest context."""
    if path is None:
        return DEMO_TEXT
    try:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    except OSError as error:
        raise ValueError(f"cannot read --prompts-file {path}: {error.strerror}") from None
    return f"{path.name} {digest}" + ("" if path.suffix == ".jsonl" else f", cut for {max(contexts)} tokens")
