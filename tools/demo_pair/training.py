# SPDX-License-Identifier: Apache-2.0
"""Training of the demo models by wall clock."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .corpus import sample_windows
from .modeling import Draft, Target, visible_context

WARMUP = 0.03
FINAL_LEARNING_RATE = 0.02


@dataclass(frozen=True)
class Budget:
    """When a training ends: by the clock, or after a number of steps if one is given."""

    seconds: float
    steps: int | None

    def progress(self, *, step: int, elapsed: float) -> float:
        """Fraction of the training that is over."""
        return elapsed / self.seconds if self.steps is None else step / self.steps


def learning_rate_scale(progress: float) -> float:
    """Linear warm-up, then a cosine down to a small rest."""
    if progress < WARMUP:
        return (progress + 1e-3) / (WARMUP + 1e-3)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, (progress - WARMUP) / (1 - WARMUP))))
    return FINAL_LEARNING_RATE + (1 - FINAL_LEARNING_RATE) * cosine


def train(
    name: str,
    model: nn.Module,
    loss_of_batch: Callable[[], torch.Tensor],
    *,
    budget: Budget,
    learning_rate: float,
    device: torch.device,
) -> dict[str, float]:
    """AdamW in bfloat16 autocast until the budget is spent; returns steps, seconds and the last steps' loss."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95), fused=device.type == "cuda")
    model.train()
    started = last_print = time.monotonic()
    step, recent = 0, deque[float](maxlen=50)
    while (progress := budget.progress(step=step, elapsed=time.monotonic() - started)) < 1.0:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * learning_rate_scale(progress)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = loss_of_batch()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        # Reading the loss waits for the device: it keeps the clock honest and costs little beside a step.
        recent.append(loss.item())
        step += 1
        now = time.monotonic()
        if now - last_print > 10 or step == 1:
            last_print = now
            print(f"{name}: step {step}, {now - started:.0f} s, loss {fmean(recent):.4f}", flush=True)
    model.eval()
    seconds, last = time.monotonic() - started, fmean(recent)
    print(f"{name}: {step} steps in {seconds:.0f} s, loss {last:.4f}", flush=True)
    return {"steps": step, "seconds": seconds, "loss": last}


def train_target(
    target: Target, stream: torch.Tensor, *, context: int, batch: int, seed: int, **options: Any
) -> dict[str, float]:
    """Next-byte prediction on long contexts; ``options`` are those of :func:`train`."""
    generator = torch.Generator().manual_seed(seed)

    def loss_of_batch() -> torch.Tensor:
        # [B, T + 1]
        tokens = sample_windows(stream, length=context + 1, batch=batch, generator=generator)
        logits = target(tokens[:, :-1], use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

    return train("target", target, loss_of_batch, device=stream.device, **options)


def train_draft(
    draft: Draft,
    target: Target,
    stream: torch.Tensor,
    *,
    context: int,
    batch: int,
    anchors: int,
    loss_decay: float,
    seed: int,
    **options: Any,
) -> dict[str, float]:
    """Prediction of the target's distribution over the next tokens, from contexts that end early."""
    generator = torch.Generator().manual_seed(seed)
    size = draft.num_draft_tokens
    # [N]
    weights = loss_decay ** torch.arange(size, device=stream.device)
    weights = weights / weights.sum()
    offsets = torch.arange(size, device=stream.device)

    def loss_of_batch() -> torch.Tensor:
        # [B, context + 1 + N]: the last anchor sits right after the context, what it drafts after that
        tokens = sample_windows(stream, length=context + 1 + size, batch=batch, generator=generator)
        # [B, A]; an anchor is preceded by at least one token, and context is everything before it
        anchor_positions = torch.randint(1, context + 1, (tokens.shape[0], anchors), generator=generator)
        anchor_positions = anchor_positions.to(stream.device)
        with torch.no_grad():
            output = target(tokens[:, :-1], output_hidden_states=True, use_cache=False)
            # [B, context, features * hidden]
            selected = draft.select_features(output.hidden_states)[:, :context]
        # [B, A, N]: draft token i follows the token at p + i
        slots = anchor_positions[:, :, None] + offsets
        rows = torch.arange(tokens.shape[0], device=stream.device)[:, None, None]
        known = tokens[rows, slots]
        expected = output.logits[rows, slots].float().softmax(-1)
        visible = visible_context(anchor_positions, context_length=context, num_draft_tokens=size)
        logits = draft(draft.context(selected, tokens[:, : context + 1]), known, anchor_positions, visible)
        log_probabilities = logits.float().log_softmax(-1)
        # [B, A, N]
        cross_entropy = -(expected * log_probabilities).sum(-1)
        return (cross_entropy.mean((0, 1)) * weights).sum()

    return train("draft", draft, loss_of_batch, device=stream.device, **options)
