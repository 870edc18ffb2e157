# SPDX-License-Identifier: Apache-2.0
"""The benchmark's own logic: what it writes, compares and reports; engines are measured on a GPU."""

import json
import math
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from vllm_draft_window.bench import acceptance, equality, micro, models, pair, report, session, summary
from vllm_draft_window.bench import command as bench_gpu
from vllm_draft_window.bench.bandwidth import floor_ms
from vllm_draft_window.bench.serve import MODES, Request, ServeRun
from vllm_draft_window.bench.spec import EngineRun, PairSizes, Workload

SIZES = PairSizes(
    layers=3, draft_layers=2, hidden=64, heads=2, kv_heads=2, head_dim=32, vocab=64, draft_tokens=7, max_positions=512
)


def result(config, number, milliseconds):
    """One engine's result; ``milliseconds`` are the median steps at 128 and 512 tokens and of the mixed batch."""
    window = {"on": 64}.get(config)
    contexts = {"128": (128,), "512": (512,), "mixed": (64, 256)}
    return {
        "config": config,
        "round": number,
        "copy_bandwidth": 4.0e12 + number,
        "versions": {"vllm": "0.26.0", "torch": "2.11.0"},
        "machine": {"device": "a GPU"},
        "engine": {
            "speculator": "DSparkSpeculator",
            "window_columns": window and [5],
            "kv_cache_groups": ["5 x FullAttentionSpec"],
            "block_size": 16,
            "cudagraph_mode": "FULL_DECODE_ONLY",
        },
        "workloads": {
            name: {
                "contexts": list(lengths),
                "median_ms": ms,
                "p10_ms": 0.9 * ms,
                "accepted_length": 1.01,
                "tokens": [[7, 8, 9, 10, *range(number)] for _ in lengths],
            }
            for (name, lengths), ms in zip(contexts.items(), milliseconds, strict=True)
        },
        "addresses": {
            "builds": 20,
            "replays": 20,
            "distinct_pairs": 1,
            "builds_on_twins": window and 20,
            "captured_on_twins": window and 3,
            "seen_at_capture": True,
        },
        "sync": None,
        "host_us": {"context": 128, "methods": {"refresh": {"median_us": 12.3, "calls_per_step": 1.0}}},
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
    run = EngineRun(
        config="",
        round=0,
        target="",
        draft="",
        method="dspark",
        draft_tokens=7,
        window=None,
        workloads=(Workload("2048", (2048,)), Workload("mixed", (64, 4096))),
        max_model_len=8192,
        cpus=(0, 2),
    )
    return session.Plan(
        sizes=SIZES,
        configs=session.CONFIGS,
        rounds=3,
        tiny_rounds=1,
        window=64,
        tiny_window=8,
        template=run,
        work=tmp_path,
    )


def test_specs_survive_the_way_to_the_child(plan, tmp_path):
    plan.template.write(tmp_path / "spec.json")
    assert EngineRun.read(tmp_path / "spec.json") == plan.template
    matrix = equality.Matrix(
        methods=("dspark", "dflash"), modes=MODES, window=64, requests=4, device="cuda", work=tmp_path, jobs=1
    )
    runs = matrix.runs()
    assert len({run.name for run in runs}) == len(runs) == 12
    for run in runs:
        run.write(tmp_path / "serve.json")
        assert ServeRun.read(tmp_path / "serve.json") == run
        assert run.llm_arguments()["additional_config"] == ({} if run.window is None else {"draft_window_size": 64})


def test_rounds_are_interleaved_and_the_control_comes_last(plan):
    configs = [config for _, config in plan.order()]
    assert configs == ["off", "on", "native"] * 3 + ["tiny"]


def test_workloads_must_fit(plan):
    session.check_fits(plan)
    short = replace(plan, template=replace(plan.template, max_model_len=4100))
    with pytest.raises(ValueError, match="workload 2048: .* exceed --max-model-len 4100"):
        session.check_fits(short)


@pytest.mark.parametrize("wrong", [{"layers": 2}, {"heads": 3}])
def test_impossible_sizes(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        replace(SIZES, **wrong)


def test_a_failing_child_is_reported_with_its_log(plan):
    with pytest.raises(session.ChildFailed, match="No module named vllm_draft_window.bench.nothing"):
        session.run_child("vllm_draft_window.bench.nothing", plan.template, plan.work / "child", timeout_s=60)


@pytest.mark.parametrize("method", ["dspark", "dflash"])
def test_random_models_are_complete(tmp_path, method):
    from transformers import AutoModelForCausalLM

    sizes = replace(SIZES, method=method)
    models.write_target(tmp_path / "target", sizes)
    model, loading = AutoModelForCausalLM.from_pretrained(tmp_path / "target", output_loading_info=True)
    assert not loading["missing_keys"] and not loading["unexpected_keys"]
    assert torch.isfinite(model(torch.arange(8).unsqueeze(0)).logits).all()

    models.write_draft(tmp_path / "draft", sizes)
    models.write_native(tmp_path / "native", tmp_path / "draft", sizes, 32)
    weights = load_file(tmp_path / "native" / "model.safetensors")
    assert weights["fc.weight"].shape == (64, 64 * sizes.draft_layers)
    assert any(name.startswith("markov_head") for name in weights) == (method == "dspark")
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("draft", "native")]
    assert configs[1]["dflash_config"]["swa_window_size"] == 32 and configs[1]["dflash_config"]["use_swa"]
    assert {k: v for k, v in configs[0].items() if k != "dflash_config"} == {
        k: v for k, v in configs[1].items() if k != "dflash_config"
    }


def test_floor_counts_what_has_to_be_read():
    per_layer = 2 * 2 * 32 * 2
    bandwidth = 1e9
    off = floor_ms(SIZES, (1000, 10), bandwidth, window=None, block_size=16)
    assert off == pytest.approx((3 + 2) * 1010 * per_layer / bandwidth * 1e3)
    on = floor_ms(SIZES, (1000, 10), bandwidth, window=64, block_size=16)
    assert on == pytest.approx((3 * 1010 + 2 * (64 + 16 + 10)) * per_layer / bandwidth * 1e3)


def test_summary_takes_medians_over_rounds(results):
    entries = summary.summarize(results, SIZES, window=64)
    assert [entry["workload"] for entry in entries] == ["128", "512", "mixed"]
    on = entries[1]["configs"]["on"]
    assert on["round_medians_ms"] == [3.0, 3.2] and on["median_ms"] == pytest.approx(3.1)
    assert entries[1]["ratios"]["off/on"] == pytest.approx(4.2 / 3.1)
    assert entries[1]["ratios_of_p10"]["off/on"] == pytest.approx(4.2 / 3.1)
    # Two rounds of one and two requests, against the shorter first round.
    assert [entry["tokens"]["on"] for entry in entries] == [
        {"equal": True, "compared": compared, "differences": []} for compared in (10, 10, 20)
    ]
    assert entries[2]["floor_ms"]["on"] < entries[2]["floor_ms"]["off"]
    assert summary.failed_checks(results, entries) == []


def test_a_workload_that_did_not_fit_is_left_out(results):
    for one in results:
        one["workloads"]["512"] = {"contexts": [512], "skipped": "needs 33 KV blocks, 32 there"}
    entries = summary.summarize(results, SIZES, window=64)
    assert entries[1]["configs"] == {} and entries[1]["tokens"] == {} and entries[0]["tokens"]["on"]["equal"]
    report.print_summary(Console(width=200, record=True), results, entries)


def _change_token(on):
    on["workloads"]["512"]["tokens"][0][3] ^= 1


@pytest.mark.parametrize(
    ("break_it", "found"),
    [
        (_change_token, "512: tokens differ off and on"),
        (lambda on: on["addresses"].update(distinct_pairs=2), "2 address pairs"),
        (lambda on: on["addresses"].update(captured_on_twins=0), "other addresses"),
        (lambda on: on["addresses"].update(builds=0, builds_on_twins=0, replays=0), "neither built"),
        (lambda on: on["engine"].update(window_columns=None), "the window is not in force"),
        (lambda on: on.update(config="off"), "the window is in force"),
        (
            lambda on: on.update(sync={"calls": {"refresh": 1}, "violations": ["refresh: x"], "detector_works": True}),
            "synchronizes in refresh",
        ),
    ],
)
def test_broken_promises_are_found(results, break_it, found):
    break_it(results[1])
    failures = summary.failed_checks(results, summary.summarize(results, SIZES, window=64))
    assert len(failures) == 1 and found in failures[0]


def test_graphs_that_refresh_the_window_need_no_builds(results):
    results[1]["addresses"].update(builds=0, builds_on_twins=0, distinct_pairs=0)
    assert summary.failed_checks(results, summary.summarize(results, SIZES, window=64)) == []


def test_report_and_plot(results, tmp_path):
    entries = summary.summarize(results, SIZES, window=64)
    console = Console(width=200, record=True)
    report.print_summary(console, results, entries)
    text = console.export_text()
    for expected in ("off/on", "mixed", f"{4.2 / 3.1:.3f}", "refresh 12 (1.0)", "10 equal"):
        assert expected in text
    report.plot(tmp_path / "plot.png", results, entries, window=64, tiny=8)
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="workloads of one request"):
        report.plot(tmp_path / "none.png", results, entries[2:], window=64, tiny=8)


