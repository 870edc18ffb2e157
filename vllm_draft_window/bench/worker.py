# SPDX-License-Identifier: Apache-2.0
"""What is watched, and for the fast prefill changed, inside vLLM's workers.

vLLM imports this module before a worker loads its model (``worker_extension_cls``), so that the addresses that graph
capture bakes in are seen too.
"""

from __future__ import annotations

import importlib
import statistics
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

# Modules that call `build_attn_metadata` for the draft, for a step and for graph capture.
_BUILD_MODULES = ("vllm.v1.worker.gpu.spec_decode.speculator", "vllm.v1.worker.gpu.spec_decode.dflash.cudagraph")
# The target's, which autoregressive drafts capture with.
_CAPTURE_MODULE = "vllm.v1.worker.gpu.model_states.default"
_BUILDS = ("_build_draft_attn_metadata", "_build_attn_metadata")
_CUDAGRAPH_MANAGERS = ("query_cudagraph_manager", "prefill_cudagraph_manager", "decode_cudagraph_manager")
# A decode step has at most K + 1 query tokens a request; a prefill chunk has far more.
_MIN_PREFILL_QUERIES = 64


class Probes:
    """What every worker gets; ``collective_rpc("bench", args=(PROBE, ...))`` calls a probe on each rank."""

    model_runner: Any

    def bench(self, probe: str, *arguments: Any) -> Any:
        return _PROBES[probe](self.model_runner.speculator, *arguments)


def window_of(speculator: Any) -> Any:
    """The windowed lengths and tables of a speculator, ``None`` without a window."""
    # Where this checkout keeps them, and others that it is compared with.
    return getattr(getattr(speculator, "window", None), "inputs", None) or getattr(speculator, "windowed_inputs", None)


def describe(speculator: Any) -> dict[str, Any]:
    """What the worker decided, for the report and for the checks."""
    window = window_of(speculator)
    return {
        "speculator": type(speculator).__name__,
        "window_columns": None if window is None else list(window.geometry.columns),
        "window_bytes": None if window is None else window.num_bytes,
        "draft_backends": sorted({g.backend.get_name() for groups in speculator.attn_groups for g in groups}),
    }


class Addresses:
    """Device addresses of the lengths and block tables that draft attention metadata is built from."""

    def __init__(self) -> None:
        self._started = False
        self._replays = 0
        self._builds: dict[bool, Counter[tuple[int, ...]]] = {False: Counter(), True: Counter()}
        for name in (*_BUILD_MODULES, _CAPTURE_MODULE):
            module: Any = importlib.import_module(name)
            module.build_attn_metadata = self._watching(module.build_attn_metadata, target=name == _CAPTURE_MODULE)

    def _watching(self, build: Any, *, target: bool) -> Any:
        def build_attn_metadata(*args: Any, **kwargs: Any) -> Any:
            if not (target and self._started):
                # Only the draft's groups are filled in a speculator's list.
                groups = [i for i, group in enumerate(kwargs["attn_groups"]) if group]
                tensors = (kwargs["seq_lens"], *(kwargs["block_tables"][i] for i in groups))
                self._builds[self._started][tuple(tensor.data_ptr() for tensor in tensors)] += 1
            return build(*args, **kwargs)

        return build_attn_metadata

    def begin(self, speculator: Any) -> None:
        """Builds so far were the start's; from here on count FULL replays too, which may need no build."""
        self._started = True
        for manager in filter(None, (getattr(speculator, name, None) for name in _CUDAGRAPH_MANAGERS)):
            manager.run_fullgraph = self._counting(manager.run_fullgraph)

    def _counting(self, replay: Any) -> Any:
        def run_fullgraph(*args: Any, **kwargs: Any) -> Any:
            self._replays += 1
            return replay(*args, **kwargs)

        return run_fullgraph

    def report(self, speculator: Any) -> dict[str, Any]:
        """Counts, and whether every build of the run read the addresses of the window's tensors."""
        start, run = self._builds[False], self._builds[True]
        window = window_of(speculator)
        own = None if window is None else tuple(t.data_ptr() for t in (window.seq_lens, *window.block_tables))
        return {
            "builds": run.total(),
            "builds_at_start": start.total(),
            "replays": self._replays,
            "distinct_pairs": len(run),
            "builds_on_window": None if own is None else run[own],
            "captured_on_window": None if own is None else start[own],
            "seen_at_capture": all(pair in start for pair in run) if start else None,
        }


