# SPDX-License-Identifier: Apache-2.0
"""The model card, from ``card.md`` and the records of the training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import StrictUndefined, Template

from . import DRAFT_FOLDERS

CARD = Template((Path(__file__).parent / "card.md").read_text(), undefined=StrictUndefined, keep_trailing_newline=True)

ARCHITECTURES = {"dspark": "Qwen3DSparkModel", "eagle3": "LlamaForCausalLMEagle3"}
TITLES = {"dspark": "DSpark", "eagle3": "EAGLE3"}
NOTES = {
    "dspark": "The layers of the DSpark draft share one `k_norm`, because vLLM's CPU kernel applies the first layer's "
    "to the context keys of all layers.",
    "eagle3": "The EAGLE3 draft was unrolled over its own hidden states for all of them (training-time test).",
}


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
        titles=TITLES,
        architectures=ARCHITECTURES,
        notes=NOTES,
    )
