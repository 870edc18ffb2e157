# SPDX-License-Identifier: Apache-2.0
"""The pages' pictures, each from data in the repository; ``python -m tools.figures`` draws all of them again."""
