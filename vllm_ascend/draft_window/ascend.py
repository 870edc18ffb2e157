# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM-Ascend project
"""What vLLM-Ascend's speculators need beyond vLLM's.

Real lengths on the host, for backends that plan there: Model Runner V2 gives none to a draft's metadata build.
vLLM-Ascend then lets ``seq_lens_cpu`` say ``max_seq_len`` for every request, which its builders hand to the operator as
the length to read: past the request's own tokens, and with a cropped block table into the null block.

Builds of their own, for autoregressive drafts: vLLM-Ascend takes the first step's from the target, in FULL graphs the
later ones' too, and counts on from the target's lengths.
"""

import inspect
import logging
from collections.abc import Callable
from copy import copy
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.spec_decode import speculator as upstream

from .autoregressive import TargetDependentDraftWindow
from .config import DraftWindow, WindowOff
from .inputs import WindowedInputs, swapped
from .startup import report_off

# Names of attention backends whose metadata builders always read ``seq_lens_cpu``. GQA's reads the device's lengths for
# parallel drafters, and the host's otherwise.
_PLANNED_ON_HOST = frozenset({"ASCEND_MLA", "ASCEND_SFA"})


class HostLengths:
    """Mixin in front of the draft window's own, for speculators of vLLM-Ascend."""

    vllm_config: Any
    attn_groups: list[list[Any]]
    windowed_inputs: WindowedInputs | None

    _planned_on_host = False
    _capturing = False

    def set_attn(self, *args: Any, **kwargs: Any) -> None:
        super().set_attn(*args, **kwargs)  # type: ignore[misc]
        parallel = self.vllm_config.speculative_config.parallel_drafting
        self._planned_on_host = self.windowed_inputs is not None and plans_on_host(self.attn_groups, parallel=parallel)

    def _build_draft_attn_metadata(self, *args: Any, **kwargs: Any) -> dict[str, Any] | None:
        build = super()._build_draft_attn_metadata  # type: ignore[misc]
        if not self._planned_on_host or self._capturing:  # nothing can be waited for in a capture
            return build(*args, **kwargs)
        with swapped((upstream, "build_attn_metadata", _with_host_lengths(upstream.build_attn_metadata))):
            return build(*args, **kwargs)


def plans_on_host(attn_groups: list[list[Any]], *, parallel: bool) -> bool:
    """Whether a draft layer's metadata builder reads lengths on the host."""
    return not parallel or any(
        group.backend.get_name() in _PLANNED_ON_HOST for groups in attn_groups for group in groups
    )


