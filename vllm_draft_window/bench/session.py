# SPDX-License-Identifier: Apache-2.0
"""Runs the configurations in interleaved rounds, one child process each, and keeps every result on disk."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from .models import write_draft, write_native, write_target
from .spec import EngineRun, PairSizes

REPOSITORY = Path(__file__).resolve().parents[2]
CONFIGS = ("off", "on", "native", "tiny")
_LOG_TAIL = 25


class Writable(Protocol):
    """What a child is started with."""

    def write(self, path: Path) -> None: ...


class ChildFailed(RuntimeError):
    """An engine process ended without a result."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A whole benchmark.

    Attributes:
        rounds: rounds of ``off``, ``on`` and ``native``.
        tiny_rounds: rounds of ``tiny``, a control that needs no repetition.
        template: an engine run whose configuration, round, models and window are filled in per child.
        budget_s: no child is started that is not expected to end within this many seconds from the start.
    """

    sizes: PairSizes
    configs: tuple[str, ...]
    rounds: int
    tiny_rounds: int
    window: int
    tiny_window: int
    template: EngineRun
    work: Path
    budget_s: float | None = None
    timeout_s: float = 900.0

    def order(self) -> Iterator[tuple[int, str]]:
        """Interleaved, so that a machine that drifts hits every configuration alike; the control comes last."""
        for number in range(1, self.rounds + 1):
            for config in self.configs:
                if config != "tiny":
                    yield number, config
        if "tiny" in self.configs:
            for number in range(1, self.tiny_rounds + 1):
                yield number, "tiny"


def run_plan(
    plan: Plan, *, say: Callable[[str], None], save: Callable[[list[dict[str, Any]], list[str]], None]
) -> tuple[list[dict[str, Any]], list[str]]:
    """Run everything; returns the children's results and a line for each run that is missing.

    Args:
        say: prints one line of progress.
        save: called after every child, so that a run that is cut short loses nothing.
    """
    started = time.perf_counter()
    _write_models(plan)
    say(f"models written in {time.perf_counter() - started:.0f} s")
    results: list[dict[str, Any]] = []
    missing: list[str] = []
    longest = 0.0
    for number, config in plan.order():
        elapsed = time.perf_counter() - started
        if plan.budget_s is not None and elapsed + longest > plan.budget_s:
            missing.append(f"round {number} {config}: out of budget after {elapsed:.0f} s")
            say(missing[-1])
            save(results, missing)
            continue
        begin = time.perf_counter()
        try:
            results.append(_run_child(plan, number, config))
        except ChildFailed as error:
            missing.append(f"round {number} {config}: {error}")
            say(missing[-1])
        else:
            longest = max(longest, time.perf_counter() - begin)
            say(f"round {number} {config}: {_medians(results[-1])} ({time.perf_counter() - begin:.0f} s)")
        save(results, missing)
    return results, missing


def _write_models(plan: Plan) -> None:
    plan.work.mkdir(parents=True, exist_ok=True)
    write_target(plan.work / "target", plan.sizes)
    write_draft(plan.work / "draft", plan.sizes)
    write_native(plan.work / "draft-native", plan.work / "draft", plan.sizes, plan.window)


def _run_child(plan: Plan, number: int, config: str) -> dict[str, Any]:
    draft = plan.work / ("draft-native" if config == "native" else "draft")
    window = {"on": plan.window, "tiny": plan.tiny_window}.get(config)
    run = replace(
        plan.template,
        config=config,
        round=number,
        target=str(plan.work / "target"),
        draft=str(draft),
        window=window,
        sync_check=plan.template.sync_check and config in ("off", "on") and number == 1,
    )
    return run_child("vllm_draft_window.bench.child", run, plan.work / f"{number}-{config}", timeout_s=plan.timeout_s)


def run_child(module: str, run: Writable, stem: Path, *, timeout_s: float) -> dict[str, Any]:
    """Run one engine process on a spec; its spec, result and log lie at ``stem`` with a suffix each.

    Raises:
        ChildFailed: it ended without a result; says how, with the end of its log.
    """
    spec, result, log = (stem.parent / f"{stem.name}{suffix}" for suffix in (".spec.json", ".json", ".log"))
    result.unlink(missing_ok=True)
    run.write(spec)
    command = [sys.executable, "-m", module, str(spec), str(result)]
    with log.open("w") as stream:
        try:
            code = subprocess.run(
                command,
                cwd=REPOSITORY,
                env=os.environ | {"PYTHONUNBUFFERED": "1"},
                stdout=stream,
                stderr=subprocess.STDOUT,
                timeout=timeout_s,
            ).returncode
        except subprocess.TimeoutExpired:
            raise ChildFailed(f"no result within {timeout_s:.0f} s, see {log}") from None
    if code != 0 or not result.exists():
        tail = "\n  ".join(log.read_text(errors="replace").splitlines()[-_LOG_TAIL:])
        raise ChildFailed(f"exit status {code}, log {log} ends with\n  {tail}")
    return json.loads(result.read_text())


def _medians(result: dict[str, Any]) -> str:
    parts = [
        f"{name} skipped" if "skipped" in measured else f"{name} {measured['median_ms']:.2f}"
        for name, measured in result["workloads"].items()
    ]
    return ", ".join(parts) + " ms"


def describe(plan: Plan) -> dict[str, Any]:
    """The plan as it goes into the JSON report."""
    template = asdict(plan.template)
    for key in ("config", "round", "target", "draft", "window"):
        del template[key]
    return {
        "sizes": asdict(plan.sizes),
        "configs": plan.configs,
        "rounds": plan.rounds,
        "tiny_rounds": plan.tiny_rounds,
        "window": plan.window,
        "tiny_window": plan.tiny_window,
        "engine": template,
    }


def check_fits(plan: Plan) -> None:
    """Raise before any time is spent.

    Raises:
        ValueError: a workload reaches past ``max_model_len`` or has more requests than an engine takes.
    """
    run = plan.template
    for workload in run.workloads:
        reach = max(workload.contexts) + run.max_tokens(workload)
        if reach > run.max_model_len:
            raise ValueError(
                f"workload {workload.name}: {max(workload.contexts)} tokens of context and up to "
                f"{run.max_tokens(workload)} generated ones exceed --max-model-len {run.max_model_len}; "
                f"use a shorter context or fewer --steps"
            )
    _check_known(plan.configs)


def _check_known(configs: Sequence[str]) -> None:
    unknown = sorted(set(configs) - set(CONFIGS))
    if unknown:
        raise ValueError(f"unknown configuration {', '.join(unknown)}; known are {', '.join(CONFIGS)}")
