# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM-Ascend project
"""Puts the draft window in front of a Model Runner V2 speculator.

MRV2 bakes lengths and block tables into per-layer metadata, so the window has to move *before* the metadata build.
Three seams see draft metadata come into being, and nothing else is touched:

* the build of a step: ``_build_draft_attn_metadata`` (vLLM 0.26 to 0.29), ``_build_attn_metadata`` (from 0.30 on);
* graph capture, which calls the attention builders directly;
* the refresh that vLLM 0.32 records into a FULL graph instead of building at replay.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.triton_utils import HAS_TRITON

from .config import DraftWindow, WindowOff, max_rejected
from .geometry import WindowGeometry
from .groups import inspect_draft_groups
from .inputs import WindowedInputs
from .startup import decide, report_in_force, report_off


class ParallelDraftWindow:
    """Mixin for parallel drafters (DFlash, DSpark): one forward and one build per step, no look-ahead.

    Stands before the speculator class in the method resolution order. While ``windowed_inputs`` is ``None``, every
    method is upstream's.
    """

    # Upstream's speculator, as far as the window looks at it.
    vllm_config: Any
    attn_groups: list[list[Any]]
    block_tables: Any
    input_buffers: Any
    max_model_len: int
    draft_max_seq_len: int
    num_query_per_req: int
    num_speculative_steps: int
    query_cudagraph_manager: Any

    draft_window: DraftWindow | None = None
    windowed_inputs: WindowedInputs | None = None
    # Whether a FULL graph reads the twins' addresses, so that they must be fresh at every step.
    _graphs_read_twins = False

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        """Resolve the options before any buffer is allocated or weight loaded.

        Raises:
            ValueError: the options are wrong, or cannot work with this draft.
        """
        decision = decide(vllm_config)
        if isinstance(decision, DraftWindow):
            self.draft_window = decision
        super().__init__(vllm_config, *args, **kwargs)  # type: ignore[call-arg]

    def set_attn(self, *args: Any, **kwargs: Any) -> None:
        """Allocate the persistent twins as soon as the KV cache groups are known.

        Raises:
            ValueError: a draft KV cache group cannot be windowed.
        """
        super().set_attn(*args, **kwargs)  # type: ignore[misc]
        if self.draft_window is None:
            return
        groups = inspect_draft_groups(self.attn_groups, self.block_tables)
        if isinstance(groups, WindowOff):
            report_off(groups, self.vllm_config)
            return
        window = self.draft_window = self.draft_window.widened_to(groups.native_window)
        geometry = WindowGeometry(
            window=window.size,
            sink=window.sink_size,
            min_context=window.min_context,
            block_sizes=groups.block_sizes,
            full_columns=groups.full_columns,
            max_model_len=self.max_model_len,
            max_queries=window.queries_per_request,
            max_lookahead=window.max_lookahead,
        )
        self.windowed_inputs = WindowedInputs(
            geometry, self.input_buffers, self.block_tables, groups.group_ids, fused=HAS_TRITON
        )
        # The host stops counting at the limit; a device length that it stands for may lie past the block table.
        self._first_cropped = min(geometry.first_cropped(queries=self.num_query_per_req), geometry.limit)
        self._max_rejected = max_rejected(self.vllm_config)
        graphs = self.vllm_config.compilation_config.cudagraph_mode.decode_mode().name
        report_in_force(
            window,
            self.vllm_config,
            f"block alignment={geometry.alignment}, table columns={list(geometry.columns)}, "
            f"KV cache groups={list(groups.group_ids)}, runner=V2 ({type(self).__name__}), decode graphs={graphs}, "
            f"{-(-self.windowed_inputs.num_bytes // 1024)} KiB",
        )

    def capture(self) -> None:
        """Capture on the twins, so that every replay reads their addresses, planned for the window's length."""
        if self.windowed_inputs is None:
            return super().capture()  # type: ignore[misc]
        self._graphs_read_twins = self.query_cudagraph_manager.needs_capture()
        planned_len = min(self.max_model_len, self.windowed_inputs.geometry.max_length)
        with self.windowed_inputs.in_place_of_originals((self, "max_model_len", planned_len)):
            return super().capture()  # type: ignore[misc]

    def _build_draft_attn_metadata(
        self,
        num_reqs: int,
        num_reqs_padded: int,
        num_tokens_padded: int,
        seq_lens_cpu_upper_bound: torch.Tensor | None = None,
        step: int = 0,
        **kwargs: Any,
    ) -> dict[str, Any] | None:
        """vLLM 0.26 to 0.29; the host bound and its step came with 0.27. A FULL replay may follow any build."""
        window, upper_bound = self._window_step(
            num_reqs, num_reqs_padded, seq_lens_cpu_upper_bound, step, always=self._graphs_read_twins
        )
        if upper_bound is not None:
            kwargs.update(seq_lens_cpu_upper_bound=upper_bound, step=step)
        with window:
            return super()._build_draft_attn_metadata(  # type: ignore[misc]
                num_reqs, num_reqs_padded, num_tokens_padded, **kwargs
            )

    def _build_attn_metadata(
        self,
        num_reqs: int,
        batch_desc: Any,
        query_start_loc_np: Any,
        seq_lens_cpu_upper_bound: torch.Tensor,
        step: int,
        **kwargs: Any,
    ) -> dict[str, Any] | None:
        """vLLM 0.30 and later."""
        window, upper_bound = self._window_step(
            num_reqs,
            batch_desc.num_reqs or num_reqs,
            seq_lens_cpu_upper_bound,
            step,
            always=batch_desc.cg_mode == CUDAGraphMode.FULL,
        )
        with window:
            return super()._build_attn_metadata(  # type: ignore[misc]
                num_reqs, batch_desc, query_start_loc_np, upper_bound, step, **kwargs
            )

    def _update_draft_decode_metadata(self, attn_metadata: dict[str, Any], num_reqs: int) -> None:
        """vLLM 0.32: recorded into the FULL graph. Rows without a request have length 0 there."""
        if self.windowed_inputs is not None:
            self.windowed_inputs.refresh(num_reqs=num_reqs, num_rows=num_reqs, queries=self.num_query_per_req)
        super()._update_draft_decode_metadata(attn_metadata, num_reqs)  # type: ignore[misc]

    def _window_step(
        self, num_reqs: int, num_rows: int, upper_bound: torch.Tensor | None, step: int, *, always: bool
    ) -> tuple[AbstractContextManager[None], torch.Tensor | None]:
        """Refresh the twins for one build.

        Args:
            upper_bound: host bound without ``step``, int32, [>= num_reqs], which the build adds to it.
            always: refresh even when the host can tell that the window removes nothing from this batch.

        Returns:
            The context to build in, and the host bound to build with.
        """
        inputs = self.windowed_inputs
        # Without a crop the twins would equal the originals.
        crops = inputs is not None and self.draft_max_seq_len >= self._first_cropped
        if inputs is None or not (crops or always):
            return nullcontext(), upper_bound
        inputs.refresh(num_reqs=num_reqs, num_rows=num_rows, queries=self.num_query_per_req)
        if crops and upper_bound is not None:
            windowed = inputs.geometry.host_bound(
                upper_bound[:num_reqs].numpy() + step, max_rejected=self._max_rejected, queries=self.num_query_per_req
            )
            upper_bound = torch.from_numpy(windowed - step)
        max_seq_len = min(self.draft_max_seq_len, inputs.geometry.max_length)
        return inputs.in_place_of_originals((self, "draft_max_seq_len", max_seq_len)), upper_bound
