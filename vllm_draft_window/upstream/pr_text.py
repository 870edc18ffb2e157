# SPDX-License-Identifier: Apache-2.0
"""The description of the pull request, in the sections that upstream's template asks for."""

from pathlib import Path

from .docs import first_table
from .integration import INTEGRATIONS
from .package import COPIED_TESTS, REPOSITORY, TEMPLATES
from .steps import Commit


def write_pull_request_text(path: Path, commits: list[Commit]) -> None:
    rows = [f"| {commit.subject} | {len(commit.edits)} |" for commit in commits]
    speculators = [
        f"| `{item.speculator}` | {', '.join(f'`{mixin}`' for _, mixin in item.mixins)} |" for item in INTEGRATIONS
    ]
    values = {
        "@COMMITS@": "\n".join(["| commit | files |", "|---|---|", *rows]),
        "@SPECULATORS@": "\n".join(["| speculator | first base classes |", "|---|---|", *speculators]),
        "@ACCEPTANCE@": first_table(REPOSITORY / "README.md", "tokens equal"),
        "@STEP_COST@": first_table(REPOSITORY / "docs" / "performance.md", "off / window"),
        "@DEFECTS@": first_table(REPOSITORY / "docs" / "differences_from_mrv1.md", "vLLM-Ascend's adapter"),
    }
    text = (TEMPLATES / "PULL_REQUEST.md").read_text()
    for key, value in values.items():
        text = text.replace(key, value)
    for ours, theirs in COPIED_TESTS.items():
        text = text.replace(f"`{ours}`", f"`{theirs}`")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
