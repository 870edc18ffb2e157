# SPDX-License-Identifier: Apache-2.0
"""The demo pair on another device: a draft for each method, and its acceptance off and on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from tools.demo_pair import DEMO_PAIR, DEMO_SPECULATION, DRAFT_FOLDERS
from vllm_draft_window.measuring.cells import Cell

from . import report
from .plan import full_graphs
from .session import EngineSpec, Result, Script

TARGET = DEMO_PAIR / "target"
DRAFT_TOKENS = {"dspark": 7, "dflash": 7, "eagle3": 3}
"""Methods that can be asked for, and the tokens that their drafts propose."""
# Standard errors of a difference beyond which two devices are said to differ.
_SIGMAS = 3.0


def engine_args(method: str, window: int | None, work: Path) -> dict[str, Any]:
    """Arguments of ``vllm.LLM`` for the pair; a draft that is not in the checkpoint is made from one that is."""
    draft = _dflash_from_dspark(work / "draft-dflash") if method == "dflash" else DEMO_PAIR / DRAFT_FOLDERS[method]
    return {
        "model": str(TARGET),
        "speculative_config": {"method": method, "model": str(draft), "num_speculative_tokens": DRAFT_TOKENS[method]},
        "additional_config": {} if window is None else {"draft_window_size": window},
        "max_num_batched_tokens": 2048,
        "enable_prefix_caching": False,
        "max_num_seqs": 8,
    }


def _dflash_from_dspark(folder: Path) -> Path:
    """DFlash shares DSpark's layers; trained for other positions, it proposes badly, which is a case of its own."""
    from safetensors.torch import load_file, save_file

    source = Path(DEMO_SPECULATION["model"])
    config = json.loads((source / "config.json").read_text()) | {"architectures": ["DFlashDraftModel"]}
    del config["mask_token_id"], config["target_layer_ids"]
    weights = load_file(source / "model.safetensors")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    kept = {name: tensor for name, tensor in weights.items() if not name.startswith("markov_head")}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def engines(method: str, window: int, longest: int, work: Path, device: str) -> list[EngineSpec]:
    """Off and on, for prompts and new tokens of ``longest`` together."""
    more = {"max_model_len": longest + 64, "kv_cache_memory_bytes": 2 << 30}
    more |= full_graphs() if device == "cuda" else {}
    columns = {"off": None, "on": window}
    return [EngineSpec(name=name, engine_args=engine_args(method, w, work) | more) for name, w in columns.items()]


def script(prompts: list[list[int]], contexts: Sequence[int], max_tokens: int, method: str) -> Script:
    """Every prompt at every context length, cut to its last tokens. The last step that counts counts whole."""
    more = {"max_tokens": max_tokens + DRAFT_TOKENS[method], "counted": max_tokens}
    return [("serve", {"prompts": [prompt[-context:] for prompt in prompts]} | more) for context in contexts]


def summarize(results: Sequence[Result], contexts: Sequence[int]) -> dict[str, Any]:
    """By context and column the tokens and target steps of each prompt: what another device is compared with."""
    cells = {}
    for i, context in enumerate(contexts):
        served = {result["config"]: result["serve"][i] for result in results}
        cells[str(context)] = {column: served[column]["target_steps"] for column in ("off", "on")}
        pairs = zip(served["off"]["tokens"], served["on"]["tokens"], strict=True)
        cells[str(context)]["equal_requests"] = sum(a == b for a, b in pairs)
    return cells


def compare(by_context: dict[str, Any], reference: dict[str, Any]) -> list[dict[str, Any]]:
    """One row per context and column: both means, the error here, their difference in standard errors over prompts."""
    rows = []
    for context, columns in by_context.items():
        for column in ("off", "on"):
            here = _cell(context, columns[column])
            row = {"context": context, "column": column, "here": here.accepted_length}
            row["error"] = float(here.resampled.std())
            if column in reference.get(context, {}):
                there = _cell(context, reference[context][column])
                # The same prompts on both sides, so the draws are pairs.
                error = float((here.resampled - there.resampled).std())
                sigmas = abs(here.accepted_length - there.accepted_length) / error if error else 0.0
                row |= {"reference": there.accepted_length, "sigmas": sigmas, "within_noise": sigmas <= _SIGMAS}
            rows.append(row)
    return rows


def _cell(context: str, prompts: Sequence[tuple[int, int]]) -> Cell:
    tokens, steps = zip(*prompts, strict=True)
    return Cell(context=int(context), tokens=tokens, steps=steps, seconds=0.0)


def table(by_context: dict[str, Any], rows: Sequence[dict[str, Any]], title: str) -> Table:
    lines: dict[str, list[str]] = {context: [context] for context in by_context}
    for row in rows:
        reference = f" ({row['reference']:.2f}, {row['sigmas']:.1f} σ)" if "reference" in row else ""
        lines[row["context"]].append(f"{row['here']:.2f} ± {row['error']:.2f}{reference}")
    for context, cells in by_context.items():
        lines[context].append(f"{cells['equal_requests']} of {len(cells['off'])}")
    title = f"Mean accepted length ± a standard error (in brackets the reference), {title}"
    return report.table(title, ["context", "off", "on", "equal requests"], lines.values())
