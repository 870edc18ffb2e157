# SPDX-License-Identifier: Apache-2.0
"""Measures acceptance on a running vLLM server: prompts through its completions API, counts from its ``/metrics``."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import requests
from prometheus_client.parser import text_string_to_metric_families

from vllm_draft_window.measuring.columns import Measure
from vllm_draft_window.parameters import numbers

from .prompts import Counted, Prompts, load_prompts
from .verdict import Window

DRAFTS = "vllm:spec_decode_num_drafts_total"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
FINISHED = "vllm:request_success_total"


class Server:
    """One server, which nobody else should use meanwhile: its counters do not tell requests apart."""

    def __init__(self, url: str) -> None:
        """Ask the server for its model; ``OPENAI_API_KEY`` is sent where it is set.

        Raises:
            ValueError: no vLLM server answers at ``url``.
        """
        self.url = url.rstrip("/").removesuffix("/v1")
        self._session = requests.Session()
        self._session.headers["Authorization"] = f"Bearer {os.environ.get('OPENAI_API_KEY', 'EMPTY')}"
        self.model = self._ask("/v1/models").json()["data"][0]["id"]

    def tokenize(self, text: str) -> list[int]:
        body = {"model": self.model, "prompt": text, "add_special_tokens": False}
        return self._ask("/tokenize", body).json()["tokens"]

    def counters(self) -> dict[str, float]:
        """Totals over all engines of the server; only those that it has."""
        totals: dict[str, float] = {}
        for family in text_string_to_metric_families(self._ask("/metrics").text):
            for sample in family.samples:
                if sample.name in (DRAFTS, ACCEPTED, FINISHED):
                    totals[sample.name] = totals.get(sample.name, 0) + sample.value
        return totals

    def measure(
        self, prompts: Sequence[Sequence[int]], *, max_tokens: int, on_finished: Callable[[], None]
    ) -> list[tuple[int, int]]:
        """Tokens and target steps of each prompt, one prompt at a time.

        Raises:
            ValueError: the server does not speculate, refuses a prompt, went down, or served somebody else meanwhile.
        """
        counted = []
        before = self.counters()
        # Greedily, past any end of text.
        body = {"model": self.model, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        for prompt in prompts:
            self._ask("/v1/completions", body | {"prompt": list(prompt)})
            after = self.counters()
            gained = {key: value - before.get(key, 0) for key, value in after.items()}
            before = after
            if gained.get(FINISHED) != 1:
                raise ValueError(f"{self.url} finished other requests meanwhile; the sweep needs a server of its own")
            steps = int(gained.get(DRAFTS, 0))
            if not steps:
                raise ValueError(f"{self.url} verified no draft ({DRAFTS} stands still): does it speculate?")
            counted.append((steps + int(gained.get(ACCEPTED, 0)), steps))
            on_finished()
        return counted

    def _ask(self, path: str, body: dict[str, Any] | None = None) -> requests.Response:
        method = "GET" if body is None else "POST"
        try:
            response = self._session.request(method, self.url + path, json=body, timeout=3600)
        except requests.RequestException:
            raise ValueError(f"no vLLM server answers at {self.url}; start it first, then wait for /health") from None
        if not response.ok:
            doubt = "; is it a vLLM server?" if response.status_code == 404 else ""
            raise ValueError(f"{response.url} refused: {response.status_code} {response.text}{doubt}")
        return response


class Servers:
    """Running servers, one for each of ``columns``."""

    is_demo = False

    def __init__(self, servers: list[str], max_tokens: int) -> None:
        self._max_tokens = max_tokens
        urls = dict(entry.partition("=")[::2] for entry in servers)
        if not all(urls.values()) or "off" not in urls or not urls.keys() - {"off", "auto"}:
            raise ValueError(f"--server needs off=URL and at least one WINDOW=URL, got {', '.join(servers)}")
        sizes = sorted((numbers("--server", key)[0], key) for key in urls.keys() - {"off", "auto"})
        keys: dict[Window, str] = {None: "off", **dict(sizes), **({"auto": "auto"} if "auto" in urls else {})}
        self.columns = list(keys)
        self._servers = {window: Server(urls[key]) for window, key in keys.items()}
        models = {server.model for server in self._servers.values()}
        if len(models) > 1:
            raise ValueError(f"the servers serve different models: {', '.join(sorted(models))}")
        self.title = f"{models.pop()} on running servers"
        self.settings = {"servers": {key: urls[key] for key in sorted(urls)}}

    def prompts(self, path: Path | None, contexts: list[int], count: int) -> Prompts:
        assert path is not None  # asked for above
        return load_prompts(path, contexts, count, self._servers[None].tokenize)

    @contextmanager
    def measuring(self, window: Window, prompts: Prompts) -> Iterator[Measure[Counted]]:
        server = self._servers[window]
        yield lambda context, on_finished: server.measure(
            prompts[context], max_tokens=self._max_tokens, on_finished=on_finished
        )
