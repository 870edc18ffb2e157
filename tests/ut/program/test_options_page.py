# SPDX-License-Identifier: Apache-2.0
"""Rows of ``docs/options.md`` as an engine's worker and the doctor say them, of vLLM's own configuration.

What only loaded layers can tell is in ``tests/e2e/test_start_up_lines.py``; ``docs/verified.md`` has the whole list.
"""

import importlib
import importlib.util
from types import SimpleNamespace

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("needs vLLM", allow_module_level=True)

from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator
from vllm.v1.worker.worker_base import WorkerBase

from tests.e2e import mtp_target
from tests.ut.program.doctoring import DSPARK, EAGLE3, TARGET, arguments, changed, examine, medusa
from vllm_ascend.draft_window import plugin
from vllm_ascend.draft_window.seams import ascend
from vllm_ascend.draft_window.seams import vllm as versions
from vllm_draft_window.doctor import engine

pytestmark = pytest.mark.configuration
plugin.register()
WINDOW = {"draft_window_size": 512}
V1 = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
DRAFT_MODEL = {"method": "draft_model", "model": str(TARGET), "num_speculative_tokens": 3}
MTP = {"method": "mtp", "num_speculative_tokens": 3}
AUXILIARY = {"hf_config": {"eagle_aux_hidden_state_layer_ids": [1, 2]}}


@pytest.fixture
def off(window_lines, monkeypatch):
    """Why there is no window, and the level of that line, if a worker and the doctor say the same."""

    def reason(given, **environment):
        verdict, _ = examine(*given, status=1, **environment)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        WorkerBase(engine.engine_config(given)[0], 0, 0, "")
        ((level, line),) = window_lines
        assert line == f"Draft window off: {verdict['reason']}."
        return level, verdict["reason"]

    return reason


@pytest.mark.parametrize(
    "speculative",
    [
        {"method": "ngram", "num_speculative_tokens": 3},
        {"method": "ngram_gpu", "num_speculative_tokens": 3},
        {"method": "suffix", "num_speculative_tokens": 3},
        {"method": "extract_hidden_states", "num_speculative_tokens": 1, "draft_model_config": AUXILIARY},
        {"method": "medusa"},
    ],
    ids=lambda speculative: speculative["method"],
)
def test_methods_without_draft_attention(speculative, off, tmp_path, monkeypatch):
    # No code of suffix decoding's own package runs before a worker has a runner.
    monkeypatch.setattr("vllm.config.speculative.has_arctic_inference", lambda: True, raising=False)
    method = speculative["method"]
    given = arguments(medusa(tmp_path) if method == "medusa" else speculative, WINDOW)
    assert off(given, **V1) == ("WARNING", f"the method {method} has no draft attention over the context")


@pytest.mark.parametrize(
    ("speculative", "options", "level", "reason"),
    [
        (None, {}, "WARNING", "speculative decoding is not configured"),
        (DSPARK, {"draft_window_size": 8192}, "INFO", "draft_window_size=8192 covers max_model_len=8192"),
        (
            DSPARK,
            {"draft_window_sink_size": 7680},
            "INFO",
            "draft_window_size=512 and draft_window_sink_size=7680 cover max_model_len=8192",
        ),
        (EAGLE3, {"draft_window_min_context": 9000}, "INFO", "draft_window_min_context=9000 covers max_model_len=8192"),
    ],
)
def test_nothing_to_window(speculative, options, level, reason, off):
    assert off(arguments(speculative, WINDOW | options)) == (level, reason)


def test_a_sliding_window_of_the_draft_that_covers_everything(off, tmp_path):
    own = changed(tmp_path, use_sliding_window=True, sliding_window=9000, max_window_layers=0)
    reason = "the draft's own sliding window of 9000 tokens covers max_model_len=8192"
    assert off(arguments(own, WINDOW)) == ("INFO", reason)


def test_an_mtp_head(off, tmp_path):
    target = {"model": mtp_target.write(tmp_path), "length": 1024}
    assert examine(*arguments(MTP, WINDOW | {"draft_window_mtp": True}, **target), status=0)[0]["window"]["size"] == 512
    level, reason = off(arguments(MTP, WINDOW, **target))
    assert level == "INFO" and reason.startswith("an MTP head is part of the target; set draft_window_mtp to window it")


