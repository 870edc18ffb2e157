# SPDX-License-Identifier: Apache-2.0
"""Makes real vLLM run on this CPU before any test imports it. Tests of plain arithmetic also run without vLLM."""

import importlib.metadata
import logging
from collections.abc import Iterator
from contextlib import suppress

import pytest

from vllm_draft_window.cpu_engine import activate

with suppress(importlib.metadata.PackageNotFoundError):
    activate()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The slow ones come first, so that all workers are busy to the end."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.fixture
def window_lines() -> Iterator[list[tuple[str, str]]]:
    """Level and text of the window's own lines, but for its metrics.

    A filter hears them: vLLM keeps its records from the root logger, and starting an engine may set up its logging
    anew, which takes handlers away.
    """
    lines = []

    def hear(record: logging.LogRecord) -> bool:
        text = record.getMessage()
        if text.startswith("Draft window") and "metrics" not in text:
            lines.append((record.levelname, text))
        return True

    logger = logging.getLogger("vllm.logger")
    logger.addFilter(hear)
    yield lines
    logger.removeFilter(hear)
