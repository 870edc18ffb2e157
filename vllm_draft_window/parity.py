# SPDX-License-Identifier: Apache-2.0
"""``draft-window parity``: what the two model runners agree on."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from .clone import CARRIED, require_clone


def main(
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write the rows, and examples of what differs, to this file.")
    ] = None,
    engines: Annotated[
        bool, typer.Option("--engines", help="Run both runners of real vLLM too, in a clone: about three minutes.")
    ] = False,
    per_kind: Annotated[int, typer.Option(min=1, help="Batches of every kind for every draft.")] = 12,
) -> None:
    """Show what Model Runner V1, Model Runner V2, the published formula and an independent oracle agree on.

    Runs on a CPU. Exits with 1 where something differs that is not meant to.
    """
    if engines:
        require_clone("the demo pair, which --engines runs,")
    from .cpu_engine import activate

    activate()
    # The oracle and the comparisons are the tests', which know nothing of this program.
    sys.path.insert(0, str(CARRIED))
    from tests.parity.report import rows

    examples: dict[str, str] = {}
    report = list(rows(per_kind, examples, engines=engines))
    faults = [row for row in report if row.differences and not row.meant]
    print("| compared | between | rows | differences | where from |\n|---|---|---:|---:|---|")
    for row in report:
        count = f"{row.differences} (meant)" if row.meant else f"{row.differences}"
        print(f"| {row.compared} | {row.ways} | {row.rows:,} | {count} | {row.where_from} |")
    print(f"\n{len(faults)} of {len(report)} comparisons differ where they should not.")
    if json_path is not None:
        record = {"faults": len(faults), "rows": [asdict(row) for row in report], "examples": examples}
        json_path.write_text(json.dumps(record, indent=1) + "\n")
    raise typer.Exit(1 if faults else 0)
