# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM-Ascend project
"""Stand-ins for a speculator's graph managers while it captures and while it proposes.

Upstream hands a manager its tensors as arguments; the stand-in hands on others. The managers themselves stay untouched,
and the speculator has them back afterwards.
"""

from collections.abc import Callable
from typing import Any

from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

from ..inputs import swapped
from ..window import WindowedDraft
from .vllm import call_with


class _StandIn:
    def __init__(self, manager: CudaGraphManager) -> None:
        self._manager = manager

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)


class CaptureOnWindow(_StandIn):
    """Captures on the windowed tensors, so that every replay reads their addresses."""

    def __init__(self, manager: CudaGraphManager, window: WindowedDraft, **arguments: Any) -> None:
        """``arguments`` are further ones of the capture to replace."""
        super().__init__(manager)
        self._window, self._replaced = window, window.inputs.stand_ins | arguments

    def capture(self, forward: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        window = self._window
        window.captured |= self._manager.needs_capture()
        with swapped(window, capturing=True):
            call_with(self._manager.capture, (window.recorded(forward), *args), kwargs, **self._replaced)


class BuildBeforeReplay(_StandIn):
    """Lets metadata be built before a FULL graph is replayed."""

    def __init__(self, manager: CudaGraphManager, build: Callable[[Any], Any]) -> None:
        super().__init__(manager)
        self._build = build

    def run_fullgraph(self, desc: Any) -> Any:
        self._build(desc)
        return self._manager.run_fullgraph(desc)
