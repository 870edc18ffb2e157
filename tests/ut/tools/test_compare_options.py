# SPDX-License-Identifier: Apache-2.0
"""Comparing the options: what is kept and shown, and the simulation against hand-made cells."""

from dataclasses import replace

import pytest
import torch
from rich.console import Console

from tools.comparison.columns import Steps, columns
from tools.comparison.plot import STYLES, plot
from tools.comparison.results import Result, different_outputs
from tools.demo_pair.export import new_draft
from tools.demo_pair.modeling import visible_context
from vllm_draft_window.measuring.cells import CellFile
from vllm_draft_window.reporting import acceptance_table

RESULT = Result(
    source="simulation",
    method="eagle3",
    column="off",
    context=512,
    tokens=(24, 26),
    steps=(12, 8),
    output="a",
    seconds=1.0,
)


def test_results_survive_a_restart(tmp_path):
    path = tmp_path / "results.jsonl"
    results = [RESULT, replace(RESULT, column="window", steps=(6, 4))]
    file = CellFile(path, Result, {"max_tokens": 24}, option="--json")
    for result in results:
        file.add(result)
    again = CellFile(path, Result, {"max_tokens": 24}, option="--json")
    assert list(again.cells.values()) == results
    with pytest.raises(ValueError, match="another max_tokens; choose another --json$"):
        CellFile(path, Result, {"max_tokens": 32}, option="--json")


def test_accepted_length_and_interval():
    assert RESULT.accepted_length == 50 / 20
    assert RESULT.interval == (24 / 12, 26 / 8)


def test_options_must_not_change_the_output():
    same = replace(RESULT, column="window")
    other = replace(RESULT, column="sink 4", output="b")
    assert different_outputs([RESULT, same]) == []
    assert different_outputs([RESULT, same, other]) == [other]
    # other prompts, other text
    assert different_outputs([RESULT, replace(other, context=1024)]) == []


def test_table_leaves_out_what_was_not_measured():
    console = Console(width=100, record=True)
    cells = {("off", 512): RESULT, ("window", 1024): replace(RESULT, column="window", context=1024)}
    console.print(acceptance_table(cells, {"off": "off", "window": "window"}, title="t"))
    rows = [line.split("│")[1:-1] for line in console.export_text().splitlines() if line.startswith("│")]
    assert [[cell.strip() for cell in row] for row in rows] == [
        ["512", "2.50 (2.00-3.25)", ""],
        ["1024", "", "2.50 (2.00-3.25)"],
    ]


def test_plot_knows_every_column(tmp_path):
    assert list(STYLES) == list(columns(512))
    plot(tmp_path / "plot.png", [RESULT, replace(RESULT, context=1024), replace(RESULT, source="vLLM")])
    assert (tmp_path / "plot.png").stat().st_size > 10_000


def test_columns_are_options_of_the_product():
    from vllm_ascend.draft_window.options import DraftWindowOptions

    assert [name for name, column in columns(512).items() if not column.options] == ["off"]
    for column in columns(512).values():
        if column.options:
            DraftWindowOptions.model_validate(column.options)
    assert [name for name, column in columns(512).items() if column.steps is not Steps.all] == [
        "step 0 only",
        "steps >= 1 only",
    ]


def test_a_window_on_later_forwards_leaves_the_first_draft_token_alone():
    torch.manual_seed(0)
    draft = new_draft("eagle3").eval()
    tokens = torch.randint(0, 256, (1, 97))
    positions = torch.arange(90, 97)[None]
    sizes = {"context_length": 96, "num_draft_tokens": 7}
    everything, windowed = visible_context(positions, **sizes), visible_context(positions, window=16, **sizes)
    with torch.inference_mode():
        known = draft.context(torch.randn(1, 96, 3 * 256), tokens)
        all_known = tokens[:, 90:, None]
        full, all_steps, later = (
            draft(known, all_known, positions, *visible)
            for visible in ((everything,), (windowed,), (everything, windowed))
        )
    assert torch.equal(later[:, :, 0], full[:, :, 0])
    assert not torch.allclose(later[:, :, 0], all_steps[:, :, 0])
    assert not torch.allclose(later[:, :, 1], full[:, :, 1])
