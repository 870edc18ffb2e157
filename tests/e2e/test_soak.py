# SPDX-License-Identifier: Apache-2.0
"""The soak test in miniature: a hundredth of its traffic, and a wrong token that it must not let pass."""

import json

from typer.testing import CliRunner

from tools.soak import app

SMALL = ["--tokens", "700", "--longest", "300", "--at-once", "4", "--preempt-every", "30", "--window", "64"]


def test_in_miniature(tmp_path):
    right, wrong = tmp_path / "right.json", tmp_path / "wrong.json"
    served = CliRunner().invoke(app, ["run", "reclaim", "--out", str(right), "--device", "cpu", *SMALL])
    assert served.exit_code == 0, served.output
    result = json.loads(right.read_text())
    assert result["generated"] >= 700
    assert result["before"] == result["after"]
    assert result["counters"]["vllm:num_preemptions"] > 0
    assert result["counters"]["vllm:spec_decode_num_accepted_tokens"] > 0

    output = next(output for output in result["outputs"] if output)
    output[len(output) // 2] = (output[len(output) // 2] + 1) % 256
    wrong.write_text(json.dumps(result))
    checked = CliRunner().invoke(app, ["check", str(right), str(wrong), "--device", "cpu"])
    first, second = checked.output.splitlines()[-2:]
    assert "; 0 without all" in first and " 0 of them no tie" in first
    assert "1 of them no tie" in second
    assert checked.exit_code == 1
