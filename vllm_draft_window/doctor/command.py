# SPDX-License-Identifier: Apache-2.0
"""Says whether the draft window would be in force, and if not, why and what to do. Loads no weights."""

import json
import os
from typing import Annotated

import typer
from rich.console import Console

from . import engine, environment
from .report import BadInput, Report, Verdict


def main(
    context: typer.Context,
    model: Annotated[str | None, typer.Option(help="Target: a folder, or a name on the hub.")] = None,
    speculative_config: Annotated[str | None, typer.Option(help="JSON, as for `vllm serve`.")] = None,
    additional_config: Annotated[list[str] | None, typer.Option(help="JSON, as for `vllm serve`.")] = None,
    max_model_len: Annotated[str | None, typer.Option(help="As for `vllm serve`: 32768, 32k, auto, ...")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    r"""Check this environment and, with --model, what an engine would make of the draft window.

    Give the arguments that you give to `vllm serve`; further engine arguments (--tensor-parallel-size, --dtype, ...)
    go straight to vLLM. No weights are loaded.

        draft-window doctor --model TARGET \
          --speculative-config '{"method": "dspark", "model": "DRAFT",
                                 "num_speculative_tokens": 7}' \
          --additional-config '{"draft_window_size": 2048}'

    Exit status:

    * 0: in force; or not asked for, and nothing is in the way
    * 1: asked for, but off
    * 2: bad input, which would stop the engine too
    * 3: the environment stands in the way (vLLM, plugin, device)
    """
    # vLLM's own log would bury the answer, and end up in the JSON.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    report = Report(versions=environment.versions())
    additional_configs = additional_config or []
    # As for `vllm serve`.
    options = [
        ("--model", model),
        ("--speculative-config", speculative_config),
        *(("--additional-config", text) for text in additional_configs),
        ("--max-model-len", max_model_len),
    ]
    arguments = [text for name, value in options if value is not None for text in (name, value)] + context.args
    try:
        speculative = engine.json_object("--speculative-config", speculative_config)
        for text in additional_configs:
            engine.json_object("--additional-config", text)
        if model is None and arguments:
            raise BadInput("the engine's arguments need --model", "add --model with the target's folder")
        engine.check_model("--model", model)
        engine.check_model("--speculative-config model", speculative.get("model"))
        _examine(report, arguments)
    except BadInput as error:
        report.verdict = Verdict("bad input", str(error), error.advice)
    if as_json:
        print(json.dumps(report.to_json(), indent=2))
    else:
        report.show(Console())
    raise typer.Exit(report.exit_code)


def _examine(report: Report, arguments: list[str]) -> None:
    """Look at the environment and then, given the arguments of an engine, at what it would do."""
    report.findings += environment.check_vllm()
    if report.problem:
        return
    report.findings += [environment.check_plugin(), environment.check_seam()]
    if not arguments or not environment.has_product():
        return
    vllm_config, given = engine.engine_config(arguments)
    report.findings += engine.check_config(vllm_config, given)
    report.verdict = engine.judge(vllm_config, engine.lost_options(given))
    if report.problem and report.verdict.state == "in force":
        problem = report.problem
        report.verdict = Verdict("off", f"{problem.check}: {problem.found}", problem.advice)
