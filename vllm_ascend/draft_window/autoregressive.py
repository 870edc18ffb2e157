# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM-Ascend project
"""The draft window for autoregressive drafts, which take one forward per token.

All forwards of a proposal share one start: each looks ahead to the positions that the later ones will write. The first
forward is special. It runs over all tokens of the target's forward (prefill chunks, verified and rejected tokens), and
where the draft depends on the target's hidden states, upstream hands it the *target's* metadata, so that it never meets
the build.
"""

import inspect
import logging
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

from .config import WindowOff
from .geometry import WindowGeometry
from .inputs import swapped
from .speculator import DraftWindowMixin
from .startup import report_off

_BUILDS_BY_DESCRIPTOR = hasattr(DraftModelSpeculator, "_build_attn_metadata")  # vLLM 0.30 and later


class AutoregressiveDraftWindow(DraftWindowMixin):
    """For a draft model of its own, which builds the metadata of its first forward like any other's."""

    max_num_tokens: int
    # Upstream's: tokens that a request's first forward has beyond the target's (a draft model adds the newest token).
    num_extra_query_per_req: int

    def _most_queries(self) -> int:
        return min(self.max_num_tokens, self.max_model_len) + self._extra_queries

    def _shortest_cropped(self, geometry: WindowGeometry) -> int:
        # Requests with more query tokens, and later steps, are cropped from larger lengths on.
        return geometry.first_cropped(queries=1, lookahead=geometry.max_lookahead)

    def _forward_shape(self, step: int, query_start_loc: np.ndarray | None) -> tuple[int | np.ndarray, int]:
        lookahead = self.num_speculative_steps - max(step - self._extra_queries, 0)
        if step == 0 and query_start_loc is not None:
            return np.diff(query_start_loc), lookahead
        return 1, lookahead

    @property
    def _extra_queries(self) -> int:
        return getattr(self, "num_extra_query_per_req", 0)

    def _tokens_ahead(self, step: int) -> int:
        # Upstream counts them in from the second forward on only.
        return max(step, self._extra_queries)


