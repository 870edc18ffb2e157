# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM-Ascend project
"""What vLLM-Ascend's speculators need beyond vLLM's.

Real lengths on the host, for backends that plan there: Model Runner V2 gives none to a draft's metadata build.
vLLM-Ascend then lets ``seq_lens_cpu`` say ``max_seq_len`` for every request, which its builders hand to the operator as
the length to read: past the request's own tokens, and with a cropped block table into the null block.

Builds of their own, for autoregressive drafts: vLLM-Ascend takes the first forward's from the target, in FULL graphs
the later ones' too, and counts on from the target's lengths.
"""

import logging
from collections.abc import Callable
from copy import copy
from functools import partial
from typing import Any

import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
from vllm.v1.worker.gpu.spec_decode import speculator

from ..config import WindowOff
from ..inputs import swapped
from ..window import WindowedDraft
from .autoregressive import TargetDependentSeam
from .parallel import ParallelSeam
from .speculator import Metadata, SpeculatorSeam
from .vllm import attention_of, first_step_by_sizes

# Whose ``build_attn_metadata`` vLLM-Ascend exchanges for its own during a proposal; no argument leads there.
upstream: Any = speculator
# Names of attention backends whose metadata builders always read ``seq_lens_cpu``. GQA's reads the device's lengths for
# parallel drafters, and the host's otherwise.
_PLANNED_ON_HOST = frozenset({"ASCEND_MLA", "ASCEND_SFA"})


def plans_on_host(attn_groups: Any, *, parallel: bool) -> bool:
    """Whether a draft layer's metadata builder reads lengths on the host."""
    return not parallel or any(
        group.backend.get_name() in _PLANNED_ON_HOST for groups in attn_groups for group in groups
    )


class HostCopyingWindow(WindowedDraft):
    """A window whose builds copy the lengths that they are given to the host, where backends plan there.

    The copy waits for the device, as vLLM-Ascend's GQA builder does for parallel drafters. A host bound would not do:
    what it counts too much was never written.
    """

    plans_on_host = False

    def build(self, *args: Any, **kwargs: Any) -> Any:
        if not self.plans_on_host or self.capturing:  # nothing can be waited for in a capture
            return super().build(*args, **kwargs)
        with swapped(upstream, build_attn_metadata=_with_host_lengths(upstream.build_attn_metadata)):
            return super().build(*args, **kwargs)


def _with_host_lengths(build_attn_metadata: Callable[..., Metadata]) -> Callable[..., Metadata]:
    def build(*, num_reqs: int, seq_lens: torch.Tensor, **kwargs: Any) -> Metadata:
        # [num_reqs]
        host = seq_lens[:num_reqs].to("cpu", copy=True).numpy()
        return build_attn_metadata(num_reqs=num_reqs, seq_lens=seq_lens, seq_lens_np=host, **kwargs)

    return build


class AscendParallelSeam(ParallelSeam):
    """In front of vLLM-Ascend's DFlash and DSpark."""

    def make_window(self, *args: Any, **kwargs: Any) -> WindowedDraft:
        window = HostCopyingWindow(*args, **kwargs)
        window.plans_on_host = plans_on_host(self.attn_groups, parallel=True)
        return window


