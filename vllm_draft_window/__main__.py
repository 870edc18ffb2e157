# SPDX-License-Identifier: Apache-2.0
"""``python -m vllm_draft_window`` is the program ``draft-window``."""

from .cli import main

main()
