# SPDX-License-Identifier: Apache-2.0
"""A DSpark draft for the demo target. It follows what vLLM's ``Qwen3DSparkModel`` computes:

* context: ``hidden_norm(fc(features))`` gives K and V of *every* layer (k_norm and RoPE on K; no ``input_layernorm``);
  k_norm is shared by the layers;
* query block: ``[anchor, mask, mask, ...]`` at positions ``p, p+1, ...`` through ordinary Qwen3 layers, each query
  seeing the context before ``p`` and the whole block (not causal inside the block);
* logits of draft token ``i``: ``lm_head(norm(h_i)) + markov_w2(markov_w1(previous token))``.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import nn
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RMSNorm

from .layers import KeyValue, init_weights, key_value, layer_output, query
from .modeling import MASK_TOKEN_ID, SIZES, TARGET_LAYERS, Draft

# vLLM's numbering: the output of layer i enters layer i + 1.
_FEATURES = {"mask_token_id": MASK_TOKEN_ID, "target_layer_ids": [i - 1 for i in Draft.features]}


def dspark_config() -> Qwen3Config:
    """Sizes, and what vLLM needs to know of a DSpark draft."""
    keys: dict[str, Any] = {
        "architectures": ["Qwen3DSparkModel"],
        "num_hidden_layers": 2,
        "block_size": Draft.num_draft_tokens,
        "markov_head_type": "vanilla",
        "markov_rank": 32,
        "num_target_layers": TARGET_LAYERS,
        "sample_from_anchor": True,
        # vLLM 0.26 sizes the draft's `fc` by the layers named here.
        "dflash_config": _FEATURES,
    }
    return Qwen3Config(**SIZES | _FEATURES | keys)


class DSparkDraft(Draft):
    """DSpark draft whose anchor predicts the first draft token (``sample_from_anchor``)."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__(config)
        self.hidden_norm = Qwen3RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(Qwen3DecoderLayer(config, i) for i in range(config.num_hidden_layers))
        # vLLM normalizes the context keys of all layers in one call with stacked weights. Its CPU kernel applies the
        # first layer's weight to every layer (seen in 0.27.1 and 0.32); a shared weight makes every backend agree.
        for attention in self._attentions():
            attention.k_norm = self._attentions()[0].k_norm
        # Low-rank bias from the token drafted before.
        w1 = nn.Embedding(config.vocab_size, config.markov_rank)
        w2 = nn.Linear(config.markov_rank, config.vocab_size, bias=False)
        self.markov_head = nn.Sequential(OrderedDict(markov_w1=w1, markov_w2=w2))
        init_weights(self, num_layers=config.num_hidden_layers)

    def _attentions(self) -> list[Any]:
        return [layer.self_attn for layer in self.layers]

    def context(self, features: torch.Tensor, tokens: torch.Tensor) -> list[KeyValue]:
        """K and V of every layer, each ``[B, kv_heads, T, head_dim]``; the tokens themselves play no part."""
        rope = self.rope(torch.arange(features.shape[1], device=features.device)[None])
        # [B, T, hidden]
        context = self.hidden_norm(self.fc(features))
        return [key_value(attention, context, rope) for attention in self._attentions()]

    def forward(
        self, context: list[KeyValue], known: torch.Tensor, positions: torch.Tensor, visible: torch.Tensor
    ) -> torch.Tensor:
        batch, num_anchors = known.shape[:2]
        size = self.num_draft_tokens
        mask = block_mask(visible, size)
        # [B, A, N]: every anchor begins a query block of its own
        tokens = torch.full((batch, num_anchors, size), MASK_TOKEN_ID, device=known.device)
        tokens[:, :, 0] = known[:, :, 0]
        # [B or 1, A * N]
        query_positions = (positions[:, :, None] + torch.arange(size, device=known.device)).flatten(1)
        rope = self.rope(query_positions)
        # [B, A * N, hidden]
        x = self.embed_tokens(tokens.flatten(1))
        layer: Any
        for layer, (context_k, context_v) in zip(self.layers, context, strict=True):
            normed = layer.input_layernorm(x)
            k, v = key_value(layer.self_attn, normed, rope)
            k, v = torch.cat([context_k, k], dim=2), torch.cat([context_v, v], dim=2)
            x = layer_output(layer, x, query(layer.self_attn, normed, rope), k, v, mask)
        # [B, A, N, vocab]
        base = self.lm_head(self.norm(x)).unflatten(1, (num_anchors, size))
        if known.shape[-1] == size:
            return base + self.markov_head(known)
        logits = [base[:, :, 0] + self.markov_head(known[:, :, 0])]
        for step in range(1, size):
            logits.append(base[:, :, step] + self.markov_head(logits[-1].argmax(-1)))
        return torch.stack(logits, dim=2)


def block_mask(visible: torch.Tensor, size: int) -> torch.Tensor:
    """``[B, A, T]`` to ``[B, 1, A * N, T + A * N]``: a query sees its anchor's context and its own block."""
    owner = torch.arange(visible.shape[1], device=visible.device).repeat_interleave(size)
    # [A * N, A * N]
    same_block = owner[:, None] == owner[None, :]
    return torch.cat(
        [visible.repeat_interleave(size, dim=1), same_block.expand(visible.shape[0], -1, -1)], dim=-1
    ).unsqueeze(1)
