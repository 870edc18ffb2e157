# SPDX-License-Identifier: Apache-2.0
"""The sweep's parts on real files and simulated prompts of known acceptance, and the tool itself on a real engine."""

import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from vllm_draft_window.measuring.cells import CellFile
from vllm_draft_window.measuring.interrupt import interrupts_kept
from vllm_draft_window.parameters import json_object, names, numbers
from vllm_draft_window.sweep.command import _read_reference
from vllm_draft_window.sweep.engines import Engines
from vllm_draft_window.sweep.prompts import MIN_DISTANCE, load_prompts
from vllm_draft_window.sweep.report import rows, write
from vllm_draft_window.sweep.verdict import WindowCell, differences, recommend

REPOSITORY = Path(__file__).resolve().parents[3]
CONTEXTS = [512, 4096]


def cell(window, context, mean, *, prompts=16, steps=40, seed=0, spread=0.3):
    """A cell whose prompts differ in difficulty, the same prompts for every window."""
    difficulty = np.random.default_rng([seed, context]).normal(1, spread, prompts).clip(0.3)
    noise = np.random.default_rng([seed, context, window if isinstance(window, int) else 0]).normal(0, 0.05, prompts)
    tokens = np.maximum(steps, np.round(steps * mean * difficulty + steps * noise)).astype(int)
    return WindowCell(
        window=window, context=context, tokens=tuple(tokens.tolist()), steps=(steps,) * prompts, seconds=1.5
    )


def sweep_of(means):
    """``means``: accepted length by window, one entry per context."""
    return {
        (window, context): cell(window, context, mean)
        for window, by_context in means.items()
        for context, mean in zip(CONTEXTS, by_context, strict=True)
    }


class TestPrompts:
    @staticmethod
    def tokenize(text):
        return list(text.encode())

    def test_text_is_cut_so_that_contexts_end_at_the_same_places(self, tmp_path):
        path = tmp_path / "source.txt"
        path.write_bytes(bytes(range(32, 127)) * 40)
        prompts = load_prompts(path, [100, 2000], 16, self.tokenize)
        assert [len(p) for p in prompts[100]] == [100] * 16
        assert [p[-100:] for p in prompts[2000]] == prompts[100]
        assert len({tuple(p) for p in prompts[100]}) == 16
        assert prompts[2000][-1] == list(path.read_bytes()[-2000:])

    def test_short_text_says_how_many_prompts_it_gives(self, tmp_path):
        path = tmp_path / "source.txt"
        path.write_text("x" * (1000 + 4 * MIN_DISTANCE))
        with pytest.raises(ValueError, match=r"1256 tokens, enough for 5 prompts of 1000 tokens; 16 such .* need 1960"):
            load_prompts(path, [100, 1000], 16, self.tokenize)

    def test_jsonl_takes_the_end_of_prompts_that_are_long_enough(self, tmp_path):
        path = tmp_path / "traffic.jsonl"
        lines = [json.dumps({"prompt": f"{i:02d}" * 30}) for i in range(16)]
        lines += [json.dumps({"prompt_token_ids": list(range(90))}), json.dumps({"prompt": "short"})]
        path.write_text("\n".join(lines) + "\n")
        prompts = load_prompts(path, [50], 17, self.tokenize)[50]
        assert prompts[0] == list(("00" * 25).encode())
        assert prompts[16] == list(range(40, 90))

    def test_too_few_long_prompts(self, tmp_path):
        path = tmp_path / "traffic.jsonl"
        path.write_text('{"prompt": "abcdef"}\n' * 20 + '{"prompt": "abcdefgh"}\n' * 7)
        with pytest.raises(ValueError, match=r"has 7 prompts of 8 or more tokens \(of 27\), 16 are needed.*context 8"):
            load_prompts(path, [4, 8], 16, self.tokenize)

    @pytest.mark.parametrize("line", ["not json", '{"text": "x"}', '["x"]', '{"prompt_token_ids": ["x"]}'])
    def test_bad_line_is_named(self, tmp_path, line):
        path = tmp_path / "traffic.jsonl"
        path.write_text('{"prompt": "x"}\n' + line + "\n")
        with pytest.raises(ValueError, match="traffic.jsonl, line 2: expected"):
            load_prompts(path, [1], 16, self.tokenize)

    @pytest.mark.parametrize("content", [None, b"\xff\xfe\x00"])
    def test_unreadable_file(self, tmp_path, content):
        path = tmp_path / "traffic.txt"
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(ValueError, match="cannot read the prompts in"):
            load_prompts(path, [1], 16, self.tokenize)


