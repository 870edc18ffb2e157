# SPDX-License-Identifier: Apache-2.0
"""What the doctor found, and the exit status that follows from it."""

from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Any


class Level(str, Enum):
    OK = "ok"
    NOTE = "note"
    PROBLEM = "problem"


class State(str, Enum):
    IN_FORCE = "in force"
    OFF = "off"
    NOT_ASKED_FOR = "not asked for"
    BAD_INPUT = "bad input"


class ExitCode(IntEnum):
    """0: in force, or not asked for. 1: asked for, but off. 2: bad input. 3: the environment stands in the way."""

    FINE = 0
    OFF = 1
    BAD_INPUT = 2
    ENVIRONMENT = 3


class BadInput(ValueError):
    """Arguments that the engine would refuse; ``advice`` says what to do."""

    def __init__(self, message: str, advice: str) -> None:
        super().__init__(message)
        self.advice = advice


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One row: what was looked at, what is there, and what to do about it."""

    check: str
    found: str
    level: Level = Level.OK
    advice: str = ""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What the engine would make of the window. ``window`` has the values in force, in tokens."""

    state: State
    reason: str = ""
    advice: str = ""
    window: dict[str, Any] | None = None


@dataclass(kw_only=True)
class Report:
    versions: dict[str, str | None]
    findings: list[Finding] = field(default_factory=list)
    verdict: Verdict = Verdict(state=State.NOT_ASKED_FOR)

    @property
    def problems(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.level is Level.PROBLEM]

    @property
    def exit_code(self) -> ExitCode:
        if self.verdict.state is State.BAD_INPUT:
            return ExitCode.BAD_INPUT
        if self.problems:
            return ExitCode.ENVIRONMENT
        return ExitCode.OFF if self.verdict.state is State.OFF else ExitCode.FINE
