# SPDX-License-Identifier: Apache-2.0
"""The planner against what a real engine allocates and against the oracle, on real config files."""

import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.option_mistakes import LOOK_ALIKES
from tests.oracle import Case, visible_tokens, windowed_length
from vllm_draft_window.cli import app
from vllm_draft_window.planner.deployment import parse_length

ROOT = Path(__file__).parents[3]
PAIR = ROOT / "checkpoints" / "demo-pair"
QUERIES = 7


def plan(*arguments, target=PAIR / "target", draft=PAIR / "draft", status=0):
    command = ["--target", str(target), "--draft", str(draft), "-k", "7", "--json", *map(str, arguments)]
    result = CliRunner().invoke(app, ["plan", *command])
    assert result.exit_code == status, result.output
    return json.loads(result.stdout) if status == 0 else result.stderr


def masks(mask, sink, gate):
    """Whether rows are masked, and what tells the planner so; nothing else may be wanted of the window."""
    return mask and not sink and not gate, "--mask" if mask else "--no-mask"


def seen_by_row(seq_len, window, *, queries, row, causal):
    """Tokens that a masked query row sees, counted one by one."""
    position = seq_len - queries + row
    return sum(position - window < token <= (position if causal else seq_len) for token in range(seq_len))


def edited(folder: Path, name: str, **changes) -> Path:
    """A copy of one of the demo pair's configs with some keys changed; ``None`` removes a key."""
    values = json.loads((PAIR / name / "config.json").read_text()) | changes
    path = folder / f"{name}-{len(list(folder.iterdir()))}"
    path.mkdir()
    (path / "config.json").write_text(json.dumps({key: value for key, value in values.items() if value is not None}))
    return path


SLIDING = {"use_sliding_window": True, "sliding_window": 1024, "max_window_layers": 0}

# window, sink, gate, block sizes, max_model_len
SHAPES = [
    (512, 0, 0, (16,), 8192),
    (500, 0, 0, (16,), 8192),
    (2048, 100, 0, (128,), 32768),
    (256, 0, 1000, (32,), 4096),
    (300, 70, 700, (16, 48), 5000),
    (4032, 0, 0, (128,), 4200),
    (7, 0, 0, (16,), 100),
]


