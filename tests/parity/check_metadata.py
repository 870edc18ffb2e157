# SPDX-License-Identifier: Apache-2.0
"""Compares the metadata of every Model Runner V1 build with the token-level oracle, while an engine runs."""

import dataclasses
from typing import Any

import numpy as np

from tests import oracle
from tests.oracle import Case
from vllm_ascend.spec_decode.sliding_window import SlidingWindowAdapter


class MetadataCheck:
    """``on_metadata`` of :func:`tests.parity.mrv1_window.windowed_proposer`; raises where a build is off.

    Attributes:
        builds: metadata builds that were compared.
        steps: of those, how many at each draft step.
        windowed_rows: rows from which the window hid something.
    """

    def __init__(self, window: int, max_model_len: int) -> None:
        self.window, self.max_model_len = window, max_model_len
        self.builds = self.windowed_rows = 0
        self.steps: dict[int, int] = {}
        self._removed = np.zeros(0, dtype=np.int64)

    def __call__(self, proposer: Any, adapter: SlidingWindowAdapter, full: Any, windowed: Any, step: int) -> None:
        self.builds += 1
        self.steps[step] = self.steps.get(step, 0) + 1
        size = adapter.block_size
        full_table, table = full.block_table_tensor.numpy(), windowed.block_table_tensor.numpy()
        length = windowed.seq_lens.numpy()
        if step == 0:
            self._check_first(adapter, full, windowed)
            # [num_reqs]
            self._removed = full.seq_lens.numpy() - length
            self.windowed_rows += int((self._removed > 0).sum())
        else:
            # The newest token's position is the proposer's own count, which the window never touches.
            position = proposer.positions[: len(length)].numpy()
            guarded = position == 0  # past max_model_len, where the proposer lets a row read one token
            np.testing.assert_array_equal((length + self._removed)[~guarded], position[~guarded] + 1)
        for row, n in enumerate(length):
            logical = np.arange(n)
            absolute = np.where(step > 0 and n == 1, 0, self._removed[row]) + logical
            np.testing.assert_array_equal(
                oracle.physical_slots(table[row], size, logical),
                oracle.physical_slots(full_table[row], size, absolute),
            )

    def _check_first(self, adapter: SlidingWindowAdapter, full: Any, windowed: Any) -> None:
        queries = np.diff(full.query_start_loc.numpy())
        assert adapter.full_block_table is full.block_table_tensor
        case = Case(
            window=self.window,
            block_sizes=(adapter.block_size,),
            full_columns=(full.block_table_tensor.shape[1],),
            max_model_len=self.max_model_len,
            lookahead=adapter._future_offset,
        )
        tables = full.block_table_tensor.numpy(), windowed.block_table_tensor.numpy()
        bound, exact = windowed.seq_lens_cpu_upper_bound, getattr(windowed, "_seq_lens_cpu", None)
        for row, seq_len in enumerate(full.seq_lens.tolist()):
            of_row = dataclasses.replace(case, queries=int(queries[row]))
            length = oracle.windowed_length(of_row, seq_len)
            assert windowed.seq_lens[row] == length, (of_row, seq_len)
            oracle.check_table_row(of_row, 0, seq_len, tables[0][row], tables[1][row])
            if exact is not None:
                assert exact[row] == oracle.windowed_length(of_row, int(full._seq_lens_cpu[row]))
            if bound is not None:
                assert length <= bound[row] <= tables[1].shape[1] * adapter.block_size
