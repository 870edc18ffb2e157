# SPDX-License-Identifier: Apache-2.0
"""What only a clone of the repository has: the demo pair with its tools, the oracle and its batches."""

from pathlib import Path

_ROOT = Path(__file__).parents[1]
DEMO_PAIR = _ROOT / "checkpoints" / "demo-pair"


class NeedsClone(ValueError):
    """Something that is in no wheel was asked for."""


def require_clone(what: str) -> None:
    """Raise where the program was installed without its repository.

    Raises:
        NeedsClone: names ``what`` is missing.
    """
    if not DEMO_PAIR.is_dir():
        raise NeedsClone(f"{what} comes with a clone of the repository only; run it there, after `pip install -e .`")
