# SPDX-License-Identifier: Apache-2.0
"""What is watched, and for the fast prefill changed, inside a running engine."""

from __future__ import annotations

import importlib
import statistics
import time
from collections import Counter
from typing import Any

import torch

# Modules that call `build_attn_metadata` for the draft, for a step and for graph capture.
_BUILD_MODULES = ("vllm.v1.worker.gpu.spec_decode.speculator", "vllm.v1.worker.gpu.spec_decode.dflash.cudagraph")
# The target's, which autoregressive drafts capture with.
_CAPTURE_MODULE = "vllm.v1.worker.gpu.model_states.default"
_CUDAGRAPH_MANAGERS = ("query_cudagraph_manager", "prefill_cudagraph_manager", "decode_cudagraph_manager")
# A decode step has at most K + 1 query tokens a request; a prefill chunk has far more.
_MIN_PREFILL_QUERIES = 64


class AddressProbe:
    """Device addresses of the lengths and block tables that draft attention metadata is built from.

    Install before the engine starts, so that the addresses that graph capture bakes in are seen too.
    """

    def __init__(self) -> None:
        self.phase = "start"
        self._replays = 0
        self._builds: dict[str, Counter[tuple[int, ...]]] = {"start": Counter(), "run": Counter()}
        for name in (*_BUILD_MODULES, _CAPTURE_MODULE):
            module: Any = importlib.import_module(name)
            module.build_attn_metadata = self._watching(module.build_attn_metadata, always=name != _CAPTURE_MODULE)

    def _watching(self, build: Any, *, always: bool) -> Any:
        def build_attn_metadata(*args: Any, **kwargs: Any) -> Any:
            if not always and self.phase != "start":
                return build(*args, **kwargs)
            # Only the draft's groups are filled in a speculator's list.
            groups = [i for i, group in enumerate(kwargs["attn_groups"]) if group]
            tensors = (kwargs["seq_lens"], *(kwargs["block_tables"][i] for i in groups))
            addresses = tuple(tensor.data_ptr() for tensor in tensors)
            self._builds[self.phase][addresses] += 1
            return build(*args, **kwargs)

        return build_attn_metadata

    def count_replays(self, speculator: Any) -> None:
        """Count FULL replays: a window that its graphs refresh by themselves needs no build before them."""
        for name in _CUDAGRAPH_MANAGERS:
            manager = getattr(speculator, name, None)
            if manager is not None:
                manager.run_fullgraph = self._counting(manager.run_fullgraph)

    def _counting(self, replay: Any) -> Any:
        def run_fullgraph(*args: Any, **kwargs: Any) -> Any:
            self._replays += 1
            return replay(*args, **kwargs)

        return run_fullgraph

    def report(self, speculator: Any) -> dict[str, Any]:
        """Counts, and whether every build of the run read the addresses of the window's twins."""
        run, start = self._builds["run"], self._builds["start"]
        inputs = getattr(speculator, "windowed_inputs", None)
        twins = None if inputs is None else (inputs.seq_lens.data_ptr(), *(t.data_ptr() for t in inputs.block_tables))
        return {
            "builds": run.total(),
            "builds_at_start": start.total(),
            "replays": self._replays,
            "distinct_pairs": len(run),
            "builds_on_twins": None if twins is None else run[twins],
            "captured_on_twins": None if twins is None else start[twins],
            "seen_at_capture": all(pair in start for pair in run) if start else None,
        }


_BUILDS = ("_build_draft_attn_metadata", "_build_attn_metadata")


class _Shadows:
    """Methods that are replaced on instances for a while."""

    def __init__(self) -> None:
        self._shadowed: list[tuple[Any, str]] = []

    def shadow(self, owner: Any, name: str) -> None:
        """Replace the method ``name`` on the instance ``owner``, if it has one."""
        if owner is not None and hasattr(owner, name):
            setattr(owner, name, self._wrap(name, getattr(owner, name)))
            self._shadowed.append((owner, name))

    def remove(self) -> None:
        for owner, name in self._shadowed:
            delattr(owner, name)
        self._shadowed.clear()

    def _wrap(self, name: str, method: Any) -> Any:
        raise NotImplementedError


