# SPDX-License-Identifier: Apache-2.0
"""Runs an unmodified vLLM-Ascend on a CPU: ``torch_npu`` is mocked, its attention operator and graphs are stood in for.

:func:`activate` takes the place of a device for one process. What vLLM-Ascend computes in Python, in torch and in
Triton is its own; what it asks of the device comes from :mod:`tests.ascend.fia` and :mod:`tests.ascend.graphs`.
"""

import importlib.machinery
import importlib.metadata
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

from vllm_draft_window.cpu_engine import activate as activate_cpu_engine

REPOSITORY = Path(__file__).parents[2]
_OUR_PACKAGES = ("vllm_ascend", "vllm_ascend.spec_decode")


def activate(checkout: str) -> None:
    """Make ``import vllm_ascend`` find ``checkout``, with our files beside its own, and put mocks where a device was.

    Must run before ``vllm`` is imported.
    """
    if "vllm" not in sys.modules:  # else the suite's conftest has done it
        activate_cpu_engine()
    os.environ["PYTORCH_NPU_ALLOC_CONF"] = "pinned_mem_register:True"  # host and device share their buffers
    os.environ["VLLM_PLUGINS"] = ""  # this process is not an NPU platform, and the tests register the window themselves
    sys.path.insert(0, checkout)
    _mock_torch_npu()
    _mock_triton_ascend()
    for package in ("scipy", "torchvision"):  # imported for things that nothing here uses
        if importlib.util.find_spec(package) is None:
            sys.meta_path.append(_NamesOnly(package))
    import vllm.v1.worker.cpu.shm  # noqa: F401  (no pinned memory, streams or events, as for vLLM's own CPU worker)

    _share_streams_with_cuda()
    _do_without_pinned_memory()
    from vllm_ascend.utils import adapt_patch

    adapt_patch(True)
    adapt_patch()
    if has_window(checkout):
        return
    for name in _OUR_PACKAGES:
        folder = REPOSITORY.joinpath(*name.split("."))
        importlib.import_module(name).__path__.append(str(folder))


def has_window(checkout: str) -> bool:
    """Whether the pull request's branches were written onto a checkout, so that its own window is to be tested."""
    return Path(checkout, "vllm_ascend", "draft_window").is_dir()


def _module(name: str, **attributes: Any) -> ModuleType:
    module = ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, loader=None)
    module.__path__ = []
    vars(module).update(attributes)
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    if parent in sys.modules:
        setattr(sys.modules[parent], child, module)
    return module


def _mock_torch_npu() -> None:
    import torch

    from tests.ascend import fia, graphs

    npu = MagicMock()
    npu.is_available.return_value = False
    npu.current_device.return_value = 0
    vars(npu).update(graphs.ENTRY_POINTS)
    graphs.capture_kernel_launches()
    native = MagicMock(_NPUTaskGroupHandle=MagicMock, _weak_ref_tensor=lambda tensor: tensor)
    _module(
        "torch_npu",
        npu=npu,
        _C=native,
        profiler=MagicMock(),
        float4_e2m1fn_x2=296,
        hifloat8=290,
        float8_e8m0fnu=293,
        npu_format_cast=lambda weight, *_: weight,
        **fia.ENTRY_POINTS,
    )
    sys.modules["torch_npu"].__getattr__ = _device_operator  # type: ignore[method-assign]
    sys.modules |= {"torch_npu._C": native, "torch_npu._C._distributed_c10d": native._distributed_c10d}
    _module("acl")
    _module("acl.rt", memcpy=MagicMock())
    _module("mooncake.engine", TransferEngine=MagicMock())
    _module("vllm_ascend._build_info", __device_type__="A2")
    torch.utils.rename_privateuse1_backend("npu")
    torch.npu = npu
    torch.version.cann = None
    torch.distributed.is_hccl_available = lambda: True


def _device_operator(name: str) -> Any:
    """Operators that nothing here stands in for exist by name and fail when called."""
    if name.startswith("__"):
        raise AttributeError(name)

    def operator(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"torch_npu.{name} has no stand-in on the CPU")

    return operator


def _share_streams_with_cuda() -> None:
    """vLLM's CPU worker has put placeholders there; vLLM-Ascend copies its own over them."""
    import torch

    for name in ("Event", "Stream", "current_stream", "set_stream"):
        setattr(torch.npu, name, getattr(torch.cuda, name))


def _do_without_pinned_memory() -> None:
    import torch

    for name in ("empty", "zeros"):
        factory = getattr(torch, name)
        setattr(torch, name, lambda *args, pin_memory=False, factory=factory, **kwargs: factory(*args, **kwargs))


def _mock_triton_ascend() -> None:
    """The names of triton-ascend that are looked up at import; kernels themselves run in Triton's interpreter."""
    import triton
    from triton.language.extra import libdevice

    slices = _module(
        "triton.language.extra.cann.extension",
        insert_slice=MagicMock(),
        extract_slice=MagicMock(),
        get_element=MagicMock(),
    )
    _module("triton.language.extra.cann", extension=slices, libdevice=libdevice)
    properties = SimpleNamespace(get_device_properties=lambda _: {"num_aicore": 8, "num_vectorcore": 8})
    target = SimpleNamespace(backend="npu", arch="", warp_size=0)
    triton.runtime.driver.set_active(
        SimpleNamespace(get_current_target=lambda: target, get_current_device=lambda: 0, utils=properties)
    )
    version = importlib.metadata.version
    importlib.metadata.version = lambda name: "3.2.0" if name == "triton-ascend" else version(name)


class _NamesOnly:
    """Finds every module of a package that is not there, with whatever names one imports from it."""

    def __init__(self, package: str) -> None:
        self._package = package

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        return importlib.util.spec_from_loader(name, self) if name.split(".")[0] == self._package else None  # type: ignore

    def create_module(self, spec: Any) -> ModuleType:
        module = ModuleType(spec.name)
        module.__path__ = []
        module.__version__ = "9.9"  # type: ignore[attr-defined]  (numba asks scipy)
        module.__getattr__ = lambda _: MagicMock()  # type: ignore[method-assign]
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass
