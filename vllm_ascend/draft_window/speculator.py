# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM-Ascend project
"""Puts the draft window in front of a Model Runner V2 speculator.

MRV2 bakes lengths and block tables into per-layer metadata, so the window has to move *before* the metadata build.
Three seams see draft metadata come into being, and nothing else is touched:

* the build of a step: ``_build_draft_attn_metadata`` (vLLM 0.26 to 0.29), ``_build_attn_metadata`` (from 0.30 on);
* graph capture, which calls the attention builders directly;
* the refresh that newer vLLM records into a FULL graph instead of building at replay.

:class:`DraftWindowMixin` knows the first, which all methods share. ``parallel.py`` and ``autoregressive.py`` know the
others, each for its kind of draft.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.triton_utils import HAS_TRITON

from . import reclaim
from .config import DraftWindow, ReclaimRefused, WindowOff, max_rejected
from .counters import DraftWindowCounters
from .geometry import WindowGeometry
from .groups import inspect_draft_groups
from .inputs import WindowedInputs
from .startup import decide, report_in_force, report_off

# By layer name; None for a draft without attention.
Metadata = dict[str, Any] | None
# Makes the twins fresh, and is the context to build in.
Window = Callable[[], AbstractContextManager[None]]


class DraftWindowMixin:
    """Stands before a speculator class in the method resolution order and windows its metadata builds.

    While ``windowed_inputs`` is ``None``, every method is upstream's.
    """

    # Upstream's speculator, as far as the window looks at it.
    vllm_config: Any
    attn_groups: list[list[Any]]
    draft_attn_layer_names: set[str]
    block_tables: Any
    input_buffers: Any
    max_model_len: int
    draft_max_seq_len: int
    num_speculative_steps: int

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

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the draft; its layers then publish what they keep.

        Raises:
            ReclaimRefused: see :func:`.reclaim.publish`.
        """
        super().load_model(*args, **kwargs)  # type: ignore[misc]
        if self.draft_window is not None and self.draft_window.reclaim:
            reclaim.publish(self.vllm_config, self.draft_window, self.draft_attn_layer_names)

    def set_attn(self, *args: Any, **kwargs: Any) -> None:
        """Allocate the persistent twins as soon as the KV cache groups are known.

        Raises:
            ValueError: a draft KV cache group cannot be windowed.
        """
        super().set_attn(*args, **kwargs)  # type: ignore[misc]
        if self.draft_window is None:
            return
        if self.draft_window.reclaim:
            reclaim.let_no_spec_mask(self.attn_groups)
        groups = inspect_draft_groups(self.attn_groups, self.block_tables)
        if isinstance(groups, WindowOff):
            if self.draft_window.reclaim:
                raise ReclaimRefused(groups.reason)
            self._switch_off(groups)
            return
        window = self.draft_window = self.draft_window.widened_to(groups.native_window)
        geometry = WindowGeometry(
            window=window.size,
            sink=window.sink_size,
            min_context=window.min_context,
            block_sizes=groups.block_sizes,
            full_columns=groups.full_columns,
            # The engine may have fitted it to its memory since the speculator was made.
            max_model_len=self.vllm_config.model_config.max_model_len,
            max_queries=self._most_queries(),
            max_lookahead=window.max_lookahead,
        )
        if covered := window.covers(geometry.limit, block_size=geometry.alignment):
            self._switch_off(covered)
            return
        self.windowed_inputs = WindowedInputs(
            geometry,
            self.input_buffers,
            self.block_tables,
            groups.group_ids,
            query_start_loc=self.input_buffers.query_start_loc,
            fused=HAS_TRITON,
        )
        # The host stops counting at the limit; a device length that it stands for may lie past the block table.
        self._first_cropped = min(self._shortest_cropped(geometry), geometry.limit)
        self._max_rejected = max_rejected(self.vllm_config)
        self._counters = DraftWindowCounters(self.vllm_config)
        graphs = self.vllm_config.compilation_config.cudagraph_mode.decode_mode().name
        report_in_force(
            window,
            self.vllm_config,
            f"block alignment={geometry.alignment}, table columns={list(geometry.columns)}, "
            f"KV cache groups={list(groups.group_ids)}, runner=V2 ({type(self).__name__}), decode graphs={graphs}, "
            f"{-(-self.windowed_inputs.num_bytes // 1024)} KiB",
        )

    def _switch_off(self, off: WindowOff) -> None:
        self.draft_window = self.windowed_inputs = None
        report_off(off, self.vllm_config)

    def _most_queries(self) -> int:
        """Most query tokens of one request in one draft forward."""
        raise NotImplementedError

    def _shortest_cropped(self, geometry: WindowGeometry) -> int:
        """Smallest ``draft_max_seq_len`` of a batch from which the window may remove something."""
        raise NotImplementedError

    def _forward_shape(self, step: int, query_start_loc: np.ndarray | None) -> tuple[int | np.ndarray, int]:
        """Query tokens of a build, one number or int32 [num_reqs], and the look-ahead that its proposal still has."""
        raise NotImplementedError

    def _tokens_ahead(self, step: int) -> int:
        """Tokens by which the lengths of a step exceed those of the target's forward."""
        return step

    def _build_draft_attn_metadata(
        self,
        num_reqs: int,
        num_reqs_padded: int,
        num_tokens_padded: int,
        seq_lens_cpu_upper_bound: torch.Tensor | None = None,
        step: int = 0,
        **kwargs: Any,
    ) -> Metadata:
        """vLLM 0.26 to 0.29; the host bound and its step came with 0.27. A FULL replay may follow any build."""
        window, upper_bound = self._window_step(
            num_reqs,
            num_reqs_padded,
            seq_lens_cpu_upper_bound,
            step,
            kwargs.get("query_start_loc_np"),
            always=self._graphs_read_twins,
        )
        if upper_bound is not None:
            kwargs.update(seq_lens_cpu_upper_bound=upper_bound, step=step)
        build = super()._build_draft_attn_metadata  # type: ignore[misc]
        return self._build_in(window, partial(build, num_reqs, num_reqs_padded, num_tokens_padded, **kwargs))

    def _build_attn_metadata(
        self,
        num_reqs: int,
        batch_desc: Any,
        query_start_loc_np: np.ndarray,
        seq_lens_cpu_upper_bound: torch.Tensor,
        step: int,
        **kwargs: Any,
    ) -> Metadata:
        """vLLM 0.30 and later."""
        window, upper_bound = self._window_step(
            num_reqs,
            batch_desc.num_reqs or num_reqs,
            seq_lens_cpu_upper_bound,
            step,
            query_start_loc_np,
            always=batch_desc.cg_mode == CUDAGraphMode.FULL,
        )
        build = super()._build_attn_metadata  # type: ignore[misc]
        return self._build_in(
            window, partial(build, num_reqs, batch_desc, query_start_loc_np, upper_bound, step, **kwargs)
        )

    def _build_in(self, window: Window, build: Callable[[], Metadata]) -> Any:
        """Run upstream's build with the window's tensors and lengths in place of its own."""
        with window():
            return build()

    def _window_removes_something(self) -> bool:
        """Whether it may, as far as the host can tell; where not, the twins would equal the originals."""
        return self.windowed_inputs is not None and self.draft_max_seq_len >= self._first_cropped

    def _window_step(
        self,
        num_reqs: int,
        num_rows: int,
        upper_bound: torch.Tensor | None,
        step: int,
        query_start_loc: np.ndarray | None,
        *,
        always: bool,
    ) -> tuple[Window, torch.Tensor | None]:
        """What the window means for one build.

        Args:
            upper_bound: host bound without ``step``, int32, [>= num_reqs], which the build adds to it.
            query_start_loc: cumulative query tokens, int32, [> num_reqs], where the build is given them.
            always: refresh even when the host can tell that the window removes nothing from this batch.

        Returns:
            What to build in, and the host bound to build with.
        """
        inputs = self.windowed_inputs
        crops = self._window_removes_something()
        if inputs is None:
            return nullcontext, upper_bound
        if not (crops or always):
            self._counters.record()
            return nullcontext, upper_bound
        queries, lookahead = self._forward_shape(step, query_start_loc)
        uniform = queries if isinstance(queries, int) else None
        if crops and upper_bound is not None:
            # [num_reqs]
            full = upper_bound[:num_reqs].numpy() + self._tokens_ahead(step)
            windowed = inputs.geometry.host_bound(
                full, max_rejected=self._max_rejected, queries=queries, lookahead=lookahead
            )
            self._counters.record(full, windowed)
            upper_bound = torch.from_numpy(windowed - step)
        else:
            self._counters.record()

        # A build that waits for its forward may never run, and leaves this to whoever runs it.
        def window() -> AbstractContextManager[None]:
            inputs.refresh(num_reqs=num_reqs, num_rows=num_rows, queries=uniform, lookahead=lookahead)
            longest = inputs.geometry.longest(queries if isinstance(queries, int) else int(queries.max()), lookahead)
            return inputs.in_place_of_originals((self, "draft_max_seq_len", min(self.draft_max_seq_len, longest)))

        return window, upper_bound

    def _refresh_in_graph(self, num_reqs: int, *, queries: int, lookahead: int = 0) -> None:
        """Recorded into a FULL graph. Rows without a request have length 0 there."""
        inputs = self.windowed_inputs
        if inputs is None:
            return
        inputs.refresh(num_reqs=num_reqs, num_rows=num_reqs, queries=queries, lookahead=lookahead)
        # Backends with blocks smaller than the table's read a persistent mapping of it, made outside the graph.
        for group_id, table in zip(inputs.group_ids, inputs.block_tables, strict=True):
            for group in self.attn_groups[group_id]:
                if getattr(group, "kernel_block_size", None) is not None:
                    group.map_to_kernel_block_table(table[:num_reqs])
