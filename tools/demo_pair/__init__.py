# SPDX-License-Identifier: Apache-2.0
"""Parts of the demo pair: corpus, models, acceptance simulation and checkpoint export."""

DRAFT_FOLDERS = {"dspark": "draft", "eagle3": "eagle3"}
"""Where the checkpoint keeps the draft of each method; the target is in ``target``."""
NUM_SPECULATIVE_TOKENS = 7
"""Tokens that the tools let either draft propose."""
