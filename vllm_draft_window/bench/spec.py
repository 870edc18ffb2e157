# SPDX-License-Identifier: Apache-2.0
"""What one engine process is asked to measure; travels from the parent to the child as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

BYTES_PER_VALUE = 2  # bf16


@dataclass(frozen=True, kw_only=True)
class PairSizes:
    """Sizes of a random-weight target and its draft."""

    method: str = "dspark"
    layers: int = 10
    draft_layers: int = 5
    hidden: int = 1024
    heads: int = 8
    kv_heads: int = 8
    head_dim: int = 128
    vocab: int = 1024
    draft_tokens: int = 7
    max_positions: int = 1_048_576
    seed: int = 0

    def __post_init__(self) -> None:
        if self.layers <= self.draft_layers:
            raise ValueError(f"layers={self.layers} must be above draft_layers={self.draft_layers}")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads={self.heads} must be a multiple of kv_heads={self.kv_heads}")

    @property
    def kv_bytes_per_layer(self) -> int:
        """Bytes of K and V of one token in one layer."""
        return 2 * self.kv_heads * self.head_dim * BYTES_PER_VALUE

    @property
    def target_layer_ids(self) -> list[int]:
        """Target layers whose output the draft reads: spread out, the last one excluded.

        As many as the draft has layers: vLLM 0.26 sizes a DSpark draft's input by that number.
        """
        last = self.layers - 2
        return [i * last // max(self.draft_layers - 1, 1) for i in range(self.draft_layers)]


@dataclass(frozen=True)
class Workload:
    """One batch: a name and the prompt length of every request."""

    name: str
    contexts: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class EngineRun:
    """One engine process: one configuration, every workload.

    Attributes:
        config: name of the configuration (``off``, ``on``, ``tiny``, ``native``).
        window: ``draft_window_size``, or ``None`` to leave the option away.
        prefill: ``real``, or ``fast`` (the target skips attention in prefill chunks, see ``probes``).
        cpus: cores that the process is pinned to; empty leaves it where it is.
        host_profile: after the workloads, time what the window is part of on the host.
        engine_args: further keyword arguments of ``vllm.LLM``; they win.
    """

    config: str
    round: int
    target: str
    draft: str
    method: str
    draft_tokens: int
    window: int | None
    workloads: tuple[Workload, ...]
    device: str = "cuda"
    prefill: str = "fast"
    max_model_len: int = 1_048_576
    max_num_seqs: int = 1
    max_num_batched_tokens: int = 8192
    gpu_memory_utilization: float = 0.9
    warmup: int = 30
    steps: int = 250
    vocab: int = 1024
    seed: int = 0
    sync_check: bool = False
    cpus: tuple[int, ...] = ()
    host_profile: bool = False
    engine_args: dict[str, Any] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1))

    @classmethod
    def read(cls, path: Path) -> EngineRun:
        values = json.loads(path.read_text())
        values["workloads"] = tuple(Workload(w["name"], tuple(w["contexts"])) for w in values["workloads"])
        values["cpus"] = tuple(values["cpus"])
        return cls(**values)

    def max_tokens(self, workload: Workload) -> int:
        """Tokens that no request of the workload can use up before the last timed step.

        Early requests already decode while later ones are prefilled, and a step yields at most K + 1 tokens.
        """
        prefill_steps = sum(-(-c // self.max_num_batched_tokens) for c in workload.contexts) + len(workload.contexts)
        steps = self.warmup + self.steps + 8 + (prefill_steps if len(workload.contexts) > 1 else 0)
        return steps * (self.draft_tokens + 1)
