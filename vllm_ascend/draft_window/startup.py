# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM-Ascend project
"""What the engine decides and says about the draft window when it starts: one line, in force or off."""

import logging
from dataclasses import replace
from typing import Any

from vllm.logger import logger

from .config import DraftWindow, WindowOff, facts_from_config, resolve
from .options import DraftWindowOptions
from .reclaim import refuse_engine
from .seams.vllm import untested


def decide(vllm_config: Any) -> DraftWindow | WindowOff | None:
    """Resolve the options of a ``VllmConfig``; ``None`` when the window is not asked for.

    Raises:
        ValueError: see :meth:`DraftWindowOptions.from_additional_config`, :func:`.config.resolve` and
            :func:`.reclaim.refuse_engine`.
    """
    options = DraftWindowOptions.from_additional_config(vllm_config.additional_config)
    if options is None:
        return None
    if vllm_config.speculative_config is None:
        return WindowOff("speculative decoding is not configured", logging.WARNING)
    decision = resolve(options, facts_from_config(vllm_config))
    if isinstance(decision, DraftWindow) and decision.reclaim:
        refuse_engine(vllm_config)
    if isinstance(decision, DraftWindow) and (warning := untested()):
        return replace(decision, warnings=(warning, *decision.warnings))
    return decision


def report_off(off: WindowOff, vllm_config: Any) -> None:
    if vllm_config.parallel_config.rank == 0:
        logger.log(off.level, "Draft window off: %s.", off.reason)


def report_in_force(window: DraftWindow, vllm_config: Any, details: str) -> None:
    """One line; ``details`` are what the runner made of the window: alignment, table columns, its own name."""
    if vllm_config.parallel_config.rank != 0:
        return
    for warning in window.warnings:
        logger.warning("Draft window: %s.", warning)
    logger.info(
        "Draft window in force: method=%s, W=%d, sink=%d, min_context=%d, %s.",
        window.method,
        window.size,
        window.sink_size,
        window.min_context,
        details,
    )
