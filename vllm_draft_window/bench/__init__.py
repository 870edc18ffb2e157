# SPDX-License-Identifier: Apache-2.0
"""``draft-window bench``: what the window costs and saves on a GPU."""
