# SPDX-License-Identifier: Apache-2.0
"""Where the window sits in a decode step: the design page's picture.

The two block tables in it come from the window's own arithmetic, not from the drawing.
"""

from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle

from vllm_ascend.draft_window.geometry import WindowGeometry

PICTURE = Path(__file__).parents[2] / "docs" / "assets" / "window_in_a_step.png"
BLOCK, WINDOW, SINK, LENGTH, COLUMNS = 16, 64, 16, 217, 16
_OURS, _STOCK, _SINK, _CUT, _LINE = "#f4b6b0", "#dfe7f1", "#bfe0b4", "#eeeeee", "#444444"


def box(axes: Axes, x: float, y: float, width: float, height: float, text: str, colour: str) -> None:
    style = "round,pad=0.02,rounding_size=0.08"
    axes.add_patch(
        FancyBboxPatch((x, y), width, height, boxstyle=style, facecolor=colour, edgecolor=_LINE, linewidth=1)
    )
    axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=9)


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], **more: str) -> None:
    axes.annotate("", end, start, arrowprops={"arrowstyle": "->", "color": _LINE, "linewidth": 1.2, **more})


def _draw_step(axes: Axes) -> None:
    axes.set_xlim(0, 12)
    axes.set_ylim(0, 4.1)
    axes.axis("off")
    axes.text(0, 3.95, "One decode step", fontsize=11, weight="bold", va="center")
    box(axes, 0.05, 2.35, 1.7, 1.0, "target forward:\nsees everything,\nverifies", _STOCK)
    box(axes, 2.25, 2.35, 1.75, 1.0, "draft inputs:\nlengths, block\ntables (originals)", _STOCK)
    box(axes, 4.6, 2.35, 1.75, 1.0, "one fused launch\nwrites windowed\ntensors", _OURS)
    box(axes, 6.95, 2.35, 1.75, 1.0, "metadata build\nreads them", _STOCK)
    box(axes, 9.3, 2.35, 1.75, 1.0, "draft forward:\nsees sink and\nnewest W tokens", _STOCK)
    for x in (1.8, 4.05, 6.4, 8.75):
        arrow(axes, (x, 2.85), (x + 0.45 if x < 2 else x + 0.5, 2.85))
    axes.add_patch(Rectangle((4.42, 2.12), 4.46, 1.5, fill=False, edgecolor="#c0392b", linestyle="--", linewidth=1.3))
    axes.text(6.65, 3.72, "stand-ins swapped in, originals back afterwards", color="#c0392b", fontsize=9, ha="center")
    box(axes, 2.25, 0.75, 1.75, 0.8, "slot mappings,\npositions", _STOCK)
    arrow(axes, (4.05, 1.15), (10.15, 2.27), connectionstyle="angle,angleA=0,angleB=90,rad=6")
    axes.text(7.0, 0.95, "never windowed: drafts write to absolute positions", fontsize=9, ha="center", va="center")
    axes.plot((11.1, 11.5, 11.5, 0.9, 0.9), (2.85, 2.85, 0.35, 0.35, 2.0), color=_LINE, linewidth=1.2)
    arrow(axes, (0.9, 1.9), (0.9, 2.3))
    axes.text(6.0, 0.15, "proposals", fontsize=9, ha="center", va="center")


def _draw_tables(axes: Axes) -> None:
    geometry = WindowGeometry(
        window=WINDOW,
        sink=SINK,
        block_sizes=(BLOCK,),
        full_columns=(COLUMNS,),
        max_model_len=BLOCK * COLUMNS,
        max_queries=8,
    )
    # [1]
    seq_lens = torch.tensor([LENGTH], dtype=torch.int32)
    removed, length = geometry.lengths(seq_lens, queries=8)
    # [1, COLUMNS]; ids as a request would have them, 0 where it has no block
    used = -(-LENGTH // BLOCK)
    full = torch.tensor([[*range(31, 31 + used), *([0] * (COLUMNS - used))]], dtype=torch.int32)
    cropped = geometry.crop_block_table(0, full, removed, length)
    sink, start = geometry.aligned_sink // BLOCK, (int(removed) + geometry.aligned_sink) // BLOCK

    axes.set_xlim(0, 12)
    axes.set_ylim(0, 2.9)
    axes.axis("off")
    title = f"One request, s = {LENGTH} tokens, blocks of {BLOCK}: W = {WINDOW}, sink {SINK}"
    axes.text(0, 2.75, title, fontsize=11, weight="bold", va="center")
    rows = (
        (1.65, f"full block table\ns = {LENGTH}", full[0].tolist(), lambda c: sink <= c < start),
        (0.35, f"windowed\ns' = {int(length)}", cropped[0].tolist(), lambda c: False),
    )
    for y, label, ids, is_cut in rows:
        axes.text(0, y + 0.28, label, fontsize=9, va="center")
        for column, block in enumerate(ids):
            x = 1.9 + column * 0.6
            colour = "white" if not block else _SINK if column < sink else _CUT if is_cut(column) else _OURS
            axes.add_patch(Rectangle((x, y), 0.58, 0.56, facecolor=colour, edgecolor=_LINE, linewidth=0.8))
            text = "#999999" if is_cut(column) or not block else "black"
            axes.text(x + 0.29, y + 0.28, str(block), ha="center", va="center", fontsize=8.5, color=text)
    middle = 1.9 + (sink + start) / 2 * 0.6
    axes.text(middle, 2.36, f"{int(removed)} tokens removed, whole blocks", fontsize=9, ha="center", color="#666666")
    axes.text(1.9 + 0.29, 2.36, "sink", fontsize=9, ha="center", color="#3d7a2c")
    axes.text(1.9 + (start + used) / 2 * 0.6, 2.36, "window, rounded out", fontsize=9, ha="center", color="#c0392b")
    arrow(axes, (2.19, 1.62), (2.19, 0.94))
    arrow(axes, (1.9 + (start + used) / 2 * 0.6, 1.62), (1.9 + (sink + (used - start) / 2) * 0.6, 0.94))


def draw(path: Path) -> None:
    figure = Figure(figsize=(10, 6), dpi=120)
    top, bottom = figure.subplots(2, 1, height_ratios=(4.1, 2.9))
    _draw_step(top)
    _draw_tables(bottom)
    figure.tight_layout()
    figure.savefig(path)
