# SPDX-License-Identifier: Apache-2.0
"""Prompts of one length from a user's text or JSONL file."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from .command import MIN_PROMPTS

MIN_DISTANCE = 64
"""Tokens between the ends of two prompts from one text; closer ones would be the same prompt."""

Prompts = dict[int, list[list[int]]]
"""Token ids by context length."""
Counted = list[tuple[int, int]]
"""Tokens and target steps of each prompt."""
Tokenize = Callable[[str], Sequence[int]]


def load_prompts(path: Path, contexts: Sequence[int], count: int, tokenize: Tokenize) -> Prompts:
    """``count`` prompts for each context length, in tokens; the same ends of the same texts for every length.

    Args:
        path: ``*.jsonl`` with one ``{"prompt": TEXT}`` or ``{"prompt_token_ids": [...]}`` a line, of which every
            prompt of at least a context's length gives its last tokens; or any other file, one long text.

    Raises:
        ValueError: the file cannot be read, or gives too few prompts; says how many it gives.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read the prompts in {path}: {error}") from None
    if path.suffix == ".jsonl":
        prompts = [_tokens(path, i, line, tokenize) for i, line in enumerate(text.splitlines(), 1) if line.strip()]
        return {context: _long_enough(path, prompts, context, count) for context in contexts}
    return _cut(path, tokenize(text), contexts, count)


def _tokens(path: Path, number: int, line: str, tokenize: Tokenize) -> list[int]:
    try:
        record = json.loads(line)
        if "prompt_token_ids" in record:
            return [int(token) for token in record["prompt_token_ids"]]
        return list(tokenize(record["prompt"]))
    except (ValueError, TypeError, KeyError):
        raise ValueError(
            f'{path}, line {number}: expected {{"prompt": TEXT}} or {{"prompt_token_ids": [INTEGERS]}}, got {line:.60}'
        ) from None


def _long_enough(path: Path, prompts: list[list[int]], context: int, count: int) -> list[list[int]]:
    long_enough = [prompt[-context:] for prompt in prompts if len(prompt) >= context]
    if len(long_enough) < count:
        raise ValueError(
            f"{path} has {len(long_enough)} prompts of {context} or more tokens (of {len(prompts)}), {count} are "
            f"needed: add longer prompts, leave the context {context} out{_or_fewer(count)}"
        )
    return long_enough[:count]


def _cut(path: Path, tokens: Sequence[int], contexts: Sequence[int], count: int) -> Prompts:
    longest = max(contexts)
    needed = longest + (count - 1) * MIN_DISTANCE
    if len(tokens) < needed:
        possible = max(0, (len(tokens) - longest) // MIN_DISTANCE + 1)
        raise ValueError(
            f"{path} has {len(tokens)} tokens, enough for {possible} prompts of {longest} tokens; {count} such prompts "
            f"need {needed} tokens: use a longer text or shorter contexts{_or_fewer(count)}"
        )
    # [count]
    ends = np.linspace(longest, len(tokens), count, dtype=np.int64)
    return {context: [list(tokens[end - context : end]) for end in ends] for context in contexts}


def _or_fewer(count: int) -> str:
    return f", or ask for fewer (--prompts, at least {MIN_PROMPTS})" if count > MIN_PROMPTS else ""
