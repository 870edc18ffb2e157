# SPDX-License-Identifier: Apache-2.0
"""Option values that are lists or JSON."""

import json
from typing import Any


def numbers(option: str, text: str) -> list[int]:
    try:
        values = sorted({int(part) for part in text.split(",")})
        if values[0] < 1:
            raise ValueError
    except ValueError:
        raise ValueError(f"{option} {text}: expected positive integers with commas between them") from None
    return values


def json_object(option: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
        if not isinstance(value, dict):
            raise ValueError("not an object")
    except ValueError as error:
        raise ValueError(f"{option} {text}: expected a JSON object ({error})") from None
    return value
