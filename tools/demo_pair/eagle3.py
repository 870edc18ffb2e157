# SPDX-License-Identifier: Apache-2.0
"""An EAGLE3 draft for the demo target. It follows what vLLM's ``Eagle3LlamaForCausalLM`` computes:

* row ``i`` of the context joins the *next* token ``x_{i+1}`` with the target features of token ``i``: the input of
  attention is ``[input_layernorm(embed(x_{i+1})), hidden_norm(h_i)]`` with ``h_i = fc(features_i)``, its RoPE position
  is ``i``, and ``h_i`` is the residual;
* the anchor ``x_p`` is thus part of row ``p - 1``, whose output predicts ``x_{p+1}``;
* draft token ``t + 1`` comes from one more row at position ``p - 1 + t``: the token drafted last, joined with the
  layer's own output (before ``norm``) instead of target features. It sees the context and the earlier rows of its own
  proposal.

One layer only: K and V of the context then depend on nothing that a window changes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm

from .layers import KeyValue, init_weights, key_value, layer_output, query
from .modeling import SIZES, Draft


def eagle3_config() -> LlamaConfig:
    """Sizes, and what vLLM needs to know of an EAGLE3 draft; one layer leaves room for a wide MLP."""
    keys: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "intermediate_size": 1536,
        "draft_vocab_size": SIZES["vocab_size"],
        "eagle_aux_hidden_state_layer_ids": list(Draft.features),
    }
    return LlamaConfig(**SIZES | keys)


Eagle3Context = tuple[torch.Tensor, KeyValue]
"""The rows of the context: the fused features ``[B, T, hidden]`` and their K and V."""


class Eagle3Layer(LlamaDecoderLayer):
    """A Llama layer whose attention also reads the embedding."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config, layer_idx=0)
        self.hidden_norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        attention = self.self_attn
        for name in ("q_proj", "k_proj", "v_proj"):
            size = getattr(attention, name).out_features
            setattr(attention, name, nn.Linear(2 * config.hidden_size, size, bias=False))
        attention.q_norm = attention.k_norm = nn.Identity()

    def attention_input(self, embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """``[B, T, 2 * hidden]``."""
        return torch.cat([self.input_layernorm(embedded), self.hidden_norm(hidden)], dim=-1)


class Eagle3Draft(Draft):
    """EAGLE3 draft, unrolled over its own hidden states as in drafting ("training-time test")."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.midlayer = Eagle3Layer(config)
        init_weights(self, num_layers=config.num_hidden_layers)

    def context(self, features: torch.Tensor, tokens: torch.Tensor) -> Eagle3Context:
        # The residual stream stays in float32 under autocast.
        hidden = self.fc(features).float()
        rope = self.rope(torch.arange(hidden.shape[1], device=hidden.device)[None])
        inputs = self.midlayer.attention_input(self.embed_tokens(tokens[:, 1:]), hidden)
        return hidden, key_value(self.midlayer.self_attn, inputs, rope)

    def forward(
        self,
        context: Eagle3Context,
        known: torch.Tensor,
        positions: torch.Tensor,
        visible: torch.Tensor,
        # [B or 1, A, T], where the forwards after the first see another part of the context
        later_visible: torch.Tensor | None = None,
    ) -> torch.Tensor:
        attention = self.midlayer.self_attn
        batch, num_anchors = known.shape[:2]
        features, (k, v) = context
        # [B or 1, A, T], one more [A, A] per step: of the rows that a step adds, an anchor sees its own
        mask = visible
        own_row = torch.eye(num_anchors, dtype=torch.bool, device=mask.device).expand(mask.shape[0], -1, -1)
        rows = torch.arange(batch, device=known.device)[:, None]
        # [B, A, hidden]
        hidden = features[rows, positions - 1]
        # [B, A]
        token = known[:, :, 0]
        logits: list[torch.Tensor] = []
        for step in range(self.num_draft_tokens):
            rope = self.rope(positions - 1 + step)
            inputs = self.midlayer.attention_input(self.embed_tokens(token), hidden)
            if step > 0:
                new_k, new_v = key_value(attention, inputs, rope)
                k, v = torch.cat([k, new_k], dim=2), torch.cat([v, new_v], dim=2)
                if step == 1 and later_visible is not None:
                    mask = later_visible
                mask = torch.cat([mask, own_row], dim=-1)
            hidden = layer_output(self.midlayer, hidden, query(attention, inputs, rope), k, v, mask.unsqueeze(1))
            logits.append(self.lm_head(self.norm(hidden)))
            if step + 1 < self.num_draft_tokens:
                token = known[:, :, step + 1] if known.shape[-1] > 1 else logits[-1].argmax(-1)
        return torch.stack(logits, dim=2)
