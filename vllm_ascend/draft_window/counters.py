# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM-Ascend project
"""What the window did, counted on the host from the host's own bounds: nothing here waits for the device."""

import threading
from collections.abc import Iterable
from typing import Any
from weakref import WeakSet

import numpy as np
from prometheus_client import REGISTRY, Counter, Metric
from prometheus_client.registry import Collector
from vllm import envs
from vllm.logger import logger

_LABELS = ("model_name", "engine")
# Not in the registry themselves: every engine that vLLM starts in a process removes what is called "vllm:" from it.
# Written when somebody looks, or a line is logged: a step only adds to plain numbers.
_COUNTERS = tuple(
    Counter(f"vllm:draft_window_num_{name}", text, _LABELS, registry=None)
    for name, text in (
        ("builds", "Number of draft attention metadata builds while a draft window is in force."),
        ("windowed_rows", "Number of requests, summed over builds, from which the draft window removed tokens."),
        ("skipped_kv_tokens", "Number of KV cache tokens, per draft layer, that windowed rows did not read."),
    )
)


class _DraftWindowCollector(Collector):
    """Exposes the counters where an engine runs in the process that is asked for metrics.

    With ``PROMETHEUS_MULTIPROC_DIR`` they go through files, as vLLM's own do, and this is not asked.
    """

    def __init__(self) -> None:
        self.engines: WeakSet[DraftWindowCounters] = WeakSet()

    def collect(self) -> Iterable[Metric]:
        for engine in self.engines:
            engine.publish()
        return (metric for counter in _COUNTERS for metric in counter.collect())


_collector = _DraftWindowCollector()
REGISTRY.register(_collector)


class DraftWindowCounters:
    """Counts for one engine, as Prometheus counters and as a line in the log while there is something to count."""

    def __init__(self, vllm_config: Any, *, log_interval: float | None = None) -> None:
        """Count on the engine's first worker only; the other ranks see the same batches.

        Attributes:
            builds: metadata builds while the window is in force.
            windowed_rows: requests, summed over builds, from which the window removed tokens.
            skipped_kv_tokens: KV tokens, per draft layer, that those requests did not read.

        Args:
            log_interval: seconds between log lines; vLLM's own interval unless given.
        """
        self._enabled = vllm_config.parallel_config.rank == 0
        self._log_interval = envs.VLLM_LOG_STATS_INTERVAL if log_interval is None else log_interval
        labels = (vllm_config.model_config.served_model_name, str(vllm_config.parallel_config.data_parallel_index))
        self._counters = [counter.labels(*labels) for counter in _COUNTERS]
        self.builds = self.windowed_rows = self.skipped_kv_tokens = 0
        self._published = self._logged = (0, 0, 0)
        _collector.engines.add(self)
        self._timer: threading.Timer | None = None

    def record(self, upper_bound: np.ndarray | None = None, windowed: np.ndarray | None = None) -> None:
        """Count one metadata build.

        Args:
            upper_bound: lengths that the draft would read without a window, as the host bounds them, [num_reqs]; left
                out where the host knows that the window removes nothing.
            windowed: their windowed counterparts, [num_reqs].
        """
        if not self._enabled:
            return
        self.builds += 1
        if upper_bound is not None:
            # [num_reqs]
            removed = upper_bound - windowed
            self.windowed_rows += int(np.count_nonzero(removed))
            self.skipped_kv_tokens += int(np.add.reduce(removed))
        if self._timer is None:
            # A timer, and no look at the clock: the line also comes after the last build of a burst.
            self._timer = threading.Timer(self._log_interval, self.log)
            self._timer.daemon = True
            self._timer.start()

    def publish(self) -> None:
        """Bring the Prometheus counters up to date."""
        totals = (self.builds, self.windowed_rows, self.skipped_kv_tokens)
        for counter, total, before in zip(self._counters, totals, self._published, strict=True):
            counter.inc(total - before)
        self._published = totals

    def log(self) -> None:
        """Log what was counted since the last line."""
        # First of all, so that a build from now on is sure of a line.
        self._timer = None
        self.publish()
        builds, rows, tokens = np.subtract(self._published, self._logged)
        self._logged = self._published
        logger.info(
            "Draft window metrics: Builds: %d, Windowed rows: %d, KV tokens not read per draft layer: %d "
            "(mean per windowed row: %.1f)",
            builds,
            rows,
            tokens,
            tokens / rows if rows else 0.0,
        )
