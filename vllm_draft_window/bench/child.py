# SPDX-License-Identifier: Apache-2.0
"""An engine that a parent measures: ``python -m vllm_draft_window.bench.child FILE_DESCRIPTOR``."""

from __future__ import annotations

import gc
import importlib.metadata
import os
import platform
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.utils.benchmark import Timer

from vllm_draft_window.measuring.engine import Engine

from .plan import Workload, prompt

_WATCHED_STEPS = 100


def main() -> None:
    """Start the engine that the parent describes, then answer its calls until it goes away."""
    pipe = Connection(int(sys.argv[1]))
    cpus, engine_args, fast_prefill = pipe.recv()
    if cpus:
        # Threads that are started from here on, and there are none yet, inherit it.
        os.sched_setaffinity(0, cpus)
    try:
        engine = BenchEngine(engine_args, fast_prefill=fast_prefill)
        while True:
            method, arguments = pipe.recv()
            pipe.send(getattr(engine, method)(**arguments))
    except BaseException:
        traceback.print_exc()
        # An orderly end would write more than the parent shows.
        os._exit(1)


class BenchEngine(Engine):
    """An engine with probes in its workers, whose single steps are timed. A parent may call its public methods."""

    def __init__(self, engine_args: dict[str, Any], *, fast_prefill: bool) -> None:
        started = time.perf_counter()
        super().__init__(**engine_args | {"worker_extension_cls": "vllm_draft_window.bench.worker.Probes"})
        self._startup_s = time.perf_counter() - started
        self._engine: Any = self.llm.llm_engine
        self._config: Any = self._engine.vllm_config
        self._probe("count")
        if fast_prefill:
            self._probe("skip prefill attention")

    def _probe(self, name: str, *arguments: Any) -> list[Any]:
        """What a probe of ``worker.py`` gives, by rank."""
        return self._engine.collective_rpc("bench", args=(name, *arguments))

    def describe(self) -> dict[str, Any]:
        """The machine, and what the engine decided."""
        config, cache = self._config, self.scheduler.kv_cache_config
        groups = [f"{len(g.layer_names)} x {type(g.kv_cache_spec).__name__}" for g in cache.kv_cache_groups]
        engine = {
            "kv_cache_groups": groups,
            "num_kv_blocks": cache.num_blocks,
            "block_size": config.cache_config.block_size,
            "cudagraph_mode": str(config.compilation_config.cudagraph_mode),
            "async_scheduling": config.scheduler_config.async_scheduling,
            "additional_config": config.additional_config,
        }
        engine |= self._probe("describe")[0]
        return {"startup_s": self._startup_s, "versions": _versions(), "machine": _machine(), "engine": engine}

    def time_steps(self, workload: Workload) -> dict[str, Any]:
        """Prefill one batch, then time decode steps; ``skipped`` says why where it does not fit."""
        named = {"workload": workload.name, "contexts": workload.contexts}
        needed = sum(self._blocks(context + self._reach(workload)) for context in workload.contexts)
        # Preemption would silently change what a step does.
        if needed > (there := self.scheduler.kv_cache_config.num_blocks):
            return named | {"skipped": f"needs {needed} KV blocks, {there} there"}
        with self._decoding(workload.contexts) as tokens:
            prefill_s = self._prefill(tokens)
            self._step(tokens, workload.warmup)
            before = sum(map(len, tokens.values()))
            seconds = np.empty(workload.steps)
            # A collection walks prompts of a million integers.
            gc.collect()
            gc.disable()
            try:
                for i in range(workload.steps):
                    begin = time.perf_counter()
                    outputs = self._engine.step()
                    seconds[i] = time.perf_counter() - begin
                    _collect(outputs, tokens)
            finally:
                gc.enable()
            emitted = sum(map(len, tokens.values())) - before
        p10, median, p90 = np.percentile(seconds * 1e3, (10, 50, 90)).tolist()
        return named | {
            "prefill_s": prefill_s,
            "median_ms": median,
            "p10_ms": p10,
            "p90_ms": p90,
            "step_ms": np.round(seconds * 1e3, 4).tolist(),
            "tokens_per_s": emitted / float(seconds.sum()),
            "accepted_length": emitted / (workload.steps * len(tokens)),
            "tokens": list(tokens.values()),
        }

    def capacity(self, lengths: Sequence[int]) -> dict[int, float]:
        """Requests of each length in tokens that the KV cache holds at once."""
        return {length: self.scheduler.kv_cache_config.num_blocks / self._blocks(length) for length in lengths}

    def saturate(self, length: int, workload: Workload) -> dict[str, Any]:
        """Decode steps of as many requests as the cache holds, each of ``length`` tokens at its end."""
        count = min(int(self.capacity([length])[length]), self._config.scheduler_config.max_num_seqs)
        full = replace(workload, contexts=(length,) * count)
        return self.time_steps(replace(full, contexts=(length - self._reach(full),) * count))

    def _reach(self, workload: Workload) -> int:
        speculation, scheduler = self._config.speculative_config, self._config.scheduler_config
        return workload.reach(speculation.num_speculative_tokens, scheduler.max_num_batched_tokens)

    def _blocks(self, tokens: int) -> int:
        """KV cache blocks that a request of so many tokens needs at most."""
        specs = [group.kv_cache_spec for group in self.scheduler.kv_cache_config.kv_cache_groups]
        with mock.patch.object(self._config.model_config, "max_model_len", tokens):
            return sum(-(-spec.max_memory_usage_bytes(self._config) // spec.page_size_bytes) for spec in specs)

    def report(self, *, guarded: int | None = None, profiled: int | None = None) -> dict[str, Any]:
        """What the probes counted, and the device's bandwidth.

        Args:
            guarded: context of a request whose steps are checked for device-to-host synchronization.
            profiled: context of a request whose steps are timed on the host, apart from the measured ones: timing
                costs too.
        """
        report: dict[str, Any] = {"sync": None, "host": None, "copy_bandwidth": _copy_bandwidth()}
        if guarded is not None:
            self._probe("watch", True)
            with self._decoding((guarded,)) as tokens:
                self._prefill(tokens)
                self._step(tokens, _WATCHED_STEPS)
            report["sync"] = self._probe("watched")[0]
        if profiled is not None:
            with self._decoding((profiled,)) as tokens:
                self._prefill(tokens)
                self._probe("watch", False)
                self._step(tokens, _WATCHED_STEPS)
                report["host"] = self._probe("watched")[0] | {"steps": _WATCHED_STEPS}
        return report | {"addresses": self._probe("addresses")}

    def serve(self, prompts: list[list[int]], *, guard: bool = False, **requests: Any) -> dict[str, Any]:
        """Serve prompts to their end, see :meth:`Engine.run`; what came out, and what the probes counted.

        ``guard`` looks for device-to-host synchronization.
        """
        if guard:
            self._probe("watch", True)
        measured = self.run(prompts, **requests)
        return {
            "tokens": measured.tokens,
            "batch_sizes": measured.batch_sizes,
            "accepted_length": measured.accepted_length,
            "sync": self._probe("watched")[0] if guard else None,
            "addresses": self._probe("addresses"),
        }

    @contextmanager
    def _decoding(self, contexts: Sequence[int]) -> Iterator[dict[str, list[int]]]:
        """Requests that decode until the block ends; gives their token lists, filled by :meth:`_step`."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        delta = RequestOutputKind.DELTA
        parameters = SamplingParams(
            temperature=0.0, max_tokens=None, ignore_eos=True, detokenize=False, output_kind=delta
        )
        seed, vocab = self._config.model_config.seed, self._config.model_config.get_vocab_size()
        tokens: dict[str, list[int]] = {}
        for i, length in enumerate(contexts):
            name = f"{time.perf_counter()}-{i}"
            self._engine.add_request(name, {"prompt_token_ids": prompt(seed, i, vocab, length)}, parameters)
            tokens[name] = []
        yield tokens
        self._engine.abort_request(list(tokens))
        # Asynchronous scheduling leaves a batch in flight.
        for _ in range(3):
            self._engine.step()

    def _prefill(self, tokens: dict[str, list[int]]) -> float:
        """Step until every request has a token; seconds."""
        started = time.perf_counter()
        while not all(tokens.values()):
            self._step(tokens)
        return time.perf_counter() - started

    def _step(self, tokens: dict[str, list[int]], steps: int = 1) -> None:
        for _ in range(steps):
            _collect(self._engine.step(), tokens)


def _collect(outputs: list[Any], tokens: dict[str, list[int]]) -> None:
    for output in outputs:
        if output.finished:
            raise RuntimeError(f"request {output.request_id} ended while it was measured ({len(tokens)} requests)")
        tokens[output.request_id].extend(output.outputs[0].token_ids)


def _copy_bandwidth() -> float:
    """Bytes read plus bytes written per second by a large copy on the device, a median."""
    cuda = torch.cuda.is_available()
    # Not zeros: some devices are faster on them.
    source = torch.randint(
        0, 255, (1 << 30 if cuda else 32 << 20,), dtype=torch.uint8, device="cuda" if cuda else "cpu"
    )
    copy = Timer("target.copy_(source)", globals={"source": source, "target": torch.empty_like(source)})
    return 2 * len(source) / copy.blocked_autorange().median


def _versions() -> dict[str, str | None]:
    import vllm

    versions = {"python": platform.python_version(), "cuda": torch.version.cuda, "vllm": vllm.__version__}
    return versions | {name: importlib.metadata.version(name) for name in ("torch", "triton", "transformers")}


def _machine() -> dict[str, Any]:
    if not torch.cuda.is_available():
        return {"device": "cpu", "cpu_cores": os.cpu_count()}
    properties = torch.cuda.get_device_properties(0)
    memory_gib = round(properties.total_memory / 2**30, 1)
    return {"device": properties.name, "memory_gib": memory_gib, "cpu_cores": os.cpu_count()}


if __name__ == "__main__":
    main()
