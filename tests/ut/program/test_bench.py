# SPDX-License-Identifier: Apache-2.0
"""The benchmark's own logic: what it writes, compares and reports; engines are measured on a GPU."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from typer.testing import CliRunner

from vllm_draft_window.bench import equality, micro, models, report, session, summary
from vllm_draft_window.bench.command import app
from vllm_draft_window.bench.models import PairSizes
from vllm_draft_window.bench.plan import CHECKOUT, Plan, Workload, configurations, prompt

SIZES = PairSizes(layers=3, draft_layers=2, hidden=64, heads=2, kv_heads=2, head_dim=32, vocab=64, max_positions=512)


def result(config, number, milliseconds):
    """One engine's result; ``milliseconds`` are the median steps at 128 and 512 tokens and of the mixed batch."""
    window = {"on": 64}.get(config)
    contexts = {"128": (128,), "512": (512,), "mixed": (64, 256)}
    return {
        "config": config,
        "round": number,
        "startup_s": 30.0,
        "copy_bandwidth": 4.0e12 + number,
        "versions": {"vllm": "0.26.0", "torch": "2.11.0"},
        "machine": {"device": "a GPU"},
        "engine": {
            "speculator": "DSparkSpeculator",
            "window_columns": window and [5],
            "kv_cache_groups": ["5 x FullAttentionSpec"],
            "block_size": 16,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "additional_config": {"draft_window_size": window} if window else {},
        },
        "time_steps": [
            {
                "workload": name,
                "contexts": list(lengths),
                "median_ms": ms,
                "p10_ms": 0.9 * ms,
                "accepted_length": 1.01,
                "tokens": [[7, 8, 9, 10, *range(number)] for _ in lengths],
            }
            for (name, lengths), ms in zip(contexts.items(), milliseconds, strict=True)
        ],
        "addresses": [
            {
                "builds": 20,
                "replays": 20,
                "distinct_pairs": 1,
                "builds_on_window": window and 20,
                "captured_on_window": window and 3,
                "seen_at_capture": True,
            }
        ],
        "sync": None,
        "host": {"calls": {"refresh": 100}, "median_us": {"refresh": 12.3}, "steps": 100},
    }


@pytest.fixture
def results():
    """Off and on in two rounds."""
    return [
        result("off", 1, (2.0, 4.0, 6.0)),
        result("on", 1, (2.1, 3.0, 5.0)),
        result("off", 2, (2.2, 4.4, 6.0)),
        result("on", 2, (1.9, 3.2, 5.0)),
    ]


@pytest.fixture
def plan(tmp_path):
    return Plan(
        sizes=SIZES,
        workloads=(
            Workload(name="2048", contexts=(2048,), warmup=30, steps=250),
            Workload(name="mixed", contexts=(64, 4096), warmup=30, steps=250),
        ),
        work=tmp_path,
        device="cuda",
        max_model_len=8192,
    )


class Recorded:
    """Stands for an engine's process: says when it starts, is called and ends."""

    log: list[str]

    def __init__(self, log, engine, **options):
        self.name, self.stem = engine.name, log.stem

    def __enter__(self):
        self.log.append(f"start {self.stem}")
        return self

    def __exit__(self, *_):
        self.log.append(f"end {self.stem}")

    def call(self, method, **arguments):
        if (self.name, method) == ("broken", "time_steps"):
            raise session.ChildFailed("out of memory")
        self.log.append(f"{method} {self.stem}")
        return {"called": method}


@pytest.fixture
def recorded(monkeypatch):
    monkeypatch.setattr(Recorded, "log", [], raising=False)
    monkeypatch.setattr(session, "Child", Recorded)
    return Recorded.log


def spec(name, **more):
    return session.EngineSpec(name=name, engine_args={}, **more)


def run(engines, tmp_path, **options):
    script = [("time_steps", {}), ("report", {})]
    return session.run(engines, script, work=tmp_path, device="cpu", say=lambda line: None, **options)


