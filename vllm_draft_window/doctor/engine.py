# SPDX-License-Identifier: Apache-2.0
"""What an engine with the given arguments would do: which runner, which window. No weights are loaded."""

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from inspect import signature
from pathlib import Path
from typing import Any
from unittest.mock import patch

from vllm_draft_window import parameters

from .report import BadInput, Finding, Verdict

_ONE_ARGUMENT = "put all keys into one --additional-config, as JSON"
_ON_AUTO = (
    "nothing; each proposal has one of the candidates, and the log says what they were worth (docs/auto.md). Where "
    "blocks are large against them, the size stays at start"
)


def json_object(option: str, text: str | None) -> dict[str, Any]:
    """See :mod:`vllm_draft_window.parameters`, with advice."""
    try:
        return parameters.json_object(option, text)
    except ValueError as error:
        raise BadInput(str(error), f"put the whole value in single quotes: {option} '{{\"key\": 1}}'") from None


def check_model(option: str, model: Any) -> None:
    """A path must hold a config that can be read; anything else may be a name on the hub.

    Raises:
        BadInput: see above.
    """
    if not isinstance(model, str) or not (model.startswith(("/", ".", "~")) or Path(model).exists()):
        return
    path = Path(model).expanduser()
    if not path.is_dir():
        raise BadInput(f"{option} {model}: no such directory", "check the path; give a name on the hub without a slash")
    try:
        parameters.read_config(path)
    except ValueError as error:
        reason, _, advice = str(error).partition("; ")
        raise BadInput(f"{option}: {reason}", advice) from None


def engine_config(arguments: Sequence[str]) -> tuple[Any, list[str]]:
    """vLLM's own ``VllmConfig`` for command-line arguments of ``vllm serve``, and each ``--additional-config`` of them.

    vLLM takes the last one. Its parser makes one more of all dotted arguments (``--additional-config.key value``).

    Raises:
        BadInput: vLLM refuses them.
    """
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    given: list[str] = []

    class Parser(FlexibleArgumentParser):
        def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
            """Sees every spelling of an argument as vLLM has made it one."""
            given.extend(_values_of("--additional-config", args))
            return super().parse_known_args(args, namespace)

        def error(self, message: str) -> Any:
            advice = "give the engine's arguments only, without those of the server (--host, --port ...)"
            raise BadInput(message, _advice_on_option(message.split()) or advice)

    try:
        parsed = EngineArgs.add_cli_args(Parser()).parse_args(list(arguments))
        return EngineArgs.from_cli_args(parsed).create_engine_config(), given
    except BadInput:
        raise
    except Exception as error:  # vLLM raises pydantic's, transformers', the hub's and its own
        raise BadInput(f"vLLM refuses these arguments: {_message(error)}", _advice_on(error)) from None


def _values_of(option: str, arguments: Sequence[str]) -> Iterator[str]:
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
        name, joined, value = argument.partition("=")
        if name == option:
            yield value if joined else following


def _message(error: Exception) -> str:
    from pydantic import ValidationError

    details = error.errors() if isinstance(error, ValidationError) else []
    texts = []
    for detail in details:
        where = ".".join(map(str, detail["loc"]))
        texts.append((f"{where}: " if where else "") + detail["msg"].removeprefix("Value error, "))
    return " ".join("; ".join(texts or [str(error)]).split())


def _advice_on_option(keys: Sequence[str]) -> str | None:
    """What to do where one of vLLM's arguments, or a key of one, means an option of the window."""
    from vllm_ascend.draft_window.options import option_meant_by

    meant = next(filter(None, map(option_meant_by, keys)), None)
    return f"{meant} goes into --additional-config, as JSON" if meant else None


def _advice_on(error: Exception) -> str:
    from pydantic import ValidationError

    if "Model Runner V2 does not yet support" in str(error) and os.environ.get("VLLM_USE_V2_MODEL_RUNNER"):
        return "unset VLLM_USE_V2_MODEL_RUNNER to let vLLM choose the runner; the window needs V2"
    if isinstance(error, ValidationError):
        keys = [str(key) for detail in error.errors() for key in detail["loc"]]
        if advice := _advice_on_option(keys):
            return advice
    if os.environ.get("HF_HUB_OFFLINE") == "1" and isinstance(error, OSError):  # so transformers and the hub say it
        return "give a folder, or set HF_HUB_OFFLINE=0 to look the model up on the hub"
    return "change what vLLM names; `vllm serve` would stop here too"


def check_config(vllm_config: Any, given: Sequence[str]) -> Iterator[Finding]:
    """Which model runner a worker would make, and what vLLM decides later or leaves out.

    Args:
        given: each ``--additional-config``, dotted arguments included.
    """
    v2 = vllm_config.use_v2_model_runner
    yield Finding("model runner", f"V{2 if v2 else 1} ({_runner_chosen_by(vllm_config)})", "ok" if v2 else "note")
    model_config = vllm_config.model_config
    if model_config.original_max_model_len == -1:
        found = f"{model_config.max_model_len}, or less where vLLM's memory does not hold as much"
        advice = "the engine decides again with the length that it fits; read its line at start-up"
        yield Finding("max_model_len", found, "note", advice)
    if len(given) > 1:
        found = f"given {len(given)} times, and only the last counts: {given[-1]}"
        yield Finding("--additional-config", found, "note", _ONE_ARGUMENT)


