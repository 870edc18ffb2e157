# SPDX-License-Identifier: Apache-2.0
"""One engine for neighbouring tests of one configuration; see "Writing an engine test" in CONTRIBUTING.md."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_draft_window.measuring.engine import Engine


class Engines:
    """Keeps the engine that was used last; a process has room for one, because vLLM's process groups are global."""

    def __init__(self) -> None:
        self._engine: Engine | None = None
        self._arguments: dict[str, Any] = {}

    @contextmanager
    def shared(self, **engine_args: Any) -> "Iterator[Engine]":
        """An engine of these arguments with an empty prefix cache: the one that is there, or a new one.

        An exception inside of the ``with``, or a request that is left, ends the engine.
        """
        from vllm_draft_window.measuring.engine import Engine

        if self._engine is None or engine_args != self._arguments:
            self.close()
            self._engine, self._arguments = Engine(**engine_args), engine_args
        engine = self._engine
        engine.llm.reset_prefix_cache()
        clean = False
        try:
            yield engine
            clean = not engine.llm.llm_engine.has_unfinished_requests()
        finally:
            if not clean:
                self.close()

    def close(self) -> None:
        """End the engine that is kept, so that another can start."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.__exit__()