def test_rounds_are_interleaved_and_the_control_runs_once(recorded, tmp_path):
    results, _ = run([spec("off"), spec("on"), spec("tiny", once=True)], tmp_path, rounds=2)
    assert [(r["round"], r["config"]) for r in results] == [(1, "off"), (1, "on"), (1, "tiny"), (2, "off"), (2, "on")]
    assert recorded[:6] == [f"{what} 1-off" for what in ("start", "describe", "time_steps", "report", "end")] + [
        "start 1-on"
    ]


def test_engines_that_are_there_at_once_take_turns(recorded, tmp_path):
    results, missing = run([spec("off"), spec("broken"), spec("on")], tmp_path, at_once=3)
    calls = [line for line in recorded if not line.startswith(("start", "end"))]
    assert calls[:3] == ["describe 1-off", "describe 1-broken", "describe 1-on"]
    assert calls[3:] == ["time_steps 1-off", "time_steps 1-on", "report 1-off", "report 1-on"]
    assert {line.split()[0] for line in recorded[:3]} == {"start"} and {line.split()[0] for line in recorded[-3:]} == {
        "end"
    }
    assert missing == ["round 1 broken: out of memory"] and [r["config"] for r in results] == ["off", "on"]
    assert results[0]["time_steps"] == [{"called": "time_steps"}] and results[0]["called"] == "report"


def test_no_engine_starts_that_would_be_done_too_late(recorded, tmp_path):
    _, missing = run([spec("off")], tmp_path, budget_s=-1.0)
    assert not recorded and "out of budget" in missing[0]


def test_another_checkout_runs_beside_this_one(tmp_path):
    with pytest.raises(ValueError, match="no checkout of this project"):
        configurations(("on",), SIZES, window=64, against=[tmp_path])
    (tmp_path / "vllm_ascend" / "draft_window").mkdir(parents=True)
    chosen = configurations(("off", "on"), SIZES, window=64, against=[tmp_path])
    assert list(chosen) == ["off", "on", f"on@{tmp_path.name}"]
    assert chosen["on"].tree == CHECKOUT and chosen[f"on@{tmp_path.name}"].tree == tmp_path
    # What its process imports: that window, and everything else from here.
    (tmp_path / "vllm_ascend" / "draft_window" / "here.py").touch()
    folder = session._site(tmp_path, tmp_path / "site")
    assert (folder / "vllm_ascend" / "draft_window" / "here.py").exists()
    assert session._environment("cuda", folder)["PYTHONPATH"].split(os.pathsep)[:2] == [str(folder), str(CHECKOUT)]


def test_arguments_of_an_engine(plan):
    chosen = configurations(("off", "on", "native"), SIZES, window=64)
    off, on, native = map(plan.engine_args, chosen.values())
    assert off["additional_config"] == native["additional_config"] == {}
    assert on["additional_config"] == {"draft_window_size": 64}
    (auto,) = configurations(("auto",), SIZES, window=64).values()
    assert auto.options == {"draft_window_size": "auto", "draft_window_candidates": [16, 32, 64]}
    assert on["speculative_config"]["model"] != native["speculative_config"]["model"]
    # An engine takes what it needs, 8,192 tokens in 3 + 2 layers, unless it is about what the GPU holds.
    assert on["kv_cache_memory_bytes"] > 5 * 8192 * SIZES.kv_bytes_per_layer
    everything = replace(plan, whole_gpu=True, full=8000, max_num_seqs=32).engine_args(chosen["on"])
    assert everything["kv_cache_memory_bytes"] is None and everything["max_num_seqs"] == 32
    with pytest.raises(ValueError, match="--max-model-len 4100 is below"):
        replace(plan, max_model_len=4100)


@pytest.mark.parametrize("wrong", [{"layers": 2}, {"heads": 3}, {"method": "ngram"}, {"method": "eagle3"}])
def test_impossible_sizes(wrong):
    with pytest.raises(
        ValueError, match="draft_layers=2 must be 1" if "eagle3" in wrong.values() else next(iter(wrong))
    ):
        replace(SIZES, **wrong)


