# SPDX-License-Identifier: Apache-2.0
"""One engine process: ``python -m vllm_draft_window.bench.child SPEC.json RESULT.json``.

Engines get a process of their own so that none shares GPU memory, graphs or kernel caches with another.
"""

from __future__ import annotations

import gc
import importlib.metadata
import json
import os
import platform
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .bandwidth import copy_bandwidth
from .probes import AddressProbe, HostTimer, SyncGuard, skip_prefill_attention
from .spec import EngineRun, Workload

PLUGIN = "draft_window"
_SYNC_STEPS = 40
_PROFILED_STEPS = 150


def main() -> None:
    """Run the engine that ``SPEC.json`` describes and write what was measured."""
    spec_path, result_path = map(Path, sys.argv[1:3])
    run = EngineRun.read(spec_path)
    if run.cpus:
        # Threads that are started from here on, and there are none yet, inherit it.
        os.sched_setaffinity(0, run.cpus)
    # Before the engine takes the memory.
    bandwidth = copy_bandwidth(run.device)
    prepare_environment(run.device)
    started = time.perf_counter()
    engine, probe = _start_engine(run)
    startup = time.perf_counter() - started
    runner = engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    skipped_attention: list[str] = []
    if run.prefill == "fast":
        skipped_attention = skip_prefill_attention(engine.vllm_config)

    probe.phase = "run"
    probe.count_replays(runner.speculator)
    measured = {workload.name: _measure(engine, run, workload) for workload in run.workloads}
    result = {
        "config": run.config,
        "round": run.round,
        "copy_bandwidth": bandwidth,
        "startup_s": startup,
        "versions": versions(),
        "machine": machine(run.device),
        "engine": describe(engine, runner) | {"prefill_attention_skipped_in": skipped_attention},
        "workloads": measured,
        "addresses": probe.report(runner.speculator),
        "sync": _sync_check(engine, runner.speculator, run) if run.sync_check else None,
        "host_us": _host_profile(engine, runner.speculator, run) if run.host_profile else None,
    }
    result_path.write_text(json.dumps(result))
    # Interpreter shutdown would spend seconds on freeing the KV cache.
    sys.stdout.flush()
    os._exit(0)


def prepare_environment(device: str) -> None:
    """Set what vLLM reads at import.

    Raises:
        RuntimeError: the window's plugin is not installed.
    """
    names = {point.name for point in importlib.metadata.entry_points(group="vllm.general_plugins")}
    if PLUGIN not in names:
        raise RuntimeError(f"vLLM would not find the plugin {PLUGIN!r}; install this project's wheel (found: {names})")
    if device == "cpu":
        from vllm_draft_window.cpu_engine import activate

        activate()
        return
    os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "1")
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    # One process, so that the probes reach the model runner.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"


def _start_engine(run: EngineRun) -> tuple[Any, Any]:
    """Start vLLM with stock arguments; returns its ``LLMEngine`` and the installed address probe."""
    from vllm import LLM

    arguments: dict[str, Any] = {
        "model": run.target,
        "skip_tokenizer_init": True,
        "seed": run.seed,
        "max_model_len": run.max_model_len,
        "max_num_seqs": run.max_num_seqs,
        "max_num_batched_tokens": run.max_num_batched_tokens,
        # A real prefill is shared by the contexts of one engine; a fast one costs little, and without a cache every
        # configuration prefills in the same chunks, to the same bits.
        "enable_prefix_caching": run.prefill == "real",
        "speculative_config": {
            "method": run.method,
            "model": run.draft,
            "num_speculative_tokens": run.draft_tokens,
        },
        "additional_config": {} if run.window is None else {"draft_window_size": run.window},
    }
    if run.device == "cpu":
        arguments |= {
            "dtype": "float32",
            "enforce_eager": True,
            "kv_cache_memory_bytes": 64 << 20,
            "block_size": 32,
        }
    else:
        arguments |= {
            "dtype": "bfloat16",
            "gpu_memory_utilization": run.gpu_memory_utilization,
            "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
        }
    probe = AddressProbe()
    return LLM(**(arguments | run.engine_args)).llm_engine, probe


def _measure(engine: Any, run: EngineRun, workload: Workload) -> dict[str, Any]:
    """Prefill one batch, then time decode steps; ``skipped`` says why where it does not fit."""
    if reason := _does_not_fit(engine, run, workload):
        return {"contexts": workload.contexts, "skipped": reason}
    tokens = _submit(engine, run, workload)
    started = time.perf_counter()
    prefill_steps = 0
    while not all(tokens.values()):
        _step(engine, tokens)
        prefill_steps += 1
    prefill = time.perf_counter() - started
    for _ in range(run.warmup):
        _step(engine, tokens)

    before = sum(map(len, tokens.values()))
    seconds = np.empty(run.steps)
    # A collection walks prompts of a million integers.
    gc.collect()
    gc.disable()
    try:
        for i in range(run.steps):
            begin = time.perf_counter()
            outputs = engine.step()
            seconds[i] = time.perf_counter() - begin
            _collect(outputs, tokens)
    finally:
        gc.enable()
    emitted = sum(map(len, tokens.values())) - before
    _retire(engine, tokens)

    p10, median, p90 = np.percentile(seconds * 1e3, (10, 50, 90))
    return {
        "contexts": workload.contexts,
        "prefill_s": prefill,
        "prefill_steps": prefill_steps,
        "steps": run.steps,
        "median_ms": median,
        "p10_ms": p10,
        "p90_ms": p90,
        "mean_ms": float(seconds.mean() * 1e3),
        "step_ms": [round(s * 1e3, 4) for s in seconds],
        "accepted_length": emitted / (run.steps * len(tokens)),
        "tokens": list(tokens.values()),
    }