@pytest.mark.parametrize(("window", "sink", "gate", "block_sizes", "length"), SHAPES)
@pytest.mark.parametrize("causal", [False, True], ids=["non-causal", "causal"])
@pytest.mark.parametrize("mask", [False, True], ids=["whole-blocks", "masked"])
def test_tokens_seen_are_the_oracles(window, sink, gate, block_sizes, length, causal, mask, tmp_path):
    masked, mask = masks(mask, sink, gate)
    draft = edited(tmp_path, "draft", dflash_config={"causal": causal})
    contexts = sorted({10, window - QUERIES, window, window + 17, 3 * length // 4, length - QUERIES, length} - {0})
    shape = [option for size in block_sizes for option in ("--block-size", size)]
    found = plan(
        *("--window", window, "--sink", sink, "--min-context", gate, "--max-model-len", length, *shape, mask),
        *(option for context in contexts for option in ("--context", context)),
        draft=draft,
    )
    assert found["masked"] == masked
    case = Case(
        window=window,
        sink=sink,
        min_context=gate,
        block_sizes=block_sizes,
        full_columns=tuple(found["full_columns"]),
        max_model_len=length,
        queries=QUERIES,
        masked=masked,
    )
    for read in found["reads"]:
        assert read["tokens_on"] == windowed_length(case, read["context"] + QUERIES)
        assert read["tokens_off"] == min(read["context"] + QUERIES, length)

    if masked:
        rows = [seen_by_row(case.limit, window, queries=QUERIES, row=row, causal=causal) for row in (0, QUERIES - 1)]
        assert found["tokens_seen"] == {"first_query": [rows[0]] * 2, "last_query": [rows[1]] * 2}
        return
    # Every place in a block, on the longest contexts.
    places = min(case.limit, math.lcm(*block_sizes))
    visible = {s: visible_tokens(case, s) for s in range(case.limit - places + 1, case.limit + 1)}
    windowed = {s: seen for s, seen in visible.items() if len(seen) < s} or {case.limit: visible[case.limit]}
    last = [len(seen) for seen in windowed.values()]
    first = [int((seen <= s - QUERIES).sum()) if causal else len(seen) for s, seen in windowed.items()]
    assert found["tokens_seen"] == {"first_query": [min(first), max(first)], "last_query": [min(last), max(last)]}


@pytest.mark.parametrize(("window", "sink", "gate", "block_sizes", "length"), SHAPES)
@pytest.mark.parametrize(
    ("mask", "layers"), [(False, 1), (False, 2), (True, 2)], ids=["whole-blocks", "whole-blocks-two-layers", "masked"]
)
def test_tokens_seen_by_an_autoregressive_draft_are_the_oracles(
    window, sink, gate, block_sizes, length, mask, layers, tmp_path
):
    """Without a mask all forwards of a proposal share one start; the first runs over the verified tokens."""
    masked, mask = masks(mask, sink, gate)
    changes = dict(architectures=["LlamaForCausalLMEagle3"], dflash_config=None, num_hidden_layers=layers)
    draft = edited(tmp_path, "draft", **changes, layer_types=None)
    shape = [option for size in block_sizes for option in ("--block-size", size)]
    contexts = sorted({10, window, 3 * length // 4, length - 20, length})
    found = plan(
        *("--window", max(window, 8), "--sink", sink, "--min-context", gate, "--max-model-len", length, *shape, mask),
        *(option for context in contexts for option in ("--context", context)),
        draft=draft,
    )
    assert found["deployment"]["method"] == "eagle3"
    steps = [
        Case(
            window=max(window, 8),
            sink=sink,
            min_context=gate,
            block_sizes=block_sizes,
            full_columns=tuple(found["full_columns"]),
            max_model_len=length,
            queries=8 if step == 0 else 1,
            lookahead=7 - step,
            first_lookahead=7,
            keeps_every_row=layers > 1,
            masked=masked,
        )
        for step in range(7)
    ]
    for read in found["reads"]:
        lengths = [windowed_length(case, read["context"] + 8 + step) for step, case in enumerate(steps)]
        assert read["tokens_on"] == lengths[-1]
        assert read["draft_on"] == sum(lengths) * found["draft_kv_bytes_per_token"]
    if masked:
        assert found["tokens_seen"] == {key: [min(max(window, 8), length)] * 2 for key in ("first_query", "last_query")}
        return
    # Long enough to be cropped, and every later step still below the limit.
    verified = range(max(length - 6 - 128, 1), length - 6)
    if all(windowed_length(steps[0], s) < s for s in verified):
        first = [int((visible_tokens(steps[0], s) <= s - 8).sum()) for s in verified]
        last = [windowed_length(steps[-1], s + 6) for s in verified]
        assert found["tokens_seen"] == {"first_query": [min(first), max(first)], "last_query": [min(last), max(last)]}


@pytest.mark.engine
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM")
@pytest.mark.parametrize(
    ("options", "max_model_len", "max_num_seqs"),
    [
        ({"draft_window_size": 100}, 1000, 5),
        ({"draft_window_size": 100, "draft_window_reclaim": True}, 1000, 5),
        ({"draft_window_size": 64, "draft_window_sink_size": 40, "draft_window_min_context": 300}, 1024, 16),
        ({"draft_window_size": 968}, 1000, 3),  # as wide as the full table
    ],
)
def test_figures_are_the_engines(options, max_model_len, max_num_seqs):
    from vllm.v1.core.kv_cache_utils import get_kv_cache_capacity

    from tools.demo_pair import DEMO_SPECULATION, demo_prompts
    from vllm_draft_window.measuring.engine import Engine

    context, block_size, drafted = 600, 32, []
    reclaims = options.get("draft_window_reclaim", False)
    with Engine(
        speculative_config=DEMO_SPECULATION,
        additional_config=options,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        block_size=block_size,
        max_num_batched_tokens=1024,
    ) as engine:
        cache = engine.scheduler.kv_cache_config
        capacity = get_kv_cache_capacity(engine.runner.vllm_config, cache)
        speculator, inputs = engine.speculator, engine.speculator.window.inputs
        columns = [table.shape[1] for table in inputs.block_tables]
        tables = engine.runner.block_tables.input_block_tables
        full_columns = [tables[i].shape[1] for i in inputs.group_ids]
        windowed_bytes = inputs.seq_lens.nbytes + sum(table.nbytes for table in inputs.block_tables)
        draft_layers = set(speculator.draft_attn_layer_names)
        per_token = {"draft": 0, "target": 0}
        for group in engine.runner.kv_cache_config.kv_cache_groups:
            for name in group.layer_names:
                spec = getattr(group.kv_cache_spec, "kv_cache_specs", {}).get(name, group.kv_cache_spec)
                per_token["draft" if name in draft_layers else "target"] += spec.page_size_bytes // spec.block_size
        refresh = inputs.refresh

        def recording(**arguments):
            refresh(**arguments)
            drafted.append(int(inputs.seq_lens[0]))

        inputs.refresh = recording
        engine.run(demo_prompts(1, context), max_tokens=3)

    found = plan(
        *("--window", options["draft_window_size"]),
        *("--sink", options.get("draft_window_sink_size", 0)),
        *("--min-context", options.get("draft_window_min_context", 0)),
        *("--max-model-len", max_model_len, "--max-num-seqs", max_num_seqs, "--block-size", block_size),
        *("--dtype", "float32", "--context", context),
        # As Engine and this platform have them.
        *("--max-num-batched-tokens", 1024, "--kv-cache-gib", 0.25, "--no-async-scheduling"),
        *(("--reclaim",) if reclaims else ()),
    )
    if found["reclaim"]["refused"] is None:
        assert found["reclaim"]["tokens"][reclaims] == capacity[0]
        assert found["reclaim"]["concurrency"][reclaims] == pytest.approx(capacity[1])
        assert len(cache.kv_cache_groups) == (found["reclaim"]["groups"] if reclaims else 1)
    assert found["columns"] == columns
    assert found["full_columns"] == full_columns
    assert found["windowed_bytes"] == windowed_bytes
    assert found["draft_kv_bytes_per_token"] == per_token["draft"] > 0
    assert found["target_kv_bytes_per_token"] == per_token["target"] > 0
    # Where the window removes nothing from any request, the engine leaves the originals in place.
    assert drafted[:1] == [found["reads"][0]["tokens_on"]][: bool(drafted)]
    assert bool(drafted) == (found["reads"][0]["tokens_on"] < context)


def test_reads_add_up():
    found = plan("--window", 512, "--max-model-len", 8192, "--context", 4096, "--batch", 3, "--with-weights")
    (read,) = found["reads"]
    # 2 and 4 layers, keys and values, 2 heads of 64, bfloat16
    assert found["draft_kv_bytes_per_token"] == 2 * 2 * 2 * 64 * 2
    assert read["draft_off"] == 3 * (4096 + 7) * 1024
    assert read["draft_on"] == 3 * read["tokens_on"] * 1024
    assert read["target"] == 3 * (4096 + 8) * 2048
    assert read["weights"] == sum((PAIR / name / "model.safetensors").stat().st_size for name in ("target", "draft"))
    for state in "off", "on":
        draft = read[f"draft_{state}"]
        assert read[f"share_{state}"] == pytest.approx(draft / (draft + read["target"] + read["weights"]), abs=1e-4)


def test_layers_heads_and_types(tmp_path):
    """Tensor parallelism, fp8, sliding-window and linear target layers, MLA."""
    split = plan("--window", 512, "--tensor-parallel-size", 4, "--kv-cache-dtype", "fp8")
    assert split["target_kv_bytes_per_token"] == 4 * 2 * 1 * 64
    kinds = ["sliding_attention", "full_attention", "linear_attention", "full_attention"]
    target = edited(tmp_path, "target", layer_types=kinds, use_sliding_window=True, sliding_window=1024)
    hybrid = plan("--window", 512, "--context", 4000, target=target)
    assert hybrid["reads"][0]["target"] == (1024 + 2 * (4000 + 8)) * 512
    assert "1 layers of the target keep no KV cache per token" in hybrid["warnings"][0]
    latent = edited(tmp_path, "target", kv_lora_rank=512, qk_rope_head_dim=64)
    assert plan("--window", 512, "--tensor-parallel-size", 2, target=latent)["target_kv_bytes_per_token"] == 4 * 576 * 2


def test_nested_config(tmp_path):
    values = json.loads((PAIR / "target" / "config.json").read_text())
    target = edited(tmp_path, "target", text_config=values, hidden_size=None, num_hidden_layers=None)
    assert plan("--window", 512, target=target) == plan("--window", 512)


@pytest.mark.parametrize(
    ("changes", "arguments", "window", "words"),
    [
        ({}, (), 2048, "does not tell"),
        ({}, ("--trained-length", 512), 512, "sees at most 512"),
        ({}, ("--trained-length", 512, "--no-mask"), 496, "sees at most 511"),
        ({}, ("--trained-length", 4096, "--block-size", 64, "--no-mask"), 4032, "sees at most 4095"),
        ({}, ("--trained-length", 16384), None, "no window needed"),
        ({}, ("--max-model-len", 2000), None, "covers max_model_len"),
        ({}, ("--trained-length", 100, "--block-size", 128), None, "whole blocks"),
        ({"max_position_embeddings": 4096}, (), 4096, "the draft's config"),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}},
            (),
            4096,
            "trained on 4096 tokens",
        ),
        (SLIDING, (), None, "sliding window of its own"),
        # Qwen reads the window only when told to, and Llama never.
        ({"sliding_window": 1024}, (), 2048, "does not tell"),
        ({"sliding_window": 1024, "model_type": "llama"}, (), 2048, "does not tell"),
    ],
)
def test_suggestion(changes, arguments, window, words, tmp_path):
    found = plan(*arguments, draft=edited(tmp_path, "draft", **changes))
    assert found["suggestion"]["window"] == window
    assert words in found["suggestion"]["reason"]
    # Without --window the suggestion is what is planned.
    assert (found["window"] or {}).get("size") == window
    assert (found["off_because"] is None) == (window is not None)


@pytest.mark.parametrize(
    ("changes", "arguments", "words"),
    [
        (
            SLIDING,
            ("-w", 512),
            "own sliding window of 1024",
        ),
        ({"max_position_embeddings": 256}, ("-w", 512), "512 tokens is above the 256 that the draft was trained on"),
        ({}, ("-w", 512, "--trained-length", 256), "512 tokens is above the 256 that the draft was trained on"),
        ({}, ("-w", 500), "takes [33] table columns, as 512 takes [34] and 496 [33]"),
    ],
)
def test_warnings(changes, arguments, words, tmp_path):
    assert any(words in warning for warning in plan(*arguments, draft=edited(tmp_path, "draft", **changes))["warnings"])


def test_window_off_says_why():
    found = plan("--window", 9000, "--max-model-len", 8192)
    assert found["window"] is None and "covers max_model_len=8192" in found["off_because"]
    assert all(read["draft_on"] == read["draft_off"] for read in found["reads"])


def test_window_that_large_blocks_round_out_to_everything():
    blocks = ("--block-size", 480, "--block-size", 864)
    found = plan("--window", 512, "--max-model-len", 4800, *blocks, "--no-mask")
    assert found["window"] is None and "in whole blocks of 4320 tokens" in found["off_because"]
    assert plan("--window", 512, "--max-model-len", 4800, *blocks)["tokens_seen"]["last_query"] == [512, 512]
    assert plan("--window", 512, "--max-model-len", 8192, *blocks)["window"]["size"] == 512


def test_what_reclaim_saves(tmp_path):
    """36 + 5 layers of 8 heads of 128 in bfloat16, 64 GiB: what vLLM's own functions made of these groups."""
    heads = dict(num_key_value_heads=8, head_dim=128)
    pair = dict(
        target=edited(tmp_path, "target", num_hidden_layers=36, layer_types=None, **heads),
        draft=edited(tmp_path, "draft", num_hidden_layers=5, layer_types=None, **heads),
    )
    arguments = ("-w", 2048, "--max-model-len", 131072, "--kv-cache-gib", 64, "--context", 32768)
    found = plan(*arguments, **pair)["reclaim"]
    assert (found["groups"], found["group_size"]) == (7, 6)
    assert found["concurrency"] == pytest.approx([3.12, 3.47], abs=0.01)
    assert found["tokens"] == [int(concurrency * 131072) for concurrency in found["concurrency"]]
    (saving,) = found["savings"]
    assert saving["saved"] == pytest.approx(0.113, abs=0.001)
    without, with_reclaim = saving["requests"]
    assert with_reclaim / without == pytest.approx(1 / (1 - saving["saved"]), rel=1e-4)
    assert found["costs_below"] == 2496
    assert plan(*arguments, "--reclaim", **pair)["window"]["reclaim"] is True


@pytest.mark.parametrize(
    ("changes", "arguments", "words"),
    [
        ({"draft": {"num_hidden_layers": 1}, "target": {"num_hidden_layers": 36}}, (), "that would save"),
        ({"draft": SLIDING}, (), "the draft keeps its KV cache as SlidingWindowSpec"),
        ({"draft": {"num_key_value_heads": 1}}, (), "a block of a target layer takes 8192 bytes"),
        ({"target": {"kv_lora_rank": 512, "qk_rope_head_dim": 64}}, (), "the target keeps its KV cache as MLA"),
        ({"target": {"layer_types": ["linear_attention", *["full_attention"] * 3]}}, (), "layers of several kinds"),
        ({}, ("--sink", 16), "draft_window_sink_size=16 needs the first"),
        ({}, ("--max-model-len", 600), "that would save"),
    ],
)
def test_reclaim_is_refused_as_the_engine_does(changes, arguments, words, tmp_path):
    models = {name: edited(tmp_path, name, layer_types=None) for name in ("target", "draft")}
    models |= {name: edited(tmp_path, name, **({"layer_types": None} | keys)) for name, keys in changes.items()}
    assert words in plan("-w", 512, *arguments, **models)["reclaim"]["refused"]
    assert words in plan("-w", 512, "--reclaim", *arguments, **models, status=2)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("-w", 6), "must be at least 7"),
        (("-w", 0), "draft_window_size=0 is not allowed"),
        (("-w", 512, "--sink", -1), "draft_window_sink_size=-1 is not allowed"),
        (("-w", 512, "--method", "ngram"), "--method ngram"),
        (("-w", 512, "--kv-cache-dtype", "int3"), "int3"),
        (("-w", 512, "--max-model-len", 1024, "--context", 2000), "above max_model_len=1024"),
    ],
)
def test_bad_options(arguments, words):
    assert words in plan(*arguments, status=2)


