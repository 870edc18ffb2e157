# SPDX-License-Identifier: Apache-2.0
"""One engine process that serves requests as they come, on ``SPEC.json RESULT.json``.

Tokens, acceptance, addresses and synchronization are recorded; time is not.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

MODES = ("eager", "piecewise", "full")
BLOCK_SIZE = {"cuda": 16, "cpu": 32}
# Of 1 to 8 requests, graphs of 1, 2, 4, 7 and 8 for a target that verifies 8 tokens per request; other batches are
# padded. A draft of 7 queries per request gets 2, 3, 5 and 8.
_CAPTURE_SIZES = (8, 16, 32, 56, 64)


@dataclass(frozen=True)
class Request:
    """A prompt, the step of its workload at which it arrives, and how many tokens it gets."""

    prompt: list[int]
    arrival: int
    max_tokens: int


@dataclass(frozen=True, kw_only=True)
class ServeRun:
    """One engine process; ``workloads`` maps names to requests.

    Attributes:
        mode: ``eager``, ``piecewise`` or ``full`` CUDA graphs.
        window: ``draft_window_size``, or ``None`` to leave the option away.
        one_split: keep attention from splitting the context, so that graphs round as eager execution does.
    """

    name: str
    target: str
    draft: str
    method: str
    draft_tokens: int
    mode: str
    window: int | None
    max_model_len: int
    max_num_seqs: int
    workloads: dict[str, list[Request]]
    device: str = "cuda"
    kv_cache_bytes: int = 512 << 20
    one_split: bool = False
    engine_args: dict[str, Any] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> ServeRun:
        values = json.loads(path.read_text())
        values["workloads"] = {k: [Request(**r) for r in requests] for k, requests in values["workloads"].items()}
        return cls(**values)

    def llm_arguments(self) -> dict[str, Any]:
        """Arguments of ``vllm.LLM``."""
        arguments: dict[str, Any] = {
            "model": self.target,
            "skip_tokenizer_init": True,
            "seed": 0,
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": 2048,
            "block_size": BLOCK_SIZE[self.device],
            "kv_cache_memory_bytes": self.kv_cache_bytes,
            "enable_prefix_caching": False,
            "speculative_config": {
                "method": self.method,
                "model": self.draft,
                "num_speculative_tokens": self.draft_tokens,
            },
            "additional_config": {} if self.window is None else {"draft_window_size": self.window},
        }
        if self.device == "cpu":
            return arguments | {"dtype": "float32", "enforce_eager": True} | self.engine_args
        # Several engines share the GPU.
        arguments |= {"dtype": "bfloat16", "gpu_memory_utilization": 0.1}
        if self.one_split:
            arguments["attention_config"] = {"flash_attn_max_num_splits_for_cuda_graph": 1}
        if self.mode == "eager":
            arguments["enforce_eager"] = True
        else:
            full = self.mode == "full"
            arguments["compilation_config"] = {
                "cudagraph_capture_sizes": list(_CAPTURE_SIZES),
                "cudagraph_mode": "FULL_DECODE_ONLY" if full else "PIECEWISE",
                # Piecewise graphs need the model split; an eager backend splits it and keeps the kernels.
                **({"mode": 0} if full else {"mode": 3, "backend": "eager"}),
            }
        return arguments | self.engine_args


def main() -> None:
    """Serve what ``SPEC.json`` describes and write what came out."""
    from . import child
    from .probes import AddressProbe, SyncGuard

    spec_path, result_path = map(Path, sys.argv[1:3])
    run = ServeRun.read(spec_path)
    child.prepare_environment(run.device)
    # Engines that start at the same time would share it.
    os.environ["VLLM_DISABLE_COMPILE_CACHE"] = "1"
    from vllm import LLM

    probe = AddressProbe()
    engine: Any = LLM(**run.llm_arguments()).llm_engine
    runner = engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    probe.phase = "run"
    probe.count_replays(runner.speculator)
    guard = SyncGuard() if run.device == "cuda" else None
    if guard is not None:
        guard.watch(runner.speculator)
    workloads = {name: _serve(engine, name, requests) for name, requests in run.workloads.items()}
    result = {
        "name": run.name,
        "method": run.method,
        "mode": run.mode,
        "window": run.window,
        "versions": child.versions(),
        "machine": child.machine(run.device),
        "engine": child.describe(engine, runner),
        "workloads": workloads,
        "addresses": probe.report(runner.speculator),
        "sync": None if guard is None else guard.finish(runner.speculator),
    }
    result_path.write_text(json.dumps(result))
    sys.stdout.flush()
    os._exit(0)


def _serve(engine: Any, workload: str, requests: Sequence[Request]) -> dict[str, Any]:
    """Run one workload to its end.

    Returns:
        per request its tokens and the decode steps that it took (its first token comes from its prefill), and the batch
        sizes in the order in which they were seen.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    waiting = sorted(range(len(requests)), key=lambda i: requests[i].arrival)
    tokens: list[list[int]] = [[] for _ in requests]
    decode_steps = [0] * len(requests)
    sizes: list[int] = []
    step = 0
    while waiting or engine.has_unfinished_requests():
        while waiting and (requests[waiting[0]].arrival <= step or not engine.has_unfinished_requests()):
            number = waiting.pop(0)
            parameters = SamplingParams(
                temperature=0.0,
                max_tokens=requests[number].max_tokens,
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
            )
            prompt: Any = {"prompt_token_ids": requests[number].prompt}
            engine.add_request(f"{workload}-{number}", prompt, parameters)
        outputs = [o for o in engine.step() if o.outputs[0].token_ids]
        for output in outputs:
            number = int(output.request_id.rsplit("-", 1)[1])
            decode_steps[number] += bool(tokens[number])
            tokens[number].extend(output.outputs[0].token_ids)
        if outputs and (not sizes or sizes[-1] != len(outputs)):
            sizes.append(len(outputs))
        step += 1
    return {"tokens": tokens, "decode_steps": decode_steps, "batch_sizes": sizes}


if __name__ == "__main__":
    main()
