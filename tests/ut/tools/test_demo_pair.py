# SPDX-License-Identifier: Apache-2.0
"""The demo pair: the committed checkpoint, the mask that it is judged with, and training runs of one step."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests import oracle
from tests.oracle import Case
from tools.demo_pair import DRAFT_FOLDERS
from tools.demo_pair.card import model_card
from tools.demo_pair.export import load_draft, load_target
from tools.demo_pair.modeling import visible_context

REPOSITORY = Path(__file__).parents[3]
PAIR = REPOSITORY / "checkpoints" / "demo-pair"
MAX_BYTES = 20_000_000
METRICS = json.loads((PAIR / "metrics.json").read_text())


def test_checkpoint_is_small_and_described():
    assert sum(path.stat().st_size for path in PAIR.rglob("*.safetensors")) <= MAX_BYTES
    assert load_target(PAIR / "target").config.num_hidden_layers == 4
    assert (PAIR / "README.md").read_text() == model_card(METRICS)


@pytest.mark.parametrize("method", METRICS["drafts"])
def test_a_window_brings_a_draft_back(method):
    draft, record = load_draft(PAIR / DRAFT_FOLDERS[method]), METRICS["drafts"][method]
    assert draft.num_draft_tokens == record["num_draft_tokens"] == 7
    assert sum(p.numel() for p in draft.parameters()) == record["parameters"]
    lengths = record["mean_accepted_length"]
    assert lengths["4096"]["512"] >= 0.9 * lengths["512"]["full"]
    assert lengths["4096"]["full"] < 0.8 * lengths["4096"]["512"]


@pytest.mark.parametrize(
    ("window", "sink", "min_context"), [(32, 0, 0), (50, 0, 0), (64, 4, 0), (300, 0, 0), (50, 40, 0), (64, 16, 130)]
)
def test_window_of_the_simulation_is_the_engines(window, sink, min_context):
    size, context = 7, 256
    positions = torch.arange(1, context - size).unsqueeze(0)
    options = {"window": window, "sink": sink, "min_context": min_context, "alignment": 16}
    visible = visible_context(positions, context_length=context, num_draft_tokens=size, **options)
    case = Case(window=window, sink=sink, block_sizes=(16,), full_columns=(64,), max_model_len=1024)
    # A parallel drafter's queries sit at and after the anchor, and count for the gate; an autoregressive one starts
    # before it and will grow.
    parallel = replace(case, queries=size, min_context=min_context + size)
    autoregressive = replace(case, queries=1, lookahead=size, min_context=min_context)
    for anchor, position in enumerate(positions[0].tolist()):
        seen = visible[0, anchor].nonzero().flatten().numpy()
        for case, length in ((parallel, position + size), (autoregressive, position)):
            tokens = oracle.visible_tokens(case, length)
            np.testing.assert_array_equal(seen, tokens[tokens < position])


@pytest.mark.slow
@pytest.mark.parametrize("method", DRAFT_FOLDERS)
def test_one_training_step_writes_what_loads(method, tmp_path):
    command = [sys.executable, "-m", "tools.train_demo_pair", "--out", tmp_path, "--device", "cpu", "--steps", "1"]
    # The target is trained with the first draft and kept for the next.
    source = [] if method == "dspark" else ["--target-from", PAIR]
    sizes = "--target-context 64 --target-batch 1 --draft-context 64 --draft-batch 1 --anchors 2 --no-tests"
    evaluation = "--eval-prompts 1 --eval-tokens 4 --eval-batch 1 --eval-contexts 64 --eval-windows 32"
    command += ["--method", method, *source, *sizes.split(), *evaluation.split()]
    subprocess.run(command, check=True, cwd=REPOSITORY, capture_output=True)
    assert (tmp_path / "target").exists() == (not source)
    draft = load_draft(tmp_path / DRAFT_FOLDERS[method])
    assert all(torch.isfinite(p).all() for p in draft.parameters())
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert list(metrics["drafts"]) == ["dspark"] if method == "dspark" else method in metrics["drafts"]
    assert (tmp_path / "README.md").read_text() == model_card(metrics)
