# SPDX-License-Identifier: Apache-2.0
"""No proposal waits for the device: nothing on the way reads a draft's lengths there, with a window as without one."""

import sys
from contextlib import contextmanager

import pytest
import torch

from tests.ascend.engine import ascend_engine, capture_autoregressive_graphs, source_code
from tests.ascend.fia import watch
from tests.parity import eagle3_draft

WINDOW = 64
PROMPTS = [source_code(length) for length in (40, 150, 330)]
PROPOSALS = 8
_READS = {"cpu", "tolist", "item", "numpy", "__bool__", "__int__", "__index__", "__array__"}


class Watched(torch.Tensor):
    """Notes whatever would wait for a device: a copy to the host, or a value asked for."""

    reads: list[str] = []

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        to_host = name == "to" and any(str(value) == "cpu" for value in (*args[1:], *(kwargs or {}).values()))
        if (name in _READS or to_host) and not _in_interpreter():
            cls.reads.append(name)
        return super().__torch_function__(func, types, args, kwargs or {})


def _in_interpreter() -> bool:
    """Triton's interpreter copies every argument of a kernel; a device does not."""
    frame = sys._getframe()
    while frame is not None:
        if "triton" in frame.f_code.co_filename and "interpreter" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


@contextmanager
def watched(speculator, window):
    """Reads of the draft's lengths on the device, its windowed ones among them, by the names of the methods."""
    owners = [speculator.input_buffers]
    if window is not None:
        owners += [window.inputs.stand_ins["input_buffers"], window.planned]
    plain = [owner.seq_lens for owner in owners]
    Watched.reads = []
    for owner in owners:
        owner.seq_lens = owner.seq_lens.as_subclass(Watched)
    try:
        yield Watched.reads
    finally:
        for owner, seq_lens in zip(owners, plain, strict=True):
            owner.seq_lens = seq_lens


@pytest.mark.parametrize("size", [None, WINDOW])
def test_eagle3_reads_nothing_back(size, tmp_path, monkeypatch):
    # Without a window, vLLM-Ascend's eager drafts take the longest length for every request, into the null block.
    monkeypatch.setattr(watch, "null_block", size is None)
    speculation = eagle3_draft.speculation(tmp_path, num_tokens=3)
    options = {} if size is None else {"draft_window_size": size}
    with ascend_engine(speculation, **options) as engine:
        speculator = engine.speculator
        window = getattr(speculator, "window", None)
        assert (window is None) == (size is None)
        engine.run(PROMPTS, max_tokens=2)
        with watched(speculator, window) as reads:
            engine.run(PROMPTS, max_tokens=PROPOSALS)
        assert reads == []
        if size is not None:
            capture_autoregressive_graphs(speculator, (4, 12))
            with watched(speculator, window) as reads:
                engine.run(PROMPTS, max_tokens=PROPOSALS)
            assert reads == []
            with watched(speculator, window) as reads:
                speculator.input_buffers.seq_lens[:2].cpu()
            assert reads == ["cpu"], "the control: a read is noticed"
