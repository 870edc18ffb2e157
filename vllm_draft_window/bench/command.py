# SPDX-License-Identifier: Apache-2.0
"""What the draft window costs and saves on a GPU, in stock vLLM and as a bare launch.

``run`` makes a random-weight target and draft and runs vLLM with the window off, on, tiny (a draft that has next to
nothing to read) and with vLLM's native alternative (a draft whose config was edited to sliding-window layers), each in
a process of its own, in interleaved rounds. ``micro`` times the window's launch alone. ``equality`` and
``demo-pair`` take the demo pair and time nothing: do all methods and graph modes give the same tokens while requests
come and go, and is acceptance what a CPU sees::

    draft-window bench run --json bench.json --plot bench.png
    draft-window bench micro --json micro.json
    draft-window bench equality --json equality.json
    draft-window bench demo-pair --reference cpu.json --json gpu.json

``run`` needs vLLM 0.26 or newer with Model Runner V2 and this project's wheel installed. Its defaults need 65 GB of KV
cache and should take seven to eight minutes on one H200: ten processes of about 30 s to start, 5 s to prefill and 10 s
to decode. ``--prefill real`` adds 22 PFLOP of attention, some 40 s, to each. ``--device cpu`` exercises the same flow
at toy size on vLLM's CPU runner; its times mean nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from vllm_draft_window.bench import arguments, report, session, summary
from vllm_draft_window.bench.spec import EngineRun, PairSizes, Workload


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status: 0, or 1 where a check failed or a run is missing."""
    commands = {"run": _run, "micro": _micro, "equality": _equality, "demo-pair": _demo_pair}
    parser = arguments.parser(__doc__, commands)
    args = parser.parse_args(argv)
    console = Console(soft_wrap=not sys.stdout.isatty(), width=None if sys.stdout.isatty() else 180)
    try:
        return args.command(args, console)
    except ValueError as error:
        parser.error(str(error))


def _run(args: argparse.Namespace, console: Console) -> int:
    with tempfile.TemporaryDirectory(prefix="gpu-bench-") as temporary:
        plan = _plan(args, args.work or Path(temporary))
        session.check_fits(plan)

        def save(results: list[dict[str, Any]], missing: list[str]) -> None:
            if results:
                _write_json(args.json, _document(plan, results, missing))

        results, missing = session.run_plan(plan, say=lambda line: console.print(line, markup=False), save=save)
    if not results:
        return 1
    entries = summary.summarize(results, plan.sizes, window=plan.window)
    report.print_summary(console, results, entries)
    if args.plot:
        args.plot.parent.mkdir(parents=True, exist_ok=True)
        report.plot(args.plot, results, entries, window=plan.window, tiny=plan.tiny_window)
    return _verdict(console, summary.failed_checks(results, entries), missing)


def _document(plan: session.Plan, results: list[dict[str, Any]], missing: list[str]) -> dict[str, Any]:
    entries = summary.summarize(results, plan.sizes, window=plan.window)
    return {
        "plan": session.describe(plan),
        "summary": entries,
        "failed_checks": summary.failed_checks(results, entries),
        "missing": missing,
        "results": results,
    }


