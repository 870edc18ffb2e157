# SPDX-License-Identifier: Apache-2.0
"""Which worker speaks, over every world, and what ranks say of each other through a real store."""

import itertools
import threading
from datetime import timedelta
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from torch.distributed import HashStore  # noqa: E402

from vllm_ascend.draft_window import ranks  # noqa: E402


@pytest.mark.parametrize(("tp", "pp", "dp", "pcp"), [*itertools.product((1, 2), (1, 2, 4), (1, 2), (1, 2))])
def test_one_worker_of_each_engine_speaks_the_first_of_the_last_stage(tp, pp, dp, pcp):
    # As vLLM numbers them: data parallel, then stages, then context and tensor parallel ranks.
    world = list(itertools.product(range(dp), range(pp), range(pcp), range(tp)))
    speaking = [
        place
        for rank, place in enumerate(world)
        if ranks.speaks(
            SimpleNamespace(
                rank=rank,
                tensor_parallel_size=tp,
                pipeline_parallel_size=pp,
                prefill_context_parallel_size=pcp,
            )
        )
    ]
    assert speaking == [(engine, pp - 1, 0, 0) for engine in range(dp)]


def agree_on(said, monkeypatch, patience=30.0):
    """What each rank raises, with ranks as threads over one store; ``None`` says nothing."""
    store, here, raised = HashStore(), threading.local(), {}
    monkeypatch.setattr(ranks, "_get_default_store", lambda: store)
    monkeypatch.setattr(ranks, "get_tp_group", lambda: SimpleNamespace(ranks=list(said), rank=here.rank))
    monkeypatch.setattr(ranks, "PATIENCE", timedelta(seconds=patience))

    def run(rank, text):
        here.rank = rank
        try:
            ranks.agree(text, SimpleNamespace(tensor_parallel_size=len(said)))
        except RuntimeError as error:
            raised[rank] = str(error)

    threads = [threading.Thread(target=run, args=(r, text)) for r, text in said.items() if text is not None]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


def test_ranks_that_window_alike(monkeypatch):
    assert agree_on({4: "W=512", 5: "W=512", 6: "W=512"}, monkeypatch) == {}


def test_a_rank_with_another_window_is_named_on_every_rank(monkeypatch):
    raised = agree_on({2: "W=512", 3: "W=256"}, monkeypatch)
    assert raised.keys() == {2, 3}
    for text in raised.values():
        assert "differs between ranks" in text
        assert "W=512, version" in text and "W=256, version" in text and "rank 2" in text and "rank 3" in text


def test_a_rank_without_the_plugin_is_named(monkeypatch):
    raised = agree_on({0: "W=512", 1: None}, monkeypatch, patience=0.2)
    assert "rank 1 says nothing of one" in raised[0] and "VLLM_PLUGINS" in raised[0]


def test_one_device_needs_nobody(monkeypatch):
    monkeypatch.setattr(ranks, "_get_default_store", None)
    ranks.agree("W=512", SimpleNamespace(tensor_parallel_size=1))
