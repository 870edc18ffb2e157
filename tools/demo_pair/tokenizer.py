# SPDX-License-Identifier: Apache-2.0
"""The demo pair's tokenizer: a token is a byte. ``python -m tools.demo_pair.tokenizer FOLDER`` writes its two files."""

import json
import sys
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers.convert_slow_tokenizer import bytes_to_unicode

from .modeling import BOS_TOKEN_ID, MASK_TOKEN_ID

BOS, MASK = "<|bos|>", "<|mask|>"


def byte_tokenizer() -> Tokenizer:
    """Token ids are the bytes of the text in UTF-8; nothing is added in front, so any cut of a text is a prompt."""
    tokenizer = Tokenizer(models.BPE(vocab={char: byte for byte, char in bytes_to_unicode().items()}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(BOS, special=True), AddedToken(MASK, special=True)])
    if (tokenizer.token_to_id(BOS), tokenizer.token_to_id(MASK)) != (BOS_TOKEN_ID, MASK_TOKEN_ID):
        raise RuntimeError("the special tokens must follow the 256 bytes in the order of the model's vocabulary")
    return tokenizer


def save_tokenizer(folder: Path) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json``."""
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": BOS,
        "mask_token": MASK,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


if __name__ == "__main__":
    save_tokenizer(Path(sys.argv[1]))
