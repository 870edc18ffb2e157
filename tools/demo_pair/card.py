# SPDX-License-Identifier: Apache-2.0
"""The model card, from ``card.md`` and the records of the training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import StrictUndefined, Template

from . import DRAFT_FOLDERS

CARD = Template((Path(__file__).parent / "card.md").read_text(), undefined=StrictUndefined, keep_trailing_newline=True)


def model_card(metrics: dict[str, Any]) -> str:
    """The README of a target and the drafts trained for it."""
    target, drafts = metrics["target"], metrics["drafts"]
    method, draft = next(iter(drafts.items()))
    return CARD.render(
        **metrics,
        method=method,
        draft=draft,
        folder=DRAFT_FOLDERS[method],
        runs={name: record["run"] for name, record in {"target": target, **drafts}.items()},
    )
