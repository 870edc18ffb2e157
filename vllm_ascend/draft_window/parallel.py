# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM-Ascend project
"""The draft window for parallel drafters (DFlash, DSpark): one forward and one build per step, no look-ahead."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from .geometry import WindowGeometry
from .groups import let_builds_only_refer
from .speculator import DraftWindowMixin, Metadata, Window


class ParallelDraftWindow(DraftWindowMixin):
    """Stands before upstream's ``DFlashSpeculator``, which DSpark's is derived from."""

    num_query_per_req: int
    query_cudagraph_manager: Any

    # Whether a forward builds its metadata and writes the twins itself, at its head. A FULL graph then records the
    # launch, and its replay, which looks at no metadata, costs the host neither.
    _forward_builds = False
    _capturing = False

    def set_attn(self, *args: Any, **kwargs: Any) -> None:
        super().set_attn(*args, **kwargs)
        # From 0.32 on upstream's own seam records it.
        if self.windowed_inputs is not None and not hasattr(self, "supports_decode_metadata_update"):
            self._forward_builds = let_builds_only_refer(self.attn_groups)

    def capture(self) -> None:
        """Capture on the twins, so that every replay reads their addresses, planned for the window's length."""
        if self.windowed_inputs is None:
            return super().capture()  # type: ignore[misc]
        self._graphs_read_twins = self.query_cudagraph_manager.needs_capture()
        planned_len = min(self.max_model_len, self.windowed_inputs.geometry.max_length)
        with self.windowed_inputs.in_place_of_originals(
            (self, "max_model_len", planned_len), (self, "_capturing", True)
        ):
            return super().capture()  # type: ignore[misc]

    def _build_in(self, window: Window, build: Callable[[], Metadata]) -> Any:
        build_now = super()._build_in
        return partial(build_now, window, build) if self._forward_builds else build_now(window, build)

    def _generate_draft(
        self,
        num_reqs: int,
        num_tokens: int,
        attn_metadata: Metadata | Callable[[], Metadata],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """The draft's forward, as it runs and as a FULL graph records it."""
        if callable(attn_metadata):
            attn_metadata = attn_metadata()
        elif self._capturing and self._forward_builds:
            self._refresh_in_graph(num_reqs, queries=self.num_query_per_req)
        super()._generate_draft(num_reqs, num_tokens, attn_metadata, *args, **kwargs)  # type: ignore[misc]

    def _update_draft_decode_metadata(self, attn_metadata: dict[str, Any], num_reqs: int) -> None:
        """vLLM 0.32: recorded into the FULL graph."""
        self._refresh_in_graph(num_reqs, queries=self.num_query_per_req)
        super()._update_draft_decode_metadata(attn_metadata, num_reqs)  # type: ignore[misc]

    def _most_queries(self) -> int:
        return self.num_query_per_req

    def _shortest_cropped(self, geometry: WindowGeometry) -> int:
        return geometry.first_cropped(queries=self.num_query_per_req)

    def _forward_shape(self, step: int, query_start_loc: np.ndarray | None) -> tuple[int | np.ndarray, int]:
        return self.num_query_per_req, 0
