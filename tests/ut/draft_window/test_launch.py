# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM-Ascend project
"""The prepared launch against Triton's own: what arrives at the C launcher, for the kernel as compiled for a GPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]

# Triton compiles without a GPU and takes any driver; only the C launcher itself is replaced, by one that records.
# A process of its own: the tests' Triton interprets, and vLLM for CPU hides Triton.
CHILD = """
import json, sys
from types import SimpleNamespace

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.compiler import ASTSource
from triton.runtime import driver

sys.modules["vllm"] = SimpleNamespace()
sys.modules["vllm.triton_utils"] = SimpleNamespace(triton=triton, tl=triton.language)
from vllm_ascend.draft_window import auto_kernel, bound_launch, kernels

TARGET = GPUTarget("cuda", 90, 32)
arrived = []

def c_launch(*arguments):
    arrived.append([a if isinstance(a, int | None) else list(a) if isinstance(a, tuple) else repr(type(a))
                    for a in arguments])

class Driver:
    launcher_cls = nvidia.CudaLauncher
    utils = SimpleNamespace(
        launch=c_launch,
        build_signature_metadata=lambda types: b"",
        get_device_properties=lambda device: {"max_shared_mem": 232448},
        load_binary=lambda name, kernel, shared, device: (1, 2, 32, 0, 1024),
    )
    get_current_device = staticmethod(lambda: 3)
    get_current_stream = staticmethod(lambda device: 7000 + device)
    get_current_target = staticmethod(lambda: TARGET)
    allocate_default_profile_scratch = None

# Types that come with the C launcher.
nvidia.PyKernelArg, nvidia.ARG_KERNEL, nvidia.ARG_CONSTEXPR, nvidia.ARG_TUPLE = (lambda **fields: None), 0, 1, 2
driver.set_active(Driver())
kernel, types, addresses, scalars, constants = json.loads(sys.argv[1])
kernel = getattr(auto_kernel if kernel == "_choose_kernel" else kernels, kernel)
names = kernel.arg_names
signature = {n: types.get(n, "*i32" if n.endswith("_ptr") else "i32" if n.islower() else "constexpr") for n in names}
constexprs = dict(zip([n for n in names if not n.islower()], constants, strict=True))
compiled = triton.compile(ASTSource(kernel, signature, constexprs), target=TARGET)
assert len(addresses) + len(scalars) + len(constants) == len(names)
compiled[(6, 1, 1)](*addresses, *scalars, *constants)
bound_launch.bind(compiled, addresses, tuple(constants), 3)(6, *scalars)
bound_launch._KNOWN_TRITON = ((0, 0), (0, 1))
bound_launch.bind(compiled, addresses, tuple(constants), 3)(6, *scalars)
print(json.dumps(arrived))
"""


POINTERS = list(range(16, 16 * 13, 16))
WINDOW_KERNEL = "_window_kernel", {}, POINTERS, (5, 4032, 0, 0)
WINDOW_CONSTANTS = [1 << 20, 16, 0, 0, 2, True, 0, *[16] * 4, *[65536] * 4, *[253] * 4, 256]
# A batch's four tensors come with each launch.
CHOOSE_KERNEL = "_choose_kernel", {"record_ptr": "*fp32", "history_ptr": "*i64"}, POINTERS[:7], (*POINTERS[7:11], 6)
CHOOSE_CONSTANTS = [7, 7, 8, 64, 4, 256, 0.35, 4, 512, 0.0068]


@pytest.mark.parametrize(
    "kernel", [(*WINDOW_KERNEL, WINDOW_CONSTANTS), (*CHOOSE_KERNEL, CHOOSE_CONSTANTS)], ids=["window", "chooser"]
)
def test_prepared_launch_passes_what_triton_passes(kernel):
    pytest.importorskip(
        "triton", minversion="3.9", reason="older Tritons build a C launcher, which needs a CUDA driver"
    )
    child = subprocess.run(
        [sys.executable, "-c", CHILD, json.dumps(kernel)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin", "HOME": str(Path.home()), "PYTHONPATH": str(REPOSITORY)},
    )
    assert child.returncode == 0, child.stderr
    by_triton, prepared, by_unknown_triton = json.loads(child.stdout)
    assert by_unknown_triton == by_triton
    assert prepared[:4] == [6, 1, 1, 7003]
    # The two chains of hooks and their metadata are left out, and nothing else.
    differing = [(a, b) for a, b in zip(by_triton, prepared, strict=True) if a != b]
    assert all(b is None for _, b in differing) and len(differing) <= 3
    assert [a for a, _ in differing if "LazyDict" not in a and "HookChain" not in a] == []
