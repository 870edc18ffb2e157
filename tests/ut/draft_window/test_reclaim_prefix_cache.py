# SPDX-License-Identifier: Apache-2.0
"""What keeping less for the draft does to prefix-cache hits of the target: the same memory with and without.

A hit needs the target's blocks and the draft's of the window in front of it. The draft's are freed while their request
still runs, so they may be evicted first, and the target's hit goes with them. On the other hand there is more memory.
``docs/reclaim.md`` has the figures; ``python -m tests.ut.draft_window.test_reclaim_prefix_cache`` prints them.
"""

import random
from collections.abc import Iterator

import pytest

from vllm_draft_window.cpu_engine import activate

if __name__ == "__main__":
    activate()

from tests.ut.draft_window.cache import BLOCK, Cache, decode

LAYERS, TEXTS, ROUNDS, AT_ONCE = 3, 8, 4, 4
TEXT, QUESTION = 1024, 96
ANSWERS = {"short": 20, "long": 400}
"""Steps of an answer, of 2.5 tokens on average."""
KINDS = [(kind, answer) for kind in ("conversations", "documents") for answer in ANSWERS]


def serve(kind: str, cache: Cache, steps: int, *, check: bool) -> float:
    """Ask about every text in every round, some at once; the share of prompt tokens that were cached from round two on.

    A conversation's prompt is all that was said before; a document's is the document.
    """
    rng = random.Random(0)
    texts = [[rng.randrange(250) for _ in range(TEXT)] for _ in range(TEXTS)]
    asked = found = 0

    def one(name: int, round_: int) -> Iterator[None]:
        nonlocal asked, found
        prompt = texts[name] + [rng.randrange(250) for _ in range(QUESTION)]
        request = cache.request(f"{name}-{round_}", prompt)
        hit = cache.start(request)
        if round_:
            asked, found = asked + len(prompt), found + hit
        yield from decode(cache, request, rng, steps, steps_ahead=0, check=check)
        if kind == "conversations":
            texts[name] = list(request.all_token_ids)
        cache.manager.free(request)

    for round_ in range(ROUNDS):
        waiting = [one(name, round_) for name in rng.sample(range(TEXTS), TEXTS)]
        while waiting:
            waiting[:AT_ONCE] = [run for run in waiting[:AT_ONCE] if next(run, run) is not run]
    return found / asked


def hit_rates(kind: str, answer: str, share: float) -> tuple[float, float]:
    """Without reclaim and with, in memory for ``share`` of what all texts take at the end without."""
    steps = ANSWERS[answer]
    grown = (QUESTION + 2.5 * steps) * (ROUNDS if kind == "conversations" else 1)
    pages = int(share * TEXTS * LAYERS * (TEXT + grown) / BLOCK)
    without = serve(kind, Cache(pages // LAYERS, size=None, enable_caching=True), steps, check=False)
    return without, serve(kind, Cache(pages, enable_caching=True), steps, check=True)


@pytest.mark.parametrize(
    ("kind", "share", "difference"),
    [("conversations", 0.75, 0.22), ("documents", 0.75, -0.2), ("documents", 1.5, 0.0)],
)
def test_hits_under_pressure(kind, share, difference):
    """As documented: conversations find more, documents that many ask about fewer, until memory suffices."""
    without, with_reclaim = hit_rates(kind, "short", share)
    assert with_reclaim - without == pytest.approx(difference, abs=0.02)


if __name__ == "__main__":
    for kind, answer in KINDS:
        for share in (0.75, 1.0, 1.5, 2.0):
            without, with_reclaim = hit_rates(kind, answer, share)
            print(f"{kind}, {answer} answers | {share:.2f} | {without:.1%} | {with_reclaim:.1%}", flush=True)
