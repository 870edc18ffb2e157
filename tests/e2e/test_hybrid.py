# SPDX-License-Identifier: Apache-2.0
"""An MTP head on a hybrid target, whose blocks hold more tokens than the window: every query sees exactly W."""

import pytest
import torch

from tests.e2e import hybrid_target
from tests.e2e.recorder import Recorder
from tools.demo_pair import demo_prompts
from vllm_draft_window.measuring.engine import Engine

WINDOW = {"draft_window_size": 256, "draft_window_mtp": True}
LENGTHS = (100, 300, 1400)


@pytest.fixture(scope="module", autouse=True)
def eager():
    """The linear attention's compiled helpers trip over an interpreted Triton."""
    with torch._dynamo.config.patch(disable=True):
        yield


def run(model, num_tokens=0, options=None, *, compare=False):
    """Output, what every forward of the target's attention was given, and the recorder of the draft's."""
    speculation = {"method": "mtp", "num_speculative_tokens": num_tokens} if num_tokens else None
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
        if compare:
            recorder = Recorder(engine.speculator, window=WINDOW["draft_window_size"], tolerance=0.05)
        measured = engine.run(prompts, max_tokens=4)
    return measured, of_target, recorder


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return hybrid_target.write(tmp_path_factory.mktemp("hybrid"))


@pytest.mark.parametrize("num_tokens", [1, 2, 3])
def test_mtp_head(num_tokens, model, window_lines):
    windowed, of_target, recorder = run(model, num_tokens, WINDOW, compare=True)
    (size,) = recorder.case.block_sizes
    assert size > 2 * WINDOW["draft_window_size"]
    assert recorder.windowed_rows > 1000
    assert f"block alignment={size}, tokens seen=256, " in window_lines[-1][1]
    assert "WindowedMTPSpeculator" in window_lines[-1][1]
    plain, of_target_plain, _ = run(model, num_tokens)
    assert windowed.tokens == plain.tokens
    assert len(of_target) == len(of_target_plain) > 0
    for on, off in zip(of_target, of_target_plain, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(on, off, strict=True))


def test_output_is_that_of_no_speculation(model):
    assert run(model, 2, WINDOW)[0].tokens == run(model)[0].tokens
