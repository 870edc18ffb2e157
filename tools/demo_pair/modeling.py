# SPDX-License-Identifier: Apache-2.0
"""The demo target, a byte-level Qwen3 of transformers, and what the drafts for it have in common.

Module names equal the names in the exported checkpoints. The drafts are in ``dspark.py`` and ``eagle3.py``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding

from .layers import Rope, init_weights

Target = Qwen3ForCausalLM
BOS_TOKEN_ID = 256
MASK_TOKEN_ID = 257
TARGET_LAYERS = 4
SIZES: dict[str, Any] = {
    "vocab_size": 260,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 768,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    "max_position_embeddings": 16_384,
    "bos_token_id": BOS_TOKEN_ID,
    "eos_token_id": BOS_TOKEN_ID,
    # As it is shipped; here everything is float32.
    "dtype": "bfloat16",
}
"""Of the target, and of drafts where they say nothing else; names of Hugging Face configs."""


def new_target() -> Target:
    """Target with random weights and tied embeddings."""
    target = Target(Qwen3Config(num_hidden_layers=TARGET_LAYERS, tie_word_embeddings=True, **SIZES))
    init_weights(target.model, num_layers=TARGET_LAYERS)
    return target


class Draft(nn.Module, ABC):
    """A draft that proposes ``N`` tokens after any *anchor*, the newest known token of a text.

    An anchor at position ``p`` follows a context of ``p`` tokens, whose target features the draft knows. Subclasses
    differ in what they make of the context and in how the tokens of one proposal depend on each other.

    Attributes:
        features: hidden states of the target that the draft reads, 0 being the embedding.
    """

    num_draft_tokens: ClassVar[int] = 7
    features: ClassVar[tuple[int, ...]] = (1, 2, 3)

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        hidden = config.hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, hidden)
        self.fc = nn.Linear(len(self.features) * hidden, hidden, bias=False)
        self.norm = LlamaRMSNorm(hidden, config.rms_norm_eps)
        self.lm_head = nn.Linear(hidden, config.vocab_size, bias=False)
        self.rotary = LlamaRotaryEmbedding(config)

    def start_from(self, target: Target) -> None:
        """Begin with the target's embedding and head."""
        with torch.no_grad():
            for own in self.embed_tokens, self.lm_head:
                own.weight.copy_(target.lm_head.weight)

    def select_features(self, hidden_states: Sequence[torch.Tensor]) -> torch.Tensor:
        """Concatenate those of the target's hidden states that this draft reads, ``[B, T, features * hidden]``."""
        return torch.cat([hidden_states[i] for i in self.features], dim=-1)

    def rope(self, positions: torch.Tensor) -> Rope:
        """For positions ``[B or 1, T]``."""
        return self.rotary(self.norm.weight, positions)

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
