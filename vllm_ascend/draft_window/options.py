# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM-Ascend project
"""What the user wrote in ``--additional-config``, read strictly: a mistake stops the start and is named."""

import difflib
import operator
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

_PREFIX = "draft_window"


class DraftWindowOptions(BaseModel):
    """The window's keys of ``additional_config``; strict, so ``True``, ``"2048"`` and ``2048.0`` are not integers."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    draft_window_size: Annotated[
        Annotated[int, Field(gt=0)] | Literal["auto"],
        Field(description="newest tokens that the draft attends to; auto learns how many are best"),
    ]
    draft_window_sink_size: Annotated[int, Field(ge=0, description="first tokens that stay visible")] = 0
    draft_window_min_context: Annotated[int, Field(ge=0, description="shorter requests are not windowed")] = 0
    draft_window_mtp: Annotated[bool, Field(description="window the MTP heads too")] = False
    draft_window_reclaim: Annotated[bool, Field(description="keep only what the window reads")] = False
    draft_window_candidates: Annotated[
        list[Annotated[int, Field(gt=0)]], Field(description="sizes that auto chooses from")
    ] = []

    @classmethod
    def from_additional_config(cls, additional_config: Any) -> "DraftWindowOptions | None":
        """Read the options; ``None`` when no window is asked for. Keys of others are left alone.

        Raises:
            ValueError: a value of the wrong type or range, a key that looks like one of the window's but is none, or an
                option of the window without the window itself. Names the key, the value and what is allowed.
        """
        # A platform may keep an object of its own there; the window's options only ever come in a dict.
        config = additional_config if isinstance(additional_config, Mapping) else {}
        if mistakes := "; ".join(misplaced_keys(config)):
            raise ValueError(mistakes)
        given = {key: _plain(config[key]) for key in cls.model_fields if config.get(key) is not None}
        # A launcher may write every default out.
        meant = {key: value for key, value in given.items() if not _is_default(cls, key, value)}
        if not meant:
            return None
        try:
            options = cls(**meant)
        except ValidationError as error:
            # A value that could have been of two kinds is wrong twice.
            raise ValueError("; ".join(dict.fromkeys(_explain(detail, meant) for detail in error.errors()))) from None
        if options.draft_window_candidates and options.draft_window_size != "auto":
            raise ValueError(
                f"additional_config draft_window_candidates={options.draft_window_candidates} is what "
                f"draft_window_size='auto' chooses from, but draft_window_size={options.draft_window_size}"
            )
        return options


def misplaced_keys(config: Mapping[Any, Any], where: str = "additional_config") -> Iterator[str]:
    """What is wrong with each key that is spelled or placed as none of the options is, but surely means one of them.

    vLLM passes such a key through unread, and the window would be off without a word. Looks one level deep too.
    """
    options = DraftWindowOptions.model_fields
    for key, value in config.items():
        if not isinstance(key, str) or key in options:
            continue
        if meant := option_meant_by(key):
            yield f"{where} has no option {key!r} (value {value!r}); did you mean {meant!r}?"
        elif isinstance(value, Mapping):
            for inner in value:
                if isinstance(inner, str) and _is_about_a_draft_window(name := _normalized(inner)):
                    yield (
                        f"{where} has {inner!r} (value {value[inner]!r}) inside {key!r}, where nothing reads it; "
                        f"did you mean {_nearest(name)!r} beside {key!r}?"
                    )


def option_meant_by(key: str) -> str | None:
    """The option that a key surely means, however it is spelled; ``None`` for keys of others."""
    name = _normalized(key)
    # Some launchers and engines call it by the name without "draft".
    meant = _is_about_a_draft_window(name) or f"draft_{name}" in DraftWindowOptions.model_fields
    return _nearest(name) if meant else None


def _normalized(key: str) -> str:
    """``draftWindowSize``, ``DRAFT-WINDOW-SIZE`` and `` draft window size`` as ``draft_window_size``."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", key)
    return re.sub(r"[^a-z0-9]+", "_", words.lower()).strip("_")


def _is_about_a_draft_window(name: str) -> bool:
    return "draft" in name and "window" in name


def _nearest(name: str) -> str:
    options = list(DraftWindowOptions.model_fields)
    if name in options:
        return name
    # A cut-off name means the first option that it begins, not the shortest one.
    longer = [option for option in options if option.startswith(name)]
    return (longer or difflib.get_close_matches(name, options, n=1, cutoff=0.8) or options)[0]


def _plain(value: Any) -> Any:
    """An integer of another library as Python's own."""
    if isinstance(value, (bool, int)):
        return value
    try:
        return operator.index(value)
    except TypeError:
        return value


def _is_default(options: type[BaseModel], key: str, value: Any) -> bool:
    default = options.model_fields[key].default
    return type(value) is type(default) and value == default


_ALLOWED = {
    "draft_window_size": "an integer greater than 0, or 'auto'",
    "draft_window_sink_size": "an integer of at least 0",
    "draft_window_min_context": "an integer of at least 0",
    "draft_window_mtp": "true or false",
    "draft_window_reclaim": "true or false",
    "draft_window_candidates": "a list of integers greater than 0",
}


def _explain(detail: Any, given: Mapping[str, Any]) -> str:
    key = detail["loc"][0]
    if detail["type"] == "missing":
        return f"{', '.join(given)} needs {key}, {_ALLOWED[key]}, which is not set"
    return f"additional_config {key}={given[key]!r} is not allowed: it must be {_ALLOWED[key]}"
