# SPDX-License-Identifier: Apache-2.0
"""Command line of ``draft-window bench``."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .pair import DRAFT_TOKENS
from .serve import MODES
from .session import CONFIGS

MIXED = tuple(1024 << i for i in range(8))
"""1k to 128k, one request each."""


def parser(description: str | None, commands: Mapping[str, Callable[..., int]]) -> argparse.ArgumentParser:
    """The parser; ``args.command`` is the entry of ``commands`` that was asked for."""
    top = argparse.ArgumentParser(
        prog="draft-window bench", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    subparsers = top.add_subparsers(required=True, metavar="COMMAND")
    defaults = argparse.ArgumentDefaultsHelpFormatter

    run = subparsers.add_parser("run", help="decode step cost in vLLM: off, on, native, tiny", formatter_class=defaults)
    run.set_defaults(command=commands["run"])
    what = run.add_argument_group("what is measured")
    what.add_argument(
        "--configs",
        type=_names(*CONFIGS),
        default=CONFIGS,
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
        "--host-profile", action="store_true", help="after the steps, time what the window is part of on the host"
    )
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
    engine.add_argument(
        "--cpus", type=_cores, default=(), metavar="LIST", help="pin every engine to these cores, like 0-3"
    )
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

    micro = subparsers.add_parser("micro", help="cost of the window's launch alone", formatter_class=defaults)
    micro.set_defaults(command=commands["micro"])
    micro.add_argument("--batches", type=_integers, default=(1, 8, 64, 256), metavar="N,...")
    micro.add_argument("--groups", type=_integers, default=(1, 2, 4), metavar="N,...", help="KV cache groups")
    micro.add_argument("--windows", type=_integers, default=(512, 4032), metavar="W,...")
    micro.add_argument("--max-model-len", type=_positive, default=1_048_576, metavar="N", help="sets the full table")
    micro.add_argument("--block-size", type=_positive, default=16, metavar="N")
    micro.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: no fused launch, host time only")
    micro.add_argument("--json", type=Path, metavar="PATH")

    equality = subparsers.add_parser(
        "equality", help="same tokens from every method, graph mode and window", formatter_class=defaults
    )
    equality.set_defaults(command=commands["equality"])
    equality.add_argument("--methods", type=_names(*DRAFT_TOKENS), default=("dspark", "dflash"), metavar="NAME,...")
    equality.add_argument("--modes", type=_names(*MODES), default=MODES, metavar="NAME,...")
    equality.add_argument("--window", type=_positive, default=64, metavar="W")
    equality.add_argument("--requests", type=_positive, default=32, metavar="N", help="that come and go")
    equality.add_argument("--jobs", type=_positive, default=4, metavar="N", help="engines at a time; nothing is timed")
    equality.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: eager only")
    equality.add_argument("--work", type=Path, metavar="DIR", help="specs, logs and results; default: deleted at end")
    equality.add_argument("--json", type=Path, metavar="PATH")

    demo = subparsers.add_parser("demo-pair", help="acceptance of the demo pair, off and on", formatter_class=defaults)
    demo.set_defaults(command=commands["demo-pair"])
    demo.add_argument("--method", choices=tuple(DRAFT_TOKENS), default="dspark")
    demo.add_argument("--contexts", type=_integers, default=(512, 1024, 2048, 4096, 8192), metavar="N,...")
    demo.add_argument("--prompts", type=_positive, default=16, metavar="N", help="without a reference")
    demo.add_argument("--max-tokens", type=_positive, default=64, metavar="N")
    demo.add_argument("--window", type=_positive, default=512, metavar="W")
    demo.add_argument(
        "--reference", type=Path, metavar="PATH", help="JSON of a run elsewhere: its prompts, its figures"
    )
    demo.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    demo.add_argument("--work", type=Path, metavar="DIR", help="specs, logs and results; default: deleted at end")
    demo.add_argument("--json", type=Path, metavar="PATH")
    return top


def _names(*known: str) -> Callable[[str], tuple[str, ...]]:
    def names(text: str) -> tuple[str, ...]:
        given = tuple(text.split(","))
        unknown = sorted(set(given) - set(known))
        if unknown:
            raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}; known are {', '.join(known)}")
        return given

    return names


def _cores(text: str) -> tuple[int, ...]:
    """Cores as taskset writes them: ``0-3,8``."""
    cores: set[int] = set()
    try:
        for part in text.split(","):
            first, _, last = part.partition("-")
            cores.update(range(int(first), int(last or first) + 1))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of cores like 0-3,8") from None
    missing = sorted(cores - os.sched_getaffinity(0))
    if missing or not cores:
        raise argparse.ArgumentTypeError(f"{text!r}: not available here: {missing or 'no core given'}")
    return tuple(sorted(cores))


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
