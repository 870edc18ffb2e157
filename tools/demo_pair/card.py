# SPDX-License-Identifier: Apache-2.0
"""Texts about a trained pair: the acceptance table and the model card."""

from __future__ import annotations

from typing import Any

CARD = """\
---
license: apache-2.0
language: code
tags: [speculative-decoding, dspark, demo]
---
# Demo pair: a byte-level target and a DSpark draft with a short memory

Two tiny models that show one effect in minutes on a CPU: a draft trained on contexts of {draft_context} bytes loses
its acceptance on longer contexts, and a draft window brings it back. They are good for nothing else.

| | target | draft |
|---|---|---|
| architecture | `Qwen3ForCausalLM` | `Qwen3DSparkModel` |
| parameters | {target_parameters:,} | {draft_parameters:,} |
| size (bfloat16) | {target_bytes:,} bytes | {draft_bytes:,} bytes |
| trained on contexts of | {target_context} bytes | {draft_context} bytes |
| steps, seconds | {target_steps:,}, {target_seconds:.0f} | {draft_steps:,}, {draft_seconds:.0f} |
| final training loss | {target_loss:.3f} nats/byte | {draft_loss:.3f} (weighted cross-entropy) |

Held-out text: **{nats:.3f} nats/byte** over contexts of {target_context} bytes. By position: {by_position}.

## Mean accepted length
Tokens per round (accepted drafts plus the bonus token, at most {most}), greedy, {prompts} held-out prompts,
{tokens} tokens each, float32 on the published weights. The window counts the context and the query block; its start
is rounded down to a 16-token cache block.

{table}

## Use
A token is a byte; {bos} begins and ends a document, {mask} is the draft's mask. There is no tokenizer.

```python
from vllm import LLM, SamplingParams, TokensPrompt

llm = LLM(
    "target",
    skip_tokenizer_init=True,
    max_model_len=8320,
    speculative_config={{"method": "dspark", "model": "draft", "num_speculative_tokens": {draft_tokens}}},
)
prompt = TokensPrompt(prompt_token_ids=list(open("some_file.py", "rb").read()[:4096]))
output = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, detokenize=False))
print(bytes(t for t in output[0].outputs[0].token_ids if t < 256).decode(errors="replace"))
```

`max_position_embeddings` is {max_positions}, so that engines accept prompts a little over {target_context} bytes;
beyond the trained length nothing is promised.

## Training
Text: the standard library of CPython {python} ({files} `*.py` files, {bytes:,} bytes; {held_out_files} more files,
chosen by the hash of their path, held out). CPython is published under the PSF licence; no text of it is part of these
folders. SHA-256 of the corpus: `{digest}`.
Seed {seed}, torch {torch}, {device}. The training stops by the clock, so another machine takes another number of steps.

The draft reads the residual stream entering target layers {feature_layers}, predicts {draft_tokens} tokens per block
from the target's own distribution, with weight {decay}^i on token i. Its layers share one `k_norm`, because vLLM's CPU
kernel applies the first layer's to the context keys of all layers.

Licence of the weights: Apache-2.0.
"""


def acceptance_table(table: dict[int, dict[int | None, float]]) -> str:
    """Markdown table, one row per context length."""
    windows = list(next(iter(table.values())))
    heads = ["full draft attention" if window is None else f"W={window}" for window in windows]
    lines = ["| context | " + " | ".join(heads) + " |", "|---" * (len(windows) + 1) + "|"]
    for context, row in table.items():
        lines.append(f"| {context} | " + " | ".join(f"{row[window]:.2f}" for window in windows) + " |")
    return "\n".join(lines)


def model_card(metrics: dict[str, Any], table: dict[int, dict[int | None, float]]) -> str:
    """The README of a trained pair."""
    target, draft, corpus = metrics["target"], metrics["draft"], metrics["corpus"]
    nats = dict(target["nats_per_byte"])
    return CARD.format(
        target_parameters=target["parameters"],
        draft_parameters=draft["parameters"],
        target_bytes=target["bytes"],
        draft_bytes=draft["bytes"],
        target_context=target["context"],
        draft_context=draft["context"],
        target_steps=target["steps"],
        draft_steps=draft["steps"],
        target_seconds=target["seconds"],
        draft_seconds=draft["seconds"],
        target_loss=target["loss"],
        draft_loss=draft["loss"],
        nats=nats.pop("all"),
        by_position=", ".join(f"{where}: {value:.3f}" for where, value in nats.items()),
        most=draft["num_draft_tokens"] + 1,
        prompts=metrics["evaluation"]["prompts"],
        tokens=metrics["evaluation"]["tokens"],
        table=acceptance_table(table),
        bos=metrics["bos_token_id"],
        mask=metrics["mask_token_id"],
        draft_tokens=draft["num_draft_tokens"],
        max_positions=target["max_position_embeddings"],
        python=metrics["python"],
        files=corpus["files"],
        bytes=corpus["bytes"],
        held_out_files=corpus["held_out_files"],
        digest=corpus["sha256"],
        seed=metrics["seed"],
        torch=metrics["torch"],
        device=metrics["device"],
        feature_layers=", ".join(str(i + 1) for i in draft["target_layer_ids"]),
        decay=draft["loss_decay"],
    )
