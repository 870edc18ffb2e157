# SPDX-License-Identifier: Apache-2.0
"""The attention of transformers' Qwen3 and Llama layers in steps, so that drafts can take K and V from elsewhere."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.llama.modeling_llama import rotate_half

KeyValue = tuple[torch.Tensor, torch.Tensor]
Rope = tuple[torch.Tensor, torch.Tensor]
"""Cosine and sine, each ``[B or 1, T, head_dim]``."""


def query(attention: Any, x: torch.Tensor, rope: Rope) -> torch.Tensor:
    """``[B, T, input]`` to ``[B, heads, T, head_dim]``."""
    q = attention.q_proj(x).unflatten(-1, (-1, attention.head_dim))
    return _rotate(attention.q_norm(q).transpose(1, 2), rope, dtype=q.dtype)


def key_value(attention: Any, x: torch.Tensor, rope: Rope) -> KeyValue:
    """``[B, T, input]`` to K and V, each ``[B, kv_heads, T, head_dim]``."""
    k, v = (proj(x).unflatten(-1, (-1, attention.head_dim)) for proj in (attention.k_proj, attention.v_proj))
    return _rotate(attention.k_norm(k).transpose(1, 2), rope, dtype=v.dtype), v.transpose(1, 2)


def layer_output(
    layer: Any, residual: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """What leaves a layer, ``[B, T, hidden]``; the mask is ``[B or 1, 1, T, keys]``."""
    attention = layer.self_attn
    k, v = (tensor.repeat_interleave(attention.num_key_value_groups, dim=1) for tensor in (k, v))
    attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    x = residual + attention.o_proj(attended.transpose(1, 2).flatten(2))
    return x + layer.mlp(layer.post_attention_layernorm(x))


def _rotate(x: torch.Tensor, rope: Rope, *, dtype: torch.dtype) -> torch.Tensor:
    cos, sin = (table.unsqueeze(1) for table in rope)
    x = x.float()
    return (x * cos + rotate_half(x) * sin).to(dtype)


def init_weights(module: nn.Module, *, num_layers: int) -> None:
    """Fan-in scaled normal weights; projections into the residual stream start smaller."""
    for name, child in module.named_modules():
        if isinstance(child, nn.Embedding):
            nn.init.normal_(child.weight, std=0.05)
        elif isinstance(child, nn.Linear):
            std = child.in_features**-0.5
            if name.endswith(("o_proj", "down_proj")):
                std *= (2 * num_layers) ** -0.5
            nn.init.normal_(child.weight, std=std)
