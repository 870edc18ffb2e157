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

from tests.engines import Engines
from vllm_draft_window.cpu_engine import activate

MAX_MODEL_LEN, BLOCK = 1024, 32
MARKER = "parity-records:"


@contextmanager
def recorded_proposals(proposer: Any, record: dict[str, Any], window: int | None, *, v2: bool) -> Iterator[None]:
    """Draft tokens of every proposal, one list per request; requests in the order of their tokens.

    The runners may keep one batch in different row orders. Model Runner V2 also records whether a block edge lies
    between the starts of a window that counts rejected tokens and of one that does not.
    """
    beyond = proposer.num_speculative_steps - window if v2 and window else 0
    record |= {"proposals": [], "straddles": []}
    propose = proposer.propose

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        drafts = propose(*args, **kwargs)
        rows = drafts.tolist()
        counted, rejected = (args[0].seq_lens.tolist(), args[6].tolist()) if v2 else ([0] * len(rows),) * 2
        edges = [(n + beyond) // BLOCK != (n - r + beyond) // BLOCK for n, r in zip(counted, rejected, strict=True)]
        pairs = sorted(zip(rows, edges, strict=True))
        record["proposals"].append([row for row, _ in pairs])
        record["straddles"].append([across for _, across in pairs])
        return drafts

    proposer.propose = wrapper
    try:
        yield
    finally:
        del proposer.propose


def run_job(job: dict[str, Any], engines: Engines, *, v2: bool) -> dict[str, Any]:
    import numpy as np

    from tests.e2e.drafts import speculation as parallel_speculation
    from tests.parity import eagle3_draft
    from tools.demo_pair import demo_prompts

    window, folder = job["window"], Path(job["folder"])
    arguments: dict[str, Any] = {"max_model_len": MAX_MODEL_LEN, "async_scheduling": False}
    if job["method"] == "dflash":
        arguments["speculative_config"] = parallel_speculation("dflash", folder, num_tokens=job["num_tokens"])
    elif job["method"] == "eagle3":
        arguments["speculative_config"] = eagle3_draft.speculation(folder, num_tokens=job["num_tokens"])
    if v2 and window is not None:
        # With a gate, however low, the window is not masked on top of the crop, which Model Runner V1 cannot either.
        arguments["additional_config"] = {"draft_window_size": window, "draft_window_min_context": 1}
    prompts = [
        p[-n:]
        for p, n in zip(demo_prompts(len(job["contexts"]), max(900, *job["contexts"])), job["contexts"], strict=True)
    ]
    record: dict[str, Any] = {"name": job["name"], "checked_builds": 0}
    with engines.shared(**arguments) as engine, ExitStack() as stack:
        assert type(engine.runner).__module__.endswith("cpu.model_runner" if v2 else "cpu_model_runner")
        if job["method"] is not None:
            proposer = engine.speculator if v2 else engine.runner.drafter
            stack.enter_context(recorded_proposals(proposer, record, window, v2=v2))
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
    engines = Engines()
    jobs.sort(key=lambda job: (str(job["method"]), str(job["window"])))  # those of one configuration share an engine
    records = [run_job(job, engines, v2=runner == "v2") for job in jobs]
    engines.close()
    print(MARKER + json.dumps(records), flush=True)


if __name__ == "__main__":
    main()
