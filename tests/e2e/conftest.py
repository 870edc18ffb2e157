# SPDX-License-Identifier: Apache-2.0
"""Engines for the end-to-end tests; everything here runs real vLLM."""

import importlib.metadata

import pytest

try:
    VLLM_VERSION = tuple(int(n) for n in importlib.metadata.version("vllm").split("+")[0].split(".")[:2])
except importlib.metadata.PackageNotFoundError:
    VLLM_VERSION = None


def pytest_collection_modifyitems(items):
    for item in items:
        if "tests/e2e" in item.path.as_posix():
            item.add_marker(pytest.mark.engine)


if VLLM_VERSION is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def block_sizes() -> tuple[int, ...]:
    """From 0.29 on the CPU attention backend takes multiples of 32 only."""
    return (16, 32, 128) if VLLM_VERSION < (0, 29) else (32, 64, 128)
