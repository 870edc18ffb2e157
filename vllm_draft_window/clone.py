# SPDX-License-Identifier: Apache-2.0
"""What belongs to a clone of the repository: some of it the wheel carries along, the rest only a clone has."""

from pathlib import Path

_ROOT = Path(__file__).parents[1]
DEMO_PAIR = _ROOT / "checkpoints" / "demo-pair"
_IN_WHEEL = Path(__file__).parent / "carried"
CARRIED = _IN_WHEEL if _IN_WHEEL.is_dir() else _ROOT
"""Root of the repository's files that the wheel carries along (see pyproject.toml); in a clone that is its own root."""


class NeedsClone(ValueError):
    """Something that is in no wheel was asked for."""


def require_clone(what: str) -> None:
    """Raise where the program was installed without its repository.

    Raises:
        NeedsClone: names ``what`` is missing.
    """
    if not DEMO_PAIR.is_dir():
        raise NeedsClone(f"{what} comes with a clone of the repository only; run it there, after `pip install -e .`")
