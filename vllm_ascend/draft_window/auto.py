# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM-Ascend project
"""``draft_window_size: "auto"``: learns on the device which window makes the draft's proposals last longest.

The output is the target's whatever the window, so the engine may try. Every proposal of a request has one size of a
ladder, its *arm*. At the next step the number of tokens that the target kept is credited to the arm and to the
request's context bucket, and a new arm is drawn by Thompson sampling: each arm's mean accepted length, blurred by as
much as so few proposals leave it uncertain, and the largest wins. Old proposals fade, so that a change is followed.

Nothing here waits for the device: a step reads what earlier steps have left in device memory, and the draws come from a
hash of the step, the row and the arm. Ranks that see the same batches make the same choices, and so do two runs.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch

from .inputs import Bind

# Contexts of at most this many tokens share the first bucket; each further one reaches twice as far.
FIRST_BUCKET_TOKENS = 256
# Blur of an arm with one proposal, as a share of the best mean. Accepted lengths scatter about as much as their mean;
# half of that already finds the best arm, and wastes less.
BLUR = 0.35
# Proposals of one arm after which its whole bucket is halved.
MEMORY = 512
# Proposals per arm that a bucket borrows from the next shorter one.
BORROWED = 4
# Proposals of a batch between two copies of the history to the host.
SEEN_EVERY = 16


class WindowChooser:
    """The arms' record, and the arm of each row of the batch.

    Attributes:
        sizes: the ladder, in tokens, ascending.
        windows: size drawn for each row of the batch, int32, [max_num_reqs]; the window's launch reads it.
        buckets: longest context of each bucket, in tokens; the last one's is ``max_model_len``.
        history: accepted tokens and proposals since the start, int64, [num_buckets, num_arms, 2].
        seen: the same on the host, a few proposals ago.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        *,
        start: int,
        max_num_reqs: int,
        max_model_len: int,
        device: torch.device,
        fused: bool = True,
        bind: Bind | None = None,
    ) -> None:
        """Allocate the record.

        Args:
            sizes: the ladder, in tokens, ascending.
            start: size to begin with, in tokens; the nearest one of the ladder below it is taken.
            max_num_reqs: rows of a batch, and slots of requests.
            fused: one Triton launch per proposal; otherwise its plain-torch twin.
            bind: how to shorten that launch, where the device knows a way.
        """
        self.sizes = tuple(sizes)
        self._start = max((i for i, size in enumerate(self.sizes) if size <= start), default=0)
        num_buckets = max(math.ceil(math.log2(max(max_model_len, 2) / FIRST_BUCKET_TOKENS)), 0) + 1
        self.buckets = (*(FIRST_BUCKET_TOKENS << i for i in range(num_buckets - 1)), max_model_len)
        shape = (num_buckets, len(self.sizes), 2)
        self.windows = torch.full((max_num_reqs,), self.sizes[self._start], dtype=torch.int32, device=device)
        self.history = torch.zeros(shape, dtype=torch.int64, device=device)
        self.seen = torch.zeros(shape, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._calls = 0
        # Like the history, but faded; [num_buckets, num_arms, 2]
        self._record = torch.zeros(shape, dtype=torch.float32, device=device)
        # What this step adds; integers, so that rows may be added in any order. [num_buckets, num_arms, 2]
        self._added = torch.zeros(shape, dtype=torch.int32, device=device)
        # Bucket and arm of the proposal that a request's slot waits for, -1 for none; [max_num_reqs]
        self._cell = torch.full((max_num_reqs,), -1, dtype=torch.int32, device=device)
        # Steps so far, and rows of this step that are done; [2]
        self._clock = torch.zeros(2, dtype=torch.int32, device=device)
        # [num_arms]
        self._sizes = torch.tensor(self.sizes, dtype=torch.int32, device=device)
        self._launch: Any = None
        if fused:
            from .auto_kernel import ChooserLaunch

            self._launch = ChooserLaunch(self, bind)

    def choose(
        self,
        *,
        # [num_reqs], row -> slot of the request
        idx_mapping: torch.Tensor,
        # [num_reqs], context of the proposal to come
        seq_lens: torch.Tensor,
        # [num_reqs], tokens that the target has just kept
        num_sampled: torch.Tensor,
        # [num_reqs + 1], cumulative; a row that verified drafts has more than one
        cu_num_logits: torch.Tensor,
        num_reqs: int,
    ) -> None:
        """Credit the proposals that were just verified, and draw the size of each row's next one."""
        if num_reqs == 0:
            return
        if self._calls % SEEN_EVERY == 0:
            self.seen.copy_(self.history, non_blocking=True)
        self._calls += 1
        if self._launch is not None:
            self._launch(num_reqs, idx_mapping, seq_lens, num_sampled, cu_num_logits)
            return
        slots, sampled = idx_mapping[:num_reqs].long(), num_sampled[:num_reqs]
        verified = (cu_num_logits[1 : num_reqs + 1] - cu_num_logits[:num_reqs] > 1) & (sampled > 0)
        # [num_reqs]
        cell = self._cell[slots]
        credited = verified & (cell >= 0)
        added = self._added.view(-1, 2)
        where = cell.clip(min=0).long()
        added[:, 0].index_add_(0, where, torch.where(credited, sampled, 0).int())
        added[:, 1].index_add_(0, where, credited.int())

        # [num_reqs]
        bucket = self._bucket(seq_lens[:num_reqs])
        arm = self._draw(bucket, seq_lens[:num_reqs])
        drafting = sampled > 0
        self._cell[slots] = torch.where(drafting, bucket * len(self.sizes) + arm, -1).int()
        self.windows[:num_reqs] = self._sizes[arm]
        self._close_step()

    def _bucket(self, seq_lens: torch.Tensor) -> torch.Tensor:
        """Index of each context's bucket, [num_reqs]."""
        # [num_buckets - 1], the last length of every bucket but the last
        edges = FIRST_BUCKET_TOKENS << torch.arange(self._record.shape[0] - 1, device=seq_lens.device)
        return (seq_lens[:, None] > edges).sum(1)

    def _draw(self, bucket: torch.Tensor, seq_lens: torch.Tensor) -> torch.Tensor:
        """Index of the arm of each row, [num_reqs]."""
        # [num_reqs, num_arms, 2]
        own, shorter = self._record[bucket], self._record[(bucket - 1).clip(min=0)]
        borrowed = (BORROWED / shorter[..., 1].clip(min=1)).clip(max=1.0) * (bucket > 0)[:, None]
        # [num_reqs, num_arms]
        proposals = own[..., 1] + shorter[..., 1] * borrowed
        tokens = own[..., 0] + shorter[..., 0] * borrowed
        # An arm above the one that covers the context is that arm once more.
        below = torch.cat([self._sizes.new_zeros(1), self._sizes[:-1]])
        useful = below < seq_lens[:, None]
        mean = tokens / proposals.clip(min=1e-6)
        tried = useful & (proposals > 0)
        best = torch.where(tried, mean, 0).amax(1, keepdim=True)
        # An arm that nobody has tried may be as good as the best.
        mean = torch.where(proposals > 0, mean, best)
        score = mean + BLUR * best * self._noise(*mean.shape) / proposals.clip(min=1).sqrt()
        drawn = score.masked_fill(~useful, -math.inf).argmax(1)
        first = torch.minimum(useful.sum(1) - 1, torch.tensor(self._start, device=drawn.device))
        return torch.where(tried.any(1), drawn, first)

    def _noise(self, num_rows: int, num_arms: int) -> torch.Tensor:
        """About standard normal: four bytes of a hash, added up; float32, [num_rows, num_arms]."""
        device = self._clock.device
        row, arm = torch.arange(num_rows, device=device)[:, None], torch.arange(num_arms, device=device)
        # uint32 arithmetic in int64
        x = (self._clock[0].long() * 0x9E3779B1 + row * 0x85EBCA77 + arm * 0xC2B2AE3D) & _UINT32
        x = ((x ^ (x >> 16)) * 0x7FEB352D) & _UINT32
        x = ((x ^ (x >> 15)) * 0x846CA68B) & _UINT32
        x = x ^ (x >> 16)
        total = (x & 255) + (x >> 8 & 255) + (x >> 16 & 255) + (x >> 24)
        return (total - 510).float() * NOISE_SCALE

    def _close_step(self) -> None:
        self.history += self._added
        self._record += self._added
        self._added.zero_()
        full = (self._record[..., 1] >= MEMORY).any(1)
        self._record *= torch.where(full, 0.5, 1.0)[:, None, None]
        self._clock[0] += 1


_UINT32 = 0xFFFFFFFF
# The sum of four bytes has the variance 4 * (256**2 - 1) / 12.
NOISE_SCALE = (3 / (256**2 - 1)) ** 0.5
