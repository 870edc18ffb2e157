# SPDX-License-Identifier: Apache-2.0
"""The doctor on the demo pair: vLLM's own configuration, the real plugin, and environments that lack something."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.option_mistakes import LOOK_ALIKES
from tests.ut.program.doctoring import DSPARK, EAGLE3, ROOT, TARGET, arguments, changed, examine, medusa
from vllm_draft_window.cli import app

pytestmark = [
    pytest.mark.configuration,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM"),
]


def test_in_force():
    options = {"draft_window_size": 512, "draft_window_sink_size": 4, "draft_window_min_context": 600}
    verdict, found = examine(*arguments(additional=options), status=0)
    assert verdict["state"] == "in force"
    assert verdict["window"] == {
        "method": "dspark",
        "size": 512,
        "sink_size": 4,
        "min_context": 600,
        "queries_per_request": 7,
        "max_lookahead": 0,
        "reclaim": False,
        "candidates": [],
        "start": None,
        "widened_from": None,
        "warnings": [],
    }
    assert found["model runner"]["found"].startswith("V2")
    assert found["plugin"]["found"] == "found, loaded, hooks in place"
    assert "attn_metadata" in found["build seam"]["found"]
    assert all(finding["level"] == "ok" for finding in found.values())


def test_auto_is_explained():
    verdict, _ = examine(*arguments(additional={"draft_window_size": "auto"}), status=0)
    assert verdict["window"]["start"] in verdict["window"]["candidates"]
    assert "each proposal has one of the candidates, and the log says what they were worth" in verdict["advice"]


def test_warnings_of_a_window_in_force(tmp_path):
    """A draft with a native window, trained on short contexts."""
    short = {
        "use_sliding_window": True,
        "sliding_window": 1024,
        "max_window_layers": 0,
        "max_position_embeddings": 512,
    }
    given = arguments(changed(tmp_path, **short), {"draft_window_size": 512})
    verdict, _ = examine(*given, status=0)
    assert verdict["window"]["size"] == 1024
    assert "own sliding window of 1024" in verdict["window"]["warnings"][0]
    assert "1024 tokens is above the 512 that the draft was trained on" in verdict["window"]["warnings"][1]
    tables = CliRunner().invoke(app, ["doctor", *given], env={"COLUMNS": "120"}).stdout
    assert "Draft window: in force: method=dspark, size=1024" in tables and "Warning: " in tables


@pytest.mark.parametrize(
    ("speculative", "additional"),
    [(DSPARK, None), (DSPARK, {"other": 1}), (DSPARK, {"draft_window_size": None}), (None, None)],
    ids=str,
)
def test_not_asked_for(speculative, additional):
    verdict, _ = examine(*arguments(speculative, additional), status=0)
    assert verdict["state"] == "not asked for"


def test_environment_alone():
    verdict, found = examine(status=0)
    assert verdict["state"] == "not asked for"
    assert found.keys() == {"platform", "plugin", "build seam"}


@pytest.mark.parametrize(
    ("given", "environment", "reason", "advice"),
    [
        (arguments(None, {"draft_window_size": 512}), {}, "speculative decoding is not", "--speculative-config"),
        (arguments(additional={"draft_window_size": 8192}), {}, "covers max_model_len=8192", "below 8192"),
        (
            arguments(additional={"draft_window_size": 64, "draft_window_min_context": 9000}),
            {},
            "draft_window_min_context=9000 covers",
            "below 8192",
        ),
        (
            arguments({"method": "ngram", "num_speculative_tokens": 3}, {"draft_window_size": 512}),
            {"VLLM_USE_V2_MODEL_RUNNER": "0"},
            "the method ngram has no draft attention",
            "instead of ngram",
        ),
        (
            arguments(DSPARK | {"method": "draft_model", "model": str(TARGET)}, {"draft_window_size": 512}),
            {"VLLM_USE_V2_MODEL_RUNNER": "0"},
            "needs Model Runner V2",
            "VLLM_USE_V2_MODEL_RUNNER=1",
        ),
    ],
)
def test_asked_for_but_off(given, environment, reason, advice):
    verdict, found = examine(*given, status=1, **environment)
    assert verdict["state"] == "off"
    assert reason in verdict["reason"] and advice in verdict["advice"]
    assert found["model runner"]["found"].startswith("V1" if environment else "V2")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (arguments(additional='{"draft_window_size": 2048'), "--additional-config is not JSON"),
        (arguments("{'method': 'dspark'}"), "--speculative-config is not JSON"),
        (arguments(additional="[1]"), "must be a JSON object"),
        (arguments(additional={"draft_window_size": True}), "draft_window_size=True is not allowed"),
        (arguments(additional={"draft_window_size": "2048"}), "draft_window_size='2048' is not allowed"),
        (arguments(additional={"draft_window_size": 0}), "draft_window_size=0 is not allowed"),
        (arguments(additional={"draft_window_sise": 512}), "did you mean 'draft_window_size'?"),
        (arguments(additional={"draft_window_size": 6}), "must be at least 7"),
        (arguments(model="/no/such/folder"), "/no/such/folder: no such directory"),
        (arguments(model=ROOT / "docs"), "has no config.json"),
        (arguments(model="nobody/nothing"), "vLLM refuses these arguments"),
        (arguments(DSPARK | {"model": "./nowhere"}), "--speculative-config model ./nowhere: no such directory"),
        (arguments(DSPARK | {"methods": "dspark"}), "methods: Unexpected keyword"),
        (arguments(length=10**6), "max_model_len"),
        ([*arguments(), "--port", "8000"], "--port"),
        (["--max-model-len", "100"], "need --model"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_input(given, words):
    verdict, _ = examine(*given, status=2)
    assert verdict["state"] == "bad input"
    assert words in verdict["reason"]
    assert verdict["advice"]


def test_a_speculator_that_is_not_windowed(tmp_path):
    """Asked of vLLM's own choice of a class; 0.27 has no DFlash2."""
    dflash2 = changed(tmp_path, architectures=["DFlash2DraftModel"]) | {"method": "dflash", "num_speculative_tokens": 6}
    given = arguments(dflash2, {"draft_window_size": 512})
    if importlib.util.find_spec("vllm.v1.worker.gpu.spec_decode.dflash2") is None:
        return examine(*given, status=2)
    verdict, _ = examine(*given, status=1)
    assert verdict["reason"] == "DFlash2Speculator is not windowed by this version"