@pytest.mark.parametrize(
    ("tokens", "label"), [(100, "100"), (2048, "2k"), (65536, "65k"), (524288, "524k"), (1040000, "1M")]
)
def test_tick_labels(tokens, label):
    assert report._short(tokens) == label


def test_the_versions_of_a_refresh_agree_on_the_cpu():
    case = micro.Case(batch=3, groups=2, window=512, max_model_len=8192, block_size=16)
    (row,) = micro.measure([case], "cpu", say=lambda line: None)
    assert set(row["host_us"]) == {"twin", "plain"} and row["device_us"] == {}


def test_requests_come_and_go():
    requests = equality.churn(16)
    assert all(len(r.prompt) + r.max_tokens < equality.MAX_MODEL_LEN for r in requests)
    assert len({len(r.prompt) for r in requests}) > 8 and len({r.max_tokens for r in requests}) > 8
    assert [r.arrival for r in requests] == sorted(r.arrival for r in requests)


def served(name, tokens, *, window=None, batch_sizes=(1, 3, 2, 4, 1)):
    return {
        "name": name,
        "window": window,
        "mode": "eager",
        "workloads": {"churn": {"tokens": tokens, "decode_steps": [2] * len(tokens), "batch_sizes": list(batch_sizes)}},
        "addresses": {"builds": 9, "builds_on_twins": 9 if window else None, "distinct_pairs": 1, "replays": 0},
        "sync": None,
        "engine": {"window_columns": [5] if window else None, "cudagraph_mode": "NONE"},
    }


