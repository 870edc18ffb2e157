# SPDX-License-Identifier: Apache-2.0
"""Draws the pictures of ``docs/assets`` again, but for a GPU's: ``draft-window bench run --plot`` makes that one."""

from . import acceptance, house, options, step, sweep

for module in (acceptance, house, options, step, sweep):
    module.draw(module.PICTURE)
    print(module.PICTURE)
