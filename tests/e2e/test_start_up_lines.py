# SPDX-License-Identifier: Apache-2.0
"""What an engine says of drafts whose loaded layers decide: each is one engine's draft, with another kind of layer.

vLLM runs no draft of these kinds on a CPU, so what it tells the draft of its KV cache groups is what differs.
"""

from dataclasses import replace

import pytest
import torch

from tools.demo_pair import DEMO_SPECULATION
from vllm_ascend.draft_window.seams.speculator import SpeculatorSeam

ENGINE = dict(
    speculative_config=DEMO_SPECULATION,
    additional_config={"draft_window_size": 64, "draft_window_sink_size": 4},
    max_model_len=992,
)


@pytest.fixture
def said_again(shared_engine, monkeypatch, window_lines):
    """Lines when the KV cache groups of a real engine become known again, with other attributes of its speculator."""

    def say(**attributes):
        with shared_engine(**ENGINE) as engine:
            speculator = engine.speculator
            seams, upstream = [], []
            for cls in type(speculator).__mro__:
                (seams if issubclass(cls, SpeculatorSeam) else upstream).append(cls)
            for cls in upstream:
                if "set_attn" in vars(cls):
                    monkeypatch.setattr(cls, "set_attn", lambda self: None)
            kept = {name: getattr(speculator, name) for name in ("draft_window", "window")}
            for name, value in attributes.items():
                monkeypatch.setattr(speculator, name, value(speculator) if callable(value) else value, raising=False)
            window_lines.clear()
            try:
                speculator.set_attn()
            finally:
                off = speculator.window is None
                vars(speculator).update(kept)
        assert off
        return list(window_lines)

    return say


def group_with(**changes):
    def attn_groups(speculator):
        (group,) = (group for groups in speculator.attn_groups for group in groups)
        return [[replace(group, **changes)]]

    return attn_groups


def test_a_draft_without_attention_layers(said_again):
    assert said_again(attn_groups=[[]]) == [("INFO", "Draft window off: the draft has no attention layers.")]


def test_sparse_attention_that_derives_positions_from_lengths(said_again):
    backend = type("Backend", (), {"get_name": staticmethod(lambda: "ASCEND_DSA")})
    ((level, line),) = said_again(attn_groups=group_with(backend=backend))
    assert level == "WARNING"
    assert line.startswith("Draft window off: the sparse backend ASCEND_DSA derives positions from seq_lens;")


def test_a_draft_with_a_state_instead_of_a_cache(said_again):
    from vllm.v1.kv_cache_interface import MambaSpec

    spec = MambaSpec(block_size=32, shapes=((2, 64),), dtypes=(torch.float32,))
    with pytest.raises(ValueError, match="draft_window_size does not support the draft's KV cache of type MambaSpec"):
        said_again(attn_groups=group_with(kv_cache_spec=spec))


def test_a_draft_that_attends_to_the_targets_cache(said_again):
    with pytest.raises(ValueError, match="attends to the target's KV cache and has none of its own"):
        said_again(advance_draft_positions=False)


def test_an_mtp_head_that_reuses_sparse_indices(said_again):
    with pytest.raises(ValueError, match="its later steps reuse the first one's sparse token indices"):
        said_again(share_mtp_topk_indices=True)
