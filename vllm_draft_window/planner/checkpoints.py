# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint's ``config.json`` says about its KV cache; loads no weights and needs no vLLM."""

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vllm_ascend.draft_window.facts import native_window
from vllm_draft_window.parameters import read_config

_NAMED_METHODS = ("dspark", "dflash", "eagle3", "eagle")


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """One model directory.

    Attributes:
        config: the language model's config, one attribute per key.
        windows: sliding window of each layer that keeps keys and values, ``None`` for full attention.
        weight_bytes: size of the weight files.
    """

    path: Path
    config: SimpleNamespace
    windows: tuple[int | None, ...]
    weight_bytes: int

    @classmethod
    def read(cls, path: Path) -> "Checkpoint":
        """Read ``path/config.json``.

        Raises:
            ValueError: it is missing, cannot be read, or does not describe a decoder; says what to do.
        """
        config = SimpleNamespace(**_language_config(read_config(path)))
        for key in ("num_hidden_layers", "num_attention_heads", "hidden_size"):
            if not isinstance(getattr(config, key, None), int):
                raise ValueError(f"{path / 'config.json'} has no integer {key!r}: it is not the config of a decoder")
        if getattr(config, "sliding_window", None) and not getattr(config, "layer_types", None):
            config.layer_types = _default_layer_types(config)
        return cls(
            path=path,
            config=config,
            windows=tuple(_layer_windows(config)),
            weight_bytes=sum(file.stat().st_size for file in path.glob("*.safetensors")),
        )

    @property
    def layers_without_kv(self) -> int:
        """Layers that keep a state of fixed size instead."""
        return self.config.num_hidden_layers - len(self.windows)

    @property
    def dtype(self) -> str:
        return str(getattr(self.config, "dtype", None) or getattr(self.config, "torch_dtype", None) or "bfloat16")

    @property
    def method(self) -> str:
        """The speculative method that this draft's architecture stands for."""
        names = *(getattr(self.config, "architectures", None) or ()), getattr(self.config, "speculators_model_type", "")
        described = " ".join(names).lower()
        return next((method for method in _NAMED_METHODS if method in described), "draft_model")

    @property
    def causal(self) -> bool:
        """Whether a query row of a parallel drafter sees only the rows before it."""
        override = (getattr(self.config, "dflash_config", None) or {}).get("causal")
        if override is not None or self.method not in ("dflash", "dspark"):
            return override is not False
        layer_types = getattr(self.config, "layer_types", None)
        return layer_types is not None and all(kind == "sliding_attention" for kind in layer_types)

    @property
    def is_mla(self) -> bool:
        return bool(getattr(self.config, "kv_lora_rank", None))

    def layer_bytes(self, element_bytes: int, tensor_parallel_size: int) -> int:
        """Keys and values of one token in one layer, on one rank."""
        config = self.config
        if self.is_mla:  # MLA keeps one latent, the same on every rank
            return (config.kv_lora_rank + config.qk_rope_head_dim) * element_bytes
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return 2 * max(heads // tensor_parallel_size, 1) * head_size * element_bytes


def _language_config(values: dict[str, Any]) -> dict[str, Any]:
    """Multimodal models and speculators' drafts nest the decoder's config."""
    for key in ("text_config", "transformer_layer_config"):
        if isinstance(values.get(key), dict):
            # The outer architecture says which draft it is.
            return values | values[key] | {k: values[k] for k in ("architectures",) if k in values}
    return values


def _default_layer_types(config: SimpleNamespace) -> list[str] | None:
    """As the engine gets them: many families leave them to transformers, which fills them in when it loads a config."""
    from transformers import AutoConfig

    try:
        return getattr(AutoConfig.for_model(**vars(config)), "layer_types", None)
    except (KeyError, TypeError, ValueError):  # a model type that transformers does not know
        return None


def _layer_windows(config: SimpleNamespace) -> list[int | None]:
    """Of each layer that keeps keys and values: a sliding window, or ``None`` for full attention."""
    layers, window = config.num_hidden_layers, native_window(config)
    kinds = getattr(config, "layer_types", None)
    if kinds is None and getattr(config, "full_attention_interval", None):
        every = config.full_attention_interval
        kinds = ["linear_attention" if (layer + 1) % every else "full_attention" for layer in range(layers)]
    # A DFlash draft with `use_swa` slides on every layer, unless its layer types say which.
    if kinds is None or (window and "sliding_attention" not in kinds):
        return [window] * layers
    of_kind = {"full_attention": None, "sliding_attention": window}
    return [of_kind[kind] for kind in kinds[:layers] if kind in of_kind]