@pytest.mark.parametrize("speculative", [EAGLE3, DRAFT_MODEL], ids=lambda speculative: speculative["method"])
def test_model_runner_v1_of_vllm(speculative, window_lines, monkeypatch):
    verdict, _ = examine(*arguments(speculative, WINDOW), status=1, **V1)
    assert verdict["reason"].startswith("it needs Model Runner V2")
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    WorkerBase(engine.engine_config(arguments(speculative, WINDOW))[0], 0, 0, "")
    line = "Draft window off: it needs Model Runner V2 (VLLM_USE_V2_MODEL_RUNNER=1)."
    assert window_lines == [("WARNING", line)]


def says_for(speculator_class, given, window_lines):
    """The line when a worker makes that speculator for these arguments."""
    plugin._new_speculator(speculator_class, engine.engine_config(given)[0])
    ((level, line),) = window_lines
    return level, line


def test_a_speculator_that_nobody_has_tested(window_lines, monkeypatch):
    monkeypatch.setattr(versions, "_TESTED", frozenset())
    given = arguments(EAGLE3, WINDOW)
    reason = "EagleSpeculator is not windowed by this version"
    name = examine(*given, status=1)[0]["reason"].split()[0]
    assert name in ("EagleSpeculator", "Eagle3Speculator")
    assert says_for(EagleSpeculator, given, window_lines) == ("WARNING", f"Draft window off: {reason}.")


def test_several_mtp_modules(tmp_path, window_lines):
    """Before 0.29 vLLM runs the first of them over and over, as EAGLE does."""
    config = mtp_target.write(tmp_path) / "config.json"
    config.write_text(config.read_text().replace('"num_nextn_predict_layers": 1', '"num_nextn_predict_layers": 3'))
    given = arguments(MTP, WINDOW | {"draft_window_mtp": True}, model=tmp_path, length=1024)
    if versions.release() < (0, 29):
        assert examine(*given, status=0)[0]["window"]["size"] == 512
        return
    reason = "MultiModuleMTPSpeculator is not windowed by this version"
    assert examine(*given, status=1)[0]["reason"] == reason
    module = importlib.import_module("vllm.v1.worker.gpu.spec_decode.multi_module_mtp.speculator")
    assert says_for(module.MultiModuleMTPSpeculator, given, window_lines) == ("WARNING", f"Draft window off: {reason}.")


@pytest.mark.skipif(versions.builds_by_descriptor(), reason="this vLLM's builds have nothing of 0.26's left")
def test_an_autoregressive_draft_on_vllm_0_26(window_lines, monkeypatch):
    monkeypatch.setattr(versions, "first_step_by_sizes", lambda: False)
    given, reason = arguments(EAGLE3, WINDOW), "it needs vLLM 0.27 or newer for this method"
    assert examine(*given, status=1)[0]["reason"] == reason
    assert says_for(EagleSpeculator, given, window_lines) == ("WARNING", f"Draft window off: {reason}.")


def test_a_vllm_that_is_too_old(window_lines, monkeypatch):
    import vllm_draft_window

    monkeypatch.setattr("vllm.__version__", "0.25.1")
    vllm_draft_window.register()
    line = "Draft window off: vLLM 0.25.1 is not supported, 0.26 or later is needed; upgrade vLLM."
    assert window_lines == [("WARNING", line)]


@pytest.mark.parametrize(
    ("attention", "graphs", "by_sizes", "reason"),
    [
        ("GQA", CUDAGraphMode.FULL_AND_PIECEWISE, True, None),
        ("GQA", CUDAGraphMode.FULL_DECODE_ONLY, True, None),
        ("GQA", CUDAGraphMode.FULL, True, "EagleSpeculator is not windowed with cudagraph_mode FULL; FULL_DECODE"),
        (
            "MLA",
            CUDAGraphMode.NONE,
            True,
            "EagleSpeculator with MLA attention is not windowed on Model Runner V2",
        ),
        (
            "SFA",
            CUDAGraphMode.NONE,
            True,
            "EagleSpeculator with SFA attention is not windowed on Model Runner V2",
        ),
        (None, CUDAGraphMode.NONE, True, "this vLLM-Ascend's EagleSpeculator is too old for a window on"),
        ("GQA", CUDAGraphMode.NONE, False, "EagleSpeculator is windowed with vLLM 0.27 to 0.29 only"),
    ],
)
def test_autoregressive_drafts_on_vllm_ascend(attention, graphs, by_sizes, reason, monkeypatch):
    """vLLM-Ascend's seam in front of vLLM's speculator; ``tests/ascend`` has it in front of vLLM-Ascend's."""
    monkeypatch.setattr(ascend, "first_step_by_sizes", lambda: by_sizes)
    seam = type("Windowed", (ascend.AscendTargetDependentSeam, EagleSpeculator), {})
    speculator = object.__new__(seam)
    speculator.vllm_config = SimpleNamespace(compilation_config=SimpleNamespace(cudagraph_mode=graphs))
    if attention is not None:
        speculator.attn_architecture = attention
    off = speculator.unsupported()
    assert off is None if reason is None else off.reason.startswith(reason)