def test_autoregressive_draft_needs_more_than_its_look_ahead():
    verdict, _ = examine(*arguments(EAGLE3, {"draft_window_size": 7}), status=2)
    assert "must be at least 8, one more than num_speculative_tokens" in verdict["reason"]


def test_a_window_of_the_draft_that_covers_everything(tmp_path):
    own = {"use_sliding_window": True, "sliding_window": 9000, "max_window_layers": 0}
    verdict, _ = examine(*arguments(changed(tmp_path, **own), {"draft_window_size": 512}), status=1)
    assert verdict["reason"] == "the draft's own sliding window of 9000 tokens covers max_model_len=8192"


def test_a_length_for_the_draft_ends_nothing():
    given = arguments(DSPARK | {"max_model_len": 4096}, {"draft_window_size": 512})
    (warning,) = examine(*given, status=0)[0]["window"]["warnings"]
    assert warning.startswith("speculative_config.max_model_len=4096 does not end drafting there")


@pytest.mark.parametrize("speculative", [DSPARK, EAGLE3], ids=lambda value: value["method"])
def test_decode_context_parallelism(speculative):
    """Dense parallel drafts are replicated from vLLM 0.31 on, and windowed; all others are refused."""
    from vllm_ascend.draft_window.seams.vllm import release

    replicated = release() >= (0, 31) and speculative is DSPARK
    ranks = ("--tensor-parallel-size", "4", "--decode-context-parallel-size", "2")
    verdict, _ = examine(*arguments(speculative, {"draft_window_size": 512}), *ranks, status=0 if replicated else 2)
    if replicated:
        assert verdict["window"]["size"] == 512
    else:
        assert "context parallelism (size 2) that shards the draft's KV cache" in verdict["reason"]


@pytest.mark.parametrize("additional_config", LOOK_ALIKES, ids=str)
def test_look_alikes(additional_config):
    verdict, _ = examine(*arguments(additional=additional_config), status=2)
    assert verdict["state"] == "bad input" and "did you mean 'draft_window_size'" in verdict["reason"]


WINDOW = '{"draft_window_size": 512}'


