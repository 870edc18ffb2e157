# SPDX-License-Identifier: Apache-2.0
"""Makes a process that :mod:`tests.ascend.test_vllm_ascend` started run on the checkout, before any test imports it."""

import os
from collections.abc import Iterator

import pytest

CHECKOUT = os.environ.get("VLLM_ASCEND_SRC")

if CHECKOUT is not None and "VLLM_ASCEND_MOCKED" in os.environ:
    from tests.ascend import npu

    npu.activate(CHECKOUT)
    collect_ignore_glob = [] if npu.has_window(CHECKOUT) else ["series/*"]

    @pytest.fixture(autouse=True)
    def no_replay_left_over() -> Iterator[None]:
        """A test that meant to fail in the middle of a replay leaves it waiting."""
        from tests.ascend.graphs import NPUGraph

        NPUGraph.pending = None
        yield