@pytest.mark.parametrize(
    ("speculative", "smallest", "because"),
    [
        (DSPARK, 7, "the query tokens of one draft forward"),
        ("1+N", 8, "the query tokens of one draft forward"),
        ("dflash", 8, "the query tokens of one draft forward"),
        (EAGLE3, 8, "one more than num_speculative_tokens"),
        (DRAFT_MODEL, 4, "one more than num_speculative_tokens"),
        (MTP, 4, "one more than num_speculative_tokens"),
    ],
    ids=lambda value: value["method"] if isinstance(value, dict) else None,
)
def test_windows_that_are_too_small(speculative, smallest, because, tmp_path):
    model = {}
    if speculative == "1+N":
        speculative = changed(tmp_path, sample_from_anchor=False)
    elif speculative == "dflash":
        speculative = changed(tmp_path, architectures=["DFlashDraftModel"]) | {"method": "dflash"}
    elif speculative is MTP:
        model = {"model": mtp_target.write(tmp_path), "length": 1024}
    method, mtp = speculative["method"], {"draft_window_mtp": True} if speculative is MTP else {}
    given = arguments(speculative, {"draft_window_size": smallest - 1} | mtp, **model)
    v2 = importlib.util.find_spec("vllm.v1.worker.gpu.spec_decode.standalone") or method != "draft_model"
    reason = examine(*given, status=2, VLLM_USE_V2_MODEL_RUNNER="1" if v2 else "0")[0]["reason"]
    assert reason.endswith(f"is too small for {method}: it must be at least {smallest}, {because}")


@pytest.mark.parametrize("max_trained_positions", [None, 2048])
def test_rope_that_depends_on_its_length(max_trained_positions, tmp_path):
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    if max_trained_positions:
        rope["max_trained_positions"] = max_trained_positions
    draft = changed(tmp_path, max_position_embeddings=2048, rope_parameters=rope)
    verdict, _ = examine(*arguments(draft, WINDOW), status=2 if max_trained_positions else 0)
    if max_trained_positions:
        assert "cannot be extended; max_model_len must be at most 2048" in verdict["reason"]


def test_a_dspark_draft_of_deepseek_v4(tmp_path):
    """Such a draft has the config of its target, and vLLM says so where its class is theirs."""
    draft = changed(tmp_path, architectures=["DSparkDraftModel"], model_type="llama")
    (warning,) = examine(*arguments(draft, WINDOW), status=0)[0]["window"]["warnings"]
    assert warning.startswith("this DSpark draft was trained with a DeepSeek-V4 target and is stable on long contexts")


@pytest.mark.parametrize("speculative", [DSPARK, EAGLE3], ids=lambda speculative: speculative["method"])
def test_prefill_context_parallelism(speculative):
    """vLLM 0.27 refuses it on Model Runner V2 in any case."""
    given = arguments(speculative, WINDOW), "--prefill-context-parallel-size", "2"
    reason = examine(*given[0], *given[1:], status=2)[0]["reason"]
    ours = "draft_window_size=512 is not supported with context parallelism (size 2) that shards the draft's KV cache"
    assert reason.startswith(ours) or "does not yet support: prefill context parallelism" in reason


@pytest.mark.parametrize("speculative", [DSPARK, EAGLE3], ids=lambda speculative: speculative["method"])
def test_adaptive_verification(speculative, window_lines):
    """vLLM wants FULL graphs for it, which a CPU has not: what is asked is set once the configuration is made."""
    config = engine.engine_config(arguments(speculative, WINDOW))[0]
    object.__setattr__(config.speculative_config, "enable_adaptive_verification", True)
    WorkerBase(config, 0, 0, "")
    if speculative is DSPARK:
        assert not window_lines
    else:
        reason = "with adaptive verification only the device knows the tokens of eagle3's first forward"
        assert window_lines == [("WARNING", f"Draft window off: {reason}.")]
