# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM-Ascend project
"""Keeps the window's options out of vLLM-Ascend's own model of ``additional_config``.

From 2026-08-30 on ``AscendConfig`` refuses every key that it does not declare, and of the window's options it declares
``draft_window_size`` only. It does so while ``VllmConfig`` is built, before a worker is there that could be asked. And
the proposers of Model Runner V1 build an adapter from the size that it holds, whatever the window's own rules say. So
it is given none of them: :mod:`.options` reads them from ``additional_config`` itself, which nobody changes.
"""

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

from .options import DraftWindowOptions


def hide_options() -> None:
    """Hook the constructor of ``AscendConfig``, where there is one; calling it again changes nothing."""
    # The platform's module loads it, and whoever builds a VllmConfig has a platform.
    module = sys.modules.get("vllm_ascend.ascend_config")
    config = getattr(module, "AscendConfig", None)
    if config is not None and not hasattr(config.__init__, "__wrapped__"):
        config.__init__ = _without_options(config.__init__)


def _without_options(init: Callable[..., None]) -> Callable[..., None]:
    @wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        # Earlier versions read the whole VllmConfig themselves, and no key of it as an argument.
        init(self, *args, **{key: value for key, value in kwargs.items() if key not in DraftWindowOptions.model_fields})

    return __init__
