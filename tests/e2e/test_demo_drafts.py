# SPDX-License-Identifier: Apache-2.0
"""The demo drafts in plain torch are the models that vLLM runs: the same proposals, token by token.

Training and simulation rest on that. A wrong shift of tokens, features or positions would change every proposal.
"""

import inspect

import pytest
import torch
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

from tools.demo_pair import DEMO_PAIR, DRAFT_FOLDERS, demo_prompts
from tools.demo_pair.export import load_draft, load_target, new_draft, round_to_bfloat16, save_draft
from tools.demo_pair.simulate import draft_everywhere, generate, sight
from tools.demo_pair.training import Budget, train_draft
from vllm_draft_window.measuring.engine import Engine

pytestmark = [pytest.mark.slow, pytest.mark.one_vllm]

LENGTHS = (40, 97, 130)
MAX_TOKENS = 16


@pytest.fixture(scope="module")
def target():
    return load_target(DEMO_PAIR / "target").requires_grad_(False)


def trained(draft, target, folder):
    """A few steps are enough for some proposals to be accepted; an untrained draft would be rejected throughout."""
    torch.manual_seed(0)
    draft.start_from(target)
    text = torch.tensor([token for prompt in demo_prompts(8, 1024) for token in prompt])
    sizes = {"context": 48, "batch": 4, "anchors": 16, "loss_decay": 0.85, "seed": 0, "learning_rate": 3e-3}
    train_draft(draft, target, text, budget=Budget(seconds=0, steps=30), **sizes)
    round_to_bfloat16(draft)
    save_draft(draft, folder)
    return folder


def proposals(engine, prompts):
    """Output tokens, and ``{prompt index: [(anchor position, drafts), ...]}`` as vLLM's speculator returned them."""
    speculator = engine.speculator
    propose = speculator.propose
    recorded = {}

    def wrapper(*args, **kwargs):
        drafts = propose(*args, **kwargs)
        inputs = inspect.signature(BaseSpeculator.propose).bind(speculator, *args, **kwargs).arguments
        batch = inputs["input_batch"]
        for row, request in enumerate(batch.req_ids):
            if inputs["num_sampled"][row] > 0:
                anchor = int(batch.seq_lens[row] - inputs["num_rejected"][row])
                recorded.setdefault(request, []).append((anchor, drafts[row].tolist()))
        return drafts

    speculator.propose = wrapper
    measured = engine.run(prompts, max_tokens=MAX_TOKENS)
    # request names end with a number in the order of the prompts
    return measured, [recorded[name] for name in sorted(recorded)]


@pytest.mark.parametrize("method", DRAFT_FOLDERS)
def test_proposals_are_those_of_vllm(method, target, tmp_path):
    folder = trained(new_draft(method), target, tmp_path / method)
    draft = load_draft(folder)
    prompts = [prompt[-length:] for prompt, length in zip(demo_prompts(3, 256), LENGTHS, strict=True)]
    size = draft.num_draft_tokens
    with Engine(
        speculative_config={"method": method, "model": str(folder), "num_speculative_tokens": size},
        max_model_len=256,
        # the longest prompts go through in chunks
        max_num_batched_tokens=64,
        max_num_seqs=4,
    ) as engine:
        measured, recorded = proposals(engine, prompts)
    assert sum(measured.accepted_per_position) > 0
    compared = 0
    for prompt, output, own in zip(prompts, measured.tokens, recorded, strict=True):
        assert list(output) == generate(target, torch.tensor([prompt]), MAX_TOKENS)[0][0].tolist()
        # [1, T]
        tokens = torch.tensor([[*prompt, *output]])
        with torch.inference_mode():
            hidden_states = target(tokens[:, :-1], output_hidden_states=True).hidden_states
            context = draft.context(draft.select_features(hidden_states), tokens)
        expected = draft_everywhere(draft, context, tokens, first=len(prompt), seen=sight())[0].tolist()
        for anchor, drafts in own:
            # vLLM also drafts after tokens beyond the last that was asked for
            if anchor < tokens.shape[1]:
                assert drafts == expected[anchor - len(prompt)], anchor
                compared += 1
    assert compared > 3 * MAX_TOKENS / (size + 1)
