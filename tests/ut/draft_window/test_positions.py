# SPDX-License-Identifier: Apache-2.0
"""vLLM's own RoPE tables, built short and made to reach: old rows bit for bit, new ones as if built long."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers import rotary_embedding

from vllm_ascend.draft_window.positions import DraftPositions

SHORT, LONG, HEAD = 64, 1500, 32
YARN = {"factor": 4.0, "original_max_position_embeddings": SHORT}
FACTORS = {"short_factor": [1.0] * (HEAD // 2), "long_factor": [1.0 + i for i in range(HEAD // 2)]}
LONGROPE = FACTORS | {"rope_type": "longrope", "original_max_position_embeddings": SHORT // 2}

FOLLOWING = {
    "default": {},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": SHORT,
    },
    "linear": {"rope_type": "linear", "factor": 4.0},
    "ntk": {"rope_type": "ntk", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "dynamic-alpha": {"rope_type": "dynamic", "alpha": 4.0},
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.5},
    "mrope": {"mrope_section": [4, 6, 6]},
}
REBUILT = {
    "yarn": YARN | {"rope_type": "yarn"},
    "yarn-mrope": YARN | {"rope_type": "yarn", "mrope_section": [4, 6, 6]},
    "deepseek_yarn": YARN | {"rope_type": "deepseek_yarn", "mscale": 0.7, "mscale_all_dim": 1.0},
    "longrope": LONGROPE,
}


class Draft(torch.nn.Module):
    """Two layers that share one RoPE, and the table under a name of the model's own, as DFlash and DSpark have it."""

    def __init__(self, config) -> None:
        super().__init__()
        rope = rotary_embedding.get_rope(
            HEAD, config.max_position_embeddings, rope_parameters=config.rope_parameters, dtype=torch.float32
        )
        self.layers = torch.nn.ModuleList(torch.nn.Module() for _ in range(2))
        for layer in self.layers:
            layer.rotary_emb = rope
        self._rope_cos_sin_cache = self.table

    @property
    def table(self) -> torch.Tensor:
        rope = self.layers[1].rotary_emb
        return rope.long_short_cos_sin_cache if hasattr(rope, "long_factor") else rope.cos_sin_cache


@pytest.fixture
def build(monkeypatch):
    """``build(rope, positions)`` in an engine of LONG tokens, like a worker does; nothing is shared between builds."""
    vllm_config = VllmConfig()

    def build(rope, positions=SHORT, *, extend=False, limit=LONG, engine=LONG):
        vllm_config.model_config = SimpleNamespace(max_model_len=engine)
        config = SimpleNamespace(
            max_position_embeddings=positions, rope_parameters={"rope_type": "default", "rope_theta": 1e4} | rope
        )
        given = SimpleNamespace(
            model_config=SimpleNamespace(max_model_len=limit),
            speculative_config=SimpleNamespace(draft_model_config=SimpleNamespace(hf_config=config)),
        )
        reaching = DraftPositions(given) if extend else None
        monkeypatch.setattr(rotary_embedding, "_ROPE_DICT", {})
        with set_current_vllm_config(vllm_config):
            draft = Draft(config)
        if reaching is not None:
            reaching.extend(draft)
        return draft, reaching

    return build


@pytest.mark.parametrize("kind", FOLLOWING | REBUILT)
def test_rows(kind, build):
    rope = (FOLLOWING | REBUILT)[kind]
    short, extended = build(rope)[0].table, build(rope, extend=True)[0].table
    assert len(short) < LONG <= len(extended)
    assert torch.equal(extended[: len(short)], short)
    if kind in FOLLOWING:
        assert torch.equal(extended, build(rope, LONG)[0].table)


@pytest.mark.parametrize("kind", ["yarn", "longrope"])
def test_rebuilt_rows_are_those_of_transformers(kind, build):
    table = build(REBUILT[kind], extend=True)[0].table[-LONG:]
    parameters = {"rope_theta": 1e4, "rope_type": kind} | REBUILT[kind]
    config = PretrainedConfig(
        rope_parameters=parameters,
        max_position_embeddings=SHORT * (4 if kind == "yarn" else 1),
        head_dim=HEAD,
        hidden_size=HEAD,
        num_attention_heads=1,
    )
    config.original_max_position_embeddings = parameters["original_max_position_embeddings"]
    frequencies, magnitude = ROPE_INIT_FUNCTIONS[kind](config, "cpu", seq_len=LONG)
    angles = torch.outer(torch.arange(LONG).float(), frequencies)
    torch.testing.assert_close(table, torch.cat((angles.cos(), angles.sin()), -1) * magnitude, atol=1e-3, rtol=0)


def test_longrope_of_a_draft_that_reads_the_short_factors(build):
    """A draft model's own config decides that, whose length is that of its training."""
    draft, positions = build(LONGROPE, extend=True, engine=SHORT // 2)
    assert not draft.layers[0].rotary_emb.use_long_rope
    short = draft.table[: SHORT // 2]
    assert torch.equal(short, build(LONGROPE, engine=SHORT // 2)[0].table[: SHORT // 2])
    assert len(draft.table) == LONG
    # The short factors are all 1 here: plain RoPE, times the magnitude that row 0 shows as cos(0).
    plain = build({}, LONG)[0].table
    torch.testing.assert_close(draft.table, plain * short[0, 0])


@pytest.mark.parametrize("kind", REBUILT)
def test_every_name_of_the_table_is_bound_anew(kind, build):
    draft, positions = build(REBUILT[kind], extend=True)
    assert draft._rope_cos_sin_cache is draft.table
    assert draft.layers[0].rotary_emb is draft.layers[1].rotary_emb
    kib = -(-draft.table.nbytes // 1024)
    assert positions.details == f", positions extended to {LONG} rows ({kib} KiB)"


@pytest.mark.parametrize("kind", FOLLOWING | REBUILT)
def test_a_table_that_reaches_is_left_alone(kind, build):
    rope = (FOLLOWING | REBUILT)[kind]
    draft, positions = build(rope, extend=True, limit=SHORT)
    assert positions.details == ""
    assert torch.equal(draft.table, build(rope)[0].table)


def test_every_part_of_a_nested_config_is_raised():
    language = SimpleNamespace(max_position_embeddings=SHORT, rope_parameters={"full_attention": {"rope_type": "yarn"}})
    outer = SimpleNamespace(get_text_config=lambda: language, max_position_embeddings=SHORT, rope_parameters=None)
    DraftPositions(
        SimpleNamespace(
            model_config=SimpleNamespace(max_model_len=LONG),
            speculative_config=SimpleNamespace(draft_model_config=SimpleNamespace(hf_config=outer)),
        )
    )
    assert language.max_position_embeddings == LONG
    # Without RoPE a larger number would be a larger, learned table.
    assert outer.max_position_embeddings == SHORT


def test_a_table_that_cannot_be_extended_is_refused(build):
    draft, _ = build({})
    _, positions = build({}, LONG, extend=True)
    with pytest.raises(ValueError, match=f"max_model_len={LONG}, but the draft's RotaryEmbedding ends at {SHORT}"):
        positions.extend(draft)
