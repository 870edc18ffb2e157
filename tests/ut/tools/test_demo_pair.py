# SPDX-License-Identifier: Apache-2.0
"""The demo pair: the committed checkpoint, the mask that it is judged with, and a training run of one step."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests import oracle
from tests.oracle import Case
from tools.demo_pair.export import MAX_PAIR_BYTES, load_draft, load_target
from tools.demo_pair.modeling import block_mask

REPOSITORY = Path(__file__).parents[3]
PAIR = REPOSITORY / "checkpoints" / "demo-pair"


def test_checkpoint_is_small_and_complete():
    weights = [PAIR / name / "model.safetensors" for name in ("target", "draft")]
    assert sum(path.stat().st_size for path in weights) <= MAX_PAIR_BYTES
    target, draft = load_target(PAIR / "target"), load_draft(PAIR / "draft")
    assert [draft.config.num_draft_tokens, target.config.num_layers] == [7, 4]
    card = json.loads((PAIR / "metrics.json").read_text())
    assert card["mean_accepted_length"]["4096"]["512"] > 2 * card["mean_accepted_length"]["4096"]["full"]


@pytest.mark.parametrize("window", [32, 50, 64, 300])
def test_window_of_the_simulation_is_the_engines(window):
    size, context = 7, 256
    positions = torch.arange(1, context - size).unsqueeze(0)
    mask = block_mask(positions, context_length=context, block_size=size, window=window, alignment=16)
    case = Case(window=window, block_sizes=(16,), full_columns=(64,), max_model_len=1024, queries=size)
    for anchor, position in enumerate(positions[0].tolist()):
        seen = mask[0, 0, anchor * size, :context].nonzero().flatten().numpy()
        visible = oracle.visible_tokens(case, position + size)
        np.testing.assert_array_equal(seen, visible[visible < position])


def test_one_training_step_writes_a_pair_that_loads(tmp_path):
    command = [sys.executable, "-m", "tools.train_demo_pair", "--out", tmp_path, "--device", "cpu", "--steps", "1"]
    sizes = "--target-context 64 --target-batch 1 --draft-context 64 --draft-batch 1 --anchors 2 --no-tests"
    evaluation = "--eval-prompts 1 --eval-tokens 4 --eval-batch 1 --eval-contexts 64 --eval-windows 32"
    subprocess.run([*command, *sizes.split(), *evaluation.split()], check=True, cwd=REPOSITORY, capture_output=True)
    draft = load_draft(tmp_path / "draft")
    assert all(torch.isfinite(p).all() for p in (*load_target(tmp_path / "target").parameters(), *draft.parameters()))
    assert "Mean accepted length" in (tmp_path / "README.md").read_text()