def _runner_chosen_by(vllm_config: Any) -> str:
    if (chosen := os.environ.get("VLLM_USE_V2_MODEL_RUNNER")) is not None:
        return f"VLLM_USE_V2_MODEL_RUNNER={chosen}"
    if type(vllm_config).use_v2_model_runner.fget.__module__.startswith("vllm_ascend"):
        return "vLLM-Ascend's choice while VLLM_USE_V2_MODEL_RUNNER is not set"
    ask = getattr(vllm_config, "_get_v2_model_runner_unsupported_features", None)
    unsupported: list[str] = ask() if ask is not None else []
    also = f"; V2 does not support {', '.join(unsupported)}" if unsupported else ""
    return f"vLLM's choice for this model{also}"


def lost_options(given: Sequence[str]) -> tuple[str, ...]:
    """Options of the window in an ``--additional-config`` that is not the last one, and not in that one."""
    from vllm_ascend.draft_window.options import DraftWindowOptions

    *earlier, last = [json_object("--additional-config", text) for text in given] or [{}]
    keys = {key: None for config in earlier for key in config if key in DraftWindowOptions.model_fields}
    return tuple(key for key in keys if key not in last)


def judge(vllm_config: Any, lost: Sequence[str] = ()) -> Verdict:
    """The window that a worker would put in force, or why it would not.

    Args:
        lost: options that the user gave and vLLM dropped.

    Raises:
        BadInput: the window's options are wrong, or cannot work with this engine.
    """
    from vllm_ascend.draft_window.config import DraftWindow, WindowOff
    from vllm_ascend.draft_window.startup import decide

    try:
        decision = decide(vllm_config)
    except ValueError as error:
        advice = _ONE_ARGUMENT if lost else "change --additional-config; README.md lists the options"
        raise BadInput(str(error), advice) from None
    if isinstance(decision, WindowOff):
        return Verdict("off", decision.reason, _advice_on_off(vllm_config, decision.reason))
    if not isinstance(decision, DraftWindow):
        if lost:
            reason = f"only the last --additional-config counts, and it has no {', '.join(lost)}"
            return Verdict("off", reason, _ONE_ARGUMENT)
        advice = "add --additional-config '{\"draft_window_size\": 2048}'"
        return Verdict("not asked for", "--additional-config has no draft_window_size", advice)
    if not _runner_windows(vllm_config):
        return Verdict("off", "it needs Model Runner V2, or vLLM-Ascend's V1", "set VLLM_USE_V2_MODEL_RUNNER=1")
    if unknown := _not_windowed(vllm_config):
        return Verdict("off", unknown, "report it with these versions, or leave the option out")
    if decision.reclaim and (refused := _reclaim_refused(vllm_config, decision)):
        raise BadInput(refused, "leave draft_window_reclaim out; `draft-window plan` says what it would save")
    return Verdict("in force", advice=_ON_AUTO if decision.candidates else "", window=asdict(decision))


def _reclaim_refused(vllm_config: Any, window: Any) -> str | None:
    """What a worker says once the layers are loaded, as far as the checkpoints' configs can tell."""
    from vllm_draft_window.planner.cache import refused
    from vllm_draft_window.planner.checkpoints import Checkpoint
    from vllm_draft_window.planner.deployment import Deployment

    speculative = vllm_config.speculative_config
    models = [Path(vllm_config.model_config.model), Path(speculative.draft_model_config.model)]
    if not all((model / "config.json").exists() for model in models):  # names on the hub
        return None
    target, draft = map(Checkpoint.read, models)
    deployment = Deployment(
        target=target,
        draft=draft,
        method=window.method,
        num_speculative_tokens=speculative.num_speculative_tokens,
        max_model_len=vllm_config.model_config.max_model_len,
        max_num_seqs=vllm_config.scheduler_config.max_num_seqs,
        block_sizes=(vllm_config.cache_config.block_size,),
        element_bytes=2,  # of both models
        tensor_parallel_size=vllm_config.parallel_config.tensor_parallel_size,
    )
    return refused(deployment, window)


def _not_windowed(vllm_config: Any) -> str | None:
    """Why the speculator that Model Runner V2 would make cannot be windowed; none is made."""
    from vllm.v1.worker.gpu import spec_decode
    from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

    from vllm_ascend.draft_window.seams.vllm import kind_of

    chosen: list[type] = []

    def choose(cls: type, *_: Any, **__: Any) -> Any:
        chosen.append(cls)
        raise NotImplementedError

    if not vllm_config.use_v2_model_runner:
        return None
    # From 0.32 on it takes the states of the runner's requests too.
    init_speculator: Any = spec_decode.init_speculator
    arguments = (vllm_config, None, None)[: len(signature(init_speculator).parameters)]
    with patch.object(DraftModelSpeculator, "__new__", choose), suppress(NotImplementedError):
        init_speculator(*arguments)
    kind = kind_of(chosen[0]) if chosen else None
    return kind if isinstance(kind, str) else None


def _runner_windows(vllm_config: Any) -> bool:
    """As the plugin finds out in a worker's constructor."""
    if vllm_config.use_v2_model_runner:
        return True
    from vllm.utils.import_utils import resolve_obj_by_qualname

    from vllm_ascend.draft_window import mrv1

    # The worker's module loads vLLM-Ascend's proposers, if there are any.
    resolve_obj_by_qualname(vllm_config.parallel_config.worker_cls)
    return mrv1.install()


def _advice_on_off(vllm_config: Any, reason: str) -> str:
    speculative, length = vllm_config.speculative_config, vllm_config.model_config.max_model_len
    if speculative is None:
        return "add --speculative-config with a draft model"
    if "max_model_len" in reason:
        return f"choose values below {length}, or serve longer sequences (--max-model-len); else leave the option out"
    if "draft_window_mtp" in reason:
        return 'add "draft_window_mtp": true to --additional-config, or leave the option out'
    return f"use a draft that can be windowed instead of {speculative.method}, or leave the option out"
