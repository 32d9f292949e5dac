"""A rival arm: the same signals in Triton, with each row split among programs and a second kernel that combines
them."""

# mypy would read the Triton kernels as Python, which they are not.
# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl

LOWEST = tl.constexpr(-3.402823466e38)
FLOOR = tl.constexpr(-1e4)
COLUMNS = 6


@triton.jit
def _pieces(logits, stride, vocab, end_token, per_split, floats, integers, BLOCK: tl.constexpr):  # noqa: N803, PLR0917
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    base = logits + row * stride
    end = tl.load(base + end_token).to(tl.float32)
    best, total, weighted = -float("inf"), 0.0, 0.0
    at, above = vocab, 0
    for start in range(split * per_split, tl.minimum((split + 1) * per_split, vocab), BLOCK):
        place = start + tl.arange(0, BLOCK)
        inside = (place < vocab) & (place < (split + 1) * per_split)
        x = tl.load(base + place, mask=inside, other=-float("inf")).to(tl.float32)
        top = tl.max(x, 0)
        at = tl.where(top > best, tl.min(tl.where(x == top, place, vocab), 0), at)
        old, new = tl.maximum(best, LOWEST), tl.maximum(tl.maximum(best, top), LOWEST)
        best = tl.maximum(best, top)
        shift = tl.maximum(old - new, FLOOR)
        d = tl.maximum(x - new, FLOOR)
        e = tl.exp(d)
        weighted = tl.exp(shift) * (weighted + total * shift) + tl.sum(e * d, 0)
        total = tl.exp(shift) * total + tl.sum(e, 0)
        above += tl.sum((x > end).to(tl.int32), 0)
    piece = row * tl.num_programs(1) + split
    tl.store(floats + piece * 3, best)
    tl.store(floats + piece * 3 + 1, total)
    tl.store(floats + piece * 3 + 2, weighted)
    tl.store(integers + piece * 2, at)
    tl.store(integers + piece * 2 + 1, above)


@triton.jit
def _combine(logits, stride, vocab, end_token, splits, floats, integers, out, SPLITS: tl.constexpr):  # noqa: N803, PLR0917
    row, rows = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    piece = row * splits + tl.arange(0, SPLITS)
    inside = tl.arange(0, SPLITS) < splits
    best = tl.load(floats + piece * 3, mask=inside, other=-float("inf"))
    total = tl.load(floats + piece * 3 + 1, mask=inside, other=0.0)
    weighted = tl.load(floats + piece * 3 + 2, mask=inside, other=0.0)
    at = tl.load(integers + piece * 2, mask=inside, other=vocab)
    above = tl.load(integers + piece * 2 + 1, mask=inside, other=0)
    top = tl.max(best, 0)
    new = tl.maximum(top, LOWEST)
    shift = tl.maximum(tl.maximum(best, LOWEST) - new, FLOOR)
    scale = tl.exp(shift)
    weighted = tl.sum(scale * (weighted + total * shift), 0)
    total = tl.sum(scale * total, 0)
    end = tl.load(logits + row * stride + end_token).to(tl.float32)
    log_total = tl.log(total)
    tl.store(out + row, log_total - weighted / total)
    tl.store(out + rows + row, new + log_total)
    tl.store(out + 2 * rows + row, -log_total)
    tl.store(out + 3 * rows + row, end - new - log_total)
    tl.store(out + 4 * rows + row, tl.min(tl.where(best == top, at, vocab), 0).to(tl.float32))
    tl.store(out + 5 * rows + row, (tl.sum(above, 0) + 1).to(tl.float32))


class TritonProbe:
    """Computes the columns of RowSignals, all float32, [6, rows]; it does not flag rows that cannot be measured."""

    def __init__(self, rows: int, vocab: int, device: torch.device, programs: int, block: int = 4096) -> None:
        most = triton.cdiv(vocab, block)
        self._splits = max(1, min(most, programs // rows))
        self._per_split = triton.cdiv(most, self._splits) * block
        self._block = block
        self._floats = torch.empty(rows * self._splits * 3, dtype=torch.float32, device=device)
        self._integers = torch.empty(rows * self._splits * 2, dtype=torch.int32, device=device)
        self.out = torch.empty(COLUMNS, rows, dtype=torch.float32, device=device)

    def __call__(self, logits: torch.Tensor, end_token: int) -> torch.Tensor:
        rows, vocab = logits.shape
        stride, pieces = logits.stride(0), (self._floats, self._integers)
        _pieces[rows, self._splits](
            logits, stride, vocab, end_token, self._per_split, *pieces, BLOCK=self._block, num_warps=8
        )
        _combine[rows,](
            logits,
            stride,
            vocab,
            end_token,
            self._splits,
            *pieces,
            self.out,
            SPLITS=triton.next_power_of_2(self._splits),
            num_warps=1,
        )
        return self.out