@pytest.mark.parametrize(
    ("given", "status", "words"),
    [
        (["--additional-config.draft_window_size", "512"], 0, None),
        (["--additional-config.draft-window-size", "512"], 2, "did you mean 'draft_window_size'"),
        (["--additional-config", WINDOW, "--additional-config.refresh", "true"], 1, "has no draft_window_size"),
        (["--additional-config", WINDOW, "--additional_config", '{"a": 1}'], 1, "has no draft_window_size"),
        (["--additional-config", '{"a": 1}', f"--additional-config={WINDOW}"], 0, None),
        (
            ["--additional-config", WINDOW, "--additional-config.draft_window_sink_size", "4"],
            2,
            "draft_window_sink_size needs draft_window_size",
        ),
    ],
    ids=str,
)
def test_only_the_last_additional_config_counts(given, status, words):
    verdict, found = examine(*arguments(), *given, status=status)
    if words is None:
        assert verdict["window"]["size"] == 512
    else:
        assert words in verdict["reason"]
    repeated = sum(text.startswith("--additional") for text in given) > 1
    assert ("--additional-config" in found) == repeated
    if repeated and status:
        assert "into one --additional-config" in verdict["advice"]


@pytest.mark.parametrize(
    ("length", "window", "status"),
    [("8k", 7999, 0), ("8K", 8191, 0), ("8k", 8000, 1), ("auto", 16383, 0), ("-1", 16384, 1), ("8kb", 512, 2)],
)
def test_lengths_as_vllm_reads_them(length, window, status):
    verdict, found = examine(*arguments(additional={"draft_window_size": window}, length=length), status=status)
    if length in ("auto", "-1"):
        assert found["max_model_len"]["found"].startswith("16384, or less")
    assert status != 1 or "covers max_model_len=" in verdict["reason"]


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("draft_window_size", "draft_window_size"),
        ("draft-window-size", "draft_window_size"),
        ("draftWindowSize", "draft_window_size"),
        ("draft_window", "draft_window_size"),
        ("window_size", "draft_window_size"),
        ("draft_window_sink", "draft_window_sink_size"),
    ],
)
def test_options_of_the_window_in_the_speculative_config(key, meant):
    """vLLM's own error names the key, in an engine too; where it belongs is ours to say."""
    verdict, _ = examine(*arguments(DSPARK | {key: 512}), status=2)
    assert f"{key.replace('-', '_')}: Unexpected keyword argument" in verdict["reason"]
    assert verdict["advice"] == f"{meant} goes into --additional-config, as JSON"


@pytest.mark.parametrize("argument", ["--draft-window-size", "--draft_window_size", "--window-size"])
def test_options_of_the_window_as_arguments_of_their_own(argument):
    verdict, _ = examine(*arguments(), argument, "512", status=2)
    assert "unrecognized arguments" in verdict["reason"] and "-window" in verdict["reason"]
    assert verdict["advice"] == "draft_window_size goes into --additional-config, as JSON"


def test_what_vllm_refuses_is_no_matter_of_the_hub(tmp_path):
    """Model Runner V2 has no Medusa."""
    verdict, _ = examine(*arguments(medusa(tmp_path), {"draft_window_size": 512}), status=2, HF_HUB_OFFLINE="1")
    assert "does not yet support" in verdict["reason"] and "HF_HUB_OFFLINE" not in verdict["advice"]


def test_reclaim(tmp_path):
    """The engine's configuration and the checkpoints' layers; what it would say is said before it loads anything."""
    options = {"draft_window_size": 512, "draft_window_reclaim": True}
    verdict, _ = examine(*arguments(additional=options), status=0)
    assert verdict["window"]["reclaim"] is True
    for more, length, words in (
        (["--disable-hybrid-kv-cache-manager"], 8192, "the hybrid KV cache manager is off"),
        ([], 560, "draft layers: 2, target layers: 4; that would save -"),
    ):
        verdict, _ = examine(*arguments(additional=options, length=length), *more, status=2)
        assert words in verdict["reason"]


def test_ngram_where_v2_is_forced():
    """vLLM 0.27 refuses the pair, 0.32 runs it; neither way is there anything to window."""
    given = arguments({"method": "ngram", "num_speculative_tokens": 3}, {"draft_window_size": 512})
    result = CliRunner().invoke(app, ["doctor", *given, "--json"], env={"VLLM_USE_V2_MODEL_RUNNER": "1"})
    verdict = json.loads(result.stdout)["verdict"]
    if result.exit_code == 2:
        assert "does not yet support: ngram" in verdict["reason"] and "unset VLLM_USE_V2" in verdict["advice"]
    else:
        assert result.exit_code == 1 and "ngram has no draft attention" in verdict["reason"]


