# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM-Ascend project
"""Parallel drafters (DFlash, DSpark): one forward and one build per proposal, no look-ahead."""

from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

from ..inputs import swapped
from .graphs import CaptureOnWindow
from .speculator import SpeculatorSeam


class ParallelSeam(SpeculatorSeam):
    """In front of upstream's ``DFlashSpeculator``, which DSpark's is derived from."""

    query_cudagraph_manager: CudaGraphManager

    def num_forwards(self, num_tokens: int | None) -> int:
        return 0 if num_tokens == 0 else 1

    def capture(self) -> None:
        """Capture on the windowed tensors, planned for the window's length."""
        if self.window is None:
            return super().capture()
        planned_len = min(self.max_model_len, self.window.geometry.max_length)
        manager = CaptureOnWindow(self.query_cudagraph_manager, self.window, max_model_len=planned_len)
        with swapped(self, query_cudagraph_manager=manager):
            super().capture()
