# SPDX-License-Identifier: Apache-2.0
"""What the draft window costs and saves on a GPU, in stock vLLM and as a bare launch.

``run`` makes a random-weight target and draft and runs vLLM with the window off, on, tiny (a draft that has next to
nothing to read) and with vLLM's native alternative (a draft whose config was edited to sliding-window layers), each in
a process of its own, in interleaved rounds. ``micro`` times the window's launch alone::

    python -m tools.bench_gpu run --json bench.json --plot bench.png
    python -m tools.bench_gpu micro --json micro.json

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

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console

from tools.gpu_bench import report, session, summary
from tools.gpu_bench.spec import EngineRun, PairSizes, Workload

MIXED = tuple(1024 << i for i in range(8))
"""1k to 128k, one request each."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status: 0, or 1 where a check failed or a run is missing."""
    parser = _parser()
    args = parser.parse_args(arguments)
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
            if args.json and results:
                args.json.parent.mkdir(parents=True, exist_ok=True)
                args.json.write_text(json.dumps(_document(plan, results, missing)))

        results, missing = session.run_plan(plan, say=lambda line: console.print(line, markup=False), save=save)
    if not results:
        return 1
    entries = summary.summarize(results, plan.sizes, window=plan.window)
    report.print_summary(console, results, entries)
    if args.plot:
        args.plot.parent.mkdir(parents=True, exist_ok=True)
        report.plot(args.plot, results, entries, window=plan.window, tiny=plan.tiny_window)
    failures = summary.failed_checks(results, entries)
    for line in (*(f"FAILED {failure}" for failure in failures), *(f"MISSING {line}" for line in missing)):
        console.print(line, markup=False)
    if not failures and not missing:
        console.print("all checks passed")
    return 1 if failures or missing else 0


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
    from tools.gpu_bench import micro

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
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(rows, indent=1))
    return 0


def _integers(text: str) -> tuple[int, ...]:
    try:
        values = tuple(int(part.replace("_", "")) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of integers like 2048,16384") from None
    if min(values) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: every value must be at least 1")
    return values


def _positive(text: str) -> int:
    (value,) = _integers(text)
    return value


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("not a JSON object")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bench_gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    defaults = argparse.ArgumentDefaultsHelpFormatter

    run = commands.add_parser("run", help="decode step cost in vLLM: off, on, native, tiny", formatter_class=defaults)
    run.set_defaults(command=_run)
    what = run.add_argument_group("what is measured")
    what.add_argument(
        "--configs",
        type=lambda t: tuple(t.split(",")),
        default=session.CONFIGS,
        metavar="NAME,...",
        help="of off, on, native, tiny",
    )
    what.add_argument("--rounds", type=_positive, default=3, metavar="N", help="rounds of off, on and native")
    what.add_argument(
        "--tiny-rounds", type=_positive, default=1, metavar="N", help="rounds of tiny, which is a control"
    )
    what.add_argument("--window", type=_positive, default=4032, metavar="W", help="draft_window_size of on and native")
    what.add_argument(
        "--contexts",
        type=_integers,
        default=(2048, 16384, 65536, 262144, 524288, 1_040_000),
        metavar="N,...",
        help="prompt lengths, tokens",
    )
    what.add_argument("--batches", type=_integers, default=(1,), metavar="N,...", help="requests at each context")
    what.add_argument("--mixed", action="store_true", help="add one batch of mixed contexts")
    what.add_argument("--mixed-contexts", type=_integers, default=MIXED, metavar="N,...", help="one request each")
    what.add_argument("--steps", type=_positive, default=250, metavar="N", help="timed decode steps")
    what.add_argument("--warmup", type=_positive, default=30, metavar="N", help="decode steps before them")
    what.add_argument("--sync-check", action="store_true", help="check off and on for device-to-host synchronization")
    what.add_argument(
        "--prefill",
        choices=("fast", "real"),
        default="fast",
        help="fast: the target skips attention in prefill chunks (K and V are still computed and written)",
    )

    models = run.add_argument_group("models")
    models.add_argument("--method", choices=("dspark", "dflash"), default="dspark", help="draft method")
    models.add_argument("--layers", type=_positive, default=10, metavar="N", help="full-attention target layers")
    models.add_argument("--draft-layers", type=_positive, default=5, metavar="N", help="draft layers")
    models.add_argument(
        "--hidden", type=_positive, default=1024, metavar="N", help="hidden size; the MLP is three times as wide"
    )
    models.add_argument("--heads", type=_positive, metavar="N", help="query heads; default: as many as KV heads")
    models.add_argument("--kv-heads", type=_positive, default=8, metavar="N", help="KV heads of target and draft")
    models.add_argument("--head-dim", type=_positive, default=128, metavar="N", help="size of a head")
    models.add_argument("--draft-tokens", type=_positive, default=7, metavar="K", help="speculative tokens")
    models.add_argument("--seed", type=int, default=0, help="of weights and prompts")

    engine = run.add_argument_group("engine")
    engine.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a toy run of the same flow")
    engine.add_argument("--max-model-len", type=_positive, default=1_048_576, metavar="N", help="longest sequence")
    engine.add_argument("--max-num-batched-tokens", type=_positive, default=8192, metavar="N", help="prefill chunk")
    engine.add_argument("--gpu-memory-utilization", type=float, default=0.9, metavar="F", help="see vLLM")
    engine.add_argument(
        "--engine-args", type=_json_object, default={}, metavar="JSON", help="further arguments of vllm.LLM; they win"
    )

    output = run.add_argument_group("output")
    output.add_argument(
        "--work", type=Path, metavar="DIR", help="models, logs and raw results; default: deleted at end"
    )
    output.add_argument("--json", type=Path, metavar="PATH", help="everything, written anew after every process")
    output.add_argument("--plot", type=Path, metavar="PATH.png", help="step cost against context")
    output.add_argument("--budget", type=float, metavar="SECONDS", help="start no process that would end later")

    micro = commands.add_parser("micro", help="cost of the window's launch alone", formatter_class=defaults)
    micro.set_defaults(command=_micro)
    micro.add_argument("--batches", type=_integers, default=(1, 8, 64, 256), metavar="N,...")
    micro.add_argument("--groups", type=_integers, default=(1, 2, 4), metavar="N,...", help="KV cache groups")
    micro.add_argument("--windows", type=_integers, default=(512, 4032), metavar="W,...")
    micro.add_argument("--max-model-len", type=_positive, default=1_048_576, metavar="N", help="sets the full table")
    micro.add_argument("--block-size", type=_positive, default=16, metavar="N")
    micro.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: no fused launch, host time only")
    micro.add_argument("--json", type=Path, metavar="PATH")
    return parser


if __name__ == "__main__":
    sys.exit(main())
