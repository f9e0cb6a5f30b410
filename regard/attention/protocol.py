"""What a mechanism is: everything that stands in a block and looks at other tokens.

A mechanism is a frozen config and the module that it makes. The config says
    make(dim, memory_dim, add)   the module, in a model of this width
    heads, rope, window          as they are, or None
and the module says what is below. `forward` is written here, once: fast forms replace `enter`, `mix` or `leave`
(regard/fast), and models, summaries and caches ask for `cache_spec` and `flops`, whatever the mechanism is.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn

from regard.attention.context import Context
from regard.cache import CacheSpec
from regard.layers import Add
from regard.mask import Visible


class Mechanism(nn.Module):
    """x (b t m) -> residual + f(x) (b t m), or f(x) alone without a residual."""

    # Methods with the call of `mix` that compute the same, where it can be computed in more than one way.
    forms: ClassVar[tuple[str, ...]] = ()
    # Whether several rows of queries may read one row of what was kept: beams that share a source.
    shares_rows: ClassVar[bool] = False

    config: Any
    wo: Any
    e: int  # width of a value head
    add: Add

    def forward(self, x: Tensor, ctx: Context, residual: Tensor | None = None) -> Tensor:
        return self.leave(self.weigh(self.look(x, ctx), x), residual)

    def look(self, x: Tensor, ctx: Context) -> Tensor:
        q, new = self.enter(x, ctx)
        kept, k_pos = ctx.keep(**new)  # every token so far
        mask = ctx.visible(k_pos, self.config.window)
        return self.mix(q, kept, mask, ctx, ctx.bias(k_pos))  # b t h e

    def enter(self, x: Tensor, ctx: Context) -> tuple[Any, dict[str, Tensor]]:
        """Projections, head norms, positions: queries (b t h d), and what each token leaves behind."""
        return self.queries(self.query_input(x), ctx), self.entries(x, ctx)

    def query_input(self, x: Tensor) -> Tensor:
        """What queries are made of, if it is not x itself."""
        return x

    def queries(self, x: Tensor, ctx: Context) -> Tensor:
        raise NotImplementedError

    def entries(self, x: Tensor, ctx: Context) -> dict[str, Tensor]:
        """What each token of x, or of the memory, leaves behind, by the names of `cache_spec`; nothing when a frozen
        cache already holds it."""
        raise NotImplementedError

    def mix(
        self,
        q: Any,
        kept: dict[str, Tensor],
        mask: Visible | Tensor | None,
        ctx: Context,
        bias: Tensor | None,
    ) -> Tensor:
        """The mechanism itself: queries meet all that was kept. (b t h e)"""
        raise NotImplementedError

    def gathered(
        self, q: Tensor, kept: dict[str, Tensor], mask: Tensor, ctx: Context, bias: Tensor | None
    ) -> Tensor:
        """`mix` where every query has keys of its own: the batch is of single queries."""
        return self.mix(q, kept, mask, ctx, bias)

    def weigh(self, o: Tensor, x: Tensor) -> Tensor:
        """What was seen, by how much of it x lets through, where a mechanism has such a gate."""
        return o

    def leave(self, o: Tensor, residual: Tensor | None = None) -> Tensor:
        """Output projection, and what a block adds to its stream."""
        return self.add(self.wo(o.flatten(2)), residual)

    def cache_spec(self) -> CacheSpec:
        raise NotImplementedError

    def flops(self, context: int) -> int:
        """Of one query over `context` keys, without the weights: scores and weighted sums."""
        raise NotImplementedError
