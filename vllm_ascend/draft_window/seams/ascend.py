# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM-Ascend project
"""What vLLM-Ascend's speculators need beyond vLLM's.

Lengths on the host, for backends that take them there: Model Runner V2 gives none to a draft's metadata build, and
vLLM-Ascend then lets ``seq_lens_cpu`` say ``max_seq_len`` for every request. The host decides the window's start too,
so that no build waits for the device, see ``host_planned.py``.

Builds of their own, for autoregressive drafts: vLLM-Ascend takes the first forward's from the target, in FULL graphs
the later ones' too, and counts on from the target's lengths.
"""

import logging
from copy import copy
from functools import partial
from typing import Any

import numpy as np
import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
from vllm.v1.worker.gpu.spec_decode import speculator

from ..config import WindowOff
from ..host_planned import HostPlannedWindow
from ..inputs import swapped
from ..window import Build, WindowedDraft
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


class ReplayedWindow(HostPlannedWindow):
    """Writes its tensors also where nothing is cut off, while FULL graphs may read them."""

    replayed = False

    def _cuts(self, removed: np.ndarray) -> bool:
        return self.replayed or super()._cuts(removed)


class HostDecidedWindow(WindowedDraft):
    """A window whose start the host decides, where backends take their lengths there.

    vLLM-Ascend's runner keeps lengths on the host. Like without a window, they count this step's drafts as accepted.
    """

    def __init__(self, *args: Any, host_decides: bool, **kwargs: Any) -> None:
        super().__init__(*args, host_decides=host_decides, **kwargs)
        self.host_decides = host_decides
        inputs = self.inputs
        self.planned = ReplayedWindow(self.geometry, inputs.group_ids, inputs.seq_lens, inputs.block_tables)

    def build(
        self,
        build: Build[Any],
        reader: Any,
        upper_bound: torch.Tensor | None,
        num_reqs: int,
        num_rows: int,
        step: int = 0,
        query_start_loc: np.ndarray | None = None,
        replayed: bool = False,
    ) -> Any:
        if not self.host_decides:
            return super().build(build, reader, upper_bound, num_reqs, num_rows, step, query_start_loc, replayed)
        if self.capturing:  # lengths are of no request, and a graph would repeat the launch behind the host's back
            with self.inputs.in_place_of_originals(reader):
                return build(upper_bound)
        # [num_reqs]
        host_lens = reader.input_batch.seq_lens_np[:num_reqs] + step
        self.planned.replayed = replayed
        windowed = partial(
            self.planned.build,
            upstream.build_attn_metadata,
            host_lens,
            queries=self._queries if step or query_start_loc is None else np.diff(query_start_loc),
            lookahead=self.lookahead(step),
        )
        with swapped(upstream, build_attn_metadata=windowed):
            return build(upper_bound)

    def host_lens(self, reader: Any, step: int, num_rows: int) -> torch.Tensor:
        """Lengths of that forward from the start of the last build, int32, [num_rows]."""
        lengths, live = torch.zeros(num_rows, dtype=torch.int32), reader.input_batch.num_reqs
        full = np.minimum(reader.input_batch.seq_lens_np[:live] + step, self.geometry.limit)
        lengths[:live] = torch.from_numpy(full - self.planned.removed[:live])
        return lengths


class AscendParallelSeam(ParallelSeam):
    """In front of vLLM-Ascend's DFlash and DSpark."""

    host_decides = True

    def make_window(self, *args: Any, **kwargs: Any) -> WindowedDraft:
        return HostDecidedWindow(*args, host_decides=plans_on_host(self.attn_groups, parallel=True), **kwargs)


class AscendTargetDependentSeam(TargetDependentSeam):
    """In front of vLLM-Ascend's EAGLE, EAGLE3 and MTP."""

    host_decides = True
    window: HostDecidedWindow | None
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
        return HostDecidedWindow(*args, host_decides=True, **kwargs)

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
        metadata = self._build_draft_attn_metadata(
            batch.num_reqs,
            num_reqs_padded,
            num_reqs_padded,
            seq_lens_cpu_upper_bound=batch.seq_lens_cpu_upper_bound,
            step=1,
        )
        return [
            _at_lengths(metadata or {}, window.host_lens(self, step, num_reqs_padded))
            for step in range(1, self.num_speculative_steps)
        ]


def _at_lengths(attn_metadata: dict[str, Any], seq_lens: torch.Tensor) -> dict[str, Any]:
    """A forward of one query token per row; tables stay those of the build."""
    step = {name: copy(metadata) for name, metadata in attn_metadata.items()}
    for metadata in step.values():
        metadata.seq_lens = metadata.seq_lens_cpu = seq_lens
        metadata.seq_lens_list = seq_lens.tolist()
        metadata.actual_seq_lengths_q = list(range(1, len(seq_lens) + 1))
    return step
