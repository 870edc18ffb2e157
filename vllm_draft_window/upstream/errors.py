# SPDX-License-Identifier: Apache-2.0
"""Why the pull request cannot be written; the text is for the user."""


class Refused(Exception):
    """The checkout, the branch or the arguments do not allow it. Nothing was changed."""


class MissingAnchor(Refused):
    """Upstream moved: something that an edit hangs on is not where it was."""

    def __init__(self, path: str, anchor: str) -> None:
        super().__init__(f"{path}: {anchor} is not there. Upstream moved, so this edit has to be looked at again.")
