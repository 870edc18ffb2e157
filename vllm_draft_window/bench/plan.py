# SPDX-License-Identifier: Apache-2.0
"""What is compared, and on what."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from .models import PairSizes, write_draft, write_target

CHECKOUT = Path(__file__).resolve().parents[2]
BLOCK_SIZE = 16


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """One side of a comparison.

    Attributes:
        options: the draft window's, as in ``additional_config``.
        native_window: the draft's config asks vLLM for sliding-window layers of so many tokens.
        tree: the checkout whose window runs.
    """

    options: dict[str, Any] = field(default_factory=dict)
    native_window: int | None = None
    tree: Path = CHECKOUT


def configurations(
    names: Sequence[str], sizes: PairSizes, *, window: int, against: Sequence[Path] = ()
) -> dict[str, Configuration]:
    """The named configurations; the windowed ones again as ``NAME@FOLDER`` with the window of each other checkout.

    Raises:
        ValueError: a name is unknown or has no meaning for the method, or a folder is no checkout.
    """
    on = {"draft_window_size": window} | ({"draft_window_mtp": True} if sizes.method == "mtp" else {})
    known = {
        "off": Configuration(),
        "on": Configuration(options=on),
        # Drawn among three, none larger: what "auto" itself costs.
        "auto": Configuration(
            options=on | {"draft_window_size": "auto", "draft_window_candidates": [window // 4, window // 2, window]}
        ),
        # Only what the window reads is kept.
        "reclaim": Configuration(options=on | {"draft_window_reclaim": True}),
        # A sink rules a mask per row out: the crop alone.
        "sink": Configuration(options=on | {"draft_window_sink_size": 64}),
        # vLLM's alternative, for which the checkpoint is edited; an MTP head is part of the target.
        **({} if sizes.method == "mtp" else {"native": Configuration(native_window=window)}),
        # A draft with next to nothing to read, which needs no repetition: a control.
        "tiny": Configuration(options=on | {"draft_window_size": max(8, sizes.draft_tokens + 1)}),
    }
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"--configs: {', '.join(unknown)} is none of {', '.join(known)} (with {sizes.method})")
    chosen = {}
    for name in names:
        chosen[name] = known[name]
        for tree in against if known[name].options else ():
            if not (tree / "vllm_ascend" / "draft_window").is_dir():
                raise ValueError(f"--against {tree} is no checkout of this project: no vllm_ascend/draft_window in it")
            chosen[f"{name}@{tree.resolve().name}"] = replace(known[name], tree=tree.resolve())
    return chosen


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One batch: the prompt length of every request, and how many decode steps follow."""

    name: str
    contexts: tuple[int, ...]
    warmup: int
    steps: int

    def reach(self, draft_tokens: int, chunk: int) -> int:
        """Tokens that no request can use up before the last timed step.

        Early requests already decode while later ones are prefilled, and a step yields at most K + 1 tokens.
        """
        prefill = sum(-(-c // chunk) for c in self.contexts) + len(self.contexts) if len(self.contexts) > 1 else 0
        return (self.warmup + self.steps + 8 + prefill) * (draft_tokens + 1)


@cache
def prompt(seed: int, request: int, vocab: int, length: int) -> list[int]:
    """Random tokens, a shorter one the beginning of a longer one; the last id is the draft's mask and stays out."""
    return np.random.default_rng((seed, request)).integers(0, vocab - 1, size=length).tolist()


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Models, workloads, and the engines that run them.

    Attributes:
        work: folder of the models.
        chunk: prompt tokens that are prefilled in one step.
        max_model_len: longest sequence; ``None`` is what the workloads need.
        full: length of the requests of which there will be as many as the KV cache holds.
        max_num_seqs: most requests at once; ``None`` is what the workloads need.
        whole_gpu: the KV cache takes what is left of the GPU instead of what the workloads need.

    Raises:
        ValueError: a workload reaches past ``max_model_len``.
    """

    sizes: PairSizes
    workloads: Sequence[Workload]
    work: Path
    device: str
    fast_prefill: bool = True
    chunk: int = 8192
    max_model_len: int | None = None
    full: int | None = None
    max_num_seqs: int | None = None
    whole_gpu: bool = False

    def __post_init__(self) -> None:
        if self.max_model_len is not None and self.max_model_len < self._longest:
            raise ValueError(f"--max-model-len {self.max_model_len} is below {self._longest}, context and new tokens")

    @property
    def _longest(self) -> int:
        return max(self.full or 0, *(max(w.contexts) + self._reach(w) for w in self.workloads))

    def _reach(self, workload: Workload) -> int:
        return workload.reach(self.sizes.draft_tokens, self.chunk)

    def draft_folder(self, configuration: Configuration) -> Path:
        return self.work / ("draft" if configuration.native_window is None else "draft-native")

    def write_models(self, chosen: Iterable[Configuration]) -> None:
        write_target(self.work / "target", self.sizes)
        for configuration in chosen if self.sizes.method != "mtp" else ():
            write_draft(self.draft_folder(configuration), self.sizes, native_window=configuration.native_window)

    def engine_args(self, configuration: Configuration) -> dict[str, Any]:
        """Arguments of ``vllm.LLM``."""
        sizes = self.sizes
        speculation: dict[str, Any] = {"method": sizes.method, "num_speculative_tokens": sizes.draft_tokens}
        if sizes.method != "mtp":
            speculation["model"] = str(self.draft_folder(configuration))
        max_model_len = self.max_model_len or self._longest
        arguments: dict[str, Any] = {
            "model": str(self.work / "target"),
            "speculative_config": speculation,
            "additional_config": configuration.options,
            "seed": sizes.seed,
            "max_model_len": max_model_len,
            "max_num_seqs": self.max_num_seqs or max(len(w.contexts) for w in self.workloads),
            "max_num_batched_tokens": self.chunk,
            # A real prefill is shared by the contexts of one engine; a fast one costs little, and without a cache
            # every configuration prefills in the same chunks, to the same bits.
            "enable_prefix_caching": not self.fast_prefill,
            "disable_log_stats": True,
        }
        if self.device == "cpu":
            return arguments
        memory: dict[str, Any] = {"gpu_memory_utilization": 0.9, "kv_cache_memory_bytes": None}
        if not self.whole_gpu:
            # Several engines may share the GPU; and one that need not find out how much it has starts sooner.
            needed = [sum(w.contexts) + len(w.contexts) * (self._reach(w) + BLOCK_SIZE) for w in self.workloads]
            tokens = max(*needed, max_model_len)
            memory = {"gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": sizes.kv_cache_bytes(tokens)}
        return arguments | full_graphs() | memory


def full_graphs() -> dict[str, Any]:
    """Arguments of ``vllm.LLM`` on a GPU: bfloat16, full graphs for decode steps, nothing compiled."""
    compilation = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    return {"dtype": "bfloat16", "enforce_eager": False, "block_size": BLOCK_SIZE, "compilation_config": compilation}
