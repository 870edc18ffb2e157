# SPDX-License-Identifier: Apache-2.0
"""Ways in which a new user writes ``draft_window_size`` so that no engine would read it."""

# As additional_config.
LOOK_ALIKES = (
    {"draft-window-size": 2048},
    {"DRAFT_WINDOW_SIZE": 2048},
    {"draftWindowSize": 2048},
    {" draft_window_size": 2048},
    {"draft_attention_window": 2048},
    {"speculative_draft_window_size": 2048},
    {"window_size": 2048},
    {"draft_window": {"size": 2048}},
    {"ascend": {"draft_window_size": 2048}},
)
