# SPDX-License-Identifier: Apache-2.0
"""What an engine with the given arguments would do: which runner, which window. No weights are loaded."""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vllm_draft_window.doctor.report import BadInput, Finding, Level, State, Verdict


def json_object(option: str, text: str | None) -> dict[str, Any]:
    """The value of an option that takes a JSON object; empty where it is not given.

    Raises:
        BadInput: it is not JSON, or not an object.
    """
    if text is None:
        return {}
    advice = f"put the whole value in single quotes: {option} '{{\"key\": 1}}'"
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise BadInput(f"{option} is not JSON: {error.msg} at character {error.pos + 1} of {text!r}", advice) from None
    if not isinstance(value, dict):
        raise BadInput(f"{option} must be a JSON object, not {text!r}", advice)
    return value


def check_model(option: str, model: Any) -> None:
    """A path must hold a config that can be read; anything else may be a name on the hub.

    Raises:
        BadInput: see above.
    """
    if not isinstance(model, str) or not (model.startswith(("/", ".", "~")) or Path(model).exists()):
        return
    path = Path(model).expanduser()
    config = path / "config.json"
    if not path.is_dir():
        raise BadInput(f"{option} {model}: no such directory", "check the path; give a name on the hub without a slash")
    if not config.exists():
        raise BadInput(f"{option} {model} has no config.json", "give the folder that holds the checkpoint itself")
    try:
        json.loads(config.read_text())
    except OSError as error:
        raise BadInput(f"{option}: cannot read {config}: {error.strerror}", "check its permissions") from None
    except ValueError as error:
        raise BadInput(f"{option}: {config} is not JSON: {error}", "download the checkpoint again") from None


def engine_config(arguments: Sequence[str]) -> Any:
    """vLLM's own ``VllmConfig`` for command-line arguments of ``vllm serve``.

    Raises:
        BadInput: vLLM refuses them.
    """
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):
        def error(self, message: str) -> Any:
            raise BadInput(
                message, "give the engine's arguments only, without those of the server (--host, --port ...)"
            )

    try:
        parsed = EngineArgs.add_cli_args(Parser()).parse_args(list(arguments))
        return EngineArgs.from_cli_args(parsed).create_engine_config()
    except BadInput:
        raise
    except Exception as error:  # vLLM raises pydantic's, transformers', the hub's and its own
        raise BadInput(f"vLLM refuses these arguments: {_message(error)}", _advice_on(error)) from None


def _message(error: Exception) -> str:
    from pydantic import ValidationError

    details = error.errors() if isinstance(error, ValidationError) else []
    texts = []
    for detail in details:
        where = ".".join(map(str, detail["loc"]))
        texts.append((f"{where}: " if where else "") + detail["msg"].removeprefix("Value error, "))
    return " ".join("; ".join(texts or [str(error)]).split())


def _advice_on(error: Exception) -> str:
    if "Model Runner V2 does not yet support" in str(error) and os.environ.get("VLLM_USE_V2_MODEL_RUNNER"):
        return "unset VLLM_USE_V2_MODEL_RUNNER to let vLLM choose the runner; the window needs V2"
    if os.environ.get("HF_HUB_OFFLINE") == "1" and not isinstance(error, ValueError):
        return "give a folder, or set HF_HUB_OFFLINE=0 to look the model up on the hub"
    return "change what vLLM names; `vllm serve` would stop here too"


def check_runner(vllm_config: Any) -> Finding:
    """Which model runner a worker would make, and who decided it."""
    v2 = vllm_config.use_v2_model_runner
    chosen = os.environ.get("VLLM_USE_V2_MODEL_RUNNER")
    decided_by = type(vllm_config).use_v2_model_runner.fget.__module__
    if chosen is not None:
        why = f"VLLM_USE_V2_MODEL_RUNNER={chosen}"
    elif decided_by.startswith("vllm_ascend"):
        why = "vLLM-Ascend's choice while VLLM_USE_V2_MODEL_RUNNER is not set"
    else:
        why = "vLLM's choice for this model"
        ask = getattr(vllm_config, "_get_v2_model_runner_unsupported_features", None)
        unsupported: list[str] = ask() if ask is not None else []
        if unsupported:
            why += f"; V2 does not support {', '.join(unsupported)}"
    return Finding(check="model runner", found=f"V{2 if v2 else 1} ({why})", level=Level.OK if v2 else Level.NOTE)


def judge(vllm_config: Any) -> Verdict:
    """The window that a worker would put in force, or why it would not.

    Raises:
        BadInput: the window's options are wrong, or cannot work with this engine.
    """
    from vllm_ascend.draft_window.config import DraftWindow, WindowOff
    from vllm_ascend.draft_window.startup import decide

    try:
        decision = decide(vllm_config)
    except ValueError as error:
        raise BadInput(str(error), "change --additional-config; README.md lists the options") from None
    if isinstance(decision, WindowOff):
        return Verdict(state=State.OFF, reason=decision.reason, advice=_advice_on_off(vllm_config))
    if not isinstance(decision, DraftWindow):
        return Verdict(
            state=State.NOT_ASKED_FOR,
            reason="--additional-config has no draft_window_size",
            advice="add --additional-config '{\"draft_window_size\": 2048}'",
        )
    if not _runner_windows(vllm_config):
        return Verdict(
            state=State.OFF,
            reason="it needs Model Runner V2, or vLLM-Ascend's V1",
            advice="set VLLM_USE_V2_MODEL_RUNNER=1",
        )
    return Verdict(state=State.IN_FORCE, window=asdict(decision))


def _runner_windows(vllm_config: Any) -> bool:
    """As the plugin finds out in a worker's constructor."""
    if vllm_config.use_v2_model_runner:
        return True
    from vllm.utils.import_utils import resolve_obj_by_qualname

    from vllm_ascend.draft_window import mrv1

    # The worker's module loads vLLM-Ascend's proposers, if there are any.
    resolve_obj_by_qualname(vllm_config.parallel_config.worker_cls)
    return mrv1.install()


def _advice_on_off(vllm_config: Any) -> str:
    speculative, length = vllm_config.speculative_config, vllm_config.model_config.max_model_len
    if speculative is None:
        return "add --speculative-config with a draft model"
    options = vllm_config.additional_config
    if max(options.get("draft_window_size") or 0, options.get("draft_window_min_context") or 0) >= length:
        return f"choose values below {length}, or serve longer sequences (--max-model-len); else leave the option out"
    return f"use a draft that can be windowed instead of {speculative.method}, or leave the option out"


def arguments_of(
    model: str, speculative: str | None, additional: str | None, max_model_len: int | None, others: Sequence[str]
) -> list[str]:
    """As for ``vllm serve``; a tokenizer is not needed to resolve a window."""
    options = {
        "--model": model,
        "--speculative-config": speculative,
        "--additional-config": additional,
        "--max-model-len": max_model_len,
    }
    given = [text for name, value in options.items() if value is not None for text in (name, str(value))]
    return [*given, *others]