class SyncGuard(_Shadows):
    """Runs chosen methods with CUDA's synchronization check set to "error"; a violation is recorded, not raised.

    The check knows what torch does (copies to the host, ``.item()``, pageable blocking copies), which is what the
    product consists of next to Triton launches, and those do not synchronize.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.violations: list[str] = []

    def watch(self, speculator: Any) -> None:
        """Guard the draft's metadata builds and the window's refresh."""
        for name in _BUILDS:
            self.shadow(speculator, name)
        self.shadow(getattr(speculator, "windowed_inputs", None), "refresh")

    def finish(self, speculator: Any) -> dict[str, Any]:
        """Stop guarding and report; a refresh that graphs have taken in is launched once from here."""
        inputs = getattr(speculator, "windowed_inputs", None)
        if inputs is not None and not self.calls["refresh"]:
            inputs.refresh(num_reqs=1, num_rows=1, queries=getattr(speculator, "num_query_per_req", 1))
        self.remove()
        return {
            "calls": dict(self.calls),
            "violations": sorted(set(self.violations)),
            "violating_calls": len(self.violations),
            "detector_works": detects_synchronization(),
        }

    def _wrap(self, name: str, method: Any) -> Any:
        def guarded(*args: Any, **kwargs: Any) -> Any:
            self.calls[name] += 1
            previous = torch.cuda.get_sync_debug_mode()
            torch.cuda.set_sync_debug_mode("error")
            try:
                result = method(*args, **kwargs)
            except RuntimeError as error:
                if "synchroniz" not in str(error):
                    raise
                self.violations.append(f"{name}: {str(error).splitlines()[0]}")
                torch.cuda.set_sync_debug_mode(0)
                result = method(*args, **kwargs)
            finally:
                torch.cuda.set_sync_debug_mode(previous)
            # A build that waits for the forward that needs it.
            return self._wrap(name, result) if callable(result) else result

        return guarded


class HostTimer(_Shadows):
    """Host time spent in chosen methods; one contains another where they call each other."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: dict[str, list[float]] = {}

    def watch(self, speculator: Any) -> None:
        """Time a proposal, its metadata build, the window's refresh in it, and the draft's forward or replay."""
        for name in ("propose", *_BUILDS, "_generate_draft"):
            self.shadow(speculator, name)
        self.shadow(getattr(speculator, "windowed_inputs", None), "refresh")
        self.shadow(getattr(speculator, "query_cudagraph_manager", None), "run_fullgraph")

    def report(self, steps: int) -> dict[str, dict[str, float]]:
        """Per method the median microseconds of a call, and calls per step."""
        return {
            name: {"median_us": statistics.median(seconds) * 1e6, "calls_per_step": len(seconds) / steps}
            for name, seconds in self.seconds.items()
            if seconds
        }

    def _wrap(self, name: str, method: Any) -> Any:
        seconds = self.seconds.setdefault(name, [])

        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                seconds.append(time.perf_counter() - begin)

        return timed


def detects_synchronization() -> bool:
    """Positive control: the check must object to a copy to the host."""
    value = torch.ones(1, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        value.item()
    except RuntimeError:
        return True
    finally:
        torch.cuda.set_sync_debug_mode(0)
    return False


def skip_prefill_attention(vllm_config: Any) -> list[str]:
    """Make attention return zeros in prefill chunks; returns the names of the attention implementations.

    A real prefill of a million tokens is quadratic and takes most of a benchmark's time. The fast one still writes
    every layer's K and V from the prompt's tokens and positions, through the engine's own kernels, so decode attends
    over a full cache of varied values; what the values are does not change what a decode step costs. Decode steps
    never come here: they replay graphs, or have too few query tokens.

    Raises:
        RuntimeError: a backend writes its KV cache inside the call that would be skipped.
    """
    layers = vllm_config.compilation_config.static_forward_context.values()
    impls = {type(layer.impl) for layer in layers if hasattr(layer, "impl")}
    for impl in impls:
        backends = {layer.get_attn_backend() for layer in layers if type(getattr(layer, "impl", None)) is impl}
        if any(getattr(backend, "forward_includes_kv_cache_update", True) for backend in backends):
            raise RuntimeError(f"--prefill fast does not work with {impl.__name__}; use --prefill real")
        impl.forward = _skipping(impl.forward, min_queries=_MIN_PREFILL_QUERIES)
    return sorted(impl.__name__ for impl in impls)


def _skipping(forward: Any, *, min_queries: int) -> Any:
    """Attention that gives zeros without metadata and for chunks of more than ``min_queries`` queries."""

    def skipping_forward(
        self: Any,
        layer: Any,
        query: Any,
        key: Any,
        value: Any,
        kv_cache: Any,
        attn_metadata: Any,
        output: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if attn_metadata is None or attn_metadata.max_query_len > min_queries:
            return output.zero_()
        return forward(self, layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs)

    return skipping_forward
