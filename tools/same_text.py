# SPDX-License-Identifier: Apache-2.0
"""What a long context does to a windowed draft, and what to the text: ``python -m tools.same_text --help``.

The target continues 4,096 tokens in another way than the newest 512 of them, and some texts are easier to draft than
others. So both continuations are drafted after both contexts here. Equal rows say that the context costs nothing.
"""

from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import track

from tools.comparison.simulated import BATCH
from tools.demo_pair import DEMO_PAIR, DRAFT_FOLDERS, demo_prompts
from tools.demo_pair.export import load_draft, load_target
from tools.demo_pair.modeling import Draft, Target
from tools.demo_pair.simulate import draft_everywhere, generate, sight, walk
from vllm_draft_window.measuring.cells import Cell, interval
from vllm_draft_window.reporting import table

SHORT, LONG = 512, 4096


def main(
    method: Annotated[str, typer.Option(help=f"One of {', '.join(DRAFT_FOLDERS)}.")] = "eagle3",
    window: Annotated[int, typer.Option(min=8, help="draft_window_size, tokens; a mask for each query row.")] = 512,
    prompts: Annotated[int, typer.Option(min=1, help="Places of the held-out text.")] = 96,
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens of each continuation.")] = 32,
) -> None:
    """Accepted length of one draft of the demo pair, by the context of the draft and by that of the text, simulated."""
    if method not in DRAFT_FOLDERS:
        raise typer.BadParameter(f"{method!r} is none of {', '.join(DRAFT_FOLDERS)}", param_hint="--method")
    target, draft = load_target(DEMO_PAIR / "target"), load_draft(DEMO_PAIR / DRAFT_FOLDERS[method])
    walked: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for places in track(torch.tensor(demo_prompts(prompts, LONG)).split(BATCH), "places"):
        for text in (SHORT, LONG):
            # [P, max_tokens - 1 + N]: the prefill's token comes without a draft, and the last proposals are judged, too
            truth, _ = generate(target, places[:, -text:], max_tokens - 1 + draft.num_draft_tokens)
            for context in (SHORT, LONG):
                rounds = accepted(target, draft, places[:, -context:], truth, window, max_tokens)
                walked.setdefault((text, context), []).extend(rounds)
    # Cells of one text draw the same prompts.
    cells = {key: Cell.of(rounds, context=key[0], seconds=0.0) for key, rounds in walked.items()}
    rows = []
    for text in (SHORT, LONG):
        short, long = cells[text, SHORT], cells[text, LONG]
        low, high = interval(long.resampled / short.resampled)
        ratio = long.accepted_length / short.accepted_length
        rows.append([f"{text} tokens", str(short), str(long), f"{ratio:.3f} [dim]({low:.3f}-{high:.3f})[/]"])
    headings = ("text continues", *(f"drafted after {context} tokens" for context in (SHORT, LONG)), "ratio")
    title, caption = f"{method}, W={window}, {prompts} prompts", "tokens per target step, and 95 % intervals"
    Console().print(table(headings, rows, title=title, caption=caption))


@torch.inference_mode()
def accepted(
    target: Target,
    draft: Draft,
    # [P, T]
    prompts: torch.Tensor,
    # [P, max_tokens - 1 + N]
    truth: torch.Tensor,
    window: int,
    max_tokens: int,
) -> list[tuple[int, int]]:
    """Emitted tokens and rounds of each prompt, where the target says ``truth`` behind these prompts."""
    tokens = torch.cat([prompts, truth[:, : max_tokens - 1]], dim=1)
    hidden_states: Any = target(tokens[:, :-1], output_hidden_states=True, use_cache=False).hidden_states
    context = draft.context(draft.select_features(hidden_states), tokens)
    seen = sight(window=window, alignment=1)
    return walk(draft_everywhere(draft, context, tokens, first=prompts.shape[1], seen=seen), truth)


if __name__ == "__main__":
    typer.run(main)
