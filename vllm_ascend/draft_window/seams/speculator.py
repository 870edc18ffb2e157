# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM-Ascend project
"""What every windowed speculator has in front: options before it is built, tensors once its KV cache groups are known,
and the window around each metadata build.

Model Runner V2 bakes lengths and block tables into per-layer metadata, so the window acts *before* the build. A
standalone draft model needs nothing more; ``parallel.py`` and ``autoregressive.py`` add what other drafts need.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from math import lcm
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.triton_utils import HAS_TRITON
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
from vllm.v1.worker.gpu.input_batch import InputBatch

from .. import reclaim
from ..config import DraftWindow, ReclaimRefused, WindowOff
from ..facts import max_rejected
from ..geometry import Rows
from ..groups import inspect_draft_groups, own_window
from ..inputs import Bind
from ..positions import DraftPositions
from ..ranks import agree
from ..startup import decide, report_in_force, report_off
from ..window import Counters, WindowedDraft, rows_kept
from . import vllm as versions

Metadata = dict[str, Any] | None
"""By layer name; ``None`` for a draft without attention."""

if not TYPE_CHECKING:
    Speculator = object  # the real one comes behind the seam
else:

    class Speculator:
        """Upstream's, as far as the window looks at it."""

        vllm_config: Any
        model: torch.nn.Module
        attn_groups: Sequence[Sequence[Any]]
        draft_attn_layer_names: set[str]
        target_attn_groups: Sequence[Sequence[Any]]
        block_tables: Any
        input_buffers: Any
        max_model_len: int
        max_num_tokens: int
        draft_max_seq_len: int
        num_speculative_steps: int

        def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None: ...
        def load_model(self, *args: Any, **kwargs: Any) -> None: ...
        def set_attn(self, *args: Any, **kwargs: Any) -> None: ...
        def capture(self) -> None: ...
        def propose(self, *args: Any, **kwargs: Any) -> Any: ...
        def _prefill(self, *args: Any, **kwargs: Any) -> None: ...
        def _generate_draft(self, *args: Any, **kwargs: Any) -> None: ...
        def _generate_fused_drafts(self, *args: Any, **kwargs: Any) -> None: ...
        def _build_draft_attn_metadata(self, *args: Any, **kwargs: Any) -> Metadata: ...
        def _build_attn_metadata(self, *args: Any, **kwargs: Any) -> Metadata: ...
        def _update_draft_decode_metadata(self, attn_metadata: dict[str, Any], num_reqs: int) -> None: ...
        def build_draft_attn_metadatas(self, *args: Any) -> Any: ...


