# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM-Ascend project
"""Drafts that continue the target's hidden states, token by token (EAGLE, EAGLE3, MTP).

All forwards of a proposal share one start: each looks ahead to the positions that the later ones will write. The first
forward runs over all tokens of the target's forward (prefill chunks, verified and rejected tokens), and upstream hands
it the *target's* metadata, so that it never meets a build of the draft's. It gets one here.
"""

from contextlib import AbstractContextManager
from typing import Any

from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CudaGraphManager
from vllm.v1.worker.gpu.input_batch import InputBatch

from ..inputs import swapped
from .graphs import BuildBeforeReplay, CaptureOnWindow
from .speculator import Metadata, SpeculatorSeam
from .vllm import builds_by_descriptor


class TargetDependentSeam(SpeculatorSeam):
    """In front of upstream's ``AutoRegressiveSpeculator``, from vLLM 0.32 on ``TargetDependentARSpeculator``."""

    prefill_cudagraph_manager: CudaGraphManager
    decode_cudagraph_manager: CudaGraphManager
    # The target's, while a proposal is at work.
    target_batch: InputBatch | None = None

    def capture(self) -> None:
        """Capture on the windowed tensors and, for the first forward too, through the draft's own builders."""
        window, prefill, decode = self.window, self.prefill_cudagraph_manager, self.decode_cudagraph_manager
        if window is None:
            return super().capture()
        with swapped(
            self,
            prefill_cudagraph_manager=CaptureOnWindow(prefill, window, attn_groups=self.attn_groups),
            decode_cudagraph_manager=CaptureOnWindow(decode, window),
        ):
            super().capture()

    def num_forwards(self, num_tokens: int | None) -> int:
        """The first runs in any case, so that the draft keeps up with the target."""
        return self.num_speculative_steps if num_tokens is None else max(num_tokens, 1)

    def proposing(self, input_batch: InputBatch) -> AbstractContextManager[None]:
        """Let the first forward's metadata be built before a replay too; upstream counts on the target's build."""
        manager: Any = self.prefill_cudagraph_manager  # None while memory is profiled
        if self.window is not None and manager is not None:
            manager = BuildBeforeReplay(manager, lambda desc: self.build_first_step(input_batch, desc.num_tokens, desc))
        return swapped(self, target_batch=input_batch, prefill_cudagraph_manager=manager)

    def _prefill(self, num_reqs: int, num_tokens: int, attn_metadata: Metadata, *args: Any, **kwargs: Any) -> None:
        """The first forward: with metadata of its own in place of the target's. While capturing there is no batch."""
        window, batch = self.window, self.target_batch
        build = window is not None and window.may_hide(self.draft_max_seq_len)
        if build and batch is not None and attn_metadata is not None:
            attn_metadata = self.build_first_step(batch, batch.num_tokens)
        super()._prefill(num_reqs, num_tokens, attn_metadata, *args, **kwargs)

    def build_first_step(
        self, batch: InputBatch, num_tokens: int, desc: BatchExecutionDescriptor | None = None
    ) -> Metadata:
        """Query layout and slot mappings are still the target's; slots are never windowed."""
        num_reqs, upper_bound = batch.num_reqs, batch.seq_lens_cpu_upper_bound
        # [num_reqs + 1]
        starts = batch.query_start_loc_np[: num_reqs + 1]
        desc = desc or BatchExecutionDescriptor(CUDAGraphMode.NONE, num_tokens=num_tokens, num_reqs=num_reqs)
        if builds_by_descriptor():
            return self._build_attn_metadata(num_reqs, desc, starts, upper_bound, step=0)
        return self._build_draft_attn_metadata(
            num_reqs, desc.num_reqs or num_reqs, num_tokens, upper_bound, step=0, query_start_loc_np=starts
        )
