# SPDX-License-Identifier: Apache-2.0
"""``draft_window_size: "auto"``: what the chooser credits, draws, forgets; and the fused launch against its twin."""

import numpy as np
import pytest
import torch

from vllm_ascend.draft_window.auto import MEMORY, WindowChooser
from vllm_ascend.draft_window.config import LADDER

MAX_MODEL_LEN = 16384


def make_chooser(rows=8, sizes=LADDER, start=2048, fused=False):
    return WindowChooser(
        sizes, start=start, max_num_reqs=rows, max_model_len=MAX_MODEL_LEN, device=torch.device("cpu"), fused=fused
    )


def step(chooser, seq_lens, sampled, num_logits, slots=None):
    """One proposal of a batch; the sizes drawn, [num_reqs]."""
    num_reqs = len(seq_lens)
    chooser.choose(
        idx_mapping=torch.tensor(range(num_reqs) if slots is None else slots, dtype=torch.int32),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        num_sampled=torch.tensor(sampled, dtype=torch.int32),
        cu_num_logits=torch.tensor(np.concatenate([[0], np.cumsum(num_logits)]), dtype=torch.int32),
        num_reqs=num_reqs,
    )
    return chooser.windows[:num_reqs].tolist()


@pytest.mark.parametrize("start, first", [(2048, 2048), (1500, 1024), (100, 128), (100_000, 8192)])
def test_begins_with_the_start_or_the_size_below(start, first):
    assert step(make_chooser(start=start), [9000], [1], [1]) == [first]


def test_begins_with_the_size_that_covers_a_short_context():
    assert step(make_chooser(), [100, 300, 512, 513], [1] * 4, [1] * 4) == [128, 512, 512, 1024]


@pytest.mark.parametrize("fused", [False, True], ids=["torch", "fused"])
def test_credits_the_size_and_the_bucket_of_the_proposal(fused):
    if fused:
        pytest.importorskip("vllm")
    chooser = make_chooser(fused=fused)
    step(chooser, [9000, 300, 9000, 9000], [1, 1, 1, 1], [1, 1, 1, 1])
    assert chooser.history.sum() == 0
    # The rows move; the third is preempted, the fourth verifies nothing, a chunk of a prefill samples nothing.
    step(chooser, [305, 9004, 9000, 5000], [5, 4, 1, 0], [8, 8, 1, 1], slots=[1, 0, 3, 5])
    expected = torch.zeros_like(chooser.history)
    expected[1, LADDER.index(512)] = torch.tensor([5, 1])
    expected[6, LADDER.index(2048)] = torch.tensor([4, 1])
    assert torch.equal(chooser.history, expected)


def test_a_new_request_does_not_inherit_the_slot_of_another():
    chooser = make_chooser()
    step(chooser, [9000], [1], [1], slots=[3])
    step(chooser, [2000], [0], [1], slots=[3])  # another request's prefill
    step(chooser, [2100], [4], [8], slots=[3])
    assert chooser.history.sum() == 0


def play(chooser, means, *, steps, seq_len=9000, rows=8, seed=0, drafts=7):
    """Share of proposals drawn with each size, against a draft whose accepted length is ``means[size]``."""
    generator = np.random.default_rng(seed)
    counts = dict.fromkeys(chooser.sizes, 0)
    sampled, logits = [1] * rows, [1] * rows
    for _ in range(steps):
        sizes = step(chooser, [seq_len] * rows, sampled, logits)
        for size in sizes:
            counts[size] += 1
        kept = np.array([means[size] for size in sizes])
        # Geometric, cut off where the proposal ends; close enough to the mean asked for.
        sampled = np.minimum(generator.geometric(1 / kept), drafts + 1).tolist()
        logits = [drafts + 1] * rows
    return {size: count / (steps * rows) for size, count in counts.items()}


COLLAPSES_AT_1024 = {128: 3.2, 256: 3.6, 512: 4.2, 1024: 2.2, 2048: 1.5, 4096: 1.4, 8192: 1.4}
BEST_WHEN_LARGE = {128: 1.4, 256: 1.6, 512: 2.0, 1024: 2.4, 2048: 2.9, 4096: 3.5, 8192: 4.2}


@pytest.mark.parametrize("means", [COLLAPSES_AT_1024, BEST_WHEN_LARGE], ids=["short", "long"])
def test_finds_the_best_size(means):
    shares = [play(make_chooser(), means, steps=150, seed=seed) for seed in range(6)]
    accepted = np.mean([sum(share * means[size] for size, share in run.items()) for run in shares])
    assert accepted >= 0.93 * max(means.values())  # all 1,200 proposals, the first ones too


def test_follows_a_change():
    chooser = make_chooser()
    play(chooser, COLLAPSES_AT_1024, steps=100)
    play(chooser, BEST_WHEN_LARGE, steps=50)  # 400 proposals to notice
    shares = play(chooser, BEST_WHEN_LARGE, steps=50)
    assert sum(share * BEST_WHEN_LARGE[size] for size, share in shares.items()) >= 0.9 * 4.2


def test_a_longer_bucket_borrows_from_the_shorter_one():
    chooser = make_chooser(sizes=LADDER[:5])
    play(chooser, COLLAPSES_AT_1024, steps=100, seq_len=4000)
    first = [step(chooser, [6000] * 8, [1] * 8, [1] * 8) for _ in range(4)]
    assert sum(size <= 512 for sizes in first for size in sizes) >= 28


def test_forgets_by_halves():
    chooser = make_chooser(rows=1, sizes=(512,), start=512)
    for _ in range(MEMORY + 2):
        step(chooser, [9000], [3], [8])
    assert chooser.history[6, 0, 1] == MEMORY + 1
    assert chooser._record[6, 0, 1] == MEMORY / 2 + 1


@pytest.mark.parametrize("seed", range(3))
def test_the_fused_launch_equals_its_twin(seed):
    pytest.importorskip("vllm")
    generator = np.random.default_rng(seed)
    plain, fused = make_chooser(rows=12), make_chooser(rows=12, fused=True)
    for _ in range(40):
        rows = int(generator.integers(1, 12))
        slots = generator.permutation(12)[:rows].tolist()
        lens = generator.integers(1, MAX_MODEL_LEN, rows).tolist()
        logits = generator.choice([1, 8], rows).tolist()
        sampled = [int(generator.integers(0, n + 1)) for n in logits]
        assert step(plain, lens, sampled, logits, slots) == step(fused, lens, sampled, logits, slots)
    for name in ("history", "_record", "_cell", "_clock", "_added"):
        assert torch.equal(getattr(plain, name), getattr(fused, name)), name


def test_two_runs_draw_alike():
    one, other = make_chooser(), make_chooser()
    assert play(one, COLLAPSES_AT_1024, steps=30) == play(other, COLLAPSES_AT_1024, steps=30)
    assert torch.equal(one._record, other._record)
