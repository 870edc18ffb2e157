# SPDX-License-Identifier: Apache-2.0
"""The benchmark: ``draft-window bench``."""
