# SPDX-License-Identifier: Apache-2.0
"""Soak test: the demo pair under hours' worth of traffic in minutes, every token judged by the target itself.

Requests of 50 to 8,000 tokens arrive in waves, share prefixes, are aborted, and are preempted all at once from time to
time. Float32 keeps near-ties rare; a token that is not the target's best is only accepted where their logits tie. Every
engine gets a process of its own, and the target, which needs no engine, comes last::

    python -m tools.soak run off --out off.json
    python -m tools.soak run window --out window.json
    python -m tools.soak run reclaim --out reclaim.json
    python -m tools.soak check off.json window.json reclaim.json

With ``poisoned``, blocks that reclaim frees are spoiled at once; acceptance must be that of ``reclaim``, both without
prefix caching.
"""

import gc
import json
import math
import os
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from tools.demo_pair import demo_prompts, demo_speculation
from tools.poison import Poison

if TYPE_CHECKING:
    from vllm_draft_window.measuring.engine import Engine

MODES: dict[str, tuple[str, ...]] = {
    "off": (),
    "window": ("size",),
    "auto": ("size",),
    "reclaim": ("size", "reclaim"),
    "poisoned": ("size", "reclaim"),
}
POISON = 1e4
STALLED = 5000
"""Steps without a finished request after which none will come."""
TIE = 1e-3
"""Nats between the target's two best tokens below which rounding may choose; float32 is good to about 1e-5 of it."""

app = typer.Typer(add_completion=False, help=__doc__)
Tokens = Annotated[int, typer.Option(min=1, help="Tokens to generate, about; aborted requests come on top.")]
Longest = Annotated[int, typer.Option(min=100, help="Prompt and output of the longest request.")]
AtOnce = Annotated[int, typer.Option(min=1, help="Most requests at once.")]
Device = Annotated[str, typer.Option(help="cuda, or cpu in Triton's interpreter.")]


@dataclass(frozen=True)
class Request:
    prompt: list[int]
    max_tokens: int
    aborted_after: int | None
    """Steps in the engine; such a request is not compared."""


