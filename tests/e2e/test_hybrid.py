# SPDX-License-Identifier: Apache-2.0
"""Drafts of a hybrid target, whose blocks hold more tokens than the window: every query sees exactly W."""

import pytest
import torch

from tests.e2e import drafts, hybrid_target
from tests.e2e.recorder import Recorder
from tools.demo_pair import demo_prompts, demo_speculation
from vllm_draft_window.measuring.engine import Engine

WINDOW = {"draft_window_size": 128, "draft_window_mtp": True}
LENGTHS = (60, 200, 800)


@pytest.fixture(scope="module", autouse=True)
def eager():
    """The linear attention's compiled helpers trip over an interpreted Triton."""
    with torch._dynamo.config.patch(disable=True):
        yield


def run(model, speculation=None, options=None):
    """Output, what every forward of the target's attention was given, and the recorder of a windowed draft's."""
    prompts = [prompt[-n:] for prompt, n in zip(demo_prompts(3, max(LENGTHS)), LENGTHS, strict=True)]
    of_target, recorder = [], None
    with Engine(
        model, speculative_config=speculation, additional_config=options or {}, **hybrid_target.ENGINE
    ) as engine:
        if speculation:
            propose = engine.speculator.propose

            def remembering(batch, attn_metadata, *args, **kwargs):
                found = [m for m in (attn_metadata or {}).values() if hasattr(m, "block_table")]
                of_target.extend((m.seq_lens.clone(), m.block_table.clone(), m.slot_mapping.clone()) for m in found)
                return propose(batch, attn_metadata, *args, **kwargs)

            engine.speculator.propose = remembering
        if options:
            recorder = Recorder(engine.speculator, window=WINDOW["draft_window_size"], tolerance=0.05)
        measured = engine.run(prompts, max_tokens=4)
    return measured, of_target, recorder


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return hybrid_target.write(tmp_path_factory.mktemp("hybrid"))


@pytest.fixture(scope="module")
def alone(model):
    """Output tokens without speculation."""
    return run(model)[0].tokens


@pytest.mark.parametrize(
    ("method", "num_tokens"), [("mtp", 1), ("mtp", 2), ("mtp", 3), ("eagle3", 3), ("dspark", 7), ("dflash", 7)]
)
def test_a_draft_of_a_hybrid_target(method, num_tokens, model, alone, tmp_path, window_lines):
    speculation = {
        "mtp": lambda: {"method": "mtp"},
        "dflash": lambda: drafts.speculation("dflash", tmp_path),
    }.get(method, lambda: demo_speculation(method))() | {"num_speculative_tokens": num_tokens}
    windowed, of_target, recorder = run(model, speculation, WINDOW)
    (size,) = recorder.case.block_sizes
    assert size > 2 * WINDOW["draft_window_size"]
    # The first forward of an autoregressive draft runs over the prompts.
    assert recorder.windowed_rows > (500 if recorder.case.first_lookahead else 20)
    assert f"block alignment={size}, tokens seen=128, " in window_lines[-1][1]
    plain, of_target_plain, _ = run(model, speculation)
    assert windowed.tokens == plain.tokens == alone
    assert len(of_target) == len(of_target_plain) > 0
    for on, off in zip(of_target, of_target_plain, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(on, off, strict=True))
