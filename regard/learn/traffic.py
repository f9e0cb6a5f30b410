"""Bytes of attention between slow and fast memory: counted as they go, and by formula. All tensors
of one head are of float32, queries (1 1 n d), keys and values alike."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from regard.attention.core import Terms, scores, softmax
from regard.attention.online import Traffic, online
from regard.mask import Visible

BYTES = 4


def plain(
    memory: dict[str, Tensor], scale: float, visible: Visible | None = None
) -> tuple[Traffic, Traffic]:
    """Attention as it is written, forward and backward, from the q, k, v and do that lie in slow
    memory: what a step makes is written there, and the next step reads it back."""
    terms, seen = Terms(scale), None if visible is None else visible.tensor()
    forward: dict[str, tuple[str, Callable[..., Tensor]]] = {
        "s": ("q k", lambda q, k: scores(q, k, terms)),
        "p": ("s", lambda s: softmax(s, seen)),
        "o": ("p v", torch.matmul),
    }
    backward: dict[str, tuple[str, Callable[..., Tensor]]] = {
        "dv": ("p do", lambda p, do: p.mT @ do),
        "dp": ("do v", lambda do, v: do @ v.mT),
        "ds": ("p dp", lambda p, dp: p * (dp - (p * dp).sum(-1, keepdim=True))),
        "dq": ("ds k", lambda ds, k: ds @ k * scale),
        "dk": ("ds q", lambda ds, q: ds.mT @ q * scale),
    }
    found = Traffic(), Traffic()
    for traffic, steps in zip(found, (forward, backward)):
        for made, (names, step) in steps.items():
            for name in names.split():
                traffic["read", name] += memory[name].nbytes
            memory[made] = step(*(memory[name] for name in names.split()))
            traffic["written", made] += memory[made].nbytes
    return found


def tiled(
    memory: dict[str, Tensor], scale: float, visible: Visible | None, tile: tuple[int, int]
) -> tuple[Traffic, Traffic]:
    """The same by the `online` backend."""
    forward, backward = Traffic(), Traffic()
    q, k, v = inputs = [memory[name].detach().requires_grad_() for name in "qkv"]
    memory["o"] = online(q, k, v, visible, Terms(scale), tile, backward)
    forward.update(backward)
    backward.clear()
    grads = torch.autograd.grad(memory["o"], inputs, memory["do"])
    memory.update(zip(("dq", "dk", "dv"), grads))
    return forward, backward


def plain_bytes(n: int, d: int) -> tuple[int, int]:
    """Forward: Q, K, V and O once; scores and weights are written and read. Backward: weights,
    their gradients and those of scores are read or written seven times."""
    return BYTES * (4 * n * d + 4 * n * n), BYTES * (8 * n * d + 7 * n * n)


def tiled_bytes(n: int, d: int, tile: tuple[int, int], causal: bool) -> tuple[int, int]:
    """Forward: Q, O and the log-sum-exps once; K and V for each row of tiles. Backward: dO and O
    once for their row sums, K, V, dK and dV once; Q, dO, dQ (there and back) and two numbers for
    each query again for each column of tiles. Causal: only as far as tiles show something."""
    rows, columns = tile
    # Keys that the rows of tiles read, queries that the columns of tiles do.
    keys = sum(
        min(n, -(-min(n, i + rows) // columns) * columns) if causal else n
        for i in range(0, n, rows)
    )
    queries = sum(n - j // rows * rows if causal else n for j in range(0, n, columns))
    forward = 2 * n * d + n + 2 * keys * d
    return BYTES * forward, BYTES * (6 * n * d + n + queries * (4 * d + 2))


def kept(backend: Callable[..., Tensor], n: int, d: int) -> int:
    """Bytes that torch keeps of a forward for the backward."""
    found: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        found[x.data_ptr()] = x.nbytes
        return x

    q, k, v = (torch.ones(1, 1, n, d, requires_grad=True) for _ in range(3))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = backend(q, k, v, None, Terms(d**-0.5))
    # All of it lives as long as the output, so that no place is counted for two.
    assert out.requires_grad
    return sum(found.values())
