# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM-Ascend project
"""What the engine decides and says about the draft window when it starts: one line, in force or off."""

import logging
from dataclasses import replace
from typing import Any

from vllm.logger import logger

from .config import DraftWindow, WindowOff, resolve
from .facts import facts_from_config
from .layout import kept_tokens
from .options import DraftWindowOptions
from .ranks import agree, speaks
from .reclaim import refuse_engine
from .seams.vllm import draft_context_parallel_size, untested, uses_v2_runner


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
    facts = replace(facts_from_config(vllm_config), context_parallel_size=draft_context_parallel_size(vllm_config))
    decision = resolve(options, facts)
    if isinstance(decision, DraftWindow) and decision.reclaim:
        refuse_engine(vllm_config)
    if isinstance(decision, DraftWindow):
        if not uses_v2_runner(vllm_config):
            decision = decision.fixed("Model Runner V1 plans lengths on the host")
        warnings = filter(None, (untested(), _ignored_length(vllm_config.speculative_config)))
        return replace(decision, warnings=(*warnings, *decision.warnings))
    return decision


def _ignored_length(speculative_config: Any) -> str | None:
    length = getattr(speculative_config, "max_model_len", None)
    text = f"speculative_config.max_model_len={length} does not end drafting there, on Model Runner V2; nor the window"
    return text if length is not None else None


def report_off(off: WindowOff, vllm_config: Any) -> None:
    if speaks(vllm_config.parallel_config):
        logger.log(off.level, "Draft window off: %s.", off.reason)


def report_in_force(
    window: DraftWindow, vllm_config: Any, details: str, *, block_size: int, masked: bool = False
) -> None:
    """One line; ``details`` are what the runner made of the window: table columns, its own name.

    Args:
        block_size: tokens to which the window is rounded out.
        masked: a query sees the window alone all the same.
    """
    in_force = f"method={window.method}, W={window.name}, sink={window.sink_size}, min_context={window.min_context}"
    agree(f"{in_force}, reclaim={window.reclaim}", vllm_config.parallel_config)
    if not speaks(vllm_config.parallel_config):
        return
    fewest, most = window.visible(1 if masked else block_size)
    for warning in window.warnings:
        logger.warning("Draft window: %s.", warning)
    if block_size > window.size // 4 and not (masked or window.candidates):
        logger.warning(
            "Draft window: in whole blocks of %d tokens, draft_window_size=%d shows a query up to %d tokens; a draft "
            "that was trained on fewer gains less.",
            block_size,
            window.size,
            most,
        )
    seen = f"block alignment={block_size}, tokens seen={most if masked else f'{fewest} to {most}'}"
    if window.reclaim:
        seen += f", kept={kept_tokens(window.size, window.min_context, block_size)}"
    logger.info("Draft window in force: %s, %s, %s.", in_force, seen, details)
