# SPDX-License-Identifier: Apache-2.0
"""Parts of ``tools/compare_options.py``."""
