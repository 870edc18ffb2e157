# SPDX-License-Identifier: Apache-2.0
"""Counts against a brute-force count, and where they can be read: the log, this process's metrics, the shared files."""

import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from prometheus_client import REGISTRY, CollectorRegistry, generate_latest, multiprocess
from prometheus_client.parser import text_string_to_metric_families

pytest.importorskip("vllm")

from vllm.v1.metrics.prometheus import unregister_vllm_metrics  # noqa: E402

from tests.oracle import Case  # noqa: E402
from tests.vllm_inputs import Batch  # noqa: E402
from vllm_ascend.draft_window.config import DraftWindow  # noqa: E402
from vllm_ascend.draft_window.counters import DraftWindowCounters  # noqa: E402
from vllm_ascend.draft_window.geometry import WindowGeometry  # noqa: E402
from vllm_ascend.draft_window.groups import DraftGroups  # noqa: E402
from vllm_ascend.draft_window.seams.autoregressive import TargetDependentSeam  # noqa: E402
from vllm_ascend.draft_window.seams.parallel import ParallelSeam  # noqa: E402
from vllm_ascend.draft_window.seams.speculator import SpeculatorSeam  # noqa: E402
from vllm_ascend.draft_window.window import WindowedDraft  # noqa: E402

GEOMETRY = WindowGeometry(window=512, block_sizes=(32,), full_columns=(256,), max_model_len=8192, max_queries=8)


def config(*, rank=0, engine=0, model="demo"):
    return SimpleNamespace(
        parallel_config=SimpleNamespace(
            rank=rank, data_parallel_index=engine, pipeline_parallel_size=1, tensor_parallel_size=2
        ),
        model_config=SimpleNamespace(served_model_name=model),
    )


def removed(lengths, max_rejected=14):
    upper = np.array(lengths, dtype=np.int32)
    return upper - GEOMETRY.host_bound(upper, max_rejected=max_rejected, queries=8)


def metrics(text, **labels):
    return {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("vllm:draft_window")
        and sample.name.endswith("_total")
        and labels.items() <= sample.labels.items()
    }


def test_counts_equal_a_count_row_by_row():
    counters = DraftWindowCounters(config())
    rng = np.random.default_rng(0)
    builds = rows = tokens = 0
    for _ in range(50):
        forwards = int(rng.integers(1, 4))
        tokens_removed = removed(rng.integers(0, 8192, size=rng.integers(0, 17)))
        counters.record(forwards, tokens_removed)
        builds += forwards
        for count in tokens_removed.tolist():
            rows += forwards * (count > 0)
            tokens += forwards * count
    counters.record()
    assert (counters.builds, counters.windowed_rows, counters.skipped_kv_tokens) == (builds + 1, rows, tokens)
    assert rows > 100


def test_bounds_say_what_the_device_skips_to_within_the_doubt():
    counters = DraftWindowCounters(config())
    upper = np.arange(1000, 8192, 7, dtype=np.int32)
    counters.record(1, removed(upper))
    for rejected in (0, 5, 14):
        on_device, _ = GEOMETRY.lengths(upper - rejected, queries=8)
        assert abs(counters.skipped_kv_tokens - int(on_device.sum())) <= len(upper) * (rejected + GEOMETRY.alignment)


def test_other_ranks_count_nothing():
    counters = DraftWindowCounters(config(rank=1, model="rank-1"))
    counters.record(1, removed([4096]))
    assert counters.builds == 0
    assert not any(metrics(generate_latest(REGISTRY).decode(), model_name="rank-1").values())


def test_this_process_exposes_them_whatever_vllm_unregisters():
    first = DraftWindowCounters(config(model="exposed"))
    first.record(1, removed([4096, 100]))
    unregister_vllm_metrics()  # what a second engine in the process does
    second = DraftWindowCounters(config(model="exposed", engine=1))
    second.record()
    text = generate_latest(REGISTRY).decode()
    assert metrics(text, model_name="exposed", engine="0") == {
        "vllm:draft_window_num_builds_total": 1,
        "vllm:draft_window_num_windowed_rows_total": 1,
        "vllm:draft_window_num_skipped_kv_tokens_total": first.skipped_kv_tokens,
    }
    assert metrics(text, model_name="exposed", engine="1")["vllm:draft_window_num_builds_total"] == 1


def test_one_line_per_interval_and_one_after_the_last_build(caplog_vllm):
    counters = DraftWindowCounters(config(), log_interval=0.3)
    for _ in range(20):
        counters.record(1, removed([4096, 100]))
    assert not caplog_vllm.messages
    wait_for(lambda: caplog_vllm.messages)
    skipped = int(removed([4096, 100]).sum())
    assert caplog_vllm.messages == [
        f"Draft window metrics: Builds: 20, Windowed rows: 20, KV tokens not read per draft layer: {20 * skipped} "
        f"(mean per windowed row: {skipped:.1f})"
    ]
    counters.record()
    wait_for(lambda: len(caplog_vllm.messages) == 2)
    assert "Builds: 1, Windowed rows: 0, KV tokens not read per draft layer: 0 " in caplog_vllm.messages[1]


