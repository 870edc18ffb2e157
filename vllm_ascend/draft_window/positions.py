# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM-Ascend project
"""Lets a draft's RoPE table reach as far as the engine serves.

The table ends at the draft's own ``max_position_embeddings``, but a windowed draft keeps absolute positions: past the
end a GPU reads illegal memory and a CPU garbage. RoPE scores depend on distances only, so a longer table with unchanged
frequencies is exact. For most kinds of RoPE the draft is simply built with a larger value; where the table does not
follow it (YaRN), or where the scaling would (LongRoPE), rows are added after the load.
"""

from collections.abc import Iterator
from typing import Any

import torch

from .facts import language_config, rope_parameters

_TABLES = ("cos_sin_cache", "long_short_cos_sin_cache", "cos_sin_cache_bf16")


class DraftPositions:
    """One draft's tables; made before the draft is built, which then has to be shown to :meth:`extend`.

    Attributes:
        details: rows and bytes for the start-up line, empty where the draft's own table was long enough.
    """

    details = ""

    def __init__(self, vllm_config: Any) -> None:
        """Raise what the draft's config says, so that the draft is built with a table of ``max_model_len`` rows."""
        self._limit: int = vllm_config.model_config.max_model_len
        self._was_short = False
        draft = vllm_config.speculative_config.draft_model_config
        nested = (draft.hf_config, getattr(draft, "hf_text_config", None), language_config(draft.hf_config))
        for config in {id(config): config for config in nested if config is not None}.values():
            rows = getattr(config, "max_position_embeddings", None)
            if (rows is None or rows < self._limit) and _follows(config):
                config.max_position_embeddings = self._limit
                self._was_short = True

    def extend(self, model: torch.nn.Module) -> None:
        """Add the rows that the loaded draft still lacks.

        Raises:
            ValueError: a table of a kind that cannot be extended is too short.
        """
        tables = list(_tables(model))
        for rope, name in tables:
            table: torch.Tensor = getattr(rope, name)
            if _rows(rope, table) < self._limit:
                self._was_short = True
                if hasattr(rope, "_set_cos_sin_cache"):  # vLLM-Ascend's for DeepSeek, which keeps more than the table
                    rope._set_cos_sin_cache(self._limit, device=table.device, dtype=table.dtype)
                else:
                    _replace(model, table, _extended(rope, table, self._limit))
        if self._was_short and tables:
            rows = min(_rows(rope, getattr(rope, name)) for rope, name in tables)
            size = sum(getattr(rope, name).nbytes for rope, name in tables)
            self.details = f", positions extended to {rows} rows ({-(-size // 1024)} KiB)"


def _follows(config: Any) -> bool:
    """Whether a larger ``max_position_embeddings`` adds rows, if any, and changes none."""
    kinds = rope_parameters(config)
    return bool(kinds) and all(kind.get("rope_type") not in ("longrope", "su") for kind in kinds)


def _tables(model: torch.nn.Module) -> Iterator[tuple[Any, str]]:
    """Layers mostly share one module, which comes once."""
    for module in model.modules():
        if hasattr(module, "_compute_cos_sin_cache"):
            yield from ((module, name) for name in _TABLES if getattr(module, name, None) is not None)


def _rows(rope: Any, table: torch.Tensor) -> int:
    """Positions that a table reaches. LongRoPE's has two parts, for short and for long engines, and reads one."""
    if not hasattr(rope, "long_factor"):
        return table.shape[0]
    short: int = rope.original_max_position_embeddings
    return table.shape[0] - short if rope.use_long_rope else short


def _extended(rope: Any, table: torch.Tensor, limit: int) -> torch.Tensor:
    rows = _rows(rope, table)
    if hasattr(rope, "long_factor"):
        parts = ("long_factor", "long_mscale") if rope.use_long_rope else ("short_factor", "short_mscale")
        scaling, magnitude = (getattr(rope, part) for part in parts)
        table = table if rope.use_long_rope else table[:rows]
    elif getattr(rope, "scaling_factor", None) and hasattr(rope, "mscale"):
        scaling, magnitude = rope.scaling_factor, rope.mscale
    else:
        raise ValueError(
            f"draft_window_size needs positions up to max_model_len={limit}, but the draft's "
            f"{type(rope).__name__} ends at {rows} and cannot be extended; max_model_len must be at most {rows}"
        )
    with torch.device(table.device):
        # [limit - rows, rotary_dim / 2]
        angles = torch.outer(torch.arange(rows, limit, dtype=torch.float32), rope._compute_inv_freq(scaling))
        more = torch.cat((angles.cos() * magnitude, angles.sin() * magnitude), dim=-1)
    return torch.cat((table, more.to(table.dtype)))


def _replace(model: torch.nn.Module, old: torch.Tensor, new: torch.Tensor) -> None:
    """Also where a model keeps the table under a name of its own, as DFlash and DSpark do."""
    for module in model.modules():
        for owned in (vars(module), module._buffers):
            for name in [name for name, value in owned.items() if value is old]:
                setattr(module, name, new)
