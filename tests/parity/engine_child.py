# SPDX-License-Identifier: Apache-2.0
"""Runs engines of one model runner in a process of its own: the runner is chosen before vLLM is imported.

``python -m tests.parity.engine_child v1|v2 JOBS.json`` reads a list of jobs and prints one JSON line with a record for
each. A job is ``{"name", "method": null | "dflash" | "eagle3", "window": null | W, "num_tokens", "contexts",
"max_tokens", "folder"}``.
"""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tools.cpu_engine import activate

MAX_MODEL_LEN = 1024
MARKER = "parity-records:"


@contextmanager
def recorded_proposals(proposer: Any) -> Iterator[list[list[list[int]]]]:
    """Draft tokens of every proposal, one list per request; requests in the order of their tokens.

    The runners may keep one batch in different row orders.
    """
    proposals: list[list[list[int]]] = []
    propose = proposer.propose

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        drafts = propose(*args, **kwargs)
        proposals.append(sorted(drafts.tolist()))
        return drafts

    proposer.propose = wrapper
    try:
        yield proposals
    finally:
        del proposer.propose


def run_job(job: dict[str, Any], *, v2: bool) -> dict[str, Any]:
    import numpy as np

    from tests.e2e.drafts import speculation as parallel_speculation
    from tests.parity import eagle3_draft
    from tools.measure import Engine, demo_prompts

    window, folder = job["window"], Path(job["folder"])
    arguments: dict[str, Any] = {"max_model_len": MAX_MODEL_LEN, "async_scheduling": False}
    if job["method"] == "dflash":
        arguments["speculative_config"] = parallel_speculation("dflash", folder, num_tokens=job["num_tokens"])
    elif job["method"] == "eagle3":
        arguments["speculative_config"] = eagle3_draft.speculation(folder, num_tokens=job["num_tokens"])
    if v2 and window is not None:
        arguments["additional_config"] = {"draft_window_size": window}
    prompts = [p[-n:] for p, n in zip(demo_prompts(len(job["contexts"]), 900), job["contexts"], strict=True)]
    record: dict[str, Any] = {"name": job["name"], "checked_builds": 0}
    with Engine(**arguments) as engine, ExitStack() as stack:
        assert type(engine.runner).__module__.endswith("cpu.model_runner" if v2 else "cpu_model_runner")
        if job["method"] is not None:
            proposer = engine.speculator if v2 else engine.runner.drafter
            record["proposals"] = stack.enter_context(recorded_proposals(proposer))
        if not v2 and window is not None:
            from tests.parity.check_metadata import MetadataCheck
            from tests.parity.mrv1_window import windowed_proposer

            check = MetadataCheck(window, MAX_MODEL_LEN)
            stack.enter_context(windowed_proposer(proposer, window, check))
        measured = engine.run(prompts, max_tokens=job["max_tokens"])
        if not v2 and window is not None:
            record |= {"checked_builds": check.builds, "windowed_rows": check.windowed_rows, "steps": check.steps}
    record |= {
        "tokens": [list(tokens) for tokens in measured.tokens],
        "drafts": measured.drafts,
        "accepted_per_position": list(np.atleast_1d(measured.accepted_per_position).tolist()),
        "seconds": round(measured.seconds, 1),
    }
    return record


def main() -> None:
    runner, jobs = sys.argv[1], json.loads(Path(sys.argv[2]).read_text())
    activate()
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1" if runner == "v2" else "0"
    # The window of Model Runner V1 is the harness's business here.
    records = [run_job(job, v2=runner == "v2") for job in jobs]
    print(MARKER + json.dumps(records), flush=True)


if __name__ == "__main__":
    main()
