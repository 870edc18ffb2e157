# SPDX-License-Identifier: Apache-2.0
"""Entry point ``vllm.general_plugins``, importable wherever the wheel is installed.

The package lies in vLLM-Ascend's folders, so it cannot be found where ``vllm_ascend`` is a source checkout somewhere
else. vLLM would log a traceback of that; here it becomes one line that says what to do.
"""

from importlib import import_module
from multiprocessing import parent_process

_PACKAGE = "vllm_ascend.draft_window"
_PLUGIN = f"{_PACKAGE}.plugin"


def register() -> None:
    """Install the draft window, or say in one line why it cannot be. vLLM calls this in every process."""
    try:
        plugin = import_module(_PLUGIN)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if missing == _PLUGIN:  # the pull request is in this vLLM-Ascend, which needs no hooks
            return
        if not _PLUGIN.startswith(f"{missing}."):
            raise
        return _report_off(
            f"{_folder()} has no {missing}, since vllm_ascend is loaded from another folder than this plugin's; write "
            f"the window onto that checkout with `draft-window upstream-pr --checkout CHECKOUT --series NAME`"
        )
    if reason := plugin.register():
        _report_off(reason)


def _report_off(reason: str) -> None:
    from vllm.logger import logger

    if parent_process() is None:  # the processes that it starts would say the same
        logger.warning("Draft window off: %s.", reason)


def _folder() -> str:
    import vllm_ascend

    return next(iter(vllm_ascend.__path__))
