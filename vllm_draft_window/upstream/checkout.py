# SPDX-License-Identifier: Apache-2.0
"""A git checkout that is read at one commit and written as new commits, never through its work tree.

So a failing edit leaves nothing behind: the branch appears when every commit is there.
"""

import os
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from .errors import Refused


class Tree:
    """The files of one commit with edits laid over them."""

    def __init__(self, checkout: "Checkout", commit: str) -> None:
        self._checkout, self._commit = checkout, commit
        self._texts: dict[str, str | None] = {}
        self._edited: set[str] = set()

    def get(self, path: str) -> str | None:
        """Text of a file, ``None`` where there is none."""
        if path not in self._texts:
            self._texts[path] = self._checkout.show(self._commit, path)
        return self._texts[path]

    def read(self, path: str) -> str:
        text = self.get(path)
        if text is None:
            raise Refused(f"{path} is not in the checkout. Upstream moved, so its edit has to be looked at again.")
        return text

    def write(self, path: str, text: str) -> None:
        if text != self.get(path):
            self._texts[path] = text
            self._edited.add(path)

    def take_edits(self) -> dict[str, str]:
        """What was written since the last call, by path."""
        edits = {path: self.read(path) for path in sorted(self._edited)}
        self._edited.clear()
        return edits


class Checkout:
    """A vLLM-Ascend checkout without local changes.

    Raises:
        Refused: the folder is something else, or has local changes, or git knows no one to sign the commits off.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        if not path.is_dir():
            raise Refused(f"{path} is not a folder")
        try:
            top = Path(self.git("rev-parse", "--show-toplevel"))
        except Refused:
            raise Refused(f"{path} is not a git checkout") from None
        if top != path.resolve() or not (path / "vllm_ascend" / "worker").is_dir():
            raise Refused(f"{path} is not the top folder of a vLLM-Ascend checkout (no vllm_ascend/worker in it)")
        changes = self.git("status", "--porcelain").splitlines()
        if changes:
            listed = ", ".join(line[3:] for line in changes[:3]) + (", …" if len(changes) > 3 else "")
            raise Refused(f"{path} has {len(changes)} local change(s) ({listed}); commit, stash or remove them first")
        name, email = (self.git("config", "--default", "", f"user.{key}") for key in ("name", "email"))
        if not name or not email:
            raise Refused("the commits are signed off: set git's user.name and user.email first")
        self.sign_off = f"Signed-off-by: {name} <{email}>"

    def git(self, *args: str, stdin: str | None = None, **environment: str) -> str:
        result = subprocess.run(
            ["git", "-C", str(self._path), *args],
            input=stdin,
            capture_output=True,
            encoding="utf-8",
            env={**os.environ, **environment},
        )
        if result.returncode:
            raise Refused(f"git {args[0]} failed: {result.stderr.strip()}")
        return result.stdout.strip("\n")

    def show(self, commit: str, path: str) -> str | None:
        if not self.git("ls-tree", commit, "--", path):
            return None
        # Not git(): a file's own blank lines at its end stay.
        command = ["git", "-C", str(self._path), "show", f"{commit}:{path}"]
        return subprocess.run(command, check=True, capture_output=True).stdout.decode("utf-8")

    def find_commit(self, reference: str) -> str | None:
        try:
            return self.git("rev-parse", "--verify", "--quiet", f"{reference}^{{commit}}")
        except Refused:
            return None

    def base_of(self, branch_commit: str, subjects: set[str]) -> str:
        """The newest ancestor on the first-parent line that is none of the pull request's own commits."""
        for line in self.git("log", "--first-parent", "--format=%H %s", "-n", "100", branch_commit).splitlines():
            commit, _, subject = line.partition(" ")
            if subject not in subjects:
                return commit
        raise Refused("the last 100 commits all look like the pull request's own")

    def commit(self, parent: str, edits: Mapping[str, str], message: str) -> str:
        """Write one commit on top of ``parent``, signed off, and answer its id. No branch points to it yet."""
        with tempfile.TemporaryDirectory() as folder:
            index = {"GIT_INDEX_FILE": str(Path(folder) / "index")}
            self.git("read-tree", parent, **index)
            for path, text in edits.items():
                blob = self.git("hash-object", "-w", "--stdin", stdin=text)
                self.git("update-index", "--add", "--cacheinfo", f"100644,{blob},{path}", **index)
            tree = self.git("write-tree", **index)
        return self.git("commit-tree", tree, "-p", parent, stdin=f"{message}\n\n{self.sign_off}\n")

    def tree_of(self, commit: str) -> str:
        return self.git("rev-parse", f"{commit}^{{tree}}")
