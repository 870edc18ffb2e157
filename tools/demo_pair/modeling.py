# SPDX-License-Identifier: Apache-2.0
"""The demo pair in plain torch: a byte-level Qwen3 target and a DSpark draft.

Module names equal the names in the exported checkpoints. The target is Qwen3 as published. The draft follows what
vLLM's ``Qwen3DSparkModel`` computes:

* context: ``hidden_norm(fc(features))`` gives K and V of *every* layer (k_norm and RoPE on K; no ``input_layernorm``);
  k_norm is shared by the layers;
* query block: ``[anchor, mask, mask, ...]`` at positions ``p, p+1, ...`` through ordinary Qwen3 layers, each query
  seeing the context before ``p`` and the whole block (not causal inside the block);
* logits of draft token ``i``: ``lm_head(norm(h_i)) + markov_w2(markov_w1(previous token))``.

A draft of another kind can use :class:`Target` and its features unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from .layers import KeyValue, ModelConfig, RMSNorm, init_weights, layers_of, rope_tables, stack

BOS_TOKEN_ID = 256
MASK_TOKEN_ID = 257


@dataclass(frozen=True)
class DraftConfig(ModelConfig):
    """Draft sizes plus the DSpark keys."""

    num_layers: int = 2
    num_draft_tokens: int = 7
    markov_rank: int = 32
    # vLLM's numbering: the output of layer i, which is the residual stream entering layer i + 1
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


class MarkovHead(nn.Module):
    """Low-rank bias from the previously drafted token."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(config.vocab_size, config.markov_rank)
        self.markov_w2 = nn.Linear(config.markov_rank, config.vocab_size, bias=False)

    def forward(self, previous: torch.Tensor) -> torch.Tensor:
        return self.markov_w2(self.markov_w1(previous))


class DSparkDraft(nn.Module):
    """DSpark draft whose anchor predicts the first draft token (``sample_from_anchor``)."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.fc = nn.Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = stack(config)
        # vLLM normalizes the context keys of all layers in one call with stacked weights. Its CPU kernel applies the
        # first layer's weight to every layer (seen in 0.27.1 and 0.32); a shared weight makes every backend agree.
        first, *others = layers_of(self.layers)
        for layer in others:
            layer.self_attn.k_norm = first.self_attn.k_norm
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.markov_head = MarkovHead(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        init_weights(self, num_layers=config.num_layers)

    def select_features(self, features: list[torch.Tensor]) -> torch.Tensor:
        """Concatenate the target layers this draft reads, ``[B, T, layers * hidden]``."""
        return torch.cat([features[i] for i in self.config.target_layer_ids], dim=-1)

    def context_key_value(self, features: torch.Tensor) -> list[KeyValue]:
        """K and V of the context in every layer, for features at positions 0, 1, ..."""
        rope = rope_tables(torch.arange(features.shape[1], device=features.device), self.config)
        # [B, T, hidden]
        context = self.hidden_norm(self.fc(features))
        return [layer.self_attn.key_value(context, rope) for layer in layers_of(self.layers)]

    def forward(
        self,
        # per layer [B, kv_heads, T, head_dim]
        context: list[KeyValue],
        # [B, A]
        anchors: torch.Tensor,
        # [B, A] or [1, A]
        positions: torch.Tensor,
        # [B or 1, 1, A * N, T + A * N]
        mask: torch.Tensor,
    ) -> torch.Tensor:
        """Normed output of ``A`` independent query blocks per row, ``[B, A, N, hidden]``."""
        batch, num_anchors = anchors.shape
        size = self.config.num_draft_tokens
        # [B, A, N]
        tokens = torch.full((batch, num_anchors, size), MASK_TOKEN_ID, device=anchors.device)
        tokens[:, :, 0] = anchors
        # [B or 1, A * N]
        query_positions = (positions[:, :, None] + torch.arange(size, device=anchors.device)).flatten(1)
        rope = rope_tables(query_positions, self.config)
        # [B, A * N, hidden]
        x = self.embed_tokens(tokens.flatten(1))
        for layer, (context_k, context_v) in zip(layers_of(self.layers), context, strict=True):
            normed = layer.input_layernorm(x)
            k, v = layer.self_attn.key_value(normed, rope)
            k, v = torch.cat([context_k, k], dim=2), torch.cat([context_v, v], dim=2)
            x = x + layer.self_attn.attend(layer.self_attn.query(normed, rope), k, v, mask=mask)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.norm(x).unflatten(1, (num_anchors, size))

    def logits(self, hidden: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        """Draft logits given the token before each predicted one (teacher forcing)."""
        return self.lm_head(hidden) + self.markov_head(previous)

    def sample_greedy(self, hidden: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
        """Draft left to right: ``[B, A, N, hidden]`` and ``[B, A]`` to ``[B, A, N]``."""
        base = self.lm_head(hidden)
        previous, drafted = anchors, []
        for step in range(self.config.num_draft_tokens):
            previous = (base[:, :, step] + self.markov_head(previous)).argmax(-1)
            drafted.append(previous)
        return torch.stack(drafted, dim=-1)


def block_mask(
    # [B, A]
    positions: torch.Tensor,
    *,
    context_length: int,
    block_size: int,
    window: int | None = None,
    alignment: int = 16,
) -> torch.Tensor:
    """Which keys the queries of each anchor see, ``[B, 1, A * N, T + A * N]`` bool.

    A window keeps the newest ``window`` tokens of context plus block; its start is rounded down to a cache block.
    """
    num_anchors = positions.shape[1]
    keys = torch.arange(context_length, device=positions.device)
    # [B, A, T]
    visible = keys < positions[:, :, None]
    if window is not None:
        start = (positions + block_size - window).clamp(min=0) // alignment * alignment
        visible &= keys >= start[:, :, None]
    owner = torch.arange(num_anchors, device=positions.device).repeat_interleave(block_size)
    # [A * N, A * N]
    same_block = owner[:, None] == owner[None, :]
    return torch.cat(
        [visible.repeat_interleave(block_size, dim=1), same_block.expand(positions.shape[0], -1, -1)], dim=-1
    ).unsqueeze(1)
