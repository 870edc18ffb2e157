# SPDX-License-Identifier: Apache-2.0
"""The comparison on real vLLM and its simulation count the same tokens and steps, prompt by prompt."""

import pytest
from rich.console import Console

from tools.compare_options import run_engines
from tools.comparison.columns import columns
from tools.comparison.simulated import simulate

pytestmark = [pytest.mark.slow, pytest.mark.one_vllm]

COLUMNS = columns(64)
CONTEXT, PROMPTS, MAX_TOKENS = 400, 2, 10


@pytest.mark.parametrize(
    ("method", "names"),
    [("dspark", ["sink 64"]), ("eagle3", ["sink 4", "step 0 only", "steps >= 1 only"])],
)
def test_simulation_is_the_engine(method, names):
    cells = [(method, name) for name in names]
    for expected in simulate(cells, COLUMNS, CONTEXT, prompts=PROMPTS, max_tokens=MAX_TOKENS):
        (result,) = run_engines(Console(), [("", method, expected.column, CONTEXT)], COLUMNS, PROMPTS, MAX_TOKENS)
        assert (result.tokens, result.steps) == (expected.tokens, expected.steps), expected.column