def _with_host_lengths(build_attn_metadata: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Copy the lengths that the build is given, windowed by then, to the host.

    The copy waits for the device, as vLLM-Ascend's GQA builder does for parallel drafters. A host bound would not do:
    what it counts too much was never written.
    """

    def build(*, num_reqs: int, seq_lens: torch.Tensor, **kwargs: Any) -> dict[str, Any]:
        # [num_reqs]
        host = seq_lens[:num_reqs].to("cpu", copy=True).numpy()
        return build_attn_metadata(num_reqs=num_reqs, seq_lens=seq_lens, seq_lens_np=host, **kwargs)

    return build


class AutoregressiveBuilds:
    """Mixin behind the draft window's and in front of vLLM-Ascend's speculator, for EAGLE, EAGLE3 and MTP."""

    vllm_config: Any
    draft_window: DraftWindow | None
    windowed_inputs: WindowedInputs | None
    input_batch: Any
    input_buffers: Any
    max_model_len: int
    num_speculative_steps: int

    _first_step: dict[str, Any] | None = None

    def set_attn(self, *args: Any, **kwargs: Any) -> None:
        super().set_attn(*args, **kwargs)  # type: ignore[misc]
        reason = self._unsupported() if self.draft_window is not None else None
        if reason is not None:
            self.draft_window = None  # nobody has said yet that it is in force
            report_off(WindowOff(reason, logging.WARNING), self.vllm_config)

    def _unsupported(self) -> str | None:
        mro = type(self).__mro__
        name = mro[mro.index(AutoregressiveBuilds) + 1].__name__
        build = getattr(upstream.DraftModelSpeculator, "_build_draft_attn_metadata", None)
        if build is None or "query_start_loc_np" not in inspect.signature(build).parameters:
            return f"{name} is windowed with vLLM 0.27 to 0.29 only"
        attention = getattr(self, "attn_architecture", None)
        if attention is None:
            return f"this vLLM-Ascend's {name} is too old for a window on Model Runner V2"
        if attention != "GQA":
            return f"{name} with {attention} attention is not windowed on Model Runner V2 by this version"
        if self.vllm_config.compilation_config.cudagraph_mode.mixed_mode() == CUDAGraphMode.FULL:
            return f"{name} is not windowed with cudagraph_mode FULL; FULL_DECODE_ONLY and FULL_AND_PIECEWISE are"
        return None

    def capture(self) -> None:
        """vLLM-Ascend builds the metadata of dummy steps while it captures; those are not counted."""
        if self.windowed_inputs is None:
            return super().capture()  # type: ignore[misc]
        with swapped((self, "_counters", SimpleNamespace(record=lambda *_: None))):
            return super().capture()  # type: ignore[misc]

    def _build_draft_attn_metadata(
        self,
        num_reqs: int,
        num_reqs_padded: int,
        num_tokens_padded: int,
        *args: Any,
        query_start_loc_np: np.ndarray | None = None,
        **kwargs: Any,
    ) -> dict[str, Any] | None:
        """Also what vLLM-Ascend's override does not take: the mixed queries of a first step, in the target's state."""
        sizes = num_reqs, num_reqs_padded, num_tokens_padded
        if query_start_loc_np is None:
            return super()._build_draft_attn_metadata(*sizes, *args, **kwargs)  # type: ignore[misc]
        vllms: Any = upstream
        build_attn_metadata = partial(
            vllms.build_attn_metadata,
            positions=self.input_buffers.positions[:num_tokens_padded],
            is_prefilling=torch.from_numpy(self.input_batch.is_prefilling_np),
            attn_state=self.input_batch.attn_state,
        )
        with swapped((vllms, "build_attn_metadata", build_attn_metadata)):
            self._first_step = vllms.DraftModelSpeculator._build_draft_attn_metadata(
                self, *sizes, *args, query_start_loc_np=query_start_loc_np, **kwargs
            )
        if self._first_step is not None and num_reqs_padded > num_reqs:
            _spread_queries(self._first_step, num_reqs_padded, num_tokens_padded)
        return self._first_step

    def build_draft_attn_metadatas(
        self, num_reqs_padded: int, is_draft_model_prefill: bool
    ) -> list[dict[str, Any] | None]:
        """What a replay updates its captured attention calls with, one dictionary per step."""
        if self.windowed_inputs is None:
            return super().build_draft_attn_metadatas(num_reqs_padded, is_draft_model_prefill)  # type: ignore[misc]
        if is_draft_model_prefill:  # built just before, see TargetDependentDraftWindow.init_cudagraph_manager
            return [self._first_step]
        num_reqs = self.input_batch.num_reqs
        with swapped((self, "_planned_on_host", False)):
            metadata = self._build_draft_attn_metadata(
                num_reqs,
                num_reqs_padded,
                num_reqs_padded,
                seq_lens_cpu_upper_bound=self.input_batch.seq_lens_cpu_upper_bound,
                step=1,
            )
        # [num_reqs]
        seq_lens = self.input_buffers.seq_lens[:num_reqs].cpu()
        return [
            _at_lengths(metadata, self._windowed_lengths(seq_lens, step, num_reqs_padded))
            for step in range(1, self.num_speculative_steps)
        ]

    def _windowed_lengths(self, seq_lens: torch.Tensor, step: int, num_rows: int) -> torch.Tensor:
        """What the device arrives at by that step, counted on the host from the lengths of step 1."""
        # [num_rows]
        windowed = torch.zeros(num_rows, dtype=torch.int32)
        _, windowed[: len(seq_lens)] = self.windowed_inputs.geometry.lengths(  # type: ignore[union-attr]
            (seq_lens + step - 1).clip(max=self.max_model_len), queries=1, lookahead=self.num_speculative_steps - step
        )
        return windowed


class AscendAutoregressiveDraftWindow(HostLengths, TargetDependentDraftWindow, AutoregressiveBuilds):
    """The window for vLLM-Ascend's EAGLE, EAGLE3 and MTP."""


def _spread_queries(attn_metadata: dict[str, Any], num_rows: int, num_tokens: int) -> None:
    """FULL graphs of a first step are uniform, and their padding rows have queries: the last must end the batch."""
    for metadata in attn_metadata.values():
        metadata.actual_seq_lengths_q = [(row + 1) * num_tokens // num_rows for row in range(num_rows)]


def _at_lengths(attn_metadata: dict[str, Any] | None, seq_lens: torch.Tensor) -> dict[str, Any]:
    """A step of one query token per row; tables stay those of the build."""
    step = {name: copy(metadata) for name, metadata in (attn_metadata or {}).items()}
    for metadata in step.values():
        metadata.seq_lens = metadata.seq_lens_cpu = seq_lens
        metadata.seq_lens_list = seq_lens.tolist()
        metadata.actual_seq_lengths_q = list(range(1, len(seq_lens) + 1))
    return step