@pytest.mark.parametrize("additional_config", LOOK_ALIKES, ids=str)
def test_look_alikes(additional_config):
    assert "did you mean 'draft_window_size'" in plan("--additional-config", json.dumps(additional_config), status=2)


def test_options_as_given_to_vllm():
    given = {"draft_window_size": 512, "draft_window_min_context": 600, "others": 1}
    expected = plan("--window", 512, "--min-context", 600)
    assert plan("--additional-config", json.dumps(given)) == expected


@pytest.mark.parametrize("text", ["32768", "32k", "32K", "1M", "25.6k", "1m", "auto", "AUTO", "-1"])
def test_lengths_are_read_as_vllm_reads_them(text):
    parse = pytest.importorskip("vllm.utils.argparse_utils").human_readable_int_or_auto
    assert (parse_length(text) or -1) == parse(text)


@pytest.mark.parametrize("text", ["32kb", "1.5K", "1.5", "0", "-2", "many", ""])
def test_lengths_that_are_none(text):
    assert f"--max-model-len {text} is none of" in plan("--max-model-len", text, status=2)


def test_length_of_the_target():
    auto, given = plan("-w", 512, "--max-model-len", "auto"), plan("-w", 512)
    assert auto == given and given["deployment"]["max_model_len"] == 16384


