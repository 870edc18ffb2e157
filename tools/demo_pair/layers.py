# SPDX-License-Identifier: Apache-2.0
"""Qwen3 and Llama layers in plain torch; module names equal the names in published checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import nn

VOCAB_SIZE = 260


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of one Qwen3-shaped stack; without QK-norm it is a Llama."""

    num_layers: int
    hidden_size: int = 256
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    intermediate_size: int = 768
    vocab_size: int = VOCAB_SIZE
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-6
    qk_norm: bool = True
    # RoPE has no table here; this is what the exported config promises to the engine.
    max_position_embeddings: int = 16_384


Rope = tuple[torch.Tensor, torch.Tensor]
KeyValue = tuple[torch.Tensor, torch.Tensor]


class RMSNorm(nn.Module):
    """RMS norm with a weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # torch has a fused kernel only when input and weight agree in dtype.
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


class Attention(nn.Module):
    """Grouped-query attention, in three steps so that drafts can take K and V from elsewhere."""

    def __init__(self, config: ModelConfig, *, input_size: int) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.q_proj = nn.Linear(input_size, config.num_heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(input_size, config.num_kv_heads * config.head_dim, bias=False)
        self.v_proj = nn.Linear(input_size, config.num_kv_heads * config.head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_heads * config.head_dim, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else nn.Identity()

    def query(self, x: torch.Tensor, rope: Rope) -> torch.Tensor:
        """``[B, T, input]`` to ``[B, heads, T, head_dim]``."""
        q = self.q_proj(x).unflatten(-1, (self.num_heads, self.head_dim))
        return apply_rope(self.q_norm(q).transpose(1, 2), rope, dtype=q.dtype)

    def key_value(self, x: torch.Tensor, rope: Rope) -> KeyValue:
        """``[B, T, input]`` to K and V, each ``[B, kv_heads, T, head_dim]``."""
        k = self.k_proj(x).unflatten(-1, (self.num_kv_heads, self.head_dim))
        v = self.v_proj(x).unflatten(-1, (self.num_kv_heads, self.head_dim))
        return apply_rope(self.k_norm(k).transpose(1, 2), rope, dtype=v.dtype), v.transpose(1, 2)

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        mask: torch.Tensor | None = None,
        is_causal: bool = False,
    ) -> torch.Tensor:
        """Attention output ``[B, T, hidden]``."""
        batch, _, num_queries, _ = q.shape
        groups = self.num_heads // self.num_kv_heads
        if num_queries == 1 and mask is None:
            # Decode: the heads of one group become the query rows, so that a long cache is not copied per head.
            out = F.scaled_dot_product_attention(q.view(batch, self.num_kv_heads, groups, self.head_dim), k, v)
            out = out.reshape(batch, self.num_heads, 1, self.head_dim)
        else:
            k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One pre-norm layer; the caller drives its attention, whose input may be wider than the residual stream."""

    def __init__(self, config: ModelConfig, *, attention_input_size: int | None = None) -> None:
        super().__init__()
        self.self_attn = Attention(config, input_size=attention_input_size or config.hidden_size)
        self.mlp = Mlp(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)


def stack(config: ModelConfig) -> nn.ModuleList:
    """All layers of a model."""
    return nn.ModuleList(Layer(config) for _ in range(config.num_layers))


def layers_of(modules: nn.ModuleList) -> list[Layer]:
    """The layers with their type, which a module list does not carry."""
    return cast("list[Layer]", list(modules))


def rope_tables(positions: torch.Tensor, config: ModelConfig) -> Rope:
    """Cosine and sine for ``[T]`` or ``[B, T]`` positions, broadcastable over heads."""
    exponent = torch.arange(0, config.head_dim, 2, device=positions.device, dtype=torch.float32) / config.head_dim
    # [..., T, head_dim / 2]
    angles = positions[..., None].float() * config.rope_theta**-exponent
    if positions.dim() == 2:
        angles = angles[:, None]
    return angles.cos(), angles.sin()


def apply_rope(x: torch.Tensor, rope: Rope, *, dtype: torch.dtype) -> torch.Tensor:
    """Rotate the two halves of every head (the "neox" layout)."""
    cos, sin = rope
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(dtype)


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