def test_a_difference_is_judged_by_the_target_itself():
    requests = [Request(prompt, 0, 4) for prompt in pair.texts(2, 64)]
    reference = [[32, 32, 32, 32], [10, 10, 10, 10]]
    model_order = equality.logit_gap(requests[0].prompt + [32], 32, 32, "cpu")
    assert model_order == 0
    # Byte 7 does not occur in source code: far from a tie with a space.
    changed = [[32, 7, 32, 32], reference[1]]
    results = [served("off", reference), served("on", changed, window=64)]
    rows = equality.compare(results, requests, "cpu")
    assert rows[0]["equal_tokens"] == 8 and not rows[0]["differences"]
    (difference,) = rows[1]["differences"]
    assert difference["token"] == 1 and not difference["tie"] and rows[1]["equal_tokens"] == 5
    assert [line for line in equality.failures(results, rows) if "'token': 1" in line]


def test_a_batch_that_never_shrinks_proves_nothing():
    requests = [Request([1], 0, 2)]
    results = [served("off", [[1, 2]], batch_sizes=(1, 2, 3))]
    assert "did not grow and shrink" in equality.failures(results, equality.compare(results, requests, "cpu"))[0]


def test_acceptance_and_its_noise():
    cell = acceptance.summarize({"tokens": [[0] * 9, [0] * 5, [0] * 7], "decode_steps": [2, 2, 2]})
    assert cell["accepted_length"] == pytest.approx((8 + 4 + 6) / 6)
    # Every request takes the same number of steps, so this is the standard error of their mean lengths 4, 2, 3.
    assert cell["standard_error"] == pytest.approx(1 / math.sqrt(3))

    def document(length, error):
        return {"contexts": {"512": {"off": {"accepted_length": length, "standard_error": error}}}}

    (row,) = acceptance.compare(document(4.0, 0.3), document(3.0, 0.4))
    assert row["sigmas"] == pytest.approx(2.0) and row["within_noise"]
    (row,) = acceptance.compare(document(4.0, 0.1), document(3.0, 0.1))
    assert not row["within_noise"]
    assert acceptance.compare(document(4.0, 0.1), {"contexts": {}}) == []


def test_prompts_travel_as_text():
    prompts = pair.texts(2, 32)
    assert pair.unpack(pair.pack(prompts)) == prompts


def test_reference_of_another_method_is_refused(tmp_path, capsys):
    reference = tmp_path / "cpu.json"
    reference.write_text('{"method": "dspark", "prompts": [], "contexts": {}}')
    with pytest.raises(SystemExit):
        bench_gpu.main(["demo-pair", "--method", "eagle3", "--reference", str(reference)])
    assert "is a run of dspark, not of eagle3" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    ["run --cpus 0-9999", "run --configs off,of", "equality --methods ngram", "equality --modes fast", "run --steps 0"],
)
def test_wrong_arguments(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        bench_gpu.main(arguments.split())
    assert stopped.value.code == 2
    assert arguments.split()[1] in capsys.readouterr().err
