# SPDX-License-Identifier: Apache-2.0
"""The commits of the pull request, in the order in which a reviewer wants them."""

import re
from collections.abc import Callable
from dataclasses import dataclass

from .checkout import Checkout, Tree
from .docs import write_docs, write_translations
from .errors import MissingAnchor, Refused
from .integration import (
    add_option_fields,
    integrate_proposers,
    integrate_speculators,
    report_at_start,
    route_tests,
    use_shim,
    write_tests,
)
from .package import write_mrv1, write_package

# vLLM whose speculators the mixins fit.
OLDEST_VLLM = (0, 26)


@dataclass(frozen=True)
class Step:
    subject: str
    body: str
    edits: tuple[Callable[[Tree], None], ...]


@dataclass(frozen=True)
class Commit:
    subject: str
    message: str
    edits: dict[str, str]


STEPS = (
    Step(
        "feat(spec_decode): add the draft window package",
        "A draft that was trained on short contexts collapses on long ones. With\n"
        "draft_window_size it attends to the newest tokens only; the target still\n"
        "attends to everything. Options, arithmetic, the fused launch, persistent\n"
        "lengths and block tables, and seams in front of Model Runner V2\n"
        "speculators. Nothing uses it yet.",
        (write_package,),
    ),
    Step(
        "feat(model_runner_v2): window the drafts of speculators",
        "The mixin becomes the first base class. Without the option every method is\nthe one that it was.",
        (integrate_speculators,),
    ),
    # Before the proposers, which get an attribute of the option's name.
    Step(
        "feat(config): accept the draft window's options",
        "The model of the additional config forbids keys that it does not know.",
        (add_option_fields,),
    ),
    Step(
        "fix(spec_decode): share the draft window arithmetic with Model Runner V1",
        "SlidingWindowAdapter keeps its contract and computes with the package. It\n"
        "keeps look-ahead columns, windows the lengths of a step once for all KV cache\n"
        "groups, and has a row for the padding of a full graph.",
        (write_mrv1, use_shim),
    ),
    Step(
        "fix(spec_decode): validate the draft window and crop per KV cache group",
        "Proposers take the checked decision instead of the bare number. DSpark builds\n"
        "its metadata from the cropped table of each KV cache group, where it used to\n"
        "combine windowed lengths with full tables, and its lengths count the query\n"
        "tokens already. Later steps compare unwindowed lengths with max_model_len.",
        (integrate_proposers,),
    ),
    Step(
        "feat(worker): say at start-up why a draft window cannot act",
        "One line, for methods without draft attention and for both model runners.",
        (report_at_start,),
    ),
    Step(
        "test(spec_decode): cover the draft window on the CPU runner",
        "A token-level oracle for the arithmetic, the option checks, the speculators'\n"
        "metadata build, and Model Runner V1's proposers.",
        (write_tests, route_tests),
    ),
    Step(
        "docs: document the draft window",
        "Design page, user guide section, options, navigation, and zh_CN entries.",
        (write_docs, write_translations),
    ),
)


def build_commits(checkout: Checkout, base: str) -> list[Commit]:
    """All edits, as commits to be; nothing is written to the checkout.

    Raises:
        Refused: the checkout supports a vLLM that the window does not fit, or something to hang an edit on is missing.
    """
    tree = Tree(checkout, base)
    _check_vllm(tree)
    commits = []
    for step in STEPS:
        for edit in step.edits:
            edit(tree)
        if edits := tree.take_edits():
            commits.append(Commit(step.subject, f"{step.subject}\n\n{step.body}", edits))
    return commits


def _check_vllm(tree: Tree) -> None:
    """The image of a checkout is built with the vLLM that it supports."""
    found = re.search(r"^ARG VLLM_TAG=v?(\d+)\.(\d+)\S*", tree.read("Dockerfile"), re.MULTILINE)
    if found is None:
        raise MissingAnchor("Dockerfile", "ARG VLLM_TAG, the vLLM that the checkout supports")
    if (int(found[1]), int(found[2])) < OLDEST_VLLM:
        raise Refused(
            f"this checkout is for vLLM {found[0].partition('=')[2]}; the draft window needs "
            f"{'.'.join(map(str, OLDEST_VLLM))} or later, whose speculators it extends"
        )
