# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM-Ascend project
"""What the window did, counted on the host from the host's own bounds: nothing here waits for the device."""

import threading
from collections.abc import Iterable
from functools import cache
from typing import Any
from weakref import WeakSet

import numpy as np
from prometheus_client import REGISTRY, Counter, Metric
from prometheus_client.registry import Collector
from vllm import envs
from vllm.logger import logger

from .auto import WindowChooser
from .auto_counters import ArmCounters
from .ranks import speaks

_LABELS = ("model_name", "engine")
_NAMES = {
    "builds": "Number of draft forwards while a draft window is in force, each with attention metadata of its own.",
    "windowed_rows": "Number of requests, summed over draft forwards, from which the draft window removed tokens.",
    "skipped_kv_tokens": "Number of KV cache tokens, per draft layer, that windowed rows did not read.",
}
# With draft_window_size "auto", by size drawn and by the longest context of the bucket.
_ARM_LABELS = (*_LABELS, "context", "arm")
_ARM_NAMES = {
    "arm_accepted_tokens": "Number of tokens that the target kept of verified proposals, its own one included.",
    "arm_proposals": "Number of proposals that the target has verified.",
}


class _DraftWindowCollector(Collector):
    """Exposes the counters where an engine runs in the process that is asked for metrics.

    With ``PROMETHEUS_MULTIPROC_DIR`` they go through files, as vLLM's own do, and this is not asked.
    """

    def __init__(self) -> None:
        self.engines: WeakSet[DraftWindowCounters] = WeakSet()
        # Not in the registry themselves: every engine that vLLM starts in a process removes what is called "vllm:" from
        # it. Written when somebody looks, or a line is logged: a step only adds to plain numbers.
        self.counters = [
            Counter(f"vllm:draft_window_num_{name}", text, _LABELS, registry=None) for name, text in _NAMES.items()
        ]
        self.arm_counters = [
            Counter(f"vllm:draft_window_num_{name}", text, _ARM_LABELS, registry=None)
            for name, text in _ARM_NAMES.items()
        ]

    def collect(self) -> Iterable[Metric]:
        for engine in list(self.engines):
            engine.publish()
        return (metric for counter in (*self.counters, *self.arm_counters) for metric in counter.collect())


@cache
def _collector() -> _DraftWindowCollector:
    """Registered with the first window in force, once a process."""
    collector = _DraftWindowCollector()
    REGISTRY.register(collector)
    return collector


class DraftWindowCounters:
    """Counts for one engine, as Prometheus counters and as a line in the log while there is something to count.

    A step counts on one thread; scrapes and the line in the log come on others.
    """

    def __init__(self, vllm_config: Any, *, log_interval: float | None = None) -> None:
        """Count on the engine's speaking worker only; the other ranks see the same batches.

        Args:
            log_interval: seconds between log lines; vLLM's own interval unless given.
        """
        self._enabled = speaks(vllm_config.parallel_config)
        self._log_interval = envs.VLLM_LOG_STATS_INTERVAL if log_interval is None else log_interval
        # One object, so that nobody ever reads half a step.
        self._totals = self._published = self._logged = (0, 0, 0)
        self._publishing = threading.Lock()
        self._timer: threading.Timer | None = None
        self._arms: ArmCounters | None = None
        if self._enabled:
            parallel_config, model = vllm_config.parallel_config, vllm_config.model_config.served_model_name
            self._labels = model, str(parallel_config.data_parallel_index)
            self._counters = [counter.labels(*self._labels) for counter in _collector().counters]
            _collector().engines.add(self)

    @property
    def builds(self) -> int:
        """Draft forwards while the window is in force."""
        return self._totals[0]

    @property
    def windowed_rows(self) -> int:
        """Requests, summed over forwards, from which the window removed tokens."""
        return self._totals[1]

    @property
    def skipped_kv_tokens(self) -> int:
        """KV tokens, per draft layer, that those requests did not read."""
        return self._totals[2]

    def record(self, forwards: int = 1, removed: np.ndarray | None = None) -> None:
        """Count some forwards of one proposal.

        Args:
            removed: tokens that the window removes from each request in each of them, as the host bounds it,
                [num_reqs]; left out where the host knows that it is nothing.
        """
        if not self._enabled:
            return
        builds, rows, tokens = self._totals
        if removed is not None:
            rows += forwards * int(np.count_nonzero(removed))
            tokens += forwards * int(np.add.reduce(removed))
        self._totals = builds + forwards, rows, tokens
        if self._timer is None:
            # A timer, and no look at the clock: the line also comes after the last forward of a burst.
            self._timer = threading.Timer(self._log_interval, self.log)
            self._timer.daemon = True
            self._timer.start()

    def watch(self, chooser: WindowChooser) -> None:
        """Count and log too what ``auto`` learns."""
        if self._enabled:
            self._arms = ArmCounters(chooser, _collector().arm_counters, self._labels)

    def publish(self) -> None:
        """Bring the Prometheus counters up to date."""
        with self._publishing:
            totals = self._totals
            for counter, total, before in zip(self._counters, totals, self._published, strict=True):
                counter.inc(total - before)
            self._published = totals
            if self._arms is not None:
                self._arms.publish()

    def log(self) -> None:
        """Log what was counted since the last line."""
        # First of all, so that a forward from now on is sure of a line.
        self._timer = None
        self.publish()
        totals = self._published
        builds, rows, tokens = np.subtract(totals, self._logged)
        self._logged = totals
        logger.info(
            "Draft window metrics: Builds: %d, Windowed rows: %d, KV tokens not read per draft layer: %d "
            "(mean per windowed row: %.1f)",
            builds,
            rows,
            tokens,
            tokens / rows if rows else 0.0,
        )
        if self._arms is not None and (line := self._arms.line()):
            logger.info("Draft windows drawn: %s", line)
