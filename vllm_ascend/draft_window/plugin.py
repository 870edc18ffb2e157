# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM-Ascend project
"""Puts the draft window in front of the speculators of an installed vLLM.

The entry point ``vllm.general_plugins`` (``vllm_draft_window.py``) calls :func:`register` in every process, before a
worker builds its model runner. Two constructors and a function are hooked:

* ``DraftModelSpeculator`` makes the class that vLLM or vLLM-Ascend has chosen, with a seam in front;
* ``WorkerBase`` checks the options, says so in one line where the window cannot act, and puts Model Runner V1's shim in
  place where vLLM-Ascend's proposers are loaded;
* ``get_kv_cache_groups`` looks for the draft layers that ``draft_window_reclaim`` has marked.

Without the options all do what they did before.
"""

import logging
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

from .config import DraftWindow, WindowOff
from .seams import vllm as versions


def register() -> str | None:
    """Install the hooks; calling it again changes nothing.

    Returns:
        Why there can be no window, if so; nothing is hooked then.
    """
    if reason := versions.too_old():
        return reason
    try:
        from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator
        from vllm.v1.worker.worker_base import WorkerBase

        from .reclaim import group_draft_layers

        versions.kv_cache_grouping()
    except ImportError as error:
        return versions.without(f"{error.name}: {error}")
    from .strict_config import hide_options

    hide_options()
    if DraftModelSpeculator.__new__ is object.__new__:
        worker_init = _reporting(WorkerBase.__init__)
        setattr(DraftModelSpeculator, "__new__", _new_speculator)  # noqa: B010
        setattr(WorkerBase, "__init__", worker_init)  # noqa: B010
        group_draft_layers()
    return None


def _new_speculator(cls: type, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
    """``__new__`` of a speculator; Python then calls the ``__init__`` of whatever class is made here."""
    from .seams.speculator import SpeculatorSeam
    from .startup import decide, report_off

    built_in = issubclass(cls, SpeculatorSeam)  # vLLM-Ascend with the window merged, or a class made here
    if not built_in and isinstance(decide(vllm_config), DraftWindow):
        kind = versions.kind_of(cls)
        if isinstance(kind, str):
            report_off(WindowOff(kind, logging.WARNING), vllm_config)
        else:
            cls = _windowed_class(kind, cls)
    return object.__new__(cls)


@cache
def _windowed_class(kind: versions.Kind, speculator_class: type) -> type:
    from .bound_launch import bind_on_cuda
    from .counters import DraftWindowCounters
    from .seams import recorded
    from .seams.speculator import SpeculatorSeam

    seams: dict[versions.Kind, type] = {
        versions.Kind.PARALLEL: recorded.RecordedParallelSeam,
        versions.Kind.STANDALONE: SpeculatorSeam,
        versions.Kind.TARGET_DEPENDENT: recorded.RecordedTargetDependentSeam,
    }
    if speculator_class.__module__.startswith("vllm_ascend."):
        from .seams import ascend

        seams[versions.Kind.PARALLEL] = ascend.AscendParallelSeam
        seams[versions.Kind.TARGET_DEPENDENT] = ascend.AscendTargetDependentSeam
    extras = {"__module__": __name__, "make_counters": DraftWindowCounters, "bind": staticmethod(bind_on_cuda)}
    return type(f"Windowed{speculator_class.__name__}", (seams[kind], speculator_class), extras)


def _reporting(worker_init: Callable[..., None]) -> Callable[..., None]:
    @wraps(worker_init)
    def __init__(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        from . import mrv1
        from .startup import decide, report_off

        worker_init(self, vllm_config, *args, **kwargs)
        decision = decide(vllm_config)
        if decision is None:
            return
        runner_windows = versions.uses_v2_runner(vllm_config) or mrv1.install()
        if isinstance(decision, DraftWindow) and not runner_windows:
            decision = WindowOff("it needs Model Runner V2 (VLLM_USE_V2_MODEL_RUNNER=1)", logging.WARNING)
        if isinstance(decision, WindowOff):
            report_off(decision, vllm_config)

    return __init__
