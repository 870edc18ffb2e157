# SPDX-License-Identifier: Apache-2.0
"""How fast ``draft_window_size: "auto"`` finds the best window for the demo drafts, beside simpler rules; from a clone.

::

    python -m tools.simulate_auto --json auto.json    # about ten minutes of one core

The demo pair drafts at every position of its prompts with every window of the ladder; requests are then played over
those answers, so that each rule meets the same draft. Greedy verification does not depend on what was drafted.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from tools.demo_pair import DEMO_PAIR, DRAFT_FOLDERS, demo_prompts
from tools.demo_pair.export import load_draft, load_target
from tools.demo_pair.simulate import draft_everywhere, generate, sight
from vllm_ascend.draft_window.auto import WindowChooser
from vllm_ascend.draft_window.config import DEFAULT_START, LADDER

MAX_MODEL_LEN = 16384
TOKENS = 192  # generated per prompt
RULES = ("per context", "per engine", "start only")
WARM_UP = 200  # proposals of a context that do not count
CHANGE = 400  # proposals after a change that do not count
# Context -> size -> tokens kept at each position, [prompts, TOKENS]
Answers = dict[int, dict[int, np.ndarray]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 1024, 2048, 4096])
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--proposals", type=int, default=1200, help=f"per run; the first {WARM_UP} do not count")
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = []
    print(f"| draft | traffic | context | best fixed | {' | '.join(RULES)} |\n|{'---|' * (4 + len(RULES))}")
    for method in DRAFT_FOLDERS:
        drafts = answers(method, args.contexts, args.prompts)
        for row in compare(drafts, method, args.proposals, args.runs):
            rows.append(row)
            best, shares = f"{row['best']:.2f} (W = {row['size']})", " | ".join(f"{row[rule]:.3f}" for rule in RULES)
            print(f"| {method} | {row['traffic']} | {row['context']} | {best} | {shares} |")
        share = followed(drafts, args.proposals, args.runs)
        print(f"{method}: {share:.3f} of the best, from {CHANGE} proposals on after the best size changed", flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


@torch.inference_mode()
def answers(method: str, contexts: list[int], prompts: int) -> Answers:
    """What the target keeps of a proposal at every position, with every size of the ladder."""
    target, draft = load_target(DEMO_PAIR / "target"), load_draft(DEMO_PAIR / DRAFT_FOLDERS[method])
    drafted = draft.num_draft_tokens
    result: Answers = {}
    for context in contexts:
        kept: dict[int, list[np.ndarray]] = {size: [] for size in LADDER}
        for batch in torch.tensor(demo_prompts(prompts, context)).split(4):
            truth, features = generate(target, batch, TOKENS + drafted + 1)
            # [P, context + TOKENS]
            tokens = torch.cat([batch, truth[:, :TOKENS]], dim=1)
            known = draft.context(draft.select_features([f[:, : tokens.shape[1] - 1] for f in features]), tokens)
            for size in LADDER:
                seen = sight(window=size, alignment=16)
                proposed = draft_everywhere(draft, known, tokens, first=context, seen=seen)
                agrees = proposed == truth[:, 1:].unfold(1, drafted, 1)[:, :TOKENS]
                kept[size].append((agrees.int().cumprod(-1).sum(-1) + 1).numpy())
        result[context] = {size: np.concatenate(parts) for size, parts in kept.items()}
    return result


def compare(drafts: Answers, method: str, proposals: int, runs: int) -> Iterator[dict[str, str | int | float]]:
    """Accepted length of each rule as a share of the best fixed window's, for traffic of one context and of all."""
    alone = [[context] for context in drafts]
    for traffic in alone + [list(drafts)] * (len(drafts) > 1):
        kept = {
            rule: [play(drafts, traffic, proposals, run, rule) for run in range(runs)] for rule in (*LADDER, *RULES[:2])
        }
        for context in traffic:
            means = {}
            for rule, played in kept.items():
                counted = [run[context][WARM_UP if isinstance(rule, str) else 0 :] for run in played]
                means[rule] = float(np.mean(np.concatenate(counted)))
            best = max(LADDER, key=means.__getitem__)
            yield {
                "draft": method,
                "traffic": "mixed" if len(traffic) > 1 else "alone",
                "context": context,
                "size": best,
                "best": means[best],
                **{rule: means[rule] / means[best] for rule in RULES[:2]},
                RULES[2]: means[DEFAULT_START] / means[best],
            }


def followed(drafts: Answers, proposals: int, runs: int) -> float:
    """Share of the best that is reached from ``CHANGE`` proposals on after the draft's sizes have swapped places."""
    context = max(drafts)
    sizes = dict(zip(LADDER, reversed(LADDER), strict=True))
    swapped = {context: {size: drafts[context][sizes[size]] for size in LADDER}}

    def mean(rule: str | int) -> float:
        runs_of_rule = [
            play(drafts, [context], 2 * proposals, run, rule, change=(proposals, swapped))[context]
            for run in range(runs)
        ]
        return float(np.mean([kept for run in runs_of_rule for kept in run[proposals + CHANGE :]]))

    return mean(RULES[0]) / max(map(mean, LADDER))


def play(
    drafts: Answers,
    traffic: list[int],
    proposals: int,
    seed: int,
    rule: str | int,
    *,
    rows: int = 8,
    change: tuple[int, Answers] | None = None,
) -> dict[int, list[int]]:
    """Accepted lengths by context, of a batch of ``rows`` requests that come and go, under a rule or a fixed size.

    Args:
        proposals: how many of each context, about.
        change: after so many proposals, another draft answers.
    """
    generator = np.random.default_rng(seed)
    chooser = WindowChooser(
        LADDER,
        start=DEFAULT_START,
        max_num_reqs=rows,
        max_model_len=MAX_MODEL_LEN,
        device=torch.device("cpu"),
        fused=False,
    )

    def new_request() -> tuple[int, int, int]:
        context = traffic[generator.integers(len(traffic))]
        return context, int(generator.integers(len(drafts[context][LADDER[0]]))), int(generator.integers(TOKENS // 3))

    requests = [new_request() for _ in range(rows)]
    sampled, logits = [1] * rows, [1] * rows
    lengths: dict[int, list[int]] = {context: [] for context in traffic}
    while (played := sum(map(len, lengths.values()))) < proposals * len(traffic):
        if change is not None and played >= change[0]:
            drafts = change[1]
        if isinstance(rule, int):
            sizes = [rule] * rows
        else:
            # A record that does not look at the context puts every request into the last bucket.
            lens = [context + at if rule == RULES[0] else MAX_MODEL_LEN for context, _, at in requests]
            chooser.choose(
                idx_mapping=torch.arange(rows),
                seq_lens=torch.tensor(lens),
                num_sampled=torch.tensor(sampled),
                cu_num_logits=torch.tensor([0, *logits]).cumsum(0),
                num_reqs=rows,
            )
            sizes = chooser.windows.tolist()
        for row, (context, prompt, at) in enumerate(requests):
            sampled[row], logits[row] = int(drafts[context][sizes[row]][prompt, at]), 2
            lengths[context].append(sampled[row])
            requests[row] = (context, prompt, at + sampled[row])
            if at + sampled[row] >= TOKENS:
                requests[row], sampled[row], logits[row] = new_request(), 1, 1
    return lengths


if __name__ == "__main__":
    main()
