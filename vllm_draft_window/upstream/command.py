# SPDX-License-Identifier: Apache-2.0
"""Write the draft window as a vLLM-Ascend pull request onto a checkout: signed-off commits on a branch of their own."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from .checkout import Checkout
    from .steps import Commit

console = Console(stderr=True, highlight=False)

REFUSED = 2
"""Exit code where nothing was written: the checkout, the branch or upstream's code does not allow it."""


def main(
    checkout: Annotated[Path, typer.Option(help="vLLM-Ascend checkout without local changes.", show_default=False)],
    branch: Annotated[str, typer.Option(help="Branch to create; it is checked out at the end.", show_default=False)],
    base: Annotated[
        str, typer.Option(help="Commit to start from. On a branch written before, that branch's own start.")
    ] = "HEAD",
    pr_text: Annotated[
        Path | None, typer.Option(help="Where to write the description. Default: PULL_REQUEST.md in the git folder.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what the commits would be.")] = False,
) -> None:
    """Write the draft window onto a **vLLM-Ascend** checkout: package, integration, tests, documentation.

    All edits are found by structure. When upstream moved, the missing place is named and nothing is written. A second
    run with the same inputs finds the branch and has nothing to do.

    Exit codes: 0 written, or nothing to do; 2 refused, with the reason.
    """
    from .checkout import Checkout
    from .errors import Refused

    try:
        _write(Checkout(checkout), branch, base, pr_text, dry_run)
    except Refused as reason:
        console.print(f"[red]Refused:[/red] {reason}", soft_wrap=True)
        raise typer.Exit(REFUSED) from None


def _write(checkout: "Checkout", branch: str, base: str, pr_text: Path | None, dry_run: bool) -> None:
    from .errors import Refused
    from .pr_text import write_pull_request_text
    from .steps import STEPS, build_commits

    try:
        checkout.git("check-ref-format", "--branch", branch)
    except Refused:
        raise Refused(f"{branch!r} is not a name that git allows for a branch") from None
    start = checkout.find_commit(base)
    if start is None:
        raise Refused(f"{base} is no commit of {checkout.path}")
    start = checkout.base_of(start, {step.subject for step in STEPS})
    existing = checkout.find_commit(f"refs/heads/{branch}")
    if existing is not None:
        start = checkout.base_of(existing, {step.subject for step in STEPS})
    commits = build_commits(checkout, start)
    _show(commits)
    if dry_run:
        return
    tip = start
    for commit in commits:
        tip = checkout.commit(tip, commit.edits, commit.message)
    if existing is None:
        checkout.git("switch", "--quiet", "--create", branch, tip)
        console.print(f"Wrote [bold]{len(commits)} commits[/bold] on {branch}, based on {start[:10]}.")
    elif checkout.tree_of(existing) == checkout.tree_of(tip):
        console.print(f"Nothing to do: {branch} has this content already.")
    else:
        raise Refused(f"the branch {branch} exists with other content; delete it or choose another name")
    target = pr_text or checkout.path / checkout.git("rev-parse", "--git-path", "PULL_REQUEST.md")
    write_pull_request_text(target, commits)
    console.print(f"Description: {target}", soft_wrap=True)


def _show(commits: "list[Commit]") -> None:
    table = Table("files", "commit", box=None, pad_edge=False)
    for commit in commits:
        table.add_row(str(len(commit.edits)), commit.subject)
    console.print(table)
