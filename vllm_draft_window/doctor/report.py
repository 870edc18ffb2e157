# SPDX-License-Identifier: Apache-2.0
"""What the doctor found, how it is shown, and the exit status that follows from it."""

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

Level = Literal["ok", "note", "problem"]
State = Literal["in force", "off", "not asked for", "bad input"]

_COLORS: dict[Level, str] = {"ok": "green", "note": "yellow", "problem": "bold red"}
_STATES: dict[State, str] = {
    "in force": "bold green",
    "off": "bold yellow",
    "not asked for": "bold",
    "bad input": "bold red",
}


class BadInput(ValueError):
    """Arguments that the engine would refuse; ``advice`` says what to do."""

    def __init__(self, message: str, advice: str) -> None:
        super().__init__(message)
        self.advice = advice


@dataclass(frozen=True)
class Finding:
    """One row: what was looked at, what is there, and what to do about it."""

    check: str
    found: str
    level: Level = "ok"
    advice: str = ""


@dataclass(frozen=True)
class Verdict:
    """What the engine would make of the window. ``window`` has the values in force, in tokens."""

    state: State
    reason: str = ""
    advice: str = ""
    window: dict[str, Any] | None = None


@dataclass(kw_only=True)
class Report:
    verdict: Verdict = Verdict("not asked for")
    versions: dict[str, str | None]
    findings: list[Finding] = field(default_factory=list)

    @property
    def problem(self) -> Finding | None:
        """The first thing in this environment that is in the way."""
        return next((finding for finding in self.findings if finding.level == "problem"), None)

    @property
    def exit_code(self) -> int:
        """0: in force, or not asked for. 1: asked for, but off. 2: bad input. 3: the environment stands in the way."""
        if self.verdict.state == "bad input":
            return 2
        if self.problem:
            return 3
        return int(self.verdict.state == "off")

    def to_json(self) -> dict[str, Any]:
        return {"exit_code": self.exit_code, **asdict(self)}

    def show(self, console: Console) -> None:
        headings = (Column(heading, overflow="fold") for heading in ("check", "found", "what to do"))
        table = Table(*headings, title="Draft window: this environment", title_justify="left")
        for name, version in self.versions.items():
            table.add_row(name, escape(version or "-"), "")
        table.add_section()
        for finding in self.findings:
            found = f"[{_COLORS[finding.level]}]{escape(finding.found)}[/]"
            table.add_row(finding.check, found, escape(finding.advice))
        console.print(table)
        for line in self._answer():
            console.print(line, highlight=False, soft_wrap=True)

    def _answer(self) -> list[str]:
        """Lines below the table."""
        verdict = self.verdict
        line = f"[{_STATES[verdict.state]}]Draft window: {verdict.state}[/]"
        in_force = dict(verdict.window or {})
        warnings = in_force.pop("warnings", ())
        if in_force:
            values = (f"{key}={value}" for key, value in in_force.items() if value not in (None, ()))
            line += f": {escape(', '.join(values))}"
        else:
            line += f", because {escape(verdict.reason)}." if verdict.reason else "."
        advice = [f"What to do: {escape(verdict.advice)}."] if verdict.advice else []
        return [line, *(f"[yellow]Warning:[/] {escape(warning)}." for warning in warnings), *advice]