def test_bad_checkpoints(tmp_path):
    assert "is no directory" in plan(target=tmp_path / "nowhere", status=2)
    assert "has no config.json" in plan(target=tmp_path, status=2)
    for content, words in ("{", "is not JSON (line 1"), ("[]", "not a JSON object"), ("{}", "'num_hidden_layers'"):
        (tmp_path / "config.json").write_text(content)
        assert words in plan(draft=tmp_path, status=2)
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00")
    assert "is not text" in plan(draft=tmp_path, status=2)
    assert "give --max-model-len" in plan(target=edited(tmp_path, "target", max_position_embeddings=None), status=2)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").mkdir()
    assert "cannot read" in plan(draft=tmp_path, status=2)


def test_as_a_command_without_vllm(tmp_path):
    """A newcomer's call: from any folder, tables on the screen, vLLM not imported."""
    command = [sys.executable, "-X", "importtime", "-m", "vllm_draft_window", "plan"]
    command += ["--target", PAIR / "target", "--draft", PAIR / "draft", "-k", "7", "-w", "512"]
    result = subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"COLUMNS": "120", "PYTHONPATH": str(ROOT)},
        check=True,
    )
    assert "34 of 1024" in result.stdout and "Suggested window" in result.stdout
    assert "vllm_ascend.draft_window.geometry" in result.stderr
    assert " vllm.config" not in result.stderr