def _does_not_fit(engine: Any, run: EngineRun, workload: Workload) -> str | None:
    """Preemption would silently change what a step does, so a batch must fit into the KV cache."""
    cache_config = engine.vllm_config.cache_config
    per_request = [-(-(c + run.max_tokens(workload)) // cache_config.block_size) for c in workload.contexts]
    scheduler = engine.engine_core.engine_core.scheduler
    # An upper bound: a sliding group needs fewer.
    groups = len(scheduler.kv_cache_config.kv_cache_groups)
    available = scheduler.kv_cache_config.num_blocks
    needed = sum(per_request) * groups
    return f"needs {needed} KV blocks, {available} there" if needed > available else None


@cache
def _prompt(seed: int, request: int, vocab: int, length: int) -> list[int]:
    """Random tokens; the last id is the draft's mask token and stays out."""
    return np.random.default_rng((seed, request)).integers(0, vocab - 1, size=length).tolist()


def _submit(engine: Any, run: EngineRun, workload: Workload) -> dict[str, list[int]]:
    """Add the requests; returns their token lists, to be filled by :func:`_collect`."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(
        temperature=0.0,
        max_tokens=run.max_tokens(workload),
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
    tokens: dict[str, list[int]] = {}
    for i, length in enumerate(workload.contexts):
        # Contexts are prefixes of one another, which a prefix cache makes use of.
        longest = max(w.contexts[i] for w in run.workloads if i < len(w.contexts))
        name = f"{workload.name}-{i}"
        engine.add_request(name, {"prompt_token_ids": _prompt(run.seed, i, run.vocab, longest)[:length]}, params)
        tokens[name] = []
    return tokens


def _step(engine: Any, tokens: dict[str, list[int]]) -> None:
    _collect(engine.step(), tokens)


def _collect(outputs: list[Any], tokens: dict[str, list[int]]) -> None:
    for output in outputs:
        if output.finished:
            raise RuntimeError(f"request {output.request_id} ended while it was measured ({len(tokens)} requests)")
        tokens[output.request_id].extend(output.outputs[0].token_ids)


def _retire(engine: Any, tokens: dict[str, list[int]]) -> None:
    engine.abort_request(list(tokens))
    # Asynchronous scheduling leaves a batch in flight.
    for _ in range(3):
        engine.step()


def _sync_check(engine: Any, speculator: Any, run: EngineRun) -> dict[str, Any]:
    """Decode some steps with the window's refresh and the draft's metadata build guarded."""
    guard = SyncGuard()
    guard.watch(speculator)
    single = sorted(c for w in run.workloads for c in w.contexts[:1])
    # Long enough for the window to crop, where there is such a context.
    context = next((c for c in single if c > (run.window or 0) + 256), single[-1])
    tokens = _submit(engine, run, Workload("sync", (context,)))
    for _ in range(-(-context // run.max_num_batched_tokens) + _SYNC_STEPS):
        _step(engine, tokens)
    report = guard.finish(speculator)
    _retire(engine, tokens)
    return report | {"context": context}


def _host_profile(engine: Any, speculator: Any, run: EngineRun) -> dict[str, Any]:
    """Host time per decode step of what the window is part of, apart from the measured steps: timing costs too."""
    context = min(c for w in run.workloads for c in w.contexts)
    tokens = _submit(engine, run, Workload("host", (context,)))
    while not all(tokens.values()):
        _step(engine, tokens)
    for _ in range(run.warmup):
        _step(engine, tokens)
    timer = HostTimer()
    timer.watch(speculator)
    for _ in range(_PROFILED_STEPS):
        _step(engine, tokens)
    timer.remove()
    _retire(engine, tokens)
    return {"context": context, "methods": timer.report(_PROFILED_STEPS)}


def versions() -> dict[str, str | None]:
    import vllm

    versions: dict[str, str | None] = {
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "vllm": vllm.__version__,
    }
    for name in ("torch", "triton", "transformers", "vllm-draft-window"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def machine(device: str) -> dict[str, Any]:
    machine: dict[str, Any] = {"cpu_cores": os.cpu_count(), "device": device}
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        machine |= {"device": properties.name, "memory_gib": round(properties.total_memory / 2**30, 1)}
    return machine


def describe(engine: Any, runner: Any) -> dict[str, Any]:
    """What the engine decided, for the report and for the checks."""
    config, speculator = engine.vllm_config, runner.speculator
    inputs = getattr(speculator, "windowed_inputs", None)
    groups = engine.engine_core.engine_core.scheduler.kv_cache_config.kv_cache_groups
    return {
        "speculator": type(speculator).__name__,
        "window_columns": None if inputs is None else list(inputs.geometry.columns),
        "window_bytes": None if inputs is None else inputs.num_bytes,
        "draft_backends": sorted({g.backend.get_name() for groups in speculator.attn_groups for g in groups}),
        "kv_cache_groups": [f"{len(g.layer_names)} x {type(g.kv_cache_spec).__name__}" for g in groups],
        "num_kv_blocks": config.cache_config.num_gpu_blocks,
        "block_size": config.cache_config.block_size,
        "cudagraph_mode": str(config.compilation_config.cudagraph_mode),
        "async_scheduling": config.scheduler_config.async_scheduling,
        "enable_prefix_caching": config.cache_config.enable_prefix_caching,
        "additional_config": config.additional_config,
    }


if __name__ == "__main__":
    main()
