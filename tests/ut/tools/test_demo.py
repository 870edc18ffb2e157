# SPDX-License-Identifier: Apache-2.0
"""What the demo reports and how it exits; the engine itself is measured in tests/e2e."""

import json
from types import SimpleNamespace

import pytest
import typer
from typer.testing import CliRunner

from tools import demo
from tools.demo_pair import DRAFT_FOLDERS

ENGINE = {"vllm": "0.27.1+cpu", "runner": "CPUModelRunner"}
SPECULATORS = {"dspark": "WindowedDSparkSpeculator", "eagle3": "WindowedEagleSpeculator"}


def run_demo(monkeypatch, path, *, tokens_on, arguments=()):
    def measure(console, contexts, *, method, **_):
        def row(length, tokens):
            return {context: SimpleNamespace(accepted_length=length, tokens=tokens) for context in contexts}

        engine = ENGINE | {"speculator": SPECULATORS[method]}
        return {"target alone": row(1.0, ((1, 2),)), "off": row(1.5, ((1, 2),)), "on": row(4.25, tokens_on)}, engine

    monkeypatch.setattr(demo, "_measure", measure)
    # vLLM is imported by now; the demo itself activates the CPU engine before that.
    monkeypatch.setattr("vllm_draft_window.cpu_engine.activate", lambda: None)
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")  # the demo's own is not for the tests behind this one
    app = typer.Typer()
    app.command()(demo.main)
    return CliRunner().invoke(app, ["--json", str(path), *arguments])


@pytest.mark.parametrize(
    ("arguments", "method", "contexts"),
    [
        ((), "dspark", [512, 2048, 4096]),
        (("--full",), "dspark", [512, 2048, 4096, 8192]),
        (("--method", "eagle3"), "eagle3", [512, 2048, 4096]),
    ],
)
def test_rows_and_json(monkeypatch, tmp_path, arguments, method, contexts):
    result = run_demo(monkeypatch, tmp_path / "demo.json", tokens_on=((1, 2),), arguments=arguments)
    assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "demo.json").read_text()) == {
        "method": method,
        "window": 512,
        "engine": ENGINE | {"speculator": SPECULATORS[method]},
        "rows": [{"context": n, "off": 1.5, "on": 4.25, "lossless": True} for n in contexts],
    }
    assert "4.25" in result.output


def test_exit_status_where_tokens_differ(monkeypatch, tmp_path):
    result = run_demo(monkeypatch, tmp_path / "demo.json", tokens_on=((1, 3),))
    assert result.exit_code == 1
    assert not any(row["lossless"] for row in json.loads((tmp_path / "demo.json").read_text())["rows"])


def test_every_method_of_the_checkpoint_can_be_shown():
    assert [method.value for method in demo.Method] == list(DRAFT_FOLDERS)


def test_window_must_be_positive(monkeypatch, tmp_path):
    result = run_demo(monkeypatch, tmp_path / "demo.json", tokens_on=(), arguments=("--window", "0"))
    assert result.exit_code == 2 and "--window" in result.output
