# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM-Ascend project
"""What vLLM-Ascend's speculators need beyond vLLM's: real lengths on the host, for backends that plan there.

Model Runner V2 gives no host lengths to a draft's metadata build. vLLM-Ascend then lets ``seq_lens_cpu`` say
``max_seq_len`` for every request, which its builders hand to the operator as the length to read: past the request's
own tokens, and with a cropped block table into the null block.
"""

from collections.abc import Callable
from typing import Any

import torch
from vllm.v1.worker.gpu.spec_decode import speculator as upstream

from .inputs import WindowedInputs, swapped

# Names of attention backends whose metadata builders always read ``seq_lens_cpu``. GQA's reads the device's lengths for
# parallel drafters, and the host's otherwise.
_PLANNED_ON_HOST = frozenset({"ASCEND_MLA", "ASCEND_SFA"})


class HostLengths:
    """Mixin in front of the draft window's own, for speculators of vLLM-Ascend."""

    vllm_config: Any
    attn_groups: list[list[Any]]
    windowed_inputs: WindowedInputs | None

    _planned_on_host = False

    def set_attn(self, *args: Any, **kwargs: Any) -> None:
        super().set_attn(*args, **kwargs)  # type: ignore[misc]
        parallel = self.vllm_config.speculative_config.parallel_drafting
        self._planned_on_host = self.windowed_inputs is not None and plans_on_host(self.attn_groups, parallel=parallel)

    def _build_draft_attn_metadata(self, *args: Any, **kwargs: Any) -> dict[str, Any] | None:
        build = super()._build_draft_attn_metadata  # type: ignore[misc]
        if not self._planned_on_host:
            return build(*args, **kwargs)
        with swapped((upstream, "build_attn_metadata", _with_host_lengths(upstream.build_attn_metadata))):
            return build(*args, **kwargs)


def plans_on_host(attn_groups: list[list[Any]], *, parallel: bool) -> bool:
    """Whether a draft layer's metadata builder reads lengths on the host."""
    return not parallel or any(
        group.backend.get_name() in _PLANNED_ON_HOST for groups in attn_groups for group in groups
    )


def _with_host_lengths(build_attn_metadata: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Copy the lengths that the build is given, windowed by then, to the host.

    The copy waits for the device, as vLLM-Ascend's GQA builder does for parallel drafters. A host bound would not do:
    what it counts too much was never written.
    """

    def build(*, num_reqs: int, seq_lens: torch.Tensor, **kwargs: Any) -> dict[str, Any]:
        # [num_reqs]
        host = seq_lens[:num_reqs].to("cpu", copy=True).numpy()
        return build_attn_metadata(num_reqs=num_reqs, seq_lens=seq_lens, seq_lens_np=host, **kwargs)

    return build