class Watch:
    """Calls of chosen methods: how often, how long on the host, and, if asked for, what synchronizes in them.

    CUDA's check knows what torch does (copies to the host, ``.item()``, pageable blocking copies), which is what the
    product consists of next to Triton launches, and those do not synchronize.
    """

    def __init__(self) -> None:
        self._replaced: list[tuple[Any, str]] = []

    def begin(self, speculator: Any, check: bool) -> None:
        """Watch the draft's metadata builds and the window's launch; unless ``check``, what they are a part of too."""
        self._check = check
        self._seconds: dict[str, list[float]] = defaultdict(list)
        self._synchronizations: Counter[str] = Counter()
        watched = [(speculator, name) for name in _BUILDS] + [(window_of(speculator), "refresh")]
        watched.append((getattr(getattr(speculator, "window", None), "chooser", None), "choose"))
        if not check:
            watched += [(speculator, "propose"), (speculator, "_generate_draft")]
            watched += [(getattr(speculator, name, None), "run_fullgraph") for name in _CUDAGRAPH_MANAGERS]
        for owner, name in watched:
            if owner is not None and hasattr(owner, name):
                setattr(owner, name, self._wrap(name, getattr(owner, name)))
                self._replaced.append((owner, name))

    def _wrap(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            checked: AbstractContextManager[list[Any]] = synchronizations() if self._check else nullcontext([])
            with checked as found:
                begin = time.perf_counter()
                result = method(*args, **kwargs)
                self._seconds[name].append(time.perf_counter() - begin)
            self._synchronizations.update({name: len(found)} if found else {})
            # A build that waits for the forward that needs it.
            if hasattr(result, "build"):
                result.build = self._wrap(name, result.build)
            return result

        return watched

    def report(self, speculator: Any) -> dict[str, Any]:
        """Stop watching; per method its calls, the median microseconds of one, and what synchronized."""
        window = window_of(speculator)
        if self._check and window is not None and not self._seconds["refresh"]:
            # Graphs have taken the launch in.
            window.refresh(num_reqs=1, num_rows=1, queries=getattr(speculator, "num_query_per_req", 1))
        for owner, name in self._replaced:
            delattr(owner, name)
        self._replaced.clear()
        report: dict[str, Any] = {
            "calls": {name: len(seconds) for name, seconds in self._seconds.items()},
            "median_us": {name: statistics.median(seconds) * 1e6 for name, seconds in self._seconds.items()},
        }
        if self._check:
            with synchronizations() as found:  # the check must object to a copy to the host
                torch.ones(1, device="cuda").item()
            report |= {"synchronizations": dict(self._synchronizations), "detector_works": bool(found)}
        return report


@contextmanager
def synchronizations() -> Iterator[list[Any]]:
    """What CUDA's check finds in the block."""
    found: list[Any] = []
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode(mode)
    # Switching it on says once that it is a prototype and does not detect all "synchronizing operations".
    found += [warning for warning in caught if "called a synchronizing" in str(warning.message)]


def skip_prefill_attention(speculator: Any) -> None:
    """Make attention return zeros in prefill chunks.

    A real prefill of a million tokens is quadratic and takes most of a benchmark's time. The fast one still writes
    every layer's K and V from the prompt's tokens and positions, through the engine's own kernels, so decode attends
    over a full cache of varied values; what the values are does not change what a decode step costs. Decode steps
    never come here: they replay graphs, or have too few query tokens.

    Raises:
        RuntimeError: a backend writes its KV cache inside the call that would be skipped.
    """
    layers = speculator.vllm_config.compilation_config.static_forward_context.values()
    used = {type(layer.impl): layer.get_attn_backend() for layer in layers if hasattr(layer, "impl")}
    for impl, backend in used.items():
        if getattr(backend, "forward_includes_kv_cache_update", True):
            raise RuntimeError(f"--prefill fast does not work with {impl.__name__}; use --prefill real")
        impl.forward = _skipping(impl.forward)


def _skipping(forward: Any) -> Any:
    """Attention that gives zeros without metadata and in chunks."""

    # layer, query, key, value, kv_cache, metadata
    def skipping_forward(self: Any, *args: Any, output: Any, **kwargs: Any) -> Any:
        if args[5] is None or args[5].max_query_len > _MIN_PREFILL_QUERIES:
            return output.zero_()
        return forward(self, *args, output=output, **kwargs)

    return skipping_forward


_addresses, _watch = Addresses(), Watch()
_PROBES: dict[str, Callable[..., Any]] = {
    "describe": describe,
    "skip prefill attention": skip_prefill_attention,
    "count": _addresses.begin,
    "addresses": _addresses.report,
    "watch": _watch.begin,
    "watched": _watch.report,
}
