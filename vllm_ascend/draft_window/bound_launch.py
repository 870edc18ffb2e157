# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM-Ascend project
"""A shorter launch of a kernel whose tensors never change, for CUDA and the Tritons that it is known to fit."""

from collections.abc import Callable
from typing import Any

import torch
from vllm.triton_utils import triton

_KNOWN_TRITON = ((3, 4), (3, 9))


def bind_on_cuda(compiled: Any, tensors: tuple[torch.Tensor, ...], constants: Any) -> Callable[..., None] | None:
    """Elsewhere (interpreter, triton-ascend) a compiled kernel takes other arguments, or there is none."""
    if torch.version.cuda is None or not tensors[0].is_cuda:
        return None
    return bind(compiled, tuple(tensor.data_ptr() for tensor in tensors), constants, tensors[0].device.index)


def bind(compiled: Any, addresses: tuple[int, ...], constants: Any, device_index: int) -> Callable[..., None]:
    """``launch(num_rows, *scalars)`` of a compiled CUDA kernel, by the shortest way that its Triton is known to have.

    ``compiled[grid](...)`` costs three times as much: it prepares metadata for launch hooks and calls both chains of
    them, empty or not. ``run`` is what is left without hooks, and what Triton's own ``JITFunction`` calls; its first
    nine parameters are the same from Triton 3.4 to 3.9. Profilers that rely on Triton's hooks do not see the launch.
    """
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if not _KNOWN_TRITON[0] <= version <= _KNOWN_TRITON[1]:
        return lambda num_rows, *scalars: compiled[(num_rows, 1, 1)](*addresses, *scalars, *constants)
    from triton.runtime import driver

    run, stream_of = compiled.run, driver.active.get_current_stream
    no_metadata, no_enter_hook, no_exit_hook = None, None, None
    head = (compiled.function, compiled.packed_metadata, no_metadata, no_enter_hook, no_exit_hook, *addresses)

    def launch(num_rows: int, *scalars: int) -> None:
        run(num_rows, 1, 1, stream_of(device_index), *head, *scalars, *constants)

    return launch
