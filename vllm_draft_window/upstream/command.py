# SPDX-License-Identifier: Apache-2.0
"""Write the draft window as a series of vLLM-Ascend pull requests onto a checkout: one branch of commits for each."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

console = Console(stderr=True, highlight=False)

REFUSED = 2
"""Exit code where nothing was written: the checkout, the names or upstream's code do not allow it."""


def main(
    checkout: Annotated[Path, typer.Option(help="vLLM-Ascend checkout without local changes.", show_default=False)],
    series: Annotated[
        str, typer.Option(help="What the names of the branches begin with; the last one is checked out.")
    ] = "draft-window",
    base: Annotated[
        str, typer.Option(help="Commit to start from. On branches written before, their own start.")
    ] = "HEAD",
    pr_text: Annotated[
        Path | None, typer.Option(help="Folder for the descriptions. Default: pull-requests in the git folder.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what the commits would be.")] = False,
) -> None:
    """Write the draft window onto a **vLLM-Ascend** checkout: stacked branches, each complete without the next.

    All edits are found by structure. When upstream moved, the missing place is named and nothing is written. A second
    run with the same inputs finds the branches and has nothing to do.

    Exit codes: 0 written, or nothing to do; 2 refused, with the reason.
    """
    from .errors import Refused

    try:
        _write(checkout, series, base, pr_text, dry_run)
    except Refused as reason:
        console.print(f"[red]Refused:[/red] {reason}", soft_wrap=True)
        raise typer.Exit(REFUSED) from None


def _write(path: Path, series: str, base: str, pr_text: Path | None, dry_run: bool) -> None:
    from .checkout import Checkout
    from .errors import Refused
    from .in_tree import template
    from .series import BRANCHES, build_series

    checkout = Checkout(path)
    try:
        checkout.git("check-ref-format", "--branch", series)
    except Refused:
        raise Refused(f"{series!r} is not a name that git allows for a branch") from None
    start = checkout.find_commit(base)
    if start is None:
        raise Refused(f"{base} is no commit of {path}")
    own_subjects = {step.subject for branch in BRANCHES for step in branch.steps}
    names = {branch: f"{series}-{branch.name}" for branch in BRANCHES}
    existing = {branch: checkout.find_commit(f"refs/heads/{name}") for branch, name in names.items()}
    start = checkout.base_of(next(filter(None, existing.values()), start), own_subjects)

    built = build_series(checkout, start)
    table = Table("branch", "files", "commit", box=None, pad_edge=False)
    for branch, commits in built.items():
        for step, edits in commits.items():
            table.add_row(branch.name, str(len(edits)), step.subject)
    console.print(table)
    if dry_run:
        return
    tips, tip = {}, start
    for branch, commits in built.items():
        for step, edits in commits.items():
            tip = checkout.commit(tip, edits, step.message)
        there = existing[branch]
        if there is not None and checkout.tree_of(there) != checkout.tree_of(tip):
            raise Refused(f"the branch {names[branch]} exists with other content; delete it or choose another name")
        tips[branch] = tip
    new = [branch for branch in tips if existing[branch] is None]
    for branch in new:
        checkout.git("branch", names[branch], tips[branch])
        console.print(f"Wrote [bold]{names[branch]}[/bold].")
    if new:
        checkout.git("switch", "--quiet", names[new[-1]])
    else:
        console.print("Nothing to do: the branches have this content already.")
    folder = pr_text or path / checkout.git("rev-parse", "--git-path", "pull-requests")
    for branch in tips:
        target = folder / names[branch] / "PULL_REQUEST.md"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(template(f"{branch.template}/PULL_REQUEST.md"))
        console.print(f"Description: {target}", soft_wrap=True)
