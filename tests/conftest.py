# SPDX-License-Identifier: Apache-2.0
"""Makes real vLLM run on this CPU before any test imports it. Tests of plain arithmetic also run without vLLM."""

import hashlib
import importlib.metadata
import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any

import pytest

from tests.engines import Engines
from vllm_draft_window.cpu_engine import activate

with suppress(importlib.metadata.PackageNotFoundError):
    activate()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The slow ones come first, so that all workers are busy to the end."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.fixture(scope="session")
def engines() -> Iterator[Engines]:
    engines = Engines()
    yield engines
    engines.close()


@pytest.fixture
def shared_engine(engines: Engines) -> Callable[..., AbstractContextManager]:
    """``with shared_engine(**engine_args) as engine``: an ``Engine``, kept for the next test that shares it."""
    return engines.shared


@pytest.fixture(autouse=True)
def only_those_that_share_find_an_engine(request: pytest.FixtureRequest, engines: Engines) -> None:
    if "shared_engine" not in request.fixturenames:
        engines.close()


@pytest.fixture(scope="session")
def without_speculation(engines: Engines, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple]:
    """Output tokens of the target alone; one engine run for each distinct request, whichever worker asks first."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent

    def tokens(prompts: Sequence[Sequence[int]], *, max_tokens: int, **engine_args: Any) -> tuple[tuple[int, ...], ...]:
        from vllm_draft_window.measuring.engine import Engine

        request = json.dumps([list(map(list, prompts)), max_tokens, engine_args], sort_keys=True)
        known = folder / f"without-speculation-{hashlib.sha256(request.encode()).hexdigest()[:16]}.json"
        if not known.exists():
            engines.close()
            with Engine(**engine_args) as engine:
                measured = engine.run(prompts, max_tokens=max_tokens)
            complete = known.with_suffix(f".{os.getpid()}")
            complete.write_text(json.dumps(measured.tokens))
            complete.rename(known)
        return tuple(map(tuple, json.loads(known.read_text())))

    return tokens


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
