# SPDX-License-Identifier: Apache-2.0
"""Measures acceptance on a real vLLM engine in this process. The demo, the sweep and the engine tests share it.

It imports vLLM: set up the environment first (see ``vllm_draft_window.cpu_engine``).
"""

import gc
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.platforms import current_platform

from vllm_draft_window import cpu_engine
from vllm_draft_window.clone import DEMO_PAIR


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One set of prompts through one engine.

    Attributes:
        tokens: output tokens, one tuple per prompt.
        lengths: output tokens so far after each step of the engine, one tuple per prompt.
        drafts: proposals that the target verified.
        accepted_per_position: of those, how many were accepted at least up to each draft position.
        batch_sizes: requests that got tokens in a step, without repetitions.
        preemptions: requests that lost their cache and were computed again.
        cached: prompt tokens that the prefix cache had.
        seconds: wall time.
    """

    tokens: tuple[tuple[int, ...], ...]
    lengths: tuple[tuple[int, ...], ...]
    drafts: int
    accepted_per_position: tuple[int, ...]
    batch_sizes: tuple[int, ...]
    preemptions: int
    cached: int
    seconds: float

    @property
    def accepted_length(self) -> float:
        """Mean tokens per target step: accepted draft tokens plus the target's own."""
        return 1 + sum(self.accepted_per_position) / self.drafts if self.drafts else 1.0

    def target_steps(self, max_tokens: int) -> list[tuple[int, int]]:
        """Tokens and target steps of each prompt, of all steps that began with fewer than ``max_tokens`` tokens.

        The last of them counts whole: cutting it at ``max_tokens`` would cost long acceptances more than short ones.
        So generate ``num_speculative_tokens`` more than ``max_tokens``. The prefill's own token comes without a draft.
        """
        counted = []
        for lengths in self.lengths:
            steps = sum(length < max_tokens for length in lengths[:-1])
            counted.append((lengths[steps] - lengths[0], steps))
        return counted


class Engine:
    """A vLLM engine with token-id prompts; ``with`` frees it, so that the next one finds the memory."""

    def __init__(self, model: Path | str | None = None, **engine_args: Any) -> None:
        """Start the engine of ``model``, by default the demo pair's target; ``engine_args`` are those of ``vllm.LLM``.

        Raises:
            ValueError: options that vLLM or the draft window refuses.
        """
        defaults: dict[str, Any] = dict(
            skip_tokenizer_init=True,
            enforce_eager=True,
            use_tqdm_on_load=False,
            disable_log_stats=False,
            dtype="float32",
            block_size=32,
            kv_cache_memory_bytes=256 << 20,
            max_num_seqs=16,
            seed=0,
        )
        if current_platform.is_cpu():
            cpu_engine.describe_models_here()
        # vLLM collects garbage ten times around an engine; what is here before, such as vLLM itself, it need not walk.
        gc.freeze()
        self.llm = LLM(str(model or DEMO_PAIR / "target"), **(defaults | engine_args))

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        # While the engine is still referred to, collecting garbage, as vLLM does three times here, frees nothing of it.
        with mock.patch("gc.collect"):
            self.llm.llm_engine.engine_core.shutdown()
            cleanup_dist_env_and_memory()
        del self.llm
        gc.collect()

    @property
    def runner(self) -> Any:
        """The model runner, where the engine core runs in this process."""
        core: Any = self.llm.llm_engine.engine_core
        return core.engine_core.model_executor.driver_worker.worker.model_runner

    @property
    def scheduler(self) -> Any:
        core: Any = self.llm.llm_engine.engine_core
        return core.engine_core.scheduler

    @property
    def speculator(self) -> Any:
        return self.runner.speculator

    def run(
        self,
        prompts: Iterable[Sequence[int]],
        *,
        max_tokens: int | Sequence[int],
        arrivals: Sequence[int] | None = None,
        on_finished: Callable[[], None] | None = None,
        **sampling: Any,
    ) -> Measurement:
        """Generate ``max_tokens`` for every prompt, greedily unless ``sampling`` says otherwise.

        Args:
            max_tokens: for every prompt, or one number a prompt.
            arrivals: ascending, the step at which each prompt comes, or earlier if the engine idles; default: at once.
            on_finished: called after each prompt.
        """
        common: dict[str, Any] = dict(temperature=0.0, ignore_eos=True, detokenize=False) | sampling
        engine, before, started = self.llm.llm_engine, self.counters(), time.perf_counter()
        waiting = deque(enumerate(map(list, prompts)))
        names = [f"{started}-{i}" for i in range(len(waiting))]
        limits = [max_tokens] * len(names) if isinstance(max_tokens, int) else max_tokens
        outputs: dict[str, tuple[int, ...]] = {}
        lengths: dict[str, list[int]] = {name: [] for name in names}
        sizes: list[int] = []
        for step in itertools.count():
            while waiting and (not engine.has_unfinished_requests() or not arrivals or arrivals[waiting[0][0]] <= step):
                i, prompt = waiting.popleft()
                parameters = SamplingParams(max_tokens=limits[i], **common)
                engine.add_request(names[i], {"prompt_token_ids": prompt}, parameters)
            if not engine.has_unfinished_requests():
                break
            output: Any
            # Others may share the engine.
            own = [output for output in engine.step() if output.request_id in lengths]
            for output in own:
                lengths[output.request_id].append(len(output.outputs[0].token_ids))
                if output.finished:
                    outputs[output.request_id] = tuple(output.outputs[0].token_ids)
                    if on_finished is not None:
                        on_finished()
            sizes.append(len(own))
        seconds = time.perf_counter() - started
        gained = {name: np.subtract(value, before.get(name, 0)) for name, value in self.counters().items()}
        return Measurement(
            tokens=tuple(outputs[name] for name in names),
            lengths=tuple(tuple(lengths[name]) for name in names),
            drafts=int(gained.get("vllm:spec_decode_num_drafts", 0)),
            accepted_per_position=tuple(
                int(n) for n in np.atleast_1d(gained.get("vllm:spec_decode_num_accepted_tokens_per_pos", []))
            ),
            batch_sizes=tuple(size for size, _ in itertools.groupby(filter(None, sizes))),
            preemptions=int(gained.get("vllm:num_preemptions", 0)),
            cached=int(gained.get("vllm:prefix_cache_hits", 0)),
            seconds=seconds,
        )

    def counters(self) -> dict[str, Any]:
        """Totals since the process started; a vector metric is a list."""
        metrics: list[Any] = self.llm.get_metrics()
        return {
            metric.name: metric.values if hasattr(metric, "values") else metric.value
            for metric in metrics
            if hasattr(metric, "values") or hasattr(metric, "value")
        }
