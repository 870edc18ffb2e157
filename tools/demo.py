# SPDX-License-Identifier: Apache-2.0
"""Shows the draft window at work: real vLLM (Model Runner V2) on a CPU, off and on, over growing contexts.

``bash tools/demo.sh`` makes an environment and runs this. Prompts are cut from Python source that the demo models were
not trained on. The exit status is 1 where any output token differs from the target's own.
"""

import importlib.metadata
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

CONTEXTS = (512, 2048, 4096)
FULL_CONTEXTS = (*CONTEXTS, 8192)


class Method(str, Enum):
    """The kinds of draft that there is a checkpoint for."""

    dspark = "dspark"
    eagle3 = "eagle3"


def main(
    method: Annotated[Method, typer.Option(help="Kind of draft: all tokens at once, or one after the other.")] = (
        Method.dspark
    ),
    window: Annotated[int, typer.Option(min=1, help="draft_window_size, tokens.")] = 512,
    full: Annotated[bool, typer.Option("--full", help="Add a context of 8192 tokens.")] = False,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts per context.")] = 16,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate per prompt.")] = 32,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the results here.")] = None,
    log_level: Annotated[str, typer.Option(help="vLLM's log level.")] = "ERROR",
) -> None:
    """Print context length, accepted length with the window off and on, and whether the tokens are equal."""
    os.environ["VLLM_LOGGING_LEVEL"] = log_level
    from vllm_draft_window.cpu_engine import activate

    activate()
    console = Console()
    contexts = FULL_CONTEXTS if full else CONTEXTS
    measurements, engine = _measure(
        console, contexts, method=method.value, window=window, prompts=prompts, max_tokens=max_tokens
    )

    rows = [
        {
            "context": context,
            "off": round(measurements["off"][context].accepted_length, 3),
            "on": round(measurements["on"][context].accepted_length, 3),
            "lossless": all(measurements[name][context].tokens == target.tokens for name in ("off", "on")),
        }
        for context, target in measurements["target alone"].items()
    ]
    console.print(_table(rows, window, engine))
    if json_path is not None:
        report = {"method": method.value, "window": window, "engine": engine, "rows": rows}
        json_path.write_text(json.dumps(report, indent=2) + "\n")
    if not all(row["lossless"] for row in rows):
        console.print("[bold red]Output tokens differ: speculation must not change them.")
        raise typer.Exit(1)


def _measure(
    console: Console, contexts: tuple[int, ...], *, method: str, window: int, prompts: int, max_tokens: int
) -> tuple[dict[str, dict[int, Any]], dict[str, str]]:
    """One engine at a time, every context through each; returns measurements by engine and context."""
    from tools.demo_pair import demo_prompts, demo_speculation
    from vllm_draft_window.measuring.columns import Measure, measure_columns
    from vllm_draft_window.measuring.engine import Engine, Measurement

    speculation = demo_speculation(method)
    configurations: dict[str, dict[str, Any]] = {
        "target alone": {},
        "off": {"speculative_config": speculation},
        "on": {"speculative_config": speculation, "additional_config": {"draft_window_size": window}},
    }
    texts = {context: demo_prompts(prompts, context) for context in contexts}
    names = {"vllm": importlib.metadata.version("vllm")}

    @contextmanager
    def opened(name: str) -> Iterator[Measure[Measurement]]:
        with Engine(
            max_model_len=max(contexts) + 256,
            max_num_seqs=min(prompts, 16),
            kv_cache_memory_bytes=(1 << 30) if max(contexts) <= 4096 else (2 << 30),
            **configurations[name],
        ) as engine:
            names.update(runner=type(engine.runner).__name__, speculator=type(engine.speculator).__name__)
            yield lambda context, on_finished: engine.run(
                texts[context], max_tokens=max_tokens, on_finished=on_finished
            )

    measurements: dict[str, dict[int, Measurement]] = {name: {} for name in configurations}
    for name, context, measured, _ in measure_columns(
        console, dict.fromkeys(configurations, contexts), opened, prompts=prompts
    ):
        measurements[name][context] = measured
    return measurements, names


def _table(rows: list[dict[str, Any]], window: int, engine: dict[str, str]) -> Table:
    from tools.demo_pair import NUM_SPECULATIVE_TOKENS
    from vllm_draft_window.reporting import table

    names = f"vLLM {engine['vllm']}, {engine['runner']}, {engine['speculator']}"
    return table(
        ("context length", "draft window off", f"draft_window_size={window}", "tokens equal"),
        [
            [str(row["context"]), f"{row['off']:.2f}", f"{row['on']:.2f}", "yes" if row["lossless"] else "[red]NO"]
            for row in rows
        ],
        title=f"Mean accepted length (of {NUM_SPECULATIVE_TOKENS + 1}) · {names}",
        caption="accepted draft tokens plus the target's own, per target step; greedy.\n"
        "Each length continues a text of its own, so compare within a row",
    )


if __name__ == "__main__":
    typer.run(main)
