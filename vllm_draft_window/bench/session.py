# SPDX-License-Identifier: Apache-2.0
"""Engines in processes of their own, and the rounds in which they are measured."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from vllm_draft_window.cpu_engine import SITE_DIR

from .plan import CHECKOUT

Result = dict[str, Any]
_LOG_TAIL = 25
_TIMEOUT_S = 600
# Calls whose answers are parts of the result; those of others are listed under their name.
_ONCE = ("describe", "report")


class ChildFailed(RuntimeError):
    """An engine process ended, or was ended, without an answer."""


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """An engine: its name, arguments of ``vllm.LLM``, whose window runs in it, and whether one round is enough."""

    name: str
    engine_args: dict[str, Any]
    tree: Path = CHECKOUT
    once: bool = False


class Child:
    """A process with an engine, one call of a :class:`.child.BenchEngine` method at a time; ``with`` ends it.

    Engines share no process, so that none shares graphs or kernel caches with another.
    """

    def __init__(
        self, log: Path, engine: EngineSpec, *, device: str, cpus: tuple[int, ...] = (), fast_prefill: bool = False
    ) -> None:
        """Start the engine; the first call waits until it is there."""
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = log
        self._pipe, theirs = Pipe()
        with log.open("w") as stream:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "vllm_draft_window.bench.child", str(theirs.fileno())],
                cwd=log.parent,
                env=_environment(device, _site(engine.tree, log.with_suffix(".site"))),
                stdout=stream,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        theirs.close()
        self._pipe.send((cpus, engine.engine_args, fast_prefill))

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        # An orderly end would spend seconds on freeing the KV cache.
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._pipe.close()

    def call(self, method: str, **arguments: Any) -> Any:
        """Call ``method`` in the process.

        Raises:
            ChildFailed: it ended without an answer; says how, with the end of its log.
        """
        try:
            self._pipe.send((method, arguments))
            if self._pipe.poll(_TIMEOUT_S):
                return self._pipe.recv()
            raise ChildFailed(f"no answer within {_TIMEOUT_S} s, see {self._log}")
        except (EOFError, ConnectionError):
            tail = "\n  ".join(self._log.read_text(errors="replace").splitlines()[-_LOG_TAIL:])
            raise ChildFailed(f"exit status {self._process.wait()}, log {self._log} ends with\n  {tail}") from None


def _site(tree: Path, folder: Path) -> Path:
    """A folder for ``PYTHONPATH`` that gives the window of ``tree`` and its entry point, whatever is installed."""
    metadata = folder / "vllm_draft_window-0.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-draft-window\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text("[vllm.general_plugins]\ndraft_window = vllm_draft_window:register\n")
    link = folder / "vllm_ascend"
    link.unlink(missing_ok=True)
    link.symlink_to(tree / "vllm_ascend")
    return folder


def _environment(device: str, site: Path) -> dict[str, str]:
    path = [str(site), str(CHECKOUT), *([str(SITE_DIR)] if device == "cpu" else []), os.environ.get("PYTHONPATH", "")]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "PYTHONUNBUFFERED": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": os.environ.get("VLLM_USE_FLASHINFER_SAMPLER", "0"),
        # The engine core stays in the child, so that it can be stepped.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # Engines that start at the same time would share it.
        "VLLM_DISABLE_COMPILE_CACHE": "1",
    }


Script = Sequence[tuple[str, dict[str, Any]]]
"""Calls of :class:`.child.BenchEngine` methods, with their arguments."""


def run(
    engines: Sequence[EngineSpec],
    script: Script,
    *,
    work: Path,
    device: str,
    at_once: int = 1,
    rounds: int = 1,
    cpus: tuple[int, ...] = (),
    fast_prefill: bool = False,
    budget_s: float | None = None,
    say: Callable[[str], None],
    save: Callable[..., None] = lambda **_: None,
) -> tuple[list[Result], list[str]]:
    """Run ``script`` on every engine; returns their results and a line for each that is missing.

    Engines run in turn, so that a drifting machine hits all of them alike.

    Args:
        work: folder for logs.
        at_once: engines that start side by side and take turns call by call.
        rounds: how often every engine is started.
        budget_s: no engine is started that would not be done after so many seconds.
        say: prints one line of progress.
        save: called with ``results`` and ``missing`` now and then, so that a run that is cut short loses little.
    """
    started, longest = time.perf_counter(), 0.0
    results: list[Result] = []
    missing: list[str] = []
    for number in range(1, rounds + 1):
        chosen = [engine for engine in engines if number == 1 or not engine.once]
        for group in (chosen[i : i + at_once] for i in range(0, len(chosen), at_once)):
            begin = time.perf_counter()
            if budget_s is not None and begin - started + longest > budget_s:
                missing += [f"round {number} {e.name}: out of budget after {begin - started:.0f} s" for e in group]
                continue
            with ExitStack() as stack:
                running: list[tuple[Result, Child]] = []
                for engine in group:
                    log = work / f"{number}-{engine.name.replace(' ', '-')}.log"
                    child = Child(log, engine, device=device, cpus=cpus, fast_prefill=fast_prefill)
                    running.append(({"config": engine.name, "round": number}, stack.enter_context(child)))
                missing += _take_turns(running, script)
            results += [result for result, _ in running]
            longest = max(longest, time.perf_counter() - begin)
            now = time.perf_counter()
            say(
                f"round {number}: {', '.join(e.name for e in group)}: {now - begin:.0f} s, {now - started:.0f} s in all"
            )
            save(results=results, missing=missing)
    return results, missing


def _take_turns(running: list[tuple[Result, Child]], script: Script) -> list[str]:
    """Add every call's answer to its engine's result; engines that fail drop out, with a line for each."""
    missing = []
    for method, arguments in [("describe", {}), *script]:
        for entry in list(running):
            result, engine = entry
            try:
                answer = engine.call(method, **arguments)
            except ChildFailed as error:
                missing.append(f"round {result['round']} {result['config']}: {error}")
                running.remove(entry)
                continue
            if method in _ONCE:
                result |= answer
            else:
                result.setdefault(method, []).append(answer)
    return missing