def make_requests(tokens: int, longest: int, seed: int = 0) -> list[Request]:
    """Requests that generate ``tokens`` in all, without those that are aborted; the same for every mode."""
    rng = np.random.default_rng(seed)
    texts = demo_prompts(64, min(longest, 16_384))
    requests = []
    while tokens > 0:
        length = int(math.exp(rng.uniform(math.log(50), math.log(longest))))
        max_tokens = min(int(rng.integers(20, 1000)), length // 2)
        # Beginnings of a few texts, so that prefixes are shared, and an end of its own for every second request.
        prompt = texts[rng.integers(len(texts))][: length - max_tokens]
        own = int(rng.integers(0, len(prompt))) if rng.random() < 0.5 else 0
        prompt = prompt[: len(prompt) - own] + texts[rng.integers(len(texts))][:own]
        aborted_after = int(rng.integers(1, 60)) if rng.random() < 0.05 else None
        requests.append(Request(prompt, max_tokens, aborted_after))
        tokens -= max_tokens if aborted_after is None else 0
    return requests


def start_engine(device: str, longest: int, at_once: int, **engine_args: Any) -> "Engine":
    arguments: dict[str, Any]
    if device == "cpu":
        from vllm_draft_window.cpu_engine import activate

        if "vllm" not in sys.modules:
            activate()
        arguments = dict(kv_cache_memory_bytes=at_once * longest * 4096)
    else:
        os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "1")
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        # Triton would multiply float32 with ten bits of mantissa.
        os.environ["TRITON_F32_DEFAULT"] = "ieee"
        arguments = dict(
            # The only one that has float32 and full graphs. Its 6 KiB a token let fewer requests in than come.
            attention_config={"backend": "TRITON_ATTN"},
            enforce_eager=False,
            compilation_config={"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
            gpu_memory_utilization=0.1,  # several may share the GPU
            kv_cache_memory_bytes=at_once * longest * 1024,
        )
    from vllm_draft_window import register
    from vllm_draft_window.measuring.engine import Engine

    register()  # for a checkout that is not installed
    return Engine(
        max_model_len=longest + 64,
        max_num_seqs=at_once,
        max_num_batched_tokens=max(longest, 512),
        **(arguments | engine_args),
    )


def serve(engine: "Engine", requests: Sequence[Request], *, at_once: int, preempt_every: int) -> list[list[int] | None]:
    """Output tokens of every request, ``None`` where it was aborted.

    The number of requests at once goes up and down in waves, so that batches of every size decode between prefills.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    llm = engine.llm.llm_engine
    greedy: dict[str, Any] = dict(
        temperature=0.0, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
    )
    waiting = deque(enumerate(requests))
    outputs: list[list[int] | None] = [None] * len(requests)
    # by name: number, and the step in which it is aborted
    running: dict[str, tuple[int, float]] = {}
    wave, step, last_finished = at_once, 0, 0
    while (waiting or llm.has_unfinished_requests()) and step < last_finished + STALLED:
        # A wave arrives once the last one has gone down to a quarter.
        if len(running) <= wave // 4:
            wave = max(at_once if wave < at_once else at_once // 2, 1)
            while waiting and len(running) < wave:
                i, request = waiting.popleft()
                parameters = SamplingParams(max_tokens=request.max_tokens, **greedy)
                llm.add_request(f"request-{i}", {"prompt_token_ids": request.prompt}, parameters)
                after = math.inf if request.aborted_after is None else request.aborted_after
                running[f"request-{i}"] = i, step + after
        if overdue := [name for name, (_, when) in running.items() if when <= step]:
            llm.abort_request(overdue)
            for name in overdue:
                del running[name]
        if preempt_every and step % preempt_every == preempt_every - 1:
            engine.llm.reset_prefix_cache(reset_running_requests=True)
        output: Any
        for output in llm.step():
            if output.finished and output.request_id in running:
                i, _ = running.pop(output.request_id)
                outputs[i] = list(output.outputs[0].token_ids)
                last_finished = step
        step += 1
    return outputs


def resources(engine: "Engine") -> dict[str, int]:
    """What an idle engine holds: nothing may be more after the traffic than before."""
    import torch

    gc.collect()
    scheduler, cache = engine.scheduler, engine.scheduler.kv_cache_manager
    return {
        # One is the null block.
        "blocks_in_use": scheduler.kv_cache_config.num_blocks - 1 - cache.block_pool.get_num_free_blocks(),
        "requests": len(scheduler.requests),
        "block_tables": sum(len(manager.req_to_blocks) for manager in cache.coordinator.single_type_managers),
        "device_bytes": torch.cuda.memory_allocated() if torch.cuda.is_available() else 0,
    }


@app.command()
def run(
    mode: Annotated[str, typer.Argument(help=", ".join(MODES))],
    out: Annotated[Path, typer.Option(help="Where the outputs go.")],
    tokens: Tokens = 1_000_000,
    longest: Longest = 8000,
    at_once: AtOnce = 96,
    preempt_every: Annotated[int, typer.Option(min=0, help="Steps between preemptions of all; 0: for memory.")] = 400,
    method: Annotated[str, typer.Option(help="dspark or eagle3.")] = "dspark",
    window: Annotated[int, typer.Option(min=1, help="draft_window_size.")] = 512,
    prefix_caching: Annotated[bool, typer.Option(help="Without, nothing freed is found again.")] = True,
    device: Device = "cuda",
) -> None:
    """Serve the traffic with speculation; exit status 1 where the engine holds more afterwards."""
    if mode not in MODES:
        raise typer.BadParameter(f"{mode} is none of {', '.join(MODES)}")
    requests = make_requests(tokens, longest)
    options = {"size": "auto" if mode == "auto" else window, "reclaim": True}
    with (
        start_engine(
            device,
            longest,
            at_once,
            enable_prefix_caching=prefix_caching,
            speculative_config=demo_speculation(method),
            additional_config={f"draft_window_{name}": options[name] for name in MODES[mode]},
        ) as engine,
        Poison(engine, POISON) if mode == "poisoned" else nullcontext(),
    ):
        # Lazily allocated workspaces are not leaks.
        serve(engine, make_requests(tokens // 50 + 1, longest, seed=1), at_once=at_once, preempt_every=preempt_every)
        engine.llm.reset_prefix_cache()
        asynchronous = engine.runner.vllm_config.scheduler_config.async_scheduling
        before, counted, started = resources(engine), engine.counters(), time.perf_counter()
        outputs = serve(engine, requests, at_once=at_once, preempt_every=preempt_every)
        seconds = time.perf_counter() - started
        engine.llm.reset_prefix_cache()
        after, counters = resources(engine), engine.counters()
    gained = {name: int(np.subtract(counters.get(name, 0), counted.get(name, 0))) for name in _COUNTERS}
    result = {
        "mode": mode,
        "method": method,
        "device": device,
        "async_scheduling": asynchronous,
        "longest": longest,
        "at_once": at_once,
        "generated": sum(map(len, filter(None, outputs))),
        "finished": sum(output is not None for output in outputs),
        "aborted": sum(request.aborted_after is not None for request in requests),
        "seconds": round(seconds, 1),
        "counters": gained,
        "before": before,
        "after": after,
    }
    print(json.dumps(result, indent=2), flush=True)
    out.write_text(json.dumps(result | {"requests": list(map(asdict, requests)), "outputs": outputs}))
    raise typer.Exit(int(any(after[name] > before[name] + _SLACK.get(name, 0) for name in after)))


_COUNTERS = (
    "vllm:num_preemptions",
    "vllm:prefix_cache_hits",
    "vllm:spec_decode_num_drafts",
    "vllm:spec_decode_num_accepted_tokens",
)
# The caching allocator rounds.
_SLACK = {"device_bytes": 1 << 20}


@app.command()
def check(
    results: Annotated[list[Path], typer.Argument(help="What `run` wrote, all for the same traffic.")],
    device: Device = "cuda",
) -> None:
    """Ask the target about every token; exit status 1 where one is not its best, or a request has no output."""
    import torch

    from tools.demo_pair.judge import logits_of_last

    runs = [json.loads(path.read_text()) for path in results]
    if any(run["requests"] != runs[0]["requests"] for run in runs):
        raise typer.BadParameter("these are not of the same traffic")
    failed = False
    for result in runs:
        missing, gaps = 0, []
        for request, output in zip(result["requests"], result["outputs"], strict=True):
            if request["aborted_after"] is not None:
                continue
            if output is None or len(output) != request["max_tokens"]:
                missing += 1
                continue
            # [tokens, vocab]; differences of logits are those of log probabilities
            logits = logits_of_last(request["prompt"] + output, len(output), device)
            chosen = logits.gather(1, torch.tensor(output, device=device)[:, None])[:, 0]
            behind = logits.amax(-1) - chosen
            gaps += behind[behind > 0].tolist()
        bad = sum(gap > TIE for gap in gaps)
        failed |= bool(bad or missing)
        traffic = "{generated:,} tokens of {finished:,} requests, {aborted} aborted".format(**result)
        print(
            f"{result['mode']}: {traffic}; {missing} without all of their output, {len(gaps)} differences, {bad} of "
            f"them no tie; largest {max(gaps, default=0.0):.1e} nats"
        )
    raise typer.Exit(int(failed))


if __name__ == "__main__":
    app()
