# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C that is not lost: Python drops an exception that strikes in a finalizer, and an engine that ends has many."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def interrupts_kept() -> Iterator[Callable[[], None]]:
    """Ctrl-C raises ``KeyboardInterrupt`` as ever; the function given raises it again where it was dropped."""
    interrupted = False

    def on_signal(signum: int, frame: Any) -> None:
        nonlocal interrupted
        interrupted = True
        raise KeyboardInterrupt

    def check() -> None:
        if interrupted:
            raise KeyboardInterrupt

    previous = signal.signal(signal.SIGINT, on_signal)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, previous)
