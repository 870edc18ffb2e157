# SPDX-License-Identifier: Apache-2.0
"""Option values that are lists, JSON or folders of checkpoints, for all commands."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer


def numbers(option: str, text: str) -> list[int]:
    """Positive integers with commas between them, in the order given.

    Raises:
        ValueError: they are not.
    """
    try:
        values = [int(part) for part in text.split(",")]
        if min(values) < 1:
            raise ValueError
    except ValueError:
        raise ValueError(f"{option} {text}: expected positive integers with commas between them") from None
    return values


def names(option: str, text: str, known: Any) -> list[str]:
    """Some of ``known``.

    Raises:
        ValueError: another name is among them.
    """
    given = text.split(",")
    if unknown := sorted(set(given) - set(known)):
        raise ValueError(f"{option} {text}: {', '.join(unknown)} is none of {', '.join(known)}")
    return given


def json_object(option: str, text: str | None) -> dict[str, Any]:
    """The value of an option that takes a JSON object; empty where it is not given.

    Raises:
        ValueError: it is not JSON, or not an object.
    """
    try:
        value = {} if text is None else json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{option} is not JSON: {error.msg} at character {error.pos + 1} of {text!r}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{option} must be a JSON object, not {text!r}")
    return value


def read_config(path: Path) -> dict[str, Any]:
    """``config.json`` of a model directory.

    Raises:
        ValueError: no such directory or file, no permission, or not a JSON object; what to do follows a semicolon.
    """
    file = path / "config.json"
    try:
        if not path.is_dir():
            raise ValueError(
                f"{path} is no directory; give the folder of a checkpoint (fetch one from the hub with `hf download`)"
            )
        values = json.loads(file.read_text())
    except FileNotFoundError:
        raise ValueError(f"{path} has no config.json; give the folder that holds the checkpoint itself") from None
    except OSError as error:
        raise ValueError(f"cannot read {file}: {error.strerror}; check its permissions") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        where = f"line {error.lineno}: {error.msg}" if isinstance(error, json.JSONDecodeError) else "it is not text"
        raise ValueError(
            f"{file} is not JSON ({where}); it may be a pointer or a damaged download, fetch it again"
        ) from None
    if not isinstance(values, dict):
        raise ValueError(f"{file} is not a JSON object; give the folder of a checkpoint")
    return values


def parser(parse: Callable[..., Any], option: str, *more: Any) -> Callable[[str], Any]:
    """One of the functions above as typer calls it."""

    def parse_text(text: str) -> Any:
        try:
            return parse(option, text, *more)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None

    return parse_text