def test_a_failing_child_is_reported_with_its_log(tmp_path):
    with (
        session.Child(
            tmp_path / "child.log", session.EngineSpec(name="", engine_args={"odd": 1}), device="cpu"
        ) as child,
        pytest.raises(session.ChildFailed, match="odd"),
    ):
        child.call("describe")


@pytest.mark.parametrize("method", ["dspark", "dflash", "eagle3", "mtp"])
def test_random_models_are_complete(tmp_path, method):
    from transformers import AutoModelForCausalLM

    sizes = replace(SIZES, method=method, layers=4, draft_layers=1 if method in ("eagle3", "mtp") else 2)
    models.write_target(tmp_path / "target", sizes)
    if method == "mtp":
        names = load_file(tmp_path / "target" / "model.safetensors")
        assert {n.split(".")[1] for n in names if n.startswith("model.")} > {"layers", "mtp_layers"}
        assert not any(n.startswith("model.layers.4") for n in names)
        return
    model, loading = AutoModelForCausalLM.from_pretrained(tmp_path / "target", output_loading_info=True)
    assert not loading["missing_keys"] and not loading["unexpected_keys"]
    assert torch.isfinite(model(torch.arange(8).unsqueeze(0)).logits).all()

    models.write_draft(tmp_path / "draft", sizes)
    models.write_draft(tmp_path / "native", sizes, native_window=32)
    weights, native = (load_file(tmp_path / name / "model.safetensors") for name in ("draft", "native"))
    assert all(torch.equal(weights[name], native[name]) for name in weights)
    assert weights["fc.weight"].shape == (64, 64 * len(set(sizes.target_layer_ids)))
    assert len(sizes.target_layer_ids) == (3 if method == "eagle3" else 2)
    assert any(name.startswith("markov_head") for name in weights) == (method == "dspark")
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("draft", "native")]
    edited = {k: v for k, v in configs[1].items() if configs[0].get(k) != v}
    assert edited == (
        {"layer_types": ["sliding_attention"], "sliding_window": 32}
        if method == "eagle3"
        else {"dflash_config": configs[1]["dflash_config"]}
    )


def test_shorter_prompts_begin_longer_ones():
    assert prompt(0, 1, 64, 100) == prompt(0, 1, 64, 5000)[:100] != prompt(0, 2, 64, 100)


def test_floor_counts_what_has_to_be_read():
    per_layer = 2 * 2 * 32 * 2
    bandwidth = 1e9
    off = summary.floor_ms(SIZES, (1000, 10), bandwidth, window=None, block_size=16)
    assert off == pytest.approx((3 + 2) * 1010 * per_layer / bandwidth * 1e3)
    on = summary.floor_ms(SIZES, (1000, 10), bandwidth, window=64, block_size=16)
    assert on == pytest.approx((3 * 1010 + 2 * (64 + 16 + 10)) * per_layer / bandwidth * 1e3)


def test_summary_takes_medians_over_turns(results):
    entries = summary.summarize(results, SIZES, window=64)
    assert [entry["workload"] for entry in entries] == ["128", "512", "mixed"]
    on = entries[1]["configs"]["on"]
    assert on["all_median_ms"] == [3.0, 3.2] and on["median_ms"] == pytest.approx(3.1)
    assert on["p10_ms"] == pytest.approx(0.9 * 3.1)
    # Two rounds of one and two requests, against the shorter first round.
    assert [entry["tokens"]["on"] for entry in entries] == [
        {"equal": True, "compared": compared, "differences": []} for compared in (10, 10, 20)
    ]
    assert entries[2]["floor_ms"]["on"] < entries[2]["floor_ms"]["off"]
    assert summary.failed_checks(results, entries) == []