CHILD = """
from vllm_draft_window.cpu_engine import activate
activate()
from vllm.plugins import load_general_plugins
load_general_plugins()
from prometheus_client import REGISTRY, generate_latest
from tests.ut.draft_window.test_counters import DraftWindowCounters, config, removed
assert "draft_window" not in generate_latest(REGISTRY).decode()
for _ in range(3):
    counters = DraftWindowCounters(config(model="files"))
    counters.record(1, removed([4096]))
    counters.log()  # the files are brought up to date with the line in the log
"""


def test_they_are_registered_with_the_first_window_and_shared_files_bring_them_to_another_process(tmp_path):
    environment = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path), "VLLM_LOGGING_LEVEL": "ERROR"}
    root = Path(__file__).resolve().parents[3]
    subprocess.run([sys.executable, "-c", CHILD], env=environment, cwd=root, check=True)
    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry, path=str(tmp_path))
    found = metrics(generate_latest(registry).decode(), model_name="files", engine="0")
    assert found["vllm:draft_window_num_builds_total"] == found["vllm:draft_window_num_windowed_rows_total"] == 3
    assert found["vllm:draft_window_num_skipped_kv_tokens_total"] == 3 * int(removed([4096]).sum())


def test_two_threads_publish_nothing_twice():
    counters = DraftWindowCounters(config(model="raced"))
    stop = threading.Event()

    def publish():
        while not stop.is_set():
            counters.publish()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    threads = [threading.Thread(target=publish) for _ in range(3)]
    try:
        for thread in threads:
            thread.start()
        for _ in range(3000):
            counters.record(1, removed([4096]))
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(interval)
    exposed = metrics(generate_latest(REGISTRY).decode(), model_name="raced")
    assert exposed["vllm:draft_window_num_builds_total"] == counters.builds == 3000


KINDS = {
    # seam, method's look-ahead, tokens asked for: forwards of a proposal
    (ParallelSeam, 0, None): 1,
    (ParallelSeam, 0, 7): 1,
    (ParallelSeam, 0, 0): 0,
    (TargetDependentSeam, 7, None): 7,
    (TargetDependentSeam, 7, 3): 3,
    (TargetDependentSeam, 7, 1): 1,
    (TargetDependentSeam, 7, 0): 1,
    (SpeculatorSeam, 7, None): 7,
    (SpeculatorSeam, 7, 3): 7,
}


@pytest.mark.parametrize(("kind", "forwards"), KINDS.items(), ids=str)
@pytest.mark.parametrize("builds", ["per forward", "twice", "once", "never"])
def test_the_same_requests_count_the_same_however_their_metadata_is_built(kind, forwards, builds):
    """Eager, vLLM-Ascend's FULL graphs, fused loops, recorded refreshes: a step counts before any build of it."""
    seam, lookahead, asked = kind
    upper, queries = np.array([4096, 100, 7000], dtype=np.int32), np.array([1, 4, 8], dtype=np.int32)
    counters = DraftWindowCounters(config(model="counted alike"))

    class Upstream:
        """As vLLM 0.26 has it where ``upper_bound`` is left out of the build."""

        num_speculative_steps, prefill_cudagraph_manager = 7, None
        draft_max_seq_len = 7100

        def propose(self, batch, *_, **__):
            times = {"per forward": forwards, "twice": 2 * forwards, "once": min(forwards, 1), "never": 0}[builds]
            for _ in range(times):
                self._build_draft_attn_metadata(3, 4, 32, num_query_per_req=8, causal=False)

        def _build_draft_attn_metadata(self, *sizes, **more):
            return {}

    windowed = type("Windowed", (seam, Upstream), {})
    speculator = object.__new__(windowed)
    batch = Batch(
        Case(window=512, block_sizes=(32,), full_columns=(256,), max_model_len=8192, queries=8), upper, fused=False
    )
    speculator.input_buffers, speculator.block_tables = batch.input_buffers, batch.block_tables
    speculator.window = WindowedDraft(
        DraftWindow(method="any", size=512, sink_size=0, min_context=0, queries_per_request=8, max_lookahead=lookahead),
        DraftGroups(group_ids=(0,), block_sizes=(32,), full_columns=(256,), native_window=None),
        batch.input_buffers,
        batch.block_tables,
        max_model_len=8192,
        queries=1 if lookahead else 8,
        max_queries=8,
        max_rejected=14,
        counters=counters,
        fused=False,
    )
    requests = SimpleNamespace(
        num_reqs=3,
        seq_lens_cpu_upper_bound=torch.from_numpy(upper),
        query_start_loc_np=np.cumsum([0, *queries], dtype=np.int32),
    )
    given = {} if asked is None else {"num_speculative_tokens": asked}
    states = [None] * 5  # the target's metadata, slots, hidden states and samples
    speculator.propose(requests, *states, **given)
    speculator.propose(requests, *states, dummy_run=True, **given)
    assert counters.builds == forwards
    assert counters.windowed_rows == 2 * forwards
    full = (upper + (0 if lookahead else 8)).tolist()
    least = sum(n - 512 - 7 - 31 for n in full if n > 600)
    assert least * forwards <= counters.skipped_kv_tokens <= (sum(full) - 100 - 2 * 480) * forwards


def wait_for(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def caplog_vllm(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    caplog.set_level(logging.INFO, logger="vllm")
    return caplog
