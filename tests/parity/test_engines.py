# SPDX-License-Identifier: Apache-2.0
"""Model Runner V1 and V2 of real vLLM on the same requests with the same window: the same proposals, token by token.

The runners are compared without a window first, so that a difference of the runners is not taken for one of the window.
"""

import pytest

from tests.parity.engine_jobs import IN_BOTH, METHODS, NEAR, REJECTED_TAILS, WINDOW, compare_proposals, jobs, run

# Model Runner V1 is vLLM-Ascend's, which is built for vLLM 0.27.1.
pytestmark = [pytest.mark.engine, pytest.mark.one_vllm, pytest.mark.slow, pytest.mark.xdist_group("runners")]


@pytest.fixture(scope="module")
def v1(tmp_path_factory) -> dict[str, dict]:
    folder = tmp_path_factory.mktemp("v1")
    return run("v1", list(jobs(folder).values()), folder)


@pytest.fixture(scope="module")
def v2(tmp_path_factory) -> dict[str, dict]:
    folder = tmp_path_factory.mktemp("v2")
    all_jobs = jobs(folder)
    return run("v2", [all_jobs[name] for name in IN_BOTH + NEAR], folder)


@pytest.mark.parametrize("name", IN_BOTH)
def test_runners_agree(name, v1, v2):
    for key in ("tokens", "drafts", "accepted_per_position"):
        assert v1[name][key] == v2[name][key], key
    assert v1[name]["drafts"] > 0
    assert len(v1[name]["proposals"]) == len(v2[name]["proposals"])
    unexplained, meant = compare_proposals(v1[name], v2[name])
    assert unexplained == 0
    assert meant == 0 or name in REJECTED_TAILS


@pytest.mark.parametrize("name", NEAR)
def test_near_the_end_the_tokens_agree_and_v1_drafts_less(name, v1, v2):
    assert v1[name]["tokens"] == v2[name]["tokens"]
    drafted = [sum(map(len, record[name]["proposals"])) for record in (v1, v2)]
    assert 0 < drafted[0] < drafted[1]


def test_the_meant_difference_still_shows(v1, v2):
    assert sum(compare_proposals(v1[name], v2[name])[1] for name in REJECTED_TAILS) > 0


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("batch", ["", "-near"])
def test_output_is_that_of_no_speculation(method, batch, v1):
    assert v1[f"{method}{batch}-{WINDOW}"]["tokens"] == v1[f"none{batch}"]["tokens"]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("batch", ["", "-near"])
def test_every_build_of_v1_was_what_the_oracle_expects(method, batch, v1):
    """The comparisons ran in the child, which would have failed; this says that they did run, at every step."""
    record = v1[f"{method}{batch}-{WINDOW}"]
    # Near the end V1 makes few proposals.
    enough = 1 if batch else 10
    assert record["checked_builds"] >= enough and record["windowed_rows"] >= enough
    steps = range(1 if method == "dflash" else METHODS[method])
    assert list(record["steps"]) == [str(step) for step in steps]


def test_the_window_changes_proposals(v1):
    """Or the comparisons above would compare nothing."""
    assert v1["dflash-off"]["proposals"] != v1[f"dflash-{WINDOW}"]["proposals"]
    assert v1["eagle3-off"]["proposals"] != v1[f"eagle3-{WINDOW}"]["proposals"]
    assert sum(v1[f"dflash-{WINDOW}"]["accepted_per_position"]) > 0
    assert sum(v1[f"eagle3-{WINDOW}"]["accepted_per_position"]) > 0
