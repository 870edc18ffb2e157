# SPDX-License-Identifier: Apache-2.0
"""The pull request as a series of branches, each on the one before, and their commits."""

import re
from collections.abc import Callable
from dataclasses import dataclass

from . import autoregressive_branch, mrv1_branch, parallel_branch
from .checkout import Checkout, Tree
from .errors import MissingAnchor, Refused

# vLLM whose speculators the window fits.
OLDEST_VLLM = (0, 26)


@dataclass(frozen=True)
class Step:
    """One commit: its message, and the edits that make it."""

    subject: str
    body: str
    edits: tuple[Callable[[Tree], None], ...]

    @property
    def message(self) -> str:
        return f"{self.subject}\n\n{self.body}".strip()


@dataclass(frozen=True)
class Branch:
    """One pull request of the series.

    Attributes:
        name: end of the branch's name.
        template: folder of its texts and tests.
        oldest_vllm: the first whose speculators it can change.
    """

    name: str
    template: str
    steps: tuple[Step, ...]
    oldest_vllm: tuple[int, int] = OLDEST_VLLM


Commits = dict[Step, dict[str, str]]
"""Steps, and the texts of the files that each of them changes, by path."""

BRANCHES = (
    Branch(
        "1-mrv1",
        "mrv1",
        (
            Step(
                "fix(spec_decode): compute the draft window in one module",
                "Where a window starts and which columns of the block table it leaves, for\n"
                "the host and for the device, without a model runner. The proposers use it\n"
                "in the next commit; both runners can.",
                (mrv1_branch.write_geometry,),
            ),
            Step(
                "fix(spec_decode): mend the draft window of EAGLE, DFlash and DSpark",
                "Later steps find their block, every KV cache group is cropped at one start,\n"
                "sizes are checked, host and device cannot start apart, the limit at\n"
                "max_model_len compares whole lengths, and the padding row of a full graph\n"
                "fits. Step-3.5, which never applied the window, says so.",
                (mrv1_branch.add_option, mrv1_branch.mend_adapter, mrv1_branch.mend_proposers),
            ),
            Step(
                "test(spec_decode): cover the draft window of Model Runner V1",
                "Brute force over tokens, and one test for each fault.",
                (mrv1_branch.write_tests,),
            ),
        ),
    ),
    Branch(
        "2-mrv2-dspark-dflash",
        "parallel",
        (
            Step(
                "feat(spec_decode): let the host decide where a draft window starts",
                "A metadata build gets windowed lengths and cropped block tables, at a start\n"
                "that the host's own lengths decide. Nothing is read from the device.",
                (parallel_branch.write_window,),
            ),
            Step(
                "feat(model_runner_v2): window the drafts of DSpark and DFlash",
                "draft_window_size takes effect on Model Runner V2, by the build that\n"
                "vLLM-Ascend gives vLLM's speculators. The log says what is in force, or\n"
                "why nothing is.",
                (parallel_branch.window_speculators,),
            ),
            Step(
                "test(e2e): a windowed draft on Model Runner V2",
                "Never run, and without golden values: no NPU was at hand.",
                (parallel_branch.write_e2e_test,),
            ),
            Step(
                "docs: the draft window in the speculative decoding guide",
                "What it is for, what is windowed, and what is not.",
                (parallel_branch.write_docs,),
            ),
        ),
    ),
    Branch(
        "3-mrv2-eagle-mtp",
        "autoregressive",
        (
            Step(
                "feat(model_runner_v2): window the drafts of EAGLE and of MTP heads with GQA",
                "The first forward gets windowed copies of the target's metadata, the later\n"
                "ones are built through the window, and FULL graphs count on from there.",
                (autoregressive_branch.window_speculators,),
            ),
            Step(
                "docs: EAGLE and MTP in the table of the draft window",
                "",
                (autoregressive_branch.write_docs,),
            ),
        ),
        oldest_vllm=(0, 27),
    ),
)


def build_series(checkout: Checkout, base: str) -> dict[Branch, Commits]:
    """All edits of the branches that the checkout's vLLM allows; nothing is written to the checkout.

    Raises:
        Refused: it allows none, or something to hang an edit on is missing.
    """
    tree = Tree(checkout, base)
    found = re.search(r"^ARG VLLM_TAG=v?(\d+)\.(\d+)\S*", tree.read("Dockerfile"), re.MULTILINE)
    if found is None:
        raise MissingAnchor("Dockerfile", "ARG VLLM_TAG, the vLLM that the checkout supports")
    version = int(found[1]), int(found[2])
    if version < OLDEST_VLLM:
        raise Refused(
            f"this checkout is for vLLM {found[0].partition('=')[2]}; the draft window needs "
            f"{'.'.join(map(str, OLDEST_VLLM))} or later, whose speculators it changes"
        )
    series: dict[Branch, Commits] = {}
    for branch in BRANCHES:
        if version >= branch.oldest_vllm:
            series[branch] = {}
            for step in branch.steps:
                for edit in step.edits:
                    edit(tree)
                series[branch][step] = tree.take_edits()
    return series