class TestCells:
    settings = {"prompts": "abc", "per_cell": 16}

    def open(self, path, settings=settings, *, fresh=False):
        return CellFile(path, WindowCell, settings, option="--out", fresh=fresh)

    def test_resumes_with_what_is_finished(self, tmp_path):
        first = self.open(tmp_path / "out" / "cells.jsonl")
        first.add(cell(None, 512, 2.0))
        first.add(cell(256, 512, 4.0))
        assert self.open(first.path).cells == first.cells
        assert list(first.cells) == [(None, 512), (256, 512)]

    def test_line_cut_off_by_a_kill_is_measured_again(self, tmp_path):
        first = self.open(tmp_path / "cells.jsonl")
        first.add(cell(None, 512, 2.0))
        whole = first.path.read_text()
        first.add(cell(None, 4096, 2.0))
        first.path.write_text(first.path.read_text()[:-7])
        again = self.open(first.path)
        assert list(again.cells) == [(None, 512)]
        assert first.path.read_text() == whole
        again.add(cell(None, 4096, 2.0))
        assert list(self.open(first.path).cells) == [(None, 512), (None, 4096)]

    def test_other_settings_are_refused_unless_fresh(self, tmp_path):
        self.open(tmp_path / "cells.jsonl").add(cell(None, 512, 2.0))
        other = self.settings | {"prompts": "def"}
        with pytest.raises(ValueError, match="another prompts; choose another --out, or --fresh"):
            self.open(tmp_path / "cells.jsonl", other)
        assert not self.open(tmp_path / "cells.jsonl", other, fresh=True).cells

    def test_folder_that_cannot_be_written(self, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.raises(ValueError, match="cannot write .*choose another --out"):
            self.open(tmp_path / "file" / "cells.jsonl")


class TestVerdict:
    def test_interval_covers_the_truth_about_as_often_as_it_says(self):
        truth, hits = 3.0, 0
        for seed in range(200):
            low, high = cell(None, 512, truth, seed=seed, prompts=24).interval
            hits += low <= truth <= high
        assert 0.86 <= hits / 200 <= 0.99

    def test_smallest_window_that_is_as_good_as_the_best(self):
        verdict = recommend(
            sweep_of({None: (4.3, 1.6), 256: (4.3, 4.2), 512: (4.3, 4.22), 1024: (4.3, 2.4)}),
            [256, 512, 1024],
            CONTEXTS,
        )
        assert verdict.window == 256
        assert re.search(r"helps at (512, )?4096\.", verdict.reason)
        assert "512 is not measurably different" in verdict.reason
        assert "Measurably worse: 1024." in verdict.reason

    def test_better_larger_window_wins(self):
        verdict = recommend(sweep_of({None: (4.3, 1.6), 256: (3.0, 3.0), 512: (4.3, 4.3)}), [256, 512], CONTEXTS)
        assert verdict.window == 512

    def test_none_helps_a_draft_that_holds_up(self):
        verdict = recommend(sweep_of({None: (4.3, 4.3), 256: (4.0, 4.0), 512: (4.2, 4.1)}), [256, 512], CONTEXTS)
        assert verdict.window is None
        assert verdict.reason.startswith("No window helps on these prompts: the best, 512, gives -")

    def test_help_at_one_length_does_not_hide_a_loss_at_another(self):
        verdict = recommend(sweep_of({None: (4.5, 2.0), 256: (3.0, 2.4)}), [256], CONTEXTS)
        assert verdict.window is None
        assert "helps at 4096 only and costs acceptance at 512" in verdict.reason

    def test_loss_on_short_requests_points_at_the_gate(self):
        verdict = recommend(sweep_of({None: (4.5, 1.5), 256: (4.0, 4.0)}), [256], CONTEXTS)
        assert verdict.window == 256
        assert "draft_window_min_context=4096 keeps shorter requests" in verdict.reason


# What the published comparison recommends, in these very words: intervals and verdict must not move by themselves.
RECORDED = {
    "dspark": "It gives +1.15 tokens per step on average (95 % interval +0.95 to +1.42) over no window; it helps at "
    "1024, 2048, 4096.",
    "eagle3": "It gives +1.88 tokens per step on average (95 % interval +1.61 to +2.23) over no window; it helps at "
    "1024, 2048, 4096.",
}


@pytest.mark.parametrize("method", RECORDED)
def test_recommendation_for_recorded_cells(method):
    cells = {}
    for line in (REPOSITORY / "docs" / "assets" / "acceptance_options.jsonl").read_text().splitlines()[1:]:
        record = json.loads(line)
        if record["source"].startswith("vLLM") and record["method"] == method and record["context"] <= 4096:
            window = {"off": None, "window": 512}.get(record["column"], 0)
            counted = {"tokens": tuple(record["tokens"]), "steps": tuple(record["steps"])}
            one = WindowCell(window=window, context=record["context"], seconds=0, **counted)
            cells[one.key] = one
    verdict = recommend(cells, [512], [512, 1024, 2048, 4096])
    assert (verdict.window, verdict.reason) == (512, RECORDED[method])


def test_report_files(tmp_path):
    cells = sweep_of({None: (4.3, 1.6), 256: (4.3, 4.2), "auto": (4.3, 4.1)})
    verdict = recommend(cells, [256], CONTEXTS)
    columns = [None, 256, "auto"]
    paths = write(tmp_path, cells, columns, CONTEXTS, settings={"prompts": "abc"}, verdict=verdict)
    report = json.loads(paths[0].read_text())
    assert report["recommendation"]["window"] == 256 and report["settings"] == {"prompts": "abc"}
    with paths[1].open() as file:
        read = list(csv.DictReader(file))
    assert [(row["window"], row["context"]) for row in read] == [
        (w, str(n)) for w in ("off", "256", "auto") for n in CONTEXTS
    ]
    assert [float(row["accepted_length"]) for row in read] == [row["accepted_length"] for row in report["rows"]]
    assert all(row["low"] < row["accepted_length"] < row["high"] for row in rows(cells, columns, CONTEXTS))
    assert paths[2].read_bytes().startswith(b"\x89PNG") and paths[2].stat().st_size > 10_000


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_interrupt_that_strikes_in_a_finalizer_is_not_lost():
    class Owner:
        def __del__(self):
            os.kill(os.getpid(), signal.SIGINT)

    previous = signal.getsignal(signal.SIGINT)
    with interrupts_kept() as check:
        check()
        Owner()
        with pytest.raises(KeyboardInterrupt):
            check()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is previous


def test_a_model_of_ones_own_needs_no_clone(monkeypatch):
    monkeypatch.setitem(sys.modules, "tools.demo_pair", None)
    monkeypatch.setattr("vllm_draft_window.sweep.engines._prepare_vllm", lambda: None)
    sweep = Engines("512,256", "somewhere", '{"num_speculative_tokens": 7}', "{}", [1024], 64, with_auto=True)
    assert sweep.columns == [None, 256, 512, "auto"] and sweep.settings["model"] == "somewhere"


def test_option_values():
    assert numbers("--windows", "512, 256,512") == [512, 256, 512]
    assert names("--only", "b,a", {"a": 1, "b": 2, "c": 3}) == ["b", "a"]
    with pytest.raises(ValueError, match="--only a,d: d is none of a, b"):
        names("--only", "a,d", ["a", "b"])
    for bad in ("", "a", "0,5", "-1"):
        with pytest.raises(ValueError, match=f"--windows {bad}"):
            numbers("--windows", bad)
    for bad in ("[1]", "{", '"x"'):
        with pytest.raises(ValueError, match="--engine-args (is not JSON|must be a JSON object)"):
            json_object("--engine-args", bad)


def test_two_devices_are_compared_prompt_by_prompt(tmp_path):
    here = sweep_of({None: [3.0, 1.5], 512: [3.0, 2.5]})
    assert [sigmas for *_, sigmas in differences(here, here)] == [0.0] * 4
    # A tenth of the steps' tokens less for every prompt: little, but more than their spread.
    lower = replace(here[None, 512], tokens=tuple(n - 4 - i % 2 for i, n in enumerate(here[None, 512].tokens)))
    ((_, other, sigmas),) = differences(here, {(None, 512): lower})
    assert other is lower and sigmas > 3
    file = CellFile(tmp_path / "cells.jsonl", WindowCell, {"prompts": "a", "model": "b"}, option="--out")
    file.add(lower)
    assert _read_reference(tmp_path, {"prompts": "a"}) == {(None, 512): lower}
    with pytest.raises(ValueError, match="of another prompts"):
        _read_reference(tmp_path, {"prompts": "c"})
    with pytest.raises(ValueError, match="holds no sweep"):
        _read_reference(tmp_path / "nowhere", {})


class TestTool:
    """The command, as a user runs it."""

    @staticmethod
    def command(*arguments):
        return [sys.executable, "-m", "vllm_draft_window", "sweep", *map(str, arguments)]

    def run(self, *arguments):
        return subprocess.run(self.command(*arguments), cwd=REPOSITORY, capture_output=True, text=True)

    def test_help(self):
        result = self.run("--help")
        assert result.returncode == 0
        for text in ("--windows", "--server", "--prompts-file", "Ctrl-C is safe"):
            assert text in result.stdout

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--server", "off=http://127.0.0.1:9", "--server", "256=http://127.0.0.1:9"], "no vLLM server answers at"),
            (["--server", "256=http://127.0.0.1:9"], "--server needs off=URL"),
            (["--contexts", "4k"], "--contexts 4k: expected positive integers"),
            (["--model", "somewhere"], "--model and --speculative-config go together"),
            (["--prompts", "15"], "--prompts"),
        ],
    )
    def test_bad_input(self, tmp_path, arguments, message):
        result = self.run("--out", tmp_path, *arguments)
        assert result.returncode == 2
        assert message in " ".join((result.stdout + result.stderr).split())
        assert "Traceback" not in result.stderr

    @pytest.mark.slow
    def test_real_sweep_interrupted_and_resumed(self, tmp_path):
        """The finding on 16 prompts, the smallest context that shows it, and one window on either side of 512."""
        settings = ["--contexts", "1024", "--max-tokens", "12", "--out", tmp_path]
        state = tmp_path / "cells.jsonl"
        process = subprocess.Popen(
            self.command("--windows", "256,1024", *settings),
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            # What runs in a shell's background has inherited that it ignores the signal.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        while process.poll() is None and not (state.exists() and len(state.read_text().splitlines()) > 1):
            time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 130, output
        assert "the same command goes on from there" in " ".join(output.split())
        first = state.read_text()
        assert not (tmp_path / "sweep.json").exists()

        result = self.run("--windows", "256,1024", *settings, "--reference", tmp_path)
        assert result.returncode == 0, result.stdout + result.stderr
        assert "0.0 σ apart" in " ".join(result.stdout.split())
        assert state.read_text().startswith(first)
        report = json.loads((tmp_path / "sweep.json").read_text())
        accepted = {row["window"]: row["accepted_length"] for row in report["rows"]}
        assert report["recommendation"]["window"] == 256
        assert accepted["256"] > 1.3 * max(accepted["off"], accepted["1024"])
        assert all(row["prompts"] == 16 and row["low"] < row["high"] for row in report["rows"])
        for suffix in ("csv", "png"):
            assert (tmp_path / f"sweep.{suffix}").stat().st_size > 0