class TargetDependentDraftWindow(AutoregressiveDraftWindow):
    """For drafts that continue the target's hidden states (EAGLE, EAGLE3, MTP)."""

    advance_draft_positions: bool
    target_attn_groups: list[list[Any]]
    target_input_buffers: Any
    prefill_cudagraph_manager: Any
    decode_cudagraph_manager: Any

    _target_batch: Any = None
    _capturing = False
    # The step whose forward comes next, within a loop over steps that may be recorded as one graph.
    _fused_step: int | None = None

    def set_attn(self, *args: Any, **kwargs: Any) -> None:
        """Allocate the twins.

        Raises:
            ValueError: the draft reads the target's KV cache or reuses the first forward's choice of tokens.
        """
        if self.draft_window is not None and not self._can_build_first_step():
            self.draft_window = None
            report_off(WindowOff("it needs vLLM 0.27 or newer for this method", logging.WARNING), self.vllm_config)
        super().set_attn(*args, **kwargs)
        if self.windowed_inputs is None or self.draft_window is None:
            return
        if not self.advance_draft_positions:
            raise ValueError(
                f"draft_window_size={self.draft_window.size} is not supported by {type(self).__name__}: this draft "
                f"attends to the target's KV cache and has none of its own"
            )
        if getattr(self, "share_mtp_topk_indices", False):
            raise ValueError(
                f"draft_window_size={self.draft_window.size} is not supported by {type(self).__name__}: its later "
                f"steps reuse the first one's sparse token indices, which count from the start of that one's window"
            )

    def _can_build_first_step(self) -> bool:
        upstream: Any = super(DraftWindowMixin, self)
        return _BUILDS_BY_DESCRIPTOR or (
            "query_start_loc_np" in inspect.signature(upstream._build_draft_attn_metadata).parameters
        )

    def init_cudagraph_manager(self, *args: Any, **kwargs: Any) -> None:
        """Build the first step's metadata before its graph is replayed; upstream counts on the target's build."""
        super().init_cudagraph_manager(*args, **kwargs)  # type: ignore[misc]
        manager = self.prefill_cudagraph_manager
        replay = manager.run_fullgraph

        def build_and_replay(batch_desc: Any, *args: Any, **kwargs: Any) -> Any:
            if self.windowed_inputs is not None:
                num_reqs = self._target_batch.num_reqs
                self._build_first_step(num_reqs, batch_desc.num_reqs or num_reqs, batch_desc.num_tokens, batch_desc)
            return replay(batch_desc, *args, **kwargs)

        manager.run_fullgraph = build_and_replay

    def capture(self) -> None:
        """Capture on the twins and, for the first step too, through the draft's own builders."""
        if self.windowed_inputs is None:
            return super().capture()  # type: ignore[misc]
        managers = (self.prefill_cudagraph_manager, self.decode_cudagraph_manager)
        self._graphs_read_twins = any(manager.needs_capture() for manager in managers)
        with self.windowed_inputs.in_place_of_originals(
            (self, "target_attn_groups", self.attn_groups),
            (self, "target_input_buffers", self.input_buffers),
            (self, "_capturing", True),
        ):
            return super().capture()  # type: ignore[misc]

    def propose(self, input_batch: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        with swapped((self, "_target_batch", input_batch)):
            return super().propose(input_batch, *args, **kwargs)  # type: ignore[misc]

    def _prefill(
        self, num_reqs: int, num_tokens: int, attn_metadata: dict[str, Any] | None, *args: Any, **kwargs: Any
    ) -> None:
        """The first step: with metadata of its own in place of the target's."""
        if attn_metadata is not None and not self._capturing and self._window_removes_something():
            attn_metadata = self._build_first_step(num_reqs, num_reqs, self._target_batch.num_tokens)
        with self._forward():
            super()._prefill(num_reqs, num_tokens, attn_metadata, *args, **kwargs)  # type: ignore[misc]

    def _build_first_step(
        self, num_reqs: int, num_reqs_padded: int, num_tokens: int, batch_desc: Any = None
    ) -> dict[str, Any] | None:
        """Query layout and slot mappings are still the target's; slots are never windowed."""
        batch = self._target_batch
        # [num_reqs + 1]
        query_start_loc = batch.query_start_loc_np[: num_reqs + 1]
        upper_bound = batch.seq_lens_cpu_upper_bound
        if _BUILDS_BY_DESCRIPTOR:
            if batch_desc is None:
                batch_desc = BatchExecutionDescriptor(CUDAGraphMode.NONE, num_tokens=num_tokens, num_reqs=num_reqs)
            return self._build_attn_metadata(num_reqs, batch_desc, query_start_loc, upper_bound, step=0)
        return self._build_draft_attn_metadata(
            num_reqs, num_reqs_padded, num_tokens, upper_bound, step=0, query_start_loc_np=query_start_loc
        )

    def _generate_fused_drafts(self, num_reqs: int, *args: Any, **kwargs: Any) -> None:
        """vLLM 0.29 and later: all later steps in one loop, where a FULL graph may hold all of them."""
        self._refresh_in_graph(num_reqs, queries=1, lookahead=self.num_speculative_steps - 1)
        with swapped((self, "_fused_step", 1)):
            super()._generate_fused_drafts(num_reqs, *args, **kwargs)  # type: ignore[misc]

    def _generate_draft(self, num_reqs: int, *args: Any, **kwargs: Any) -> None:
        """One later step. It advances the lengths; within a fused loop no build follows that would window them."""
        with self._forward():
            super()._generate_draft(num_reqs, *args, **kwargs)  # type: ignore[misc]
        if self._fused_step is not None:
            self._fused_step += 1
            lookahead = self.num_speculative_steps - self._fused_step
            if lookahead > 0:
                self._refresh_in_graph(num_reqs, queries=1, lookahead=lookahead)

    def _forward(self) -> AbstractContextManager[None]:
        """A forward advances the lengths in place, so even a captured one must find the originals."""
        return self.windowed_inputs.originals() if self._capturing and self.windowed_inputs else nullcontext()