def test_a_workload_that_did_not_fit_is_left_out(results):
    for one in results:
        one["time_steps"][1] = {"workload": "512", "contexts": [512], "skipped": "needs 33 KV blocks, 32 there"}
    entries = summary.summarize(results, SIZES, window=64)
    assert entries[1]["configs"] == {} and entries[1]["tokens"] == {} and entries[0]["tokens"]["on"]["equal"]
    report.print_steps(Console(width=200, record=True), results, entries)


def _change_token(on):
    on["time_steps"][1]["tokens"][0][3] ^= 1


SYNC = {"calls": {"refresh": 1}, "synchronizations": {"refresh": 3}, "detector_works": True}


@pytest.mark.parametrize(
    ("break_it", "found"),
    [
        (_change_token, "512: tokens differ off and on"),
        (lambda on: on["addresses"][0].update(distinct_pairs=2), "2 address pairs"),
        (lambda on: on["addresses"][0].update(captured_on_window=0), "other addresses"),
        (lambda on: on["addresses"][0].update(builds=0, builds_on_window=0, replays=0), "neither built"),
        (lambda on: on["engine"].update(window_columns=None), "the window is not in force"),
        (lambda on: on["engine"].update(additional_config={}), "the window is in force"),
        (lambda on: on.update(sync=SYNC), "synchronizes 3 times in refresh"),
        (lambda on: on.update(sync=SYNC | {"synchronizations": {}, "detector_works": False}), "detect anything"),
        (lambda on: on.update(sync=SYNC | {"synchronizations": {}, "calls": {}}), "not refreshed"),
    ],
)
def test_broken_promises_are_found(results, break_it, found):
    break_it(results[1])
    failures = summary.failed_checks(results, summary.summarize(results, SIZES, window=64))
    assert len(failures) == 1 and found in failures[0]


def test_graphs_that_refresh_the_window_need_no_builds(results):
    results[1]["addresses"][0].update(builds=0, builds_on_window=0, distinct_pairs=0)
    assert summary.failed_checks(results, summary.summarize(results, SIZES, window=64)) == []


def test_report_and_plot(results, tmp_path):
    results.append(result("on", 1, (2.0, 6.0, 5.0)) | {"config": "on@old"})
    entries = summary.summarize(results, SIZES, window=64)
    console = Console(width=240, record=True)
    report.print_steps(console, results, entries)
    text = console.export_text()
    for expected in (
        "off/on",
        "mixed",
        f"{4.2 / 3.1:.3f}",
        "on@old/on",
        f"{6 / 3.1:.3f}",
        "refresh 12 (1.0)",
        "10 equal",
    ):
        assert expected in text
    report.plot_steps(tmp_path / "plot.png", "a GPU", entries, window=64)
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="workloads of one request"):
        report.plot_steps(tmp_path / "none.png", "a GPU", entries[2:], window=64)


def test_saturation_is_relative_to_the_first_engine():
    engines = [
        {"config": config, "round": 1, "engine": {"kv_cache_groups": ["15 x FullAttentionSpec"]}}
        | {"capacity": [{131072: requests}]}
        | {"saturate": [{"tokens": [[1]] * int(requests), "median_ms": 10.0, "tokens_per_s": 100 * requests}]}
        for config, requests in (("off", 8.0), ("reclaim", 11.2))
    ]
    console = Console(width=240, record=True)
    console.print(report.saturation(engines))
    text = console.export_text()
    for expected in ("requests of 131k", "11.20 (1.400)", "11 requests", "1120 (1.400)"):
        assert expected in text


@pytest.mark.parametrize(
    ("tokens", "label"), [(100, "100"), (2048, "2k"), (65536, "65k"), (524288, "524k"), (1040000, "1M")]
)
def test_tick_labels(tokens, label):
    assert report.short(tokens) == label


def test_a_refresh_is_timed():
    case = micro.Case(batch=3, groups=2, window=512, max_model_len=8192, block_size=16)
    (row,) = micro.measure([case], "cpu", say=lambda line: None)
    assert row["host_us"]["torch"] > 0 and row["device_us"] == {}
    assert micro.table([row]).row_count == 1