def _plan(args: argparse.Namespace, work: Path) -> session.Plan:
    workloads = [
        Workload(str(context) if batch == 1 else f"{batch}x{context}", (context,) * batch)
        for batch in args.batches
        for context in args.contexts
    ]
    if args.mixed:
        workloads.append(Workload("mixed", args.mixed_contexts))
    sizes = PairSizes(
        method=args.method,
        layers=args.layers,
        draft_layers=args.draft_layers,
        hidden=args.hidden,
        heads=args.heads or args.kv_heads,
        kv_heads=args.kv_heads,
        head_dim=args.head_dim,
        draft_tokens=args.draft_tokens,
        max_positions=args.max_model_len,
        seed=args.seed,
    )
    template = EngineRun(
        config="",
        round=0,
        target="",
        draft="",
        window=None,
        method=sizes.method,
        draft_tokens=sizes.draft_tokens,
        workloads=tuple(workloads),
        device=args.device,
        prefill=args.prefill,
        max_model_len=args.max_model_len,
        max_num_seqs=max(len(w.contexts) for w in workloads),
        max_num_batched_tokens=args.max_num_batched_tokens,
        gpu_memory_utilization=args.gpu_memory_utilization,
        warmup=args.warmup,
        steps=args.steps,
        vocab=sizes.vocab,
        seed=args.seed,
        sync_check=args.sync_check and args.device == "cuda",
        cpus=args.cpus,
        host_profile=args.host_profile,
        engine_args=args.engine_args,
    )
    return session.Plan(
        sizes=sizes,
        configs=args.configs,
        rounds=args.rounds,
        tiny_rounds=args.tiny_rounds,
        window=args.window,
        tiny_window=max(8, sizes.draft_tokens + 1),
        template=template,
        work=work,
        budget_s=args.budget,
    )


def _micro(args: argparse.Namespace, console: Console) -> int:
    from vllm_draft_window.bench import micro

    cases = [
        micro.Case(
            batch=batch, groups=groups, window=window, max_model_len=args.max_model_len, block_size=args.block_size
        )
        for window in args.windows
        for groups in args.groups
        for batch in args.batches
    ]
    rows = micro.measure(cases, args.device, say=lambda line: console.print(line, markup=False))
    micro.print_micro(console, rows)
    _write_json(args.json, rows)
    return 0


def _equality(args: argparse.Namespace, console: Console) -> int:
    from vllm_draft_window.bench import equality

    with tempfile.TemporaryDirectory(prefix="gpu-bench-") as temporary:
        matrix = equality.Matrix(
            methods=args.methods,
            modes=args.modes if args.device == "cuda" else ("eager",),
            window=args.window,
            requests=args.requests,
            device=args.device,
            work=args.work or Path(temporary),
            jobs=args.jobs,
        )
        results, missing = equality.run(matrix, say=lambda line: console.print(line, markup=False))
    if not results:
        return _verdict(console, [], missing)
    rows = equality.compare(results, equality.churn(args.requests), args.device)
    equality.print_rows(console, rows)
    failures = equality.failures(results, rows)
    _write_json(args.json, {"rows": rows, "failed_checks": failures, "missing": missing})
    return _verdict(console, failures, missing)


def _demo_pair(args: argparse.Namespace, console: Console) -> int:
    from vllm_draft_window.bench import acceptance, pair

    reference = json.loads(args.reference.read_text()) if args.reference else {"contexts": {}}
    longest = max(args.contexts)
    if args.reference and reference["method"] != args.method:
        raise ValueError(f"--reference {args.reference} is a run of {reference['method']}, not of {args.method}")
    prompts = pair.unpack(reference["prompts"]) if args.reference else pair.texts(args.prompts, longest)
    if longest > min(map(len, prompts)):
        raise ValueError(f"--contexts {longest} is longer than the prompts of --reference {args.reference}")
    with tempfile.TemporaryDirectory(prefix="gpu-bench-") as temporary:
        plan = acceptance.Plan(
            method=args.method,
            contexts=args.contexts,
            prompts=prompts,
            max_tokens=args.max_tokens,
            window=args.window,
            device=args.device,
            work=args.work or Path(temporary),
        )
        document = acceptance.run(plan, say=lambda line: console.print(line, markup=False))
    rows = acceptance.compare(document, reference)
    acceptance.print_document(console, document, rows)
    _write_json(args.json, document | {"against_reference": rows})
    outside = [row for row in rows if not row["within_noise"]]
    return _verdict(console, [f"not the reference's acceptance: {row}" for row in outside], [])


def _write_json(path: Path | None, document: Any) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document))


def _verdict(console: Console, failures: Sequence[str], missing: Sequence[str]) -> int:
    for line in (*(f"FAILED {failure}" for failure in failures), *(f"MISSING {line}" for line in missing)):
        console.print(line, markup=False)
    if not failures and not missing:
        console.print("all checks passed")
    return 1 if failures or missing else 0
