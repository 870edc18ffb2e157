# SPDX-License-Identifier: Apache-2.0
"""The window where attention takes its lengths on the host: one start, decided there, and no wait for the device."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("vllm")

from tests import oracle
from tests.cases import full_tables, geometry_of
from tests.strategies import batches, cases
from vllm_ascend.draft_window.geometry import WindowGeometry
from vllm_ascend.draft_window.host_planned import HostPlannedWindow


def planned(geometry: WindowGeometry, max_num_reqs: int = 16) -> HostPlannedWindow:
    tables = [torch.zeros(max_num_reqs, columns, dtype=torch.int32) for columns in geometry.columns]
    return HostPlannedWindow(geometry, range(len(tables)), torch.zeros(max_num_reqs, dtype=torch.int32), tables)


def build(window, host_lens, seq_lens, tables, **kwargs):
    """The arguments that the build gets."""
    return window.build(
        lambda **arguments: arguments,
        np.asarray(host_lens, dtype=np.int32),
        num_reqs=len(seq_lens),
        seq_lens=seq_lens if isinstance(seq_lens, torch.Tensor) else torch.tensor(seq_lens, dtype=torch.int32),
        block_tables=tables,
        max_seq_len=1 << 20,
        **kwargs,
    )


@settings(max_examples=500, deadline=None)
@given(st.data())
def test_host_and_device_share_a_start_that_no_rejection_makes_too_late(data):
    case = data.draw(cases())
    most = data.draw(st.integers(0, 9))
    seq_lens = data.draw(batches(case))
    rejected = np.array([data.draw(st.integers(0, most)) for _ in seq_lens], dtype=np.int32)
    geometry = dataclasses.replace(geometry_of(case), max_rejected=most)
    tables = [torch.from_numpy(t) for t in full_tables(case, len(seq_lens), seed=0)]
    host = np.where(seq_lens > 0, seq_lens + rejected, 0)
    built = build(
        planned(geometry, len(seq_lens)), host, torch.from_numpy(seq_lens), tables,
        queries=case.queries, lookahead=case.lookahead,
    )  # fmt: skip
    for row, s in enumerate(np.minimum(seq_lens, case.limit).tolist()):
        length = int(built["seq_lens"][row].clip(max=case.limit))
        removed = s - length
        assert removed % np.lcm.reduce(case.block_sizes) == 0
        assert removed <= s - oracle.windowed_length(case, s), "at most what the exact lengths would take out"
        assert built["seq_lens_np"][row] == min(host[row], case.limit) - removed
        decided_at = max(min(int(host[row]), case.limit + most) - most, 0)
        assert removed == min(decided_at, case.limit) - oracle.windowed_length(case, decided_at)
        for group, size in enumerate(case.block_sizes):
            columns = built["block_tables"][group].shape[1]
            assert length <= columns * size or columns == case.full_columns[group]


def test_lengths_and_tables_of_a_known_batch():
    """W = 512, K = 3, b = 128: the device's 634 keeps all of its newest 512, though the host counts 637."""
    geometry = WindowGeometry(
        window=512, block_sizes=(128,), full_columns=(64,), max_model_len=8192, max_queries=4,
        max_lookahead=3, max_rejected=3,
    )  # fmt: skip
    table = torch.arange(1, 1 + 3 * 64, dtype=torch.int32).view(3, 64)
    window = planned(geometry)
    built = build(window, [637, 1003], [634, 1000, 0], [table], lookahead=3)
    assert built["seq_lens"].tolist() == [634, 1000 - 384, 0]
    assert built["seq_lens_np"].tolist() == [637, 1003 - 384, 0]
    assert built["block_tables"][0][1, :5].tolist() == table[1, 3:8].tolist()
    assert not built["block_tables"][0][2].any()
    assert built["seq_lens"].data_ptr() == window.seq_lens.data_ptr()
    assert built["block_tables"][0].data_ptr() == window.block_tables[0].data_ptr()
    assert built["max_seq_len"] == geometry.max_length


def test_a_batch_that_the_window_covers_keeps_its_tensors():
    geometry = WindowGeometry(window=512, block_sizes=(128,), full_columns=(64,), max_model_len=8192, max_queries=1)
    window, table, seq_lens = planned(geometry), torch.ones(2, 64, dtype=torch.int32), torch.tensor([40, 512])
    built = build(window, [40, 512], seq_lens, [table])
    assert built["block_tables"][0] is table and built["seq_lens"] is seq_lens
    assert built["seq_lens_np"].tolist() == [40, 512]


def test_nothing_is_read_back_from_the_device():
    """Tensors on ``meta`` hold no data: reading one back raises."""
    geometry = WindowGeometry(window=512, block_sizes=(128,), full_columns=(64,), max_model_len=8192, max_queries=1)
    tables = [torch.zeros(2, columns, dtype=torch.int32, device="meta") for columns in geometry.columns]
    window = HostPlannedWindow(geometry, [0], torch.zeros(2, dtype=torch.int32, device="meta"), tables)
    full = torch.zeros(2, 64, dtype=torch.int32, device="meta")
    built = build(window, [1000, 2000], torch.zeros(2, dtype=torch.int32, device="meta"), [full])
    assert built["seq_lens"].is_meta and built["seq_lens_np"].tolist() == [1000 - 384, 2000 - 1408]
