# SPDX-License-Identifier: Apache-2.0
"""What the draft window costs and saves on a GPU, in stock vLLM and as a bare launch."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import BadParameter, Option

from vllm_draft_window.clone import require_clone
from vllm_draft_window.parameters import json_object, names, numbers, parser

CONFIGURATIONS = ("off", "on", "auto", "native", "reclaim", "sink", "tiny")

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)


def _cores(text: str) -> tuple[int, ...]:
    """Cores as taskset writes them: ``0-3,8``."""
    cores: set[int] = set()
    try:
        for part in filter(None, text.split(",")):
            first, _, last = part.partition("-")
            cores.update(range(int(first), int(last or first) + 1))
    except ValueError:
        raise BadParameter(f"{text!r} is not a list of cores like 0-3,8") from None
    if missing := sorted(cores - os.sched_getaffinity(0)):
        raise BadParameter(f"{text!r}: not available here: {missing}")
    return tuple(sorted(cores))


def _named(option: str, what: str, *known: str) -> Any:
    return Option(parser=parser(names, option, known), metavar="NAME,...", help=f"{what}: of {', '.join(known)}.")


def _list(option: str, help: str) -> Any:
    return Option(parser=parser(numbers, option), metavar="N,...", help=help)


def _console() -> Any:
    from rich.console import Console

    # Whole tables in a log too.
    return Console(width=None if sys.stdout.isatty() else 220)


@contextmanager
def _in(work: Path | None) -> Iterator[Path]:
    """A folder for models and logs."""
    with tempfile.TemporaryDirectory(prefix="draft-window-bench-") as temporary:
        yield (work or Path(temporary)).resolve()


def _write(path: Path | None, **document: Any) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document))


def _verdict(failures: Sequence[str], missing: Sequence[str]) -> None:
    """Exit status 1 where a check failed or a run is missing."""
    for line in (*(f"FAILED {failure}" for failure in failures), *(f"MISSING {line}" for line in missing)):
        typer.echo(line)
    if failures or missing:
        raise typer.Exit(1)
    typer.echo("all checks passed")


_MIXED = ",".join(str(1024 << i) for i in range(8))


_JSON = Option(parser=parser(json_object, "--engine-args"), metavar="JSON", help="More of vllm.LLM's; they win.")
Device = Annotated[str, Option(metavar="cuda|cpu", help="cpu: a toy run of the same flow; its times mean nothing.")]
Json = Annotated[Path | None, Option("--json", help="Where to write everything.")]
Window = Annotated[int, Option(min=1, help="draft_window_size, and the native window.")]
Work = Annotated[Path | None, Option(help="Folder for models and logs. Default: deleted at the end.")]


@app.command()
def run(
    configs: Annotated[Any, _named("--configs", "What is compared", *CONFIGURATIONS)] = "off,on,native,tiny",
    against: Annotated[list[Path] | None, Option(help="Another checkout, whose window runs beside this one's.")] = None,
    window: Window = 4032,
    rounds: Annotated[int, Option(min=1, help="How often engines are started; tiny, a control, once.")] = 3,
    turns: Annotated[int, Option(min=1, help="How often an engine runs every workload.")] = 1,
    together: Annotated[bool, Option("--together", help="All engines of a round at once, taking turns.")] = False,
    contexts: Annotated[Any, _list("--contexts", "Prompt lengths, tokens.")] = "2048,16384,65536,262144,524288,1040000",
    batches: Annotated[Any, _list("--batches", "Requests at each context.")] = "1",
    mixed: Annotated[bool, Option("--mixed", help="Add one batch of mixed contexts.")] = False,
    mixed_contexts: Annotated[Any, _list("--mixed-contexts", "One request each.")] = _MIXED,
    capacity: Annotated[Any, _list("--capacity", "Request lengths: how many does the KV cache hold at once?")] = None,
    full: Annotated[int | None, Option(min=1, help="Decode as many requests of so many tokens as it holds.")] = None,
    max_requests: Annotated[int, Option(min=1, help="Most of them.")] = 32,
    steps: Annotated[int, Option(min=1, help="Timed decode steps.")] = 250,
    warmup: Annotated[int, Option(min=1, help="Decode steps before them.")] = 30,
    sync_check: Annotated[bool, Option("--sync-check", help="Look for device-to-host synchronization.")] = False,
    host_profile: Annotated[bool, Option("--host-profile", help="Time the window's surroundings on the host.")] = False,
    prefill: Annotated[str, Option(metavar="fast|real", help="fast: no attention in the target's chunks.")] = "fast",
    method: Annotated[str, Option(metavar="NAME", help="Draft method: dspark, dflash, eagle3 or mtp.")] = "dspark",
    layers: Annotated[int, Option(min=1, help="Full-attention layers of the target.")] = 10,
    draft_layers: Annotated[int | None, Option(min=1, help="Default: 5; EAGLE3 and MTP have 1.")] = None,
    hidden: Annotated[int, Option(min=1, help="Hidden size; the MLP is three times as wide.")] = 1024,
    heads: Annotated[int | None, Option(min=1, help="Query heads. Default: as many as KV heads.")] = None,
    kv_heads: Annotated[int, Option(min=1, help="KV heads of target and draft.")] = 8,
    head_dim: Annotated[int, Option(min=1, help="Size of a head.")] = 128,
    draft_tokens: Annotated[int, Option(min=1, help="Speculative tokens.")] = 7,
    seed: Annotated[int, Option(help="Of weights and prompts.")] = 0,
    device: Device = "cuda",
    cpus: Annotated[Any, Option(parser=_cores, metavar="LIST", help="Pin engines to these cores, like 0-3.")] = "",
    max_model_len: Annotated[int | None, Option(min=1, help="Longest sequence. Default: what is needed.")] = None,
    max_num_batched_tokens: Annotated[int, Option(min=1, help="Prefill chunk.")] = 8192,
    engine_args: Annotated[Any, _JSON] = "{}",
    work: Work = None,
    budget: Annotated[float | None, Option(help="Seconds: start no engine that would be done later.")] = None,
    out: Json = None,
    plot: Annotated[Path | None, Option(metavar="PATH.png", help="Step cost against context.")] = None,
) -> None:
    """Decode step cost on models of random weights: off, on, native, ..., in interleaved rounds.

    The defaults need 65 GB of KV cache and seven to eight minutes on one H200: ten processes of about 30 s to start,
    5 s to prefill and 10 s to decode. `--together` starts them side by side where they fit.
    """
    from . import models, report, session, summary
    from .plan import Plan, Workload, configurations

    batched = {f"{n}x{context}" if n > 1 else f"{context}": (context,) * n for n in batches for context in contexts}
    batched |= {"mixed": tuple(mixed_contexts)} if mixed else {}
    with _in(work) as folder:
        try:
            sizes = models.PairSizes(
                method=method,
                layers=layers,
                draft_layers=draft_layers or models.DRAFT_LAYERS.get(method, 1),
                hidden=hidden,
                heads=heads or kv_heads,
                kv_heads=kv_heads,
                head_dim=head_dim,
                draft_tokens=draft_tokens,
                seed=seed,
            )
            chosen = configurations(configs, sizes, window=window, against=against or ())
            plan = Plan(
                sizes=sizes,
                workloads=[Workload(name=name, contexts=c, warmup=warmup, steps=steps) for name, c in batched.items()],
                work=folder,
                device=device,
                fast_prefill=prefill == "fast",
                chunk=max_num_batched_tokens,
                max_model_len=max_model_len,
                full=full,
                max_num_seqs=max_requests if full else None,
                whole_gpu=bool(capacity or full),
            )
        except ValueError as error:
            raise BadParameter(str(error)) from None
        plan.write_models(chosen.values())
        engines = [
            session.EngineSpec(
                name=name,
                engine_args=plan.engine_args(configuration) | engine_args,
                tree=configuration.tree,
                once=name.startswith("tiny"),
            )
            for name, configuration in chosen.items()
        ]
        # Long enough for the window to crop, where there is such a context.
        guarded = min((context for context in contexts if context > window + 256), default=max(contexts))
        watched = {"guarded": guarded if sync_check else None, "profiled": min(contexts) if host_profile else None}
        script: session.Script = [
            *([("capacity", {"lengths": capacity})] if capacity else []),
            *(("time_steps", {"workload": workload}) for _ in range(turns) for workload in plan.workloads),
            *([("saturate", {"length": full, "workload": plan.workloads[0]})] if full else []),
            ("report", watched),
        ]
        results, missing = session.run(
            engines,
            script,
            work=folder,
            device=device,
            at_once=len(engines) if together else 1,
            rounds=rounds,
            cpus=cpus,
            fast_prefill=plan.fast_prefill,
            budget_s=budget,
            say=typer.echo,
            save=partial(_write, out),
        )
    if not results:
        _verdict([], missing)
    entries = summary.summarize(results, sizes, window=window)
    failures = summary.failed_checks(results, entries)
    _write(out, results=results, missing=missing, summary=entries, failed_checks=failures)
    report.print_steps(_console(), results, entries)
    if capacity or full:
        _console().print(report.saturation(results))
    if plot:
        report.plot_steps(plot, report.machine(results[0]), entries, window=window)
    _verdict(failures, missing)


@app.command()
def micro(
    batches: Annotated[Any, _list("--batches", "Requests.")] = "1,8,64,256",
    groups: Annotated[Any, _list("--groups", "KV cache groups.")] = "1,2,4",
    windows: Annotated[Any, _list("--windows", "draft_window_size values.")] = "512,4032",
    max_model_len: Annotated[int, Option(min=1, help="Sets the full table.")] = 1_048_576,
    block_size: Annotated[int, Option(min=1, help="Tokens.")] = 16,
    device: Device = "cuda",
    out: Json = None,
) -> None:
    """Cost of the window's launch alone, against the same in plain torch operations."""
    from . import micro

    more = {"max_model_len": max_model_len, "block_size": block_size}
    cases = [micro.Case(batch=b, groups=g, window=w, **more) for w in windows for g in groups for b in batches]
    rows = micro.measure(cases, device, say=typer.echo)
    _console().print(micro.table(rows))
    _write(out, rows=rows)