def test_unreadable_model(tmp_path):
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00{")
    assert "is not JSON" in examine(*arguments(model=tmp_path), status=2)[0]["reason"]
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").mkdir()
    assert "cannot read" in examine(*arguments(model=tmp_path), status=2)[0]["reason"]


@pytest.mark.parametrize(("allowed", "advised"), [("ascend", "ascend,draft_window"), ("", "draft_window")])
def test_plugin_not_allowed(allowed, advised):
    verdict, found = examine(*arguments(additional={"draft_window_size": 512}), status=3, VLLM_PLUGINS=allowed)
    assert verdict["state"] == "off" and "not allowed by VLLM_PLUGINS" in verdict["reason"]
    assert found["plugin"]["advice"].endswith(f"VLLM_PLUGINS={advised}")
    examine(*arguments(additional={"draft_window_size": 512}), status=0, VLLM_PLUGINS=f"{allowed},draft_window")


def test_engine_arguments_go_to_vllm():
    verdict, _ = examine(*arguments(additional={"draft_window_size": 512}), "--dtype", "float32", status=0)
    assert verdict["state"] == "in force"
    assert "float7" in examine(*arguments(), "--dtype", "float7", status=2)[0]["reason"]


def run_doctor(*given, without=(), folder):
    """The doctor as a command in ``folder``, in an environment that lacks the distributions of some names."""
    environment = {key: value for key, value in os.environ.items() if key not in ("VLLM_USE_V2_MODEL_RUNNER",)}
    path = [ROOT]
    if without:
        site = folder / "site-packages"
        site.mkdir()
        for entry in Path(sysconfig.get_paths()["purelib"]).iterdir():
            if not any(entry.name.lower().replace("-", "_").startswith(name) for name in without):
                (site / entry.name).symlink_to(entry)
        path.append(site)
    elif (folder / "vllm_ascend").exists():
        path.append(folder)
    environment["PYTHONPATH"] = os.pathsep.join(map(str, path))
    command = [sys.executable, *(["-S"] if without else []), "-m", "vllm_draft_window", "doctor", *given, "--json"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, check=False)
    assert result.stdout.startswith("{"), result.stderr[-2000:]
    return result.returncode, json.loads(result.stdout)


def test_as_a_command(tmp_path):
    """From any folder, on a machine whose vLLM is the CPU build; nothing but JSON on stdout."""
    status, report = run_doctor(*arguments(additional={"draft_window_size": 512}), folder=tmp_path)
    assert status == 0 and report["verdict"]["state"] == "in force"
    assert report["versions"]["vllm"] and report["versions"]["draft window"]
    (note,) = (finding for finding in report["findings"] if finding["check"] == "CPU engine")
    assert "vllm_draft_window/cpu_engine/site" in note["advice"]


def test_without_vllm(tmp_path):
    status, report = run_doctor(without=("vllm",), folder=tmp_path)
    assert status == 3 and report["versions"]["vllm"] is None
    assert [finding["check"] for finding in report["findings"]] == ["vLLM"]
    assert "install vLLM" in report["findings"][0]["advice"]


def test_without_the_plugin(tmp_path):
    given = arguments(additional={"draft_window_size": 512})
    status, report = run_doctor(*given, without=("vllm_draft_window", "_vllm_draft_window"), folder=tmp_path)
    (plugin,) = (finding for finding in report["findings"] if finding["check"] == "plugin")
    assert status == 3 and plugin["level"] == "problem" and "pip install ." in plugin["advice"]
    assert report["verdict"]["state"] == "off" and "no entry point 'draft_window'" in report["verdict"]["reason"]


@pytest.mark.parametrize("built_in", [False, True], ids=["without", "with"])
def test_a_vllm_ascend_of_another_folder(built_in, tmp_path):
    """A source checkout hides the wheel's files, unless the pull request is in it; it then needs no plugin."""
    package = tmp_path / "vllm_ascend"
    package.mkdir()
    (package / "__init__.py").touch()
    if built_in:
        product = "draft_window"
        plugin_only = shutil.ignore_patterns("plugin.py", "mrv1.py", "strict_config.py")
        shutil.copytree(ROOT / "vllm_ascend" / product, package / product, ignore=plugin_only)
    given = arguments(additional={"draft_window_size": 512}) if built_in else ()
    status, report = run_doctor(*given, folder=tmp_path)
    (plugin,) = (finding for finding in report["findings"] if finding["check"] == "plugin")
    if built_in:
        assert status == 0 and plugin["found"].startswith("not needed") and str(package) in plugin["found"]
        assert report["verdict"]["window"]["size"] == 512
    else:
        assert status == 3 and str(package) in plugin["found"] and "draft-window upstream-pr" in plugin["advice"]
