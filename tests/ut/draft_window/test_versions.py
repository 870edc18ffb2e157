# SPDX-License-Identifier: Apache-2.0
"""What is asked of vLLM's version and classes, and what comes of a vLLM that nobody has tested (public case 16)."""

import logging
import sys
from types import SimpleNamespace

import pytest

vllm = pytest.importorskip("vllm")

from vllm.v1.worker.gpu.spec_decode import speculator as upstream  # noqa: E402
from vllm.v1.worker.gpu.spec_decode.dflash import speculator as dflash  # noqa: E402
from vllm.v1.worker.gpu.spec_decode.dspark.speculator import DSparkSpeculator  # noqa: E402
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator  # noqa: E402

from vllm_ascend.draft_window import plugin  # noqa: E402
from vllm_ascend.draft_window.seams import vllm as versions  # noqa: E402
from vllm_ascend.draft_window.seams.speculator import SpeculatorSeam  # noqa: E402

SPECULATORS = {DSparkSpeculator: versions.Kind.PARALLEL, EagleSpeculator: versions.Kind.TARGET_DEPENDENT}
NEWER = "vLLM 0.34.0 is newer than 0.33, the newest that the draft window was tested with"


@pytest.mark.parametrize("version", ["0.26.0", "0.27.1+cpu", "0.33.1", "0.1.dev1+gdeadbeef", "unknown"])
def test_supported_versions_are_silent(version, monkeypatch):
    monkeypatch.setattr(vllm, "__version__", version)
    assert versions.too_old() is versions.untested() is None


def test_too_old_and_too_new(monkeypatch):
    monkeypatch.setattr(vllm, "__version__", "0.25.1")
    assert versions.too_old() == "vLLM 0.25.1 is not supported, 0.26 or later is needed; upgrade vLLM"
    monkeypatch.setattr(vllm, "__version__", "0.34.0")
    assert versions.too_old() is None and versions.untested() == NEWER


@pytest.mark.parametrize("speculator", SPECULATORS)
def test_every_seam_of_this_vllm_is_found(speculator):
    assert versions.kind_of(speculator) is SPECULATORS[speculator]


@pytest.mark.parametrize(
    "name",
    [
        "dflash2.DFlash2Speculator",
        "lilicorr.LiLiCorrSpeculator",
        "xpress.XPressSpeculator",
        "multi_module_mtp.MultiModuleMTPSpeculator",
    ],
)
def test_a_relative_of_a_windowed_speculator_is_not_windowed_by_accident(name):
    module, cls = name.split(".")
    found = pytest.importorskip(f"vllm.v1.worker.gpu.spec_decode.{module}.speculator", reason="not in this vLLM")
    assert versions.kind_of(getattr(found, cls)) == f"{cls} is not windowed by this version"


@pytest.mark.parametrize(
    ("version", "method", "use_mla", "prefill", "size"),
    [
        ("0.31.0", "dflash", False, 1, 1),
        ("0.33.0", "dspark", False, 1, 1),
        ("0.31.0", "dspark", True, 1, 2),
        ("0.31.0", "dspark", False, 4, 8),
        ("0.31.0", "eagle3", False, 1, 2),
        ("0.29.0", "dspark", False, 1, 2),
        ("0.29.0", "dspark", False, 4, 8),
    ],
)
def test_ranks_over_which_a_draft_is_sharded(version, method, use_mla, prefill, size, monkeypatch):
    monkeypatch.setattr(vllm, "__version__", version)
    config = SimpleNamespace(
        speculative_config=SimpleNamespace(method=method, draft_model_config=SimpleNamespace(use_mla=use_mla)),
        parallel_config=SimpleNamespace(decode_context_parallel_size=2, prefill_context_parallel_size=prefill),
    )
    assert versions.draft_context_parallel_size(config) == size
    del config.parallel_config.prefill_context_parallel_size  # an older vLLM
    assert versions.context_parallel_size(config.parallel_config) == 2


@pytest.mark.parametrize("speculator", SPECULATORS)
def test_no_method_is_overridden_by_two_classes_of_ours(speculator):
    windowed = plugin._windowed_class(SPECULATORS[speculator], speculator)
    mro = windowed.__mro__
    ours = mro[: mro.index(speculator)]
    assert all(cls.__module__.startswith("vllm_ascend.draft_window.") for cls in ours)
    methods = [name for cls in ours for name, member in vars(cls).items() if callable(member)]
    of_upstream = [name for name in methods if hasattr(speculator, name) and name not in vars(object)]
    assert len(of_upstream) == len(set(of_upstream)) > 2