class SpeculatorSeam(Speculator):
    """Stands in front of a speculator class. While ``window`` is ``None``, every method is upstream's."""

    draft_window: DraftWindow | None = None
    window: WindowedDraft | None = None
    positions: DraftPositions
    # Whoever makes the class may bring what counts, made for the engine's configuration, and what shortens the launch.
    make_counters: Callable[[Any], Counters] | None = None
    bind: Bind | None = None
    host_decides = False

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        """Resolve the options before any buffer is allocated or weight loaded.

        Raises:
            ValueError: the options are wrong, or cannot work with this draft.
        """
        decision = decide(vllm_config)
        if isinstance(decision, DraftWindow):
            self.draft_window, self.positions = decision, DraftPositions(vllm_config)
        super().__init__(vllm_config, *args, **kwargs)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the draft; its positions then reach as far as the engine serves, and its layers publish what they keep.

        Raises:
            ValueError: see :meth:`.positions.DraftPositions.extend`.
            ReclaimRefused: see :func:`.reclaim.publish`.
        """
        super().load_model(*args, **kwargs)
        if self.draft_window is None:
            return
        self.positions.extend(self.model)
        if self.draft_window.reclaim:
            reclaim.publish(self.vllm_config, self.draft_window, self.draft_attn_layer_names)

    def set_attn(self, *args: Any, **kwargs: Any) -> None:
        """Allocate the windowed tensors as soon as the KV cache groups are known.

        Raises:
            ValueError: the draft's attention cannot be windowed.
        """
        super().set_attn(*args, **kwargs)
        self.window = None
        if self.draft_window is None:
            return
        if self.draft_window.reclaim:
            reclaim.let_no_spec_mask(self.attn_groups)
        tables, sizes = self.block_tables.input_block_tables, versions.block_sizes(self.block_tables)
        groups = self.unsupported() or inspect_draft_groups(self.attn_groups, sizes, tables)
        if isinstance(groups, WindowOff):
            return self._switch_off(groups)
        in_force = self.draft_window.widened_to(groups.native_window)
        if self.host_decides:
            in_force = in_force.fixed("vLLM-Ascend plans lengths on the host, which does not wait for the device")
        elif in_force.start is not None and in_force.start < 4 * (block_size := lcm(*groups.block_sizes)):
            in_force = in_force.fixed(f"in whole blocks of {block_size} tokens the candidates hardly differ")
        self.draft_window = in_force
        if reason := versions.refusal(self):
            raise ValueError(f"draft_window_size={in_force.size} is not supported by {type(self).__name__}: {reason}")
        queries, extra_queries = versions.queries_per_request(self), versions.extra_queries(self)
        # The first forward of an autoregressive draft runs over the target's tokens.
        first_queries = min(self.max_num_tokens, self.max_model_len) + extra_queries
        self.window = window = self.make_window(
            in_force,
            groups,
            self.input_buffers,
            self.block_tables,
            # The engine may have fitted it to its memory since the speculator was made.
            max_model_len=self.vllm_config.model_config.max_model_len,
            queries=queries,
            max_queries=first_queries if in_force.max_lookahead else queries,
            extra_queries=extra_queries,
            rows=(rows := self.rows_with(in_force)),
            max_rejected=max_rejected(self.vllm_config),
            fused=HAS_TRITON,
            bind=self.bind,
            counters=self.make_counters(self.vllm_config) if self.make_counters else None,
        )
        whole_blocks = 1 if rows is Rows.MASKED else window.geometry.alignment
        if covered := in_force.covers(window.geometry.limit, block_size=whole_blocks):
            return self._switch_off(covered)
        if rows is Rows.MASKED:
            self.mask_rows(in_force.size)
        graphs = self.vllm_config.compilation_config.cudagraph_mode.decode_mode().name
        report_in_force(
            in_force,
            self.vllm_config,
            f"table columns={list(window.geometry.columns)}, "
            f"KV cache groups={list(groups.group_ids)}, runner=V2 ({type(self).__name__}), decode graphs={graphs}, "
            f"{-(-window.inputs.num_bytes // 1024)} KiB{self.positions.details}",
            block_size=window.geometry.alignment,
            masked=rows is Rows.MASKED,
        )

    def rows_with(self, in_force: DraftWindow) -> Rows:
        """Which query rows keep their window: all, by a mask, where the backend has one and nothing else is wanted."""
        layers = list(self.draft_layers())
        can_mask = all(versions.can_mask(layer, group.kv_cache_spec) for layer, group in layers)
        return rows_kept(in_force, layers=len(layers), can_mask=can_mask)

    def mask_rows(self, window: int) -> None:
        """Layers that slide anyway keep their own window, which is not above this one."""
        target_builders = (b for groups in self.target_attn_groups for g in groups for b in g.metadata_builders)
        versions.schedule_without(target_builders, self.vllm_config)
        for layer, group in self.draft_layers():
            if not own_window(group.kv_cache_spec):
                for builder in group.metadata_builders:
                    versions.mask(layer, builder, window)

    def draft_layers(self) -> Iterator[tuple[Any, Any]]:
        """Each attention layer of the draft, with its attention group."""
        layers = self.vllm_config.compilation_config.static_forward_context
        yield from (
            (layers[name], group) for groups in self.attn_groups for group in groups for name in group.layer_names
        )

    def _switch_off(self, off: WindowOff) -> None:
        if self.draft_window is not None and self.draft_window.reclaim:  # without a window it would read freed blocks
            raise ReclaimRefused(off.reason)
        self.draft_window = self.window = None
        agree(f"off, because {off.reason}", self.vllm_config.parallel_config)
        report_off(off, self.vllm_config)

    def unsupported(self) -> WindowOff | None:
        """Why this speculator's attention cannot be windowed by this version."""
        return None

    def make_window(self, *args: Any, **kwargs: Any) -> WindowedDraft:
        return WindowedDraft(*args, **kwargs)

    def propose(
        self,
        input_batch: InputBatch,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: Any,
        aux_hidden_states: Any,
        # [num_reqs]
        num_sampled: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Count and learn from what real requests bring; idle data parallel ranks and warm-up propose for dummies."""
        window, num_reqs = self.window, input_batch.num_reqs
        if window is not None and not kwargs.get("dummy_run"):
            upper_bound = input_batch.seq_lens_cpu_upper_bound[:num_reqs].numpy()
            queries = np.diff(input_batch.query_start_loc_np[: num_reqs + 1])
            window.count(upper_bound, queries, self.num_forwards(kwargs.get("num_speculative_tokens")))
            if window.chooser is not None:
                window.chooser.choose(
                    idx_mapping=input_batch.idx_mapping,
                    seq_lens=input_batch.seq_lens,
                    num_sampled=num_sampled,
                    cu_num_logits=input_batch.cu_num_logits,
                    num_reqs=num_reqs,
                )
        states = attn_metadata, slot_mappings, last_hidden_states, aux_hidden_states
        with self.proposing(input_batch):
            return super().propose(input_batch, *states, num_sampled, *args, **kwargs)

    def num_forwards(self, num_tokens: int | None) -> int:
        """Draft forwards of a proposal, for which vLLM 0.32 and later may ask fewer tokens than K."""
        return self.num_speculative_steps  # a draft model makes all of them

    def proposing(self, input_batch: InputBatch) -> AbstractContextManager[None]:
        """What surrounds a proposal for the target's batch."""
        return nullcontext()

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
        upstream, window, bound = super()._build_draft_attn_metadata, self.window, seq_lens_cpu_upper_bound

        def build(upper_bound: torch.Tensor | None) -> Metadata:
            if upper_bound is not None:
                kwargs.update(seq_lens_cpu_upper_bound=upper_bound, step=step)
            return upstream(num_reqs, num_reqs_padded, num_tokens_padded, **kwargs)

        if window is None:
            return build(bound)
        starts = kwargs.get("query_start_loc_np")
        return window.build(build, self, bound, num_reqs, num_reqs_padded, step, starts, window.captured)

    def _build_attn_metadata(
        self,
        num_reqs: int,
        batch_desc: BatchExecutionDescriptor,
        query_start_loc_np: np.ndarray,
        seq_lens_cpu_upper_bound: torch.Tensor,
        step: int,
        **kwargs: Any,
    ) -> Metadata:
        """vLLM 0.30 and later."""
        upstream, window, starts = super()._build_attn_metadata, self.window, query_start_loc_np

        def build(upper_bound: torch.Tensor | None) -> Metadata:
            return upstream(num_reqs, batch_desc, starts, upper_bound, step, **kwargs)

        if window is None:
            return build(seq_lens_cpu_upper_bound)
        num_rows, replayed = batch_desc.num_reqs or num_reqs, batch_desc.cg_mode == CUDAGraphMode.FULL
        return window.build(build, self, seq_lens_cpu_upper_bound, num_reqs, num_rows, step, starts, replayed)
