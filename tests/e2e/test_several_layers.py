# SPDX-License-Identifier: Apache-2.0
"""An autoregressive draft of several layers caches what they computed, so its window must not depend on the chunks.

With a mask per row every layer of every prompt token sees its own newest W tokens, however the prompt was cut up.
"""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.e2e.conftest import VLLM_VERSION
from tests.e2e.recorder import Recorder
from tests.oracle import physical_slots
from tools.demo_pair import DEMO_PAIR, demo_prompts
from vllm_draft_window.measuring.engine import Engine

WINDOW, LENGTH, CHUNKS = 256, 1500, (64, 512, 2048)


def two_layers(folder):
    """The demo's EAGLE3 draft with the target's last layer behind it, which adds a little to the residual stream."""
    config = json.loads((DEMO_PAIR / "eagle3" / "config.json").read_text())
    weights = load_file(DEMO_PAIR / "eagle3" / "model.safetensors")
    mlp, prefix = config["intermediate_size"], "model.layers.3."
    for name, tensor in load_file(DEMO_PAIR / "target" / "model.safetensors").items():
        if name.startswith(prefix) and "q_norm" not in name and "k_norm" not in name:
            short = name.removeprefix(prefix)
            if short.startswith("mlp."):  # as wide as the first layer's, where rows without weights add nothing
                missing = mlp - min(tensor.shape[0 if "down" not in short else 1], mlp)
                tensor = torch.nn.functional.pad(tensor, (0, missing) if "down" in short else (0, 0, 0, missing))
            scale = 0.1 if short.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
            weights[f"layers.1.{short}"] = (tensor * scale).contiguous()
    weights["layers.1.hidden_norm.weight"] = torch.ones(config["hidden_size"], dtype=torch.bfloat16)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return {"method": "eagle3", "model": str(folder)}


def cached(recorder, length):
    """Keys and values of the first ``length`` tokens of the newest request, by layer."""
    found = {}
    for name, (gid, _) in recorder.groups.items():
        slots = physical_slots(recorder.full_tables[gid][0].numpy(), recorder.sizes[gid], torch.arange(length).numpy())
        found[name] = torch.stack((recorder.keys[name][slots], recorder.values[name][slots]))
    return found


@pytest.mark.parametrize(
    ("method", "layers"),
    [
        ("eagle3", 2),
        pytest.param("draft_model", 4, marks=pytest.mark.skipif(VLLM_VERSION < (0, 31), reason="not in this V2")),
    ],
)
def test_chunks_do_not_matter(method, layers, tmp_path, window_lines):
    speculation = {
        "eagle3": lambda: two_layers(tmp_path / "draft"),
        # the target, without the tokens that its window hides
        "draft_model": lambda: {"method": "draft_model", "model": str(DEMO_PAIR / "target")},
    }[method]() | {"num_speculative_tokens": 3}
    prompts = demo_prompts(3, LENGTH)
    results = {}
    with Engine(
        speculative_config=speculation,
        additional_config={"draft_window_size": WINDOW},
        max_model_len=2048,
        max_num_batched_tokens=max(CHUNKS),
        max_num_seqs=1,
        enable_prefix_caching=False,
    ) as engine:
        assert f"tokens seen={WINDOW}, " in window_lines[-1][1]
        for chunk in CHUNKS:
            engine.scheduler.max_num_scheduled_tokens = chunk
            with Recorder(engine.speculator, window=WINDOW, compare=False) as recorder:
                runs = []
                for prompt in prompts:
                    measured = engine.run([prompt], max_tokens=24)
                    runs.append((measured, cached(recorder, LENGTH - 1)))
            queries = max(int(snapshot["query_start_loc"].diff().max()) for snapshot in recorder.metadata)
            assert queries >= min(chunk, LENGTH)
            results[chunk] = runs
    assert len(results[64][0][1]) == layers
    for chunk in CHUNKS[1:]:
        for (measured, kept), (expected, reference) in zip(results[chunk], results[CHUNKS[0]], strict=True):
            for name in reference:
                torch.testing.assert_close(kept[name], reference[name], atol=2e-4, rtol=2e-4)
            assert measured.tokens == expected.tokens
            assert measured.accepted_per_position == expected.accepted_per_position
    assert sum(measured.accepted_length for measured, _ in results[64]) / len(prompts) > 1.5
