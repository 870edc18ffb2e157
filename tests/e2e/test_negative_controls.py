# SPDX-License-Identifier: Apache-2.0
"""Faults put in on purpose: the checks of this suite must notice each of them."""

import numpy as np
import pytest
import torch

from tests import oracle
from tests.cases import full_tables, geometry_of
from tests.e2e.recorder import Recorder
from tests.e2e.test_lossless import WINDOW, mixed_prompts
from tests.oracle import Case
from tools.demo_pair import DEMO_SPECULATION
from vllm_ascend.draft_window import inputs
from vllm_draft_window.measuring.engine import Engine


def run_with_fault(break_it) -> Recorder:
    with Engine(speculative_config=DEMO_SPECULATION, additional_config=WINDOW, max_model_len=1024) as engine:
        recorder = Recorder(engine.speculator, window=64)
        break_it(engine.speculator)
        engine.run(mixed_prompts()[2:], max_tokens=8)
    return recorder


@pytest.mark.parametrize("blocks", [-1, 1])
def test_start_off_by_one_block(blocks):
    """Right lengths over the wrong blocks: only a comparison with the unwindowed table can tell."""

    def break_it(speculator):
        windowed = speculator.window.inputs
        refresh = windowed.refresh

        def shifted(**kwargs):
            refresh(**kwargs)
            (table,) = windowed.block_tables
            table.copy_(table.roll(blocks, dims=1))

        windowed.refresh = shifted

    with pytest.raises(AssertionError, match="away from the masked reference"):
        run_with_fault(break_it)


def test_window_one_block_too_short():
    """Wrong lengths over the right blocks."""

    def break_it(speculator):
        windowed = speculator.window.inputs
        refresh = windowed.refresh
        windowed.refresh = lambda **kwargs: (refresh(**kwargs), windowed.seq_lens.sub_(32).clamp_(min=7))

    with pytest.raises(AssertionError, match="away from the masked reference"):
        run_with_fault(break_it)


def test_windowed_slot_mapping():
    """Draft tokens written through the cropped table: outputs stay right, the cache does not."""

    def break_it(speculator):
        propose = speculator.propose

        def propose_inside(*args, **kwargs):
            with speculator.window.inputs.in_place_of_originals(speculator):
                return propose(*args, **kwargs)

        speculator.propose = propose_inside

    with pytest.raises(AssertionError, match="slots .*, expected"):
        run_with_fault(break_it)


def test_no_look_ahead_columns():
    case = Case(window=64, block_sizes=(16,), full_columns=(64,), max_model_len=1024, lookahead=7)
    geometry = geometry_of(case)
    seq_lens = np.array([64 * 5 - 2], dtype=np.int32)
    (full,) = full_tables(case, 1, seed=0)
    removed, length = geometry.lengths(torch.from_numpy(seq_lens), queries=1, lookahead=7)
    for lookahead, right in ((7, True), (0, False)):
        table = geometry.crop_block_table(0, torch.from_numpy(full), removed, length, lookahead=lookahead)[0].numpy()
        if right:
            oracle.check_table_row(case, 0, seq_lens[0], full[0], table)
        else:
            with pytest.raises(AssertionError):
                oracle.check_table_row(case, 0, seq_lens[0], full[0], table)


def test_not_restoring(monkeypatch):
    """The draft's next inputs are then prepared on windowed tensors; the target's tables are another object's."""
    monkeypatch.setattr(inputs.swapped, "__exit__", lambda *_: None)
    with pytest.raises(AssertionError, match="slots .*, expected|away from the masked reference"):
        run_with_fault(lambda speculator: None)
