# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM-Ascend project
"""Puts the draft window in front of the speculators of an installed vLLM.

The entry point ``vllm.general_plugins`` (``vllm_draft_window.py``) calls :func:`register` in every process, before a
worker builds its model runner. Two constructors and a function are hooked:

* ``DraftModelSpeculator`` makes the class that vLLM or vLLM-Ascend has chosen, with the window's mixin in front;
* ``WorkerBase`` checks the options, says so in one line where the window cannot act, and puts Model Runner V1's shim in
  place where vLLM-Ascend's proposers are loaded;
* ``get_kv_cache_groups`` looks for the draft layers that ``draft_window_reclaim`` has marked.

Without the options all do what they did before.
"""

import logging
from collections.abc import Callable
from functools import cache, wraps
from typing import Any


def register() -> None:
    """Install the hooks; calling it again changes nothing."""
    from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator
    from vllm.v1.worker.worker_base import WorkerBase

    from .reclaim import group_draft_layers
    from .strict_config import hide_options

    hide_options()
    if DraftModelSpeculator.__new__ is object.__new__:
        DraftModelSpeculator.__new__ = _new_speculator  # type: ignore[method-assign, assignment]
        WorkerBase.__init__ = _reporting(WorkerBase.__init__)  # type: ignore[method-assign]
        group_draft_layers()


def _new_speculator(cls: type, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
    """``__new__`` of a speculator; Python then calls the ``__init__`` of whatever class is made here."""
    from .config import DraftWindow, WindowOff
    from .speculator import DraftWindowMixin
    from .startup import decide, report_off

    built_in = issubclass(cls, DraftWindowMixin)  # vLLM-Ascend with the window merged, or a class made here
    if not built_in and isinstance(decide(vllm_config), DraftWindow):
        mixin = _mixin_for(cls)
        if mixin is None:
            report_off(WindowOff(f"{cls.__name__} is not windowed by this version", logging.WARNING), vllm_config)
        else:
            cls = _windowed_class(mixin, cls)
    return object.__new__(cls)


def _mixin_for(cls: type) -> type | None:
    """By the name of a base class, since vLLM has moved and renamed some of them and not every version has each."""
    from .autoregressive import AutoregressiveDraftWindow, TargetDependentDraftWindow
    from .parallel import ParallelDraftWindow

    mixins = {
        "DFlashSpeculator": ParallelDraftWindow,  # and DSpark
        "AutoRegressiveSpeculator": TargetDependentDraftWindow,  # EAGLE, EAGLE3, MTP to vLLM 0.31
        "TargetDependentARSpeculator": TargetDependentDraftWindow,  # from 0.32
        "PlainDraftModelSpeculator": AutoregressiveDraftWindow,  # vLLM 0.31
        "StandaloneARSpeculator": AutoregressiveDraftWindow,  # from 0.32
    }
    return next((mixins[base.__name__] for base in cls.__mro__ if base.__name__ in mixins), None)


@cache
def _windowed_class(mixin: type, speculator_class: type) -> type:
    bases: tuple[type, ...] = (mixin, speculator_class)
    if speculator_class.__module__.startswith("vllm_ascend."):
        from .ascend import AscendAutoregressiveDraftWindow, HostLengths
        from .autoregressive import TargetDependentDraftWindow

        if mixin is TargetDependentDraftWindow:
            bases = (AscendAutoregressiveDraftWindow, speculator_class)
        else:
            bases = (HostLengths, mixin, speculator_class)
    return type(f"Windowed{speculator_class.__name__}", bases, {})


def _reporting(worker_init: Callable[..., None]) -> Callable[..., None]:
    @wraps(worker_init)
    def __init__(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        from . import mrv1
        from .config import DraftWindow, WindowOff
        from .startup import decide, report_off

        worker_init(self, vllm_config, *args, **kwargs)
        runner_windows = vllm_config.use_v2_model_runner or mrv1.install()
        decision = decide(vllm_config)
        if isinstance(decision, DraftWindow) and not runner_windows:
            decision = WindowOff("it needs Model Runner V2 (VLLM_USE_V2_MODEL_RUNNER=1)", logging.WARNING)
        if isinstance(decision, WindowOff):
            report_off(decision, vllm_config)

    return __init__
