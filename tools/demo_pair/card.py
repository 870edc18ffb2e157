# SPDX-License-Identifier: Apache-2.0
"""Texts about the trained models: acceptance tables and the model card."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from . import DRAFT_FOLDERS

CARD = (Path(__file__).parent / "card.md").read_text()

ARCHITECTURES = {"dspark": "Qwen3DSparkModel", "eagle3": "LlamaForCausalLMEagle3"}
TITLES = {"dspark": "DSpark", "eagle3": "EAGLE3"}
NOTES = {
    "dspark": "The layers of the DSpark draft share one `k_norm`, because vLLM's CPU kernel applies the first layer's "
    "to the context keys of all layers.",
    "eagle3": "The EAGLE3 draft was unrolled over its own hidden states for all of them (training-time test).",
}


def acceptance_table(lengths: dict[str, dict[str, float]]) -> str:
    """Markdown table of ``{context: {window: length}}``, one row per context length."""
    windows = list(next(iter(lengths.values())))
    heads = ["full draft attention" if window == "full" else f"W={window}" for window in windows]
    rows = [[context, *(f"{row[window]:.2f}" for window in windows)] for context, row in lengths.items()]
    return _markdown([["context", *heads], *rows])


def model_card(metrics: dict[str, Any]) -> str:
    """The README of a target and the drafts trained for it."""
    target, drafts = metrics["target"], metrics["drafts"]
    method, draft = next(iter(drafts.items()))
    nats = dict(target["nats_per_byte"])
    return CARD.format(
        tags=", ".join(drafts),
        models=_models(target, drafts),
        draft_context=draft["context"],
        target_context=target["context"],
        nats=nats.pop("all"),
        by_position=", ".join(f"{where}: {value:.3f}" for where, value in nats.items()),
        most=draft["num_draft_tokens"] + 1,
        prompts=draft["evaluation"]["prompts"],
        tokens=draft["evaluation"]["tokens"],
        tables="\n\n".join(
            f"{TITLES[name]}:\n\n{acceptance_table(record['mean_accepted_length'])}" for name, record in drafts.items()
        ),
        bos=metrics["bos_token_id"],
        mask=metrics["mask_token_id"],
        method=method,
        folder=DRAFT_FOLDERS[method],
        draft_tokens=draft["num_draft_tokens"],
        max_positions=target["max_position_embeddings"],
        runs=_runs({"target": target, **drafts}),
        feature_layers=", ".join(str(i + 1) for i in draft["target_layer_ids"]),
        decay=draft["loss_decay"],
        notes=" ".join(NOTES[name] for name in drafts),
    )


def _models(target: dict[str, Any], drafts: dict[str, dict[str, Any]]) -> str:
    records = [target, *drafts.values()]
    rows = [
        ["", "target", *(f"{TITLES[name]} draft" for name in drafts)],
        ["architecture", "`Qwen3ForCausalLM`", *(f"`{ARCHITECTURES[name]}`" for name in drafts)],
        ["parameters", *(f"{record['parameters']:,}" for record in records)],
        ["size (bfloat16)", *(f"{record['bytes']:,} bytes" for record in records)],
        ["trained on contexts of", *(f"{record['context']} bytes" for record in records)],
        ["steps, seconds", *(f"{record['steps']:,}, {record['seconds']:.0f}" for record in records)],
        [
            "final training loss",
            f"{target['loss']:.3f} nats/byte",
            *(f"{record['loss']:.3f} (weighted cross-entropy)" for record in drafts.values()),
        ],
    ]
    return _markdown(rows)


def _runs(records: dict[str, dict[str, Any]]) -> str:
    rows = [["", "trained with", "training text", "held out", "SHA-256 of the text"]]
    for name, run in ((TITLES.get(name, name), record["run"]) for name, record in records.items()):
        how, corpus = f"torch {run['torch']}, {run['device']}, seed {run['seed']}", run["corpus"]
        text = f"Python {run['python']}: {corpus['files']} files, {corpus['bytes']:,} bytes"
        rows.append([name, how, text, f"{corpus['held_out_files']} files", f"`{corpus['sha256']}`"])
    return _markdown(rows)


def _markdown(rows: list[list[str]]) -> str:
    """A Markdown table whose first row is the head."""
    head, *body = ("| " + " | ".join(row) + " |" for row in rows)
    return "\n".join([head, "|---" * len(rows[0]) + "|", *body])
