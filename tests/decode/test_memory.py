"""What decoding holds: as many bytes as the summary says, and less than a page a row more than it must."""

import pytest
import torch

from regard.cache import Paged, Pool
from regard.decode.engine import Engine
from regard.decode.settings import Settings
from regard.models.base import cache_bytes
from tests.decode.tiny import DECODERS, model, prompts, request
from tests.laws.mechanisms import decoder

PAGE = 4
PAGED = [name for name in DECODERS if name != "delta"]  # a state needs no page


def held(pool: Pool) -> int:
    """Bytes in pages that some row holds."""
    each = sum(x[0].numel() * x.element_size() for store in pool.stores for x in store.values())
    return each * sum(n > 0 for n in pool.users)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", PAGED)
def test_pool_holds_the_bytes_that_the_summary_predicts(name: str, dtype: torch.dtype) -> None:
    m = decoder(name).to(dtype)
    engine = Engine(m, page=PAGE, pages=50, chunk=4 * PAGE - 1)
    engine.submit(request(name, prompts((4 * PAGE - 1,))[0], Settings(max_new_tokens=9)))
    engine.step()  # the prompt, and one token more: full pages
    assert held(engine.pool) == 4 * PAGE * cache_bytes(m)


@pytest.mark.parametrize("name", PAGED)
def test_pool_of_n_pages_weighs_n_pages_a_blank_one_and_a_scratch_one(name: str) -> None:
    m = model(name)
    pool = Engine(m, page=PAGE, pages=50).pool
    whole = sum(x.numel() * x.element_size() for store in pool.stores for x in store.values())
    assert whole == (50 + 2) * PAGE * cache_bytes(m)


def test_contiguous_cache_weighs_what_the_summary_predicts() -> None:
    m = model("mla")
    cache = m.cache(3, capacity=20)
    whole = sum(x.numel() * x.element_size() for store in cache.slots for x in store.values())
    assert whole == 3 * 20 * cache_bytes(m)


def test_summary_prints_the_bytes_of_a_token() -> None:
    m = model("mla")
    assert f"{cache_bytes(m):,} bytes" in m.summary()


@pytest.mark.parametrize("page", [1, 3, 4, 16])
def test_paged_waste_is_below_a_page_a_sequence(page: int) -> None:
    """At every step of a ragged batch: slots held, less tokens kept, is below one page for each row."""
    engine = Engine(model("gqa_rope"), page=page, pages=300 // page, chunk=7, prefix=False)
    sizes = (1, 9, 4, 16, 7, 2)
    for i, prompt in enumerate(prompts(sizes)):
        engine.submit(request("gqa_rope", prompt, Settings(max_new_tokens=5 + 3 * i), key=i))
    looked = 0
    while not engine.idle:
        engine.step()
        caches = [cache for lane in engine.lanes.values() for cache in lane.caches()]
        assert all(isinstance(cache, Paged) for cache in caches)
        kept = [n for cache in caches for n in cache.lengths.tolist()]
        slots = page * sum(engine.pool.users)
        assert sum(kept) <= slots < sum(kept) + page * len(kept) or not kept
        looked += len(kept)
    assert looked > 50


def test_samples_waste_less_than_a_page_each_and_share_the_rest() -> None:
    engine = Engine(model("gqa_rope"), page=PAGE, pages=100, prefix=False)
    (prompt,) = prompts((22,))
    engine.submit(
        request("gqa_rope", prompt, Settings(max_new_tokens=9, temperature=1.0, samples=6))
    )
    for _ in range(6):
        engine.step()
        (lane,) = engine.lanes.values()
        lengths = lane.cache.lengths.tolist()
        own = sum(n - 20 for n in lengths)  # five full pages are common
        assert (
            20 + own
            <= PAGE * sum(n > 0 for n in engine.pool.users)
            < 20 + own + PAGE * len(lengths)
        )
