# SPDX-License-Identifier: Apache-2.0
"""``draft-window sweep``: which window is best on these prompts."""
