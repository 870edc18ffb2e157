# SPDX-License-Identifier: Apache-2.0
"""What the demo reports and how it exits; the engine itself is measured in tests/e2e."""

import json
from types import SimpleNamespace

import pytest
import typer
from typer.testing import CliRunner

from tools import demo

ENGINE = {"vllm": "0.27.1+cpu", "runner": "CPUModelRunner", "speculator": "WindowedDSparkSpeculator"}


def run_demo(monkeypatch, path, *, tokens_on, arguments=()):
    def measure(console, contexts, **_):
        def row(length, tokens):
            return {context: SimpleNamespace(accepted_length=length, tokens=tokens) for context in contexts}

        return {"target alone": row(1.0, ((1, 2),)), "off": row(1.5, ((1, 2),)), "on": row(4.25, tokens_on)}, ENGINE

    monkeypatch.setattr(demo, "_measure", measure)
    # vLLM is imported by now; the demo itself activates the CPU engine before that.
    monkeypatch.setattr("tools.cpu_engine.activate", lambda: None)
    app = typer.Typer()
    app.command()(demo.main)
    return CliRunner().invoke(app, ["--json", str(path), *arguments])


@pytest.mark.parametrize(("arguments", "contexts"), [((), [512, 2048, 4096]), (("--full",), [512, 2048, 4096, 8192])])
def test_rows_and_json(monkeypatch, tmp_path, arguments, contexts):
    result = run_demo(monkeypatch, tmp_path / "demo.json", tokens_on=((1, 2),), arguments=arguments)
    assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "demo.json").read_text()) == {
        "window": 512,
        "engine": ENGINE,
        "rows": [{"context": n, "off": 1.5, "on": 4.25, "lossless": True} for n in contexts],
    }
    assert "4.25" in result.output


def test_exit_status_where_tokens_differ(monkeypatch, tmp_path):
    result = run_demo(monkeypatch, tmp_path / "demo.json", tokens_on=((1, 3),))
    assert result.exit_code == 1
    assert not any(row["lossless"] for row in json.loads((tmp_path / "demo.json").read_text())["rows"])


def test_window_must_be_positive(monkeypatch, tmp_path):
    result = run_demo(monkeypatch, tmp_path / "demo.json", tokens_on=(), arguments=("--window", "0"))
    assert result.exit_code == 2 and "--window" in result.output
