# SPDX-License-Identifier: Apache-2.0
"""The demo pair, with a draft for each method."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tools.demo_pair import DEMO_PAIR, DEMO_SPECULATION, DRAFT_FOLDERS

TARGET = DEMO_PAIR / "target"
DRAFT_TOKENS = {"dspark": 7, "dflash": 7, "eagle3": 3}
"""Methods that can be asked for, and the tokens that their drafts propose."""


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
