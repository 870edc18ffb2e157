# SPDX-License-Identifier: Apache-2.0
"""Parts of the demo pair: corpus, models, acceptance simulation and checkpoint export."""

import functools
from typing import Any

import numpy as np

from vllm_draft_window.clone import DEMO_PAIR

DRAFT_FOLDERS = {"dspark": "draft", "eagle3": "eagle3"}
"""Where the checkpoint keeps the draft of each method; the target is in ``target``."""
NUM_SPECULATIVE_TOKENS = 7
"""Tokens that the tools let either draft propose."""


def demo_speculation(method: str) -> dict[str, Any]:
    """The ``speculative_config`` of one of the demo pair's drafts."""
    draft = DEMO_PAIR / DRAFT_FOLDERS[method]
    return {"method": method, "model": str(draft), "num_speculative_tokens": NUM_SPECULATIVE_TOKENS}


DEMO_SPECULATION = demo_speculation("dspark")


def demo_prompts(count: int, context: int) -> list[list[int]]:
    """``count`` prompts of ``context`` byte tokens: real Python source that the demo pair was not trained on.

    Every context length ends at the same places of the text, so that rows differ by context alone.
    """
    text = _held_out_text()
    ends = np.linspace(16_384, len(text), count, dtype=np.int64)
    return [text[end - context : end].tolist() for end in ends]


@functools.cache
def _held_out_text() -> np.ndarray:
    from .corpus import load_corpus, standard_library

    return load_corpus(standard_library(), include_tests=False, seed=0).held_out