class AscendTargetDependentSeam(TargetDependentSeam):
    """In front of vLLM-Ascend's EAGLE, EAGLE3 and MTP."""

    input_batch: Any
    _first_step: Metadata = None

    def unsupported(self) -> WindowOff | None:
        mro = type(self).__mro__
        name, attention = mro[mro.index(SpeculatorSeam) + 1].__name__, attention_of(self)
        graphs = self.vllm_config.compilation_config.cudagraph_mode.mixed_mode()
        if not first_step_by_sizes():
            reason = f"{name} is windowed with vLLM 0.27 to 0.29 only"
        elif attention is None:
            reason = f"this vLLM-Ascend's {name} is too old for a window on Model Runner V2"
        elif attention != "GQA":
            reason = f"{name} with {attention} attention is not windowed on Model Runner V2 by this version"
        elif graphs == CUDAGraphMode.FULL:
            reason = f"{name} is not windowed with cudagraph_mode FULL; FULL_DECODE_ONLY and FULL_AND_PIECEWISE are"
        else:
            return None
        return WindowOff(reason, logging.WARNING)

    def make_window(self, *args: Any, **kwargs: Any) -> WindowedDraft:
        window = HostCopyingWindow(*args, **kwargs)
        window.plans_on_host = True
        return window

    def build_first_step(self, batch: Any, num_tokens: int, desc: BatchExecutionDescriptor | None = None) -> Metadata:
        """The mixed queries of a first forward, in the target's state: vLLM-Ascend's own build takes neither."""
        num_reqs, num_rows = batch.num_reqs, (desc and desc.num_reqs) or batch.num_reqs
        # [num_reqs + 1]
        starts = batch.query_start_loc_np[: num_reqs + 1]

        def build(upper_bound: torch.Tensor | None) -> Metadata:
            in_targets_state = partial(
                upstream.build_attn_metadata,
                positions=self.input_buffers.positions[:num_tokens],
                is_prefilling=torch.from_numpy(batch.is_prefilling_np),
                attn_state=batch.attn_state,
            )
            with swapped(upstream, build_attn_metadata=in_targets_state):
                return upstream.DraftModelSpeculator._build_draft_attn_metadata(
                    self, num_reqs, num_rows, num_tokens, upper_bound, step=0, query_start_loc_np=starts
                )

        metadata, window = None, self.window
        if window is not None:
            bound = batch.seq_lens_cpu_upper_bound
            metadata = window.build(build, self, bound, num_reqs, num_rows, 0, starts, window.captured)
        if num_rows > num_reqs:
            # FULL graphs of a first forward are uniform, and their padding rows have queries: the last ends the batch.
            for of_layer in (metadata or {}).values():
                of_layer.actual_seq_lengths_q = [(row + 1) * num_tokens // num_rows for row in range(num_rows)]
        self._first_step = metadata
        return metadata

    def build_draft_attn_metadatas(self, num_reqs_padded: int, is_draft_model_prefill: bool) -> list[Metadata]:
        """What a replay updates its captured attention calls with, one dictionary per forward."""
        window, batch = self.window, self.input_batch
        if window is None:
            return super().build_draft_attn_metadatas(num_reqs_padded, is_draft_model_prefill)
        if is_draft_model_prefill:  # built just before, see TargetDependentSeam.propose
            return [self._first_step]
        with swapped(window, plans_on_host=False):
            rows = num_reqs_padded
            metadata = self._build_draft_attn_metadata(
                batch.num_reqs, rows, rows, seq_lens_cpu_upper_bound=batch.seq_lens_cpu_upper_bound, step=1
            )
        # [num_reqs]
        seq_lens = self.input_buffers.seq_lens[: batch.num_reqs].cpu()
        return [
            _at_lengths(metadata or {}, self.windowed_lengths(window, seq_lens, step, num_reqs_padded))
            for step in range(1, self.num_speculative_steps)
        ]

    def windowed_lengths(self, window: WindowedDraft, seq_lens: torch.Tensor, step: int, num_rows: int) -> torch.Tensor:
        """What the device arrives at by that forward, counted on the host from the lengths of the second."""
        # [num_rows]
        windowed = torch.zeros(num_rows, dtype=torch.int32)
        _, windowed[: len(seq_lens)] = window.geometry.lengths(
            (seq_lens + step - 1).clip(max=self.max_model_len), queries=1, lookahead=window.lookahead(step)
        )
        return windowed


def _at_lengths(attn_metadata: dict[str, Any], seq_lens: torch.Tensor) -> dict[str, Any]:
    """A forward of one query token per row; tables stay those of the build."""
    step = {name: copy(metadata) for name, metadata in attn_metadata.items()}
    for metadata in step.values():
        metadata.seq_lens = metadata.seq_lens_cpu = seq_lens
        metadata.seq_lens_list = seq_lens.tolist()
        metadata.actual_seq_lengths_q = list(range(1, len(seq_lens) + 1))
    return step
