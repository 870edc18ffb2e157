# SPDX-License-Identifier: Apache-2.0
"""The soak test in miniature: a thousandth of its traffic, and a wrong token that it must not let pass."""

import json

import pytest
import typer

from tools import soak


@pytest.mark.one_vllm
def test_in_miniature(tmp_path, capfd):
    right, wrong = tmp_path / "right.json", tmp_path / "wrong.json"
    with pytest.raises(typer.Exit) as stopped:
        soak.run("reclaim", right, 500, 300, at_once=4, preempt_every=30, method="dspark", window=64, device="cpu")
    assert stopped.value.exit_code == 0
    result = json.loads(right.read_text())
    assert result["generated"] >= 500
    assert result["before"] == result["after"]
    assert result["counters"]["vllm:num_preemptions"] > 0
    assert result["counters"]["vllm:spec_decode_num_accepted_tokens"] > 0

    output = next(output for output in result["outputs"] if output)
    # The last one: behind an earlier one the target is asked again, and goes on differently.
    output[-1] = (output[-1] + 1) % 256
    wrong.write_text(json.dumps(result))
    capfd.readouterr()
    with pytest.raises(typer.Exit) as stopped:
        soak.check([right, wrong], "cpu")
    assert stopped.value.exit_code == 1
    first, second = [line for line in capfd.readouterr().out.splitlines() if line.startswith("reclaim: ")]
    assert "; 0 without all" in first and " 0 of them no tie" in first
    assert " 1 of them no tie" in second
