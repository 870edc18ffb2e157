# SPDX-License-Identifier: Apache-2.0
"""NPU graphs on a CPU: what is captured is replayed on the captured tensors, with the captured Python values.

A replay behaves like the device: it stops in front of a task group whose update is still to come, goes on when the
update's event is recorded, and is never given anything new but by such an update.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any
from unittest.mock import MagicMock

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves


class _Task:
    """One captured call."""

    def __init__(self, function: Callable[..., Any], args: Any, kwargs: Any, results: Any = None) -> None:
        self.function, self.args, self.kwargs, self.results = function, args, kwargs, results

    def run(self, _: "NPUGraph") -> bool:
        fresh = self.function(*self.args, **self.kwargs)
        if self.results is not None:
            for old, new in zip(tree_leaves(self.results), tree_leaves(fresh), strict=True):
                if isinstance(old, torch.Tensor):
                    old.copy_(new)
        return True


class NPUGraph:
    """A captured sequence of tasks. Replays it on the addresses that were captured."""

    pending: "NPUGraph | None" = None

    def __init__(self, *_: Any, **__: Any) -> None:
        self.tasks: list[Any] = []
        self.replays = 0
        self._next = 0

    def replay(self) -> None:
        assert NPUGraph.pending is None, "a replay still waits for the update of a task group"
        self.replays += 1
        self._next = 0
        self.resume()

    @torch.inference_mode()
    def resume(self) -> None:
        NPUGraph.pending = self
        while self._next < len(self.tasks):
            if not self.tasks[self._next].run(self):
                return
            self._next += 1
        NPUGraph.pending = None


class ExternalEvent:
    """Holds a replay in front of a task group until the group's update is recorded."""

    def __init__(self) -> None:
        self._recorded = False

    def wait(self, _: Any) -> None:
        if _capture is not None:
            _capture.graph.tasks.append(self)

    def reset(self, _: Any) -> None:
        self._recorded = False

    def run(self, _: NPUGraph) -> bool:
        recorded, self._recorded = self._recorded, False
        return recorded

    def record(self, _: Any = None) -> None:
        self._recorded = True
        if NPUGraph.pending is not None:
            NPUGraph.pending.resume()


class _Capture(TorchDispatchMode):
    """Records every operation that reaches a device; views need no replay, they share the captured storage."""

    def __init__(self, graph: NPUGraph) -> None:
        super().__init__()
        self.graph = graph
        self.group: list[_Task] | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with self:
            result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
        result = func(*args, **kwargs)
        aliases = [returned.alias_info for returned in func._schema.returns]
        writes = any(argument.alias_info and argument.alias_info.is_write for argument in func._schema.arguments)
        if writes or not aliases:
            self.graph.tasks.append(_Task(func, args, kwargs))
        elif not any(aliases):
            self.graph.tasks.append(_Task(func, args, kwargs, result))
        return result


_capture: _Capture | None = None
_update: list[_Task] | None = None


def device_operator(function: Callable[..., Any]) -> Callable[..., Any]:
    """A stand-in that a graph captures as one task, whose arguments an update may replace."""

    @wraps(function)
    def operator(*args: Any, **kwargs: Any) -> Any:
        if _update is not None:
            (task,) = _update
            assert task.function is function, f"{task.function} cannot be updated by {function}"
            task.args, task.kwargs = args, kwargs
            return None
        with _disable_current_modes():
            result = function(*args, **kwargs)
        if _capture is not None:
            task = _Task(function, args, kwargs, result)
            _capture.graph.tasks.append(task)
            if _capture.group is not None:
                _capture.group.append(task)
        return result

    return operator


def capture_kernel_launches() -> None:
    """Let a graph capture launches of Triton kernels as it does operators: the interpreter runs them in Python."""
    from triton.runtime.interpreter import GridExecutor

    GridExecutor.__call__ = device_operator(GridExecutor.__call__)


@contextmanager
def _graph(graph: NPUGraph, *_: Any, **__: Any) -> Iterator[None]:
    global _capture
    with _Capture(graph) as _capture:
        try:
            yield
        finally:
            _capture = None


def _task_group_begin(_: Any) -> None:
    assert _capture is not None, "task groups exist in a capture only"
    _capture.group = []


def _task_group_end(_: Any) -> list[_Task]:
    assert _capture is not None and _capture.group is not None
    handle, _capture.group = _capture.group, None
    return handle


def _task_update_begin(_: Any, handle: list[_Task]) -> None:
    global _update
    _update = handle


def _task_update_end(_: Any) -> None:
    global _update
    _update = None


ENTRY_POINTS: dict[str, Any] = {
    "NPUGraph": NPUGraph,
    "graph": _graph,
    "ExternalEvent": ExternalEvent,
    "is_current_stream_capturing": lambda: _capture is not None,
    "graph_task_group_begin": _task_group_begin,
    "graph_task_group_end": _task_group_end,
    "graph_task_update_begin": _task_update_begin,
    "graph_task_update_end": _task_update_end,
    "stream": lambda *_: MagicMock(),
}