def test_requests_come_and_go():
    requests = equality.churn(16)
    sizes = [(len(p), n) for p, n in zip(requests["prompts"], requests["max_tokens"], strict=True)]
    assert all(prompt + new < equality.MAX_MODEL_LEN for prompt, new in sizes)
    assert len({prompt for prompt, _ in sizes}) > 8 and len({new for _, new in sizes}) > 8
    assert requests["arrivals"] == sorted(requests["arrivals"])


def served(name, tokens, *, window=None, batch_sizes=(1, 3, 2, 4, 1)):
    addresses = {"builds": 9, "builds_on_window": 9 if window else None, "distinct_pairs": 1, "replays": 0}
    engine = {"window_columns": [5] if window else None, "cudagraph_mode": "NONE"}
    serve = {
        "tokens": tokens,
        "batch_sizes": batch_sizes,
        "accepted_length": 1.0,
        "addresses": [addresses],
        "sync": None,
    }
    return {
        "config": name,
        "serve": [serve],
        "engine": engine | {"additional_config": {"draft_window_size": window} if window else {}},
    }


def test_a_difference_is_judged_by_the_target_itself():
    prompts = [text[-64:] for text in equality.churn(2)["prompts"]]
    reference = [[32, 32, 32, 32], [10, 10, 10, 10]]
    assert equality.logit_gap([*prompts[0], 32], 32, 32, "cpu") == 0
    # Byte 7 does not occur in source code: far from a tie with a space.
    results = [served("off", reference), served("on", [[32, 7, 32, 32], reference[1]], window=64)]
    equality.compare(results, prompts, "cpu")
    assert results[0]["equal_tokens"] == 8 and not results[0]["differences"]
    (difference,) = results[1]["differences"]
    assert difference["token"] == 1 and not difference["tie"] and results[1]["equal_tokens"] == 5
    assert [line for line in equality.failures(results) if "'token': 1" in line]
    assert equality.table(results).row_count == 2


def test_a_batch_that_never_shrinks_proves_nothing():
    results = [served("off", [[1, 2]], batch_sizes=(1, 2, 3))]
    equality.compare(results, [[1]], "cpu")
    assert "did not grow and shrink" in equality.failures(results)[0]


@pytest.mark.parametrize(
    "arguments",
    [
        "run --cpus 0-9999",
        "run --configs off,of",
        "run --configs native --method mtp",
        "run --steps 0",
        "run --engine-args []",
        "run --capacity 0",
        "equality --methods ngram",
        "equality --modes fast",
    ],
)
def test_wrong_arguments(arguments):
    refused = CliRunner().invoke(app, arguments.split())
    assert refused.exit_code == 2 and arguments.split()[1] in refused.output


@pytest.mark.engine
@pytest.mark.one_vllm
def test_engines_take_turns_and_are_measured(tmp_path):
    arguments = (
        "run --device cpu --configs off,on --together --turns 2 --window 64 --contexts 200 --batches 1,2 --steps 2"
    )
    arguments += " --warmup 1 --layers 3 --draft-layers 2 --hidden 64 --kv-heads 2 --head-dim 32 --prefill real"
    arguments += " --host-profile --max-num-batched-tokens 256"
    out = tmp_path / "run.json"
    done = CliRunner().invoke(app, [*arguments.split(), "--rounds", "1", "--work", str(tmp_path), "--json", str(out)])
    assert done.exit_code == 0, done.output
    document = json.loads(Path(out).read_text())
    assert [r["config"] for r in document["results"]] == ["off", "on"]
    assert [[s["workload"] for s in r["time_steps"]] for r in document["results"]] == [["200", "2x200"] * 2] * 2
    assert all(entry["tokens"]["on"]["equal"] for entry in document["summary"])
    assert document["results"][1]["host"]["calls"]["refresh"] == document["results"][1]["host"]["steps"]