@app.command()
def equality(
    methods: Annotated[Any, _named("--methods", "Drafts", "dspark", "dflash", "eagle3")] = "dspark,dflash",
    modes: Annotated[Any, _named("--modes", "CUDA graphs", "eager", "piecewise", "full")] = "eager,piecewise,full",
    window: Window = 64,
    requests: Annotated[int, Option(min=1, help="That come and go.")] = 32,
    jobs: Annotated[int, Option(min=1, help="Engines at a time; nothing is timed.")] = 4,
    device: Device = "cuda",
    work: Work = None,
    out: Json = None,
) -> None:
    """The same tokens from every method, graph mode and window, with the demo pair (from a clone)."""
    require_clone("The demo pair")
    from . import equality, session

    churn = equality.churn(requests)
    script = [("serve", churn | {"guard": device == "cuda"})]
    with _in(work) as folder:
        engines = equality.engines(methods, modes if device == "cuda" else ("eager",), window, folder, device)
        results, missing = session.run(engines, script, work=folder, device=device, at_once=jobs, say=typer.echo)
    if not results:
        _verdict([], missing)
    equality.compare(results, churn["prompts"], device)
    failures = equality.failures(results)
    _console().print(equality.table(results))
    _write(out, results=results, missing=missing, failed_checks=failures)
    _verdict(failures, missing)
