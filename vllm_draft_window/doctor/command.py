# SPDX-License-Identifier: Apache-2.0
"""Says whether the draft window would be in force, and if not, why and what to do. Loads no weights."""

import json
import os
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from vllm_draft_window.doctor.report import Report

_COLORS = {"ok": "green", "note": "yellow", "problem": "bold red"}
_STATES = {"in force": "bold green", "off": "bold yellow", "not asked for": "bold", "bad input": "bold red"}


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
    report = examine(model, speculative_config, additional_config or [], max_model_len, context.args)
    if as_json:
        print(json.dumps(to_json(report), indent=2))
    else:
        show(report, Console())
    raise typer.Exit(report.exit_code)


def examine(
    model: str | None,
    speculative_config: str | None,
    additional_configs: list[str],
    max_model_len: str | None,
    others: list[str],
) -> "Report":
    from vllm_draft_window.doctor import engine, environment
    from vllm_draft_window.doctor.report import BadInput, Report, State, Verdict

    report = Report(versions=environment.versions())
    try:
        speculative = engine.json_object("--speculative-config", speculative_config)
        for additional_config in additional_configs:
            engine.json_object("--additional-config", additional_config)
        asks = [speculative_config, max_model_len, *additional_configs, *others]
        if model is None and any(value is not None for value in asks):
            raise BadInput("the engine's arguments need --model", "add --model with the target's folder")
        engine.check_model("--model", model)
        engine.check_model("--speculative-config model", speculative.get("model"))

        report.findings += environment.check_vllm()
        if report.problems:
            return report
        report.findings += [environment.check_plugin(), environment.check_seam()]
        if model is None or not environment.has_product():
            return report
        arguments = engine.arguments_of(model, speculative_config, additional_configs, max_model_len, others)
        vllm_config, given = engine.engine_config(arguments)
        report.findings.append(engine.check_runner(vllm_config))
        report.findings += engine.check_length(vllm_config)
        report.findings += engine.check_repeated(given)
        report.verdict = engine.judge(vllm_config, engine.lost_options(given))
        if report.problems and report.verdict.state is State.IN_FORCE:
            problem = report.problems[0]
            report.verdict = Verdict(state=State.OFF, reason=f"{problem.check}: {problem.found}", advice=problem.advice)
    except BadInput as error:
        report.verdict = Verdict(state=State.BAD_INPUT, reason=str(error), advice=error.advice)
    return report


def to_json(report: "Report") -> dict[str, Any]:
    from dataclasses import asdict

    return {
        "exit_code": int(report.exit_code),
        "verdict": asdict(report.verdict),
        "versions": report.versions,
        "findings": [asdict(finding) for finding in report.findings],
    }


def show(report: "Report", console: Console) -> None:
    table = Table(title="Draft window: this environment", title_justify="left")
    for heading in ("check", "found", "what to do"):
        table.add_column(heading, overflow="fold")
    for name, version in report.versions.items():
        table.add_row(name, escape(version or "-"), "")
    table.add_section()
    for finding in report.findings:
        color = _COLORS[finding.level.value]
        table.add_row(finding.check, f"[{color}]{escape(finding.found)}[/]", escape(finding.advice))
    console.print(table)

    verdict = report.verdict
    state = f"[{_STATES[verdict.state.value]}]Draft window: {verdict.state.value}[/]"
    if verdict.window:
        values = dict(verdict.window)
        warnings = values.pop("warnings")
        console.print(
            f"{state}: "
            + escape(", ".join(f"{key}={value}" for key, value in values.items() if value not in (None, ()))),
            soft_wrap=True,
        )
        for warning in warnings:
            console.print(f"[yellow]Warning:[/] {escape(warning)}.", highlight=False, soft_wrap=True)
    else:
        because = f", because {escape(verdict.reason)}." if verdict.reason else "."
        console.print(state + because, highlight=False, soft_wrap=True)
    if verdict.advice:
        console.print(f"What to do: {escape(verdict.advice)}.", highlight=False, soft_wrap=True)