@pytest.mark.parametrize(
    ("speculator", "owner", "method"),
    [
        (DSparkSpeculator, dflash.DFlashCudaGraphManager, "capture"),
        (DSparkSpeculator, dflash.DFlashSpeculator, "_generate_draft"),
        (EagleSpeculator, EagleSpeculator.__mro__[1], "_prefill"),
        (EagleSpeculator, EagleSpeculator.__mro__[1], "propose"),
    ],
)
def test_a_seam_that_changed_or_went_switches_off_and_is_named(speculator, owner, method, monkeypatch):
    monkeypatch.setattr(vllm, "__version__", "0.34.0")
    monkeypatch.setattr(owner, method, lambda self, everything: None)
    assert versions.kind_of(speculator).startswith(f"{NEWER}, and has no {owner.__name__}.{method}(")
    monkeypatch.delattr(owner, method)
    if not hasattr(owner, method):
        assert versions.kind_of(speculator).startswith(f"{NEWER}, and has no {owner.__name__}.{method}(")


def test_a_build_that_went_switches_off_and_is_named(monkeypatch):
    name = "_build_attn_metadata" if versions.builds_by_descriptor() else "_build_draft_attn_metadata"
    monkeypatch.delattr(upstream.DraftModelSpeculator, name)
    reason = versions.kind_of(DSparkSpeculator)
    assert f"vLLM {vllm.__version__} is not as it was released, and has no DraftModelSpeculator.{name}(" in reason


def test_a_missed_seam_is_one_line_and_upstreams_class(monkeypatch, window_lines):
    monkeypatch.setattr(vllm, "__version__", "0.34.0")
    monkeypatch.setattr(dflash.DFlashSpeculator, "capture", None)
    monkeypatch.setattr("vllm_ascend.draft_window.startup.decide", lambda _: plugin.DraftWindow(
        method="dspark", size=64, sink_size=0, min_context=0, queries_per_request=7, max_lookahead=0
    ))  # fmt: skip
    config = SimpleNamespace(parallel_config=SimpleNamespace(rank=0, pipeline_parallel_size=1, tensor_parallel_size=1))
    made = plugin._new_speculator(DSparkSpeculator, config)
    assert type(made) is DSparkSpeculator and not isinstance(made, SpeculatorSeam)
    ((level, line),) = window_lines
    assert level == "WARNING" and line == f"Draft window off: {NEWER}, and has no DFlashSpeculator.capture()."


def test_a_planner_without_what_is_hooked_is_one_reason_and_no_hook(monkeypatch):
    before = upstream.DraftModelSpeculator.__new__
    monkeypatch.delattr(versions.kv_cache_grouping(), "create_kv_cache_group_specs")
    assert "has no vllm.v1.core.kv_cache_" in plugin.register()
    assert upstream.DraftModelSpeculator.__new__ is before


@pytest.mark.parametrize("module", ["vllm.v1.worker.gpu.spec_decode.speculator", "vllm.v1.worker.worker_base"])
def test_a_vllm_without_what_is_hooked_is_one_reason_and_no_hook(module, monkeypatch):
    before = upstream.DraftModelSpeculator.__new__
    monkeypatch.setattr(vllm, "__version__", "0.34.0")
    monkeypatch.setitem(sys.modules, module, None)
    assert plugin.register().startswith(f"{NEWER}, and has no ")
    assert upstream.DraftModelSpeculator.__new__ is before


def test_other_methods_are_named():
    assert versions.kind_of(logging.Logger) == "Logger is not windowed by this version"


def test_arguments_are_replaced_wherever_a_version_has_them():
    def capture(forward, model_state, input_buffers, block_tables, *, causal=True):
        seen.append((forward, model_state, input_buffers, block_tables, causal))

    seen: list[tuple] = []
    versions.call_with(capture, ("f", "m", "b", "t"), {"causal": False}, input_buffers="B", block_tables="T", absent=1)
    versions.call_with(capture, ("f", "m"), {"block_tables": "t", "input_buffers": "b"}, input_buffers="B")
    assert seen == [("f", "m", "B", "T", False), ("f", "m", "B", "t", True)]
