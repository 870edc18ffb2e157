# SPDX-License-Identifier: Apache-2.0
"""The demo target, a byte-level Qwen3 in plain torch, and what the drafts for it have in common.

Module names equal the names in the exported checkpoints. The drafts are in ``dspark.py`` and ``eagle3.py``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .layers import KeyValue, ModelConfig, RMSNorm, init_weights, layers_of, rope_tables, stack

BOS_TOKEN_ID = 256
MASK_TOKEN_ID = 257


@dataclass(frozen=True)
class DraftConfig(ModelConfig):
    """Draft sizes, and what of the target a draft reads."""

    num_draft_tokens: int = 7
    # vLLM's numbering for DSpark: the output of layer i, which is the residual stream entering layer i + 1
    target_layer_ids: tuple[int, ...] = (0, 1, 2)


class TargetBackbone(nn.Module):
    """Container that gives the target's weights their published names."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = stack(config)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Target(nn.Module):
    """Qwen3 causal language model with tied embeddings."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = TargetBackbone(config)
        init_weights(self, num_layers=config.num_layers)

    def forward(
        self,
        # [B, T]
        tokens: torch.Tensor,
        *,
        start: int = 0,
        cache: list[KeyValue] | None = None,
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Normed output ``[B, T, hidden]`` and the residual stream leaving every layer.

        With ``cache`` the tokens are written at ``start``: either a whole prompt at 0 or a single token later.
        """
        num_tokens = tokens.shape[1]
        if cache is not None and start > 0 and num_tokens != 1:
            raise ValueError("a filled cache takes one token at a time")
        rope = rope_tables(torch.arange(start, start + num_tokens, device=tokens.device), self.config)
        # [B, T, hidden]
        x = self.model.embed_tokens(tokens)
        features: list[torch.Tensor] = []
        for index, layer in enumerate(layers_of(self.model.layers)):
            normed = layer.input_layernorm(x)
            k, v = layer.self_attn.key_value(normed, rope)
            if cache is not None:
                for stored, new in zip(cache[index], (k, v), strict=True):
                    stored[:, :, start : start + num_tokens] = new
                k, v = (stored[:, :, : start + num_tokens] for stored in cache[index])
            x = x + layer.self_attn.attend(layer.self_attn.query(normed, rope), k, v, is_causal=num_tokens > 1)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
            features.append(x)
        return self.model.norm(x), features

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[..., hidden]`` to ``[..., vocab]``."""
        return F.linear(hidden, self.model.embed_tokens.weight)

    def new_cache(self, batch: int, capacity: int) -> list[KeyValue]:
        """Empty K and V, ``[batch, kv_heads, capacity, head_dim]`` per layer."""
        shape = (batch, self.config.num_kv_heads, capacity, self.config.head_dim)
        return [
            (self.model.norm.weight.new_zeros(shape), self.model.norm.weight.new_zeros(shape))
            for _ in self.model.layers
        ]


class Draft(nn.Module, ABC):
    """A draft that proposes ``N`` tokens after any *anchor*, the newest known token of a text.

    An anchor at position ``p`` follows a context of ``p`` tokens, whose target features the draft knows. Subclasses
    differ in what they make of the context and in how the tokens of one proposal depend on each other.
    """

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.fc = nn.Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def start_from(self, target: Target) -> None:
        """Begin with the target's embedding and head."""
        with torch.no_grad():
            self.embed_tokens.weight.copy_(target.model.embed_tokens.weight)
            self.lm_head.weight.copy_(target.model.embed_tokens.weight)

    def select_features(self, features: list[torch.Tensor]) -> torch.Tensor:
        """Concatenate the target layers this draft reads, ``[B, T, layers * hidden]``."""
        return torch.cat([features[i] for i in self.config.target_layer_ids], dim=-1)

    @abstractmethod
    def context(
        self,
        # [B, T, layers * hidden]
        features: torch.Tensor,
        # [B, T + 1]
        tokens: torch.Tensor,
    ) -> Any:
        """What :meth:`forward` needs to know of the text at positions 0, 1, ..., T - 1."""

    @abstractmethod
    def forward(
        self,
        context: Any,
        # [B, A, N] teacher forcing: the anchors and the true tokens after them; [B, A, 1] anchors only: greedy drafting
        known: torch.Tensor,
        # [B or 1, A]
        positions: torch.Tensor,
        # [B or 1, A, T]
        visible: torch.Tensor,
    ) -> torch.Tensor:
        """Draft logits ``[B, A, N, vocab]`` for anchors that each see a part of the context."""


def visible_context(
    # [B or 1, A]
    positions: torch.Tensor,
    *,
    context_length: int,
    num_draft_tokens: int,
    window: int | None = None,
    sink: int = 0,
    min_context: int = 0,
    alignment: int = 16,
) -> torch.Tensor:
    """Which tokens of the context each anchor sees, ``[B or 1, A, T]`` bool.

    A window holds the newest ``window`` tokens as of the last position of the proposal; its start is rounded down to a
    cache block and is the same for all tokens of the proposal. The first ``sink`` tokens, rounded up to blocks, stay in
    sight, and so does everything where the context is shorter than ``min_context``.
    """
    keys = torch.arange(context_length, device=positions.device)
    visible = keys < positions[:, :, None]
    if window is not None:
        start = (positions + num_draft_tokens - window).clamp(min=0) // alignment * alignment
        in_sight = (keys >= start[:, :, None]) | (keys < -(-sink // alignment) * alignment)
        visible &= in_sight | (positions < min_context)[:, :, None]
    return visible
