# SPDX-License-Identifier: Apache-2.0
"""Byte-level corpus: the Python standard library of the running interpreter (or any tree of ``*.py`` files)."""

from __future__ import annotations

import hashlib
import random
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from .modeling import BOS_TOKEN_ID

SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__"})
TEST_FOLDERS = frozenset({"test", "tests", "idle_test"})
# One file in sixteen is held out. The hash of the path decides, so the split survives added and removed files.
HELD_OUT_MODULUS = 16


@dataclass(frozen=True)
class Corpus:
    """Two token streams (documents joined by BOS) and what is needed to tell which text they were."""

    # [train_tokens] and [held_out_tokens], int16: bytes plus BOS
    train: np.ndarray
    held_out: np.ndarray
    # Sizes, and SHA-256 over the sorted (path, content) pairs, so that two runs can be compared.
    record: dict[str, int | str]


def standard_library() -> Path:
    """Folder of the running interpreter's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def load_corpus(root: Path, *, include_tests: bool, seed: int) -> Corpus:
    """Read every Python file under ``root`` into a training and a held-out stream."""
    splits: dict[bool, list[bytes]] = {False: [], True: []}
    digest = hashlib.sha256()
    skipped = SKIPPED_FOLDERS if include_tests else SKIPPED_FOLDERS | TEST_FOLDERS
    for path in sorted(root.rglob("*.py"), key=lambda p: p.relative_to(root).as_posix()):
        relative = path.relative_to(root)
        # Generated at build time: it holds compiler flags and local paths, which a published model must not recite.
        generated = path.name.startswith("_sysconfigdata")
        if generated or skipped.intersection(relative.parts[:-1]) or not (content := path.read_bytes()):
            continue
        name = relative.as_posix().encode()
        digest.update(name + b"\0" + content)
        held_out = hashlib.sha256(name).digest()[0] % HELD_OUT_MODULUS == 0
        splits[held_out].append(content)
    if not splits[False] or not splits[True]:
        raise SystemExit(f"{root} holds too few Python files for a training and a held-out split")
    for documents in splits.values():
        random.Random(seed).shuffle(documents)
    return Corpus(
        train=_join(splits[False]),
        held_out=_join(splits[True]),
        record={
            "files": len(splits[False]),
            "held_out_files": len(splits[True]),
            "bytes": sum(map(len, splits[False])),
            "held_out_bytes": sum(map(len, splits[True])),
            "sha256": digest.hexdigest(),
        },
    )


def sample_windows(stream: torch.Tensor, *, length: int, batch: int, generator: torch.Generator) -> torch.Tensor:
    """Random windows of a stream, ``[batch, length]`` int64 on the stream's device."""
    # The generator lives on the CPU so that the windows do not depend on the device.
    # [batch]
    ends = torch.randint(length, stream.numel() + 1, (batch,), generator=generator)
    return windows_ending_at(stream, ends.to(stream.device), length)


def windows_ending_at(stream: torch.Tensor, ends: torch.Tensor, length: int) -> torch.Tensor:
    """The ``length`` tokens before each end, ``[len(ends), length]`` int64."""
    offsets = ends[:, None] - length + torch.arange(length, device=stream.device)
    return stream[offsets].long()


def _join(documents: list[bytes]) -> np.ndarray:
    bos = np.array([BOS_TOKEN_ID], dtype=np.int16)
    return np.concatenate([part for text in documents for part in (bos, np.frombuffer(text, dtype=np.uint8))])
