# SPDX-License-Identifier: Apache-2.0
"""A draft whose config says 512 positions drafts like the untouched checkpoint, on every length that the engine serves.

Without a longer table its acceptance is gone from the first position beyond: vLLM reads past the table, except for
EAGLE3, whose value it raises itself.
"""

import json

import pytest

from tests.e2e.conftest import VLLM_VERSION
from tests.e2e.drafts import speculation
from tools.demo_pair import DEMO_PAIR, demo_prompts
from vllm_draft_window.measuring.engine import Engine

CONTEXTS = (500, 511, 513, 600, 2000, 4000)
POSITIONS = 512


def with_positions(method, positions, folder):
    """``speculative_config`` of a draft whose config says that many positions."""
    if method not in ("draft_model", "eagle3"):
        return speculation({"dspark": "dspark-anchor"}.get(method, method), folder, max_position_embeddings=positions)
    checkpoint = DEMO_PAIR / ("target" if method == "draft_model" else method)
    folder.mkdir()
    config = json.loads((checkpoint / "config.json").read_text()) | {"max_position_embeddings": positions}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").symlink_to(checkpoint / "model.safetensors")
    return {"method": method, "model": str(folder), "num_speculative_tokens": 3}


@pytest.mark.parametrize(
    "method",
    [
        "dspark",
        "dflash",
        "eagle3",
        pytest.param("draft_model", marks=pytest.mark.skipif(VLLM_VERSION < (0, 31), reason="not in this vLLM's V2")),
    ],
)
def test_short_positions(method, tmp_path, window_lines):
    def run(positions):
        with Engine(
            speculative_config=with_positions(method, positions, tmp_path / str(positions)),
            additional_config={"draft_window_size": 256},
            max_model_len=4352,
        ) as engine:
            proposed, propose = [], engine.speculator.propose

            def record(*args, **kwargs):
                drafts = propose(*args, **kwargs)
                proposed.append(drafts.tolist())
                return drafts

            engine.speculator.propose = record
            return engine.run([demo_prompts(1, n)[0] for n in CONTEXTS], max_tokens=8), proposed

    short, proposed = run(POSITIONS)
    assert ("positions extended to 4352 rows (1088 KiB)" in window_lines[-1][1]) == (method != "eagle3")
    long, expected = run(16384)
    assert "positions" not in window_lines[-1][1]
    assert short.tokens == long.tokens
    assert proposed == expected
    # The weights of a DSpark draft do not make a DFlash draft whose proposals are accepted.
    assert method == "dflash" or short.accepted_length > 1.5
