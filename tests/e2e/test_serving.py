# SPDX-License-Identifier: Apache-2.0
"""``vllm serve`` on the demo pair, API server and engine core in their own processes, driven as a user drives it."""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

openai = pytest.importorskip("openai")
prometheus_parser = pytest.importorskip("prometheus_client.parser")

pytestmark = [pytest.mark.slow, pytest.mark.one_vllm, pytest.mark.xdist_group("servers")]

REPOSITORY = Path(__file__).resolve().parents[2]
TEXT = Path(argparse.__file__).read_text()
# Two below the window, one across it, five beyond; all different, so that none is in the prefix cache.
PROMPTS = [TEXT[3000 * i : 3000 * i + n] for i, n in enumerate((5, 100, 280, 700, 900, 1000, 1100, 1200))]
MAX_TOKENS = 16
WINDOW = 256


class RunningServer:
    def __init__(self, folder, *arguments):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = folder / "log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                ["bash", "tools/serve_demo.sh", "--port", str(self.port), *arguments],
                cwd=REPOSITORY,
                env=os.environ | {"SERVE_PYTHON": sys.executable, "VLLM_LOG_STATS_INTERVAL": "2"},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="EMPTY", max_retries=0, timeout=300)

    def wait_until_ready(self, seconds=600):
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self.process.poll() is None:
            with suppress(openai.APIConnectionError):
                return self.client.models.list()
            time.sleep(0.5)
        raise AssertionError(f"the server did not start:\n{self.log.read_text()[-4000:]}")

    def complete(self, prompt, **more):
        return self.client.completions.create(
            model="demo", prompt=prompt, **dict(max_tokens=MAX_TOKENS, temperature=0, **more)
        )

    def text(self, prompt):
        return self.complete(prompt).choices[0].text

    def metrics(self):
        """Totals over labels."""
        totals = {}
        for family in prometheus_parser.text_string_to_metric_families(self.client.get("/../metrics", cast_to=str)):
            for sample in family.samples:
                totals[sample.name] = totals.get(sample.name, 0) + sample.value
        return totals

    def accepted_length(self):
        metrics = self.metrics()
        return 1 + metrics["vllm:spec_decode_num_accepted_tokens_total"] / metrics["vllm:spec_decode_num_drafts_total"]

    def lives(self):
        """Whether the script or any process that it started does."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, 0)
            return True
        return False

    def kill(self):
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    """Three starts side by side: without a window, with one, and with a value that no window can have."""
    arguments = {
        "off": ["--no-window"],
        "on": ["--window", str(WINDOW)],
        "refused": ["--no-window", "--", "--additional-config", '{"draft_window_size": "256"}'],
    }
    servers = {key: RunningServer(tmp_path_factory.mktemp(key), *more) for key, more in arguments.items()}
    yield servers
    for server in servers.values():
        server.kill()


@pytest.fixture(scope="module")
def off(running):
    running["off"].wait_until_ready()
    return running["off"]


@pytest.fixture(scope="module")
def on(running):
    running["on"].wait_until_ready()
    return running["on"]


@pytest.fixture(scope="module")
def texts(off, on):
    """Answers of both servers to eight requests at once each."""
    with ThreadPoolExecutor(2 * len(PROMPTS)) as pool:
        answers = {name: list(pool.map(server.text, PROMPTS)) for name, server in (("off", off), ("on", on))}
    return answers


def test_bad_option_stops_the_start_with_its_reason(running):
    assert running["refused"].process.wait(600) not in (0, None)
    log = running["refused"].log.read_text()
    assert "additional_config draft_window_size='256' is not allowed: it must be an integer greater than 0" in log


def test_eight_concurrent_requests_get_the_same_texts_off_and_on(texts):
    assert texts["on"] == texts["off"]
    assert all(len(text.encode()) >= MAX_TOKENS for text in texts["on"])


def test_streaming_gives_the_same_text_in_pieces(on, texts):
    pieces = [chunk.choices[0].text for chunk in on.complete(PROMPTS[-1], stream=True)]
    assert len([piece for piece in pieces if piece]) > 1
    assert "".join(pieces) == texts["on"][-1]


def test_aborted_request_leaves_a_server_that_answers(on, texts):
    before = on.metrics()
    with on.client.completions.create(
        model="demo", prompt=PROMPTS[6], max_tokens=2000, temperature=0, stream=True, extra_body={"ignore_eos": True}
    ) as stream:
        next(iter(stream))
    deadline = time.monotonic() + 60
    while on.metrics()["vllm:num_requests_running"]:
        assert time.monotonic() < deadline, "the aborted request still runs"
        time.sleep(0.2)
    generated = on.metrics()["vllm:generation_tokens_total"] - before["vllm:generation_tokens_total"]
    assert 0 < generated < 1500
    assert on.text(PROMPTS[5]) == texts["on"][5]


def test_start_up_line(off, on):
    line = f"Draft window in force: method=dspark, W={WINDOW}, sink=0, min_context=0, block alignment=32"
    assert on.log.read_text().count(line) == 1
    assert "Draft window" not in off.log.read_text()


def test_metrics_show_acceptance_and_what_the_window_did(off, on, texts):
    assert on.accepted_length() > off.accepted_length()
    metrics = on.metrics()
    # The engine core is a process of its own: its counts reach the server with its line in the log, every 2 s here.
    deadline = time.monotonic() + 30
    while (
        metrics["vllm:draft_window_num_builds_total"] < metrics["vllm:spec_decode_num_drafts_total"] / len(PROMPTS)
        and time.monotonic() < deadline
    ):
        time.sleep(0.2)
        metrics = on.metrics()
    assert metrics["vllm:draft_window_num_builds_total"] >= metrics["vllm:spec_decode_num_drafts_total"] / len(PROMPTS)
    assert metrics["vllm:draft_window_num_windowed_rows_total"] > 0
    assert metrics["vllm:draft_window_num_skipped_kv_tokens_total"] > 500 * MAX_TOKENS / 8
    assert not [name for name in off.metrics() if "draft_window" in name]
    assert "Draft window metrics: Builds: " in on.log.read_text()


def test_sweep_against_the_running_servers(off, on, texts, tmp_path):
    """Prompts below the window: both servers must measure the same, so that no window is what it recommends."""
    (tmp_path / "text.txt").write_text(TEXT[-2000:])
    command = [sys.executable, "-m", "vllm_draft_window", "sweep"]
    more = ["--server", f"off={off.url}", "--server", f"{WINDOW}={on.url}"]
    more += [
        "--prompts-file",
        tmp_path / "text.txt",
        "--contexts",
        "48",
        "--max-tokens",
        "4",
        "--out",
        tmp_path / "out",
    ]
    result = subprocess.run([*command, *more], cwd=REPOSITORY, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    report = json.loads((tmp_path / "out" / "sweep.json").read_text())
    without, windowed = report["rows"]
    assert (without["window"], windowed["window"]) == ("off", str(WINDOW))
    assert without["accepted_length"] == windowed["accepted_length"] > 1
    assert report["recommendation"]["window"] is None


def test_servers_stop_and_leave_no_process(off, on):
    """Last, because it ends them. The signal is what Ctrl-C and a service manager send."""
    for server in (off, on):
        server.process.send_signal(signal.SIGTERM)
    for server in (off, on):
        server.process.wait(60)
        deadline = time.monotonic() + 30
        while server.lives():
            assert time.monotonic() < deadline
            time.sleep(0.2)
