# SPDX-License-Identifier: Apache-2.0
"""The demo pair as the serving modes use it: a draft for each method, and prompts that travel as JSON."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tools.demo_pair import DEMO_PAIR as PAIR
from tools.demo_pair import DRAFT_FOLDERS
from tools.demo_pair.corpus import load_corpus, standard_library

TARGET = PAIR / "target"
DRAFT_TOKENS = {"dspark": 7, "dflash": 7, "eagle3": 3}
"""Methods that can be asked for, and the tokens that their drafts propose."""


def draft_folder(method: str, work: Path) -> Path:
    """Folder of the method's draft; one that is not in the checkpoint is made from one that is.

    Raises:
        ValueError: no draft for this method.
    """
    if method == "dflash":
        return _dflash_from_dspark(work / "draft-dflash")
    folder = PAIR / DRAFT_FOLDERS.get(method, method)
    if method not in DRAFT_TOKENS or not (folder / "model.safetensors").exists():
        raise ValueError(f"no draft for the method {method!r} in {PAIR}; known are {', '.join(DRAFT_TOKENS)}")
    return folder


def _dflash_from_dspark(folder: Path) -> Path:
    """DFlash shares DSpark's layers; trained for other positions, it proposes badly, which is a case of its own."""
    from safetensors.torch import load_file, save_file

    source = PAIR / DRAFT_FOLDERS["dspark"]
    config = json.loads((source / "config.json").read_text()) | {"architectures": ["DFlashDraftModel"]}
    del config["mask_token_id"], config["target_layer_ids"]
    weights = load_file(source / "model.safetensors")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    kept = {name: tensor for name, tensor in weights.items() if not name.startswith("markov_head")}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def texts(count: int, length: int) -> list[list[int]]:
    """``count`` prompts of Python source that the pair was not trained on; shorter ones are their last bytes."""
    held_out = load_corpus(standard_library(), include_tests=False, seed=0).held_out
    ends = np.linspace(max(16_384, length), len(held_out), count, dtype=np.int64)
    return [held_out[end - length : end].tolist() for end in ends]


def pack(prompts: Sequence[Sequence[int]]) -> list[str]:
    """Token ids as base64 of two bytes each, half of the size of JSON integers."""
    return [base64.b64encode(np.array(prompt, dtype="<u2").tobytes()).decode() for prompt in prompts]


def unpack(packed: Sequence[str]) -> list[list[int]]:
    return [np.frombuffer(base64.b64decode(text), dtype="<u2").tolist() for text in packed]
