# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM-Ascend project
"""What ``draft_window_size: "auto"`` has learned, for the log and for Prometheus."""

from collections.abc import Sequence

import numpy as np
from prometheus_client import Counter

from .auto import WindowChooser


class ArmCounters:
    """Reads what a chooser has left on the host; nothing here waits for the device."""

    def __init__(self, chooser: WindowChooser, counters: Sequence[Counter], labels: Sequence[str]) -> None:
        """Count for one engine.

        Args:
            counters: for accepted tokens and for proposals, both with ``labels``, ``context`` and ``arm``.
        """
        self._chooser, self._counters, self._labels = chooser, counters, tuple(labels)
        # [num_buckets, num_arms, 2]
        self._published = self._logged = np.zeros(chooser.seen.shape, dtype=np.int64)

    def publish(self) -> None:
        """Bring the Prometheus counters up to date."""
        seen = self._chooser.seen.numpy().copy()
        for bucket, arm, kind in np.argwhere(seen > self._published):
            context, size = self._chooser.buckets[bucket], self._chooser.sizes[arm]
            counter = self._counters[kind].labels(*self._labels, str(context), str(size))
            counter.inc(int(seen[bucket, arm, kind] - self._published[bucket, arm, kind]))
        self._published = seen

    def line(self) -> str:
        """For each context bucket with proposals since the last line, the size that was drawn most; "" for none."""
        new = self._published - self._logged
        self._logged = self._published
        drawn = []
        for longest, arms in zip(self._chooser.buckets, new, strict=True):
            if total := arms[:, 1].sum():
                arm = arms[:, 1].argmax()
                tokens, proposals = arms[arm]
                drawn.append(
                    f"to {longest} tokens W={self._chooser.sizes[arm]} in {proposals / total:.0%} of {total} "
                    f"proposals, accepted length {tokens / proposals:.2f}"
                )
        return "; ".join(drawn)
