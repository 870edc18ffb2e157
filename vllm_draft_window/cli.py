# SPDX-License-Identifier: Apache-2.0
"""The program ``draft-window``. A command imports what it needs when it runs, so help is there without any of it."""

import sys

import typer

from .bench.command import app as bench
from .clone import NeedsClone
from .doctor.command import main as doctor
from .parity import main as parity
from .planner.command import main as plan
from .sweep.command import main as sweep
from .upstream.command import main as upstream_pr

_GIVES_ON = {"allow_extra_args": True, "ignore_unknown_options": True}
_OURS = {"tests", "tools", "vllm_ascend", "vllm_draft_window"}
_VLLM = {"torch", "transformers", "triton", "vllm"}

app = typer.Typer(
    name="draft-window",
    help="Windowed draft attention for speculative decoding: is it on, which size, what does it cost and save.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)
app.command("doctor", context_settings=_GIVES_ON)(doctor)
app.command("plan")(plan)
app.command("sweep")(sweep)
app.add_typer(bench, name="bench")
app.command("parity")(parity)
app.command("upstream-pr")(upstream_pr)


def main() -> None:
    """Run the program; what is not installed, or not there without a clone, is named in one line."""
    try:
        app()
    except NeedsClone as error:
        sys.exit(f"draft-window: {error}")
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        command = " ".join(["draft-window", *sys.argv[1:2]])
        if missing in _OURS:
            raise
        if missing in _VLLM:
            sys.exit(f"{command} needs {missing}: run it with the Python that serves, or install vLLM")
        sys.exit(f"{command} needs {missing}: pip install 'vllm-draft-window[tools]'")
