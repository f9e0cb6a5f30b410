"""Random inputs have the sizes that a model takes, and are the same for a seed."""

from dataclasses import replace

import pytest
import torch

from regard.attention import GQA
from regard.block import Tower
from regard.layers import LM, MLP
from regard.models import EncoderDecoderConfig, Patches, Tokens, TransformerConfig
from regard.models.inputs import random_inputs
from regard.models.recurrent import RecurrentConfig, Seq2SeqConfig
from regard.position import Learned

TOWER = Tower(8, 1, GQA(2), MLP(8))
READER = replace(TOWER, causal=False)


def two(source: Tokens | Patches, max_len: int | None) -> EncoderDecoderConfig:
    writer = Tower(8, 1, GQA(2), MLP(8), cross=GQA(2))
    return EncoderDecoderConfig(source, READER, Tokens(7), writer, shared=False, max_len=max_len)


@pytest.mark.parametrize(
    "config, rows, tokens, shape, source",
    [
        (TransformerConfig(Tokens(9), TOWER, LM()), 3, 20, (3, 20), None),
        (TransformerConfig(Tokens(9), TOWER, LM(), max_len=6), 3, 20, (3, 6), None),
        (TransformerConfig(Tokens(9, Learned(5)), TOWER, LM()), 2, 20, (2, 5), None),
        (
            TransformerConfig(Patches(12, 4, 2), READER),
            2, 20, (2, 2, 12, 12), None,
        ),
        (two(Tokens(40), None), 3, 20, (3, 20), (3, 17)),
        (two(Tokens(40), 10), 3, 20, (3, 10), (3, 10)),
        (two(Tokens(40), None), 3, 5, (3, 5), (3, 4)),
        (two(Patches(8, 4, 1), None), 3, 9, (3, 9), (3, 1, 8, 8)),
        (RecurrentConfig(11, 6), 2, 8, (2, 8), None),
        (Seq2SeqConfig(11, 30, 6), 2, 8, (2, 8), (2, 5)),
    ],
)  # fmt: skip
def test_random_inputs_are_as_long_as_a_model_takes(config, rows, tokens, shape, source) -> None:  # type: ignore[no-untyped-def]
    model = config.make().eval()
    ids, read = random_inputs(model, rows, tokens)
    assert ids.shape == shape and (None if read is None else read.shape) == source
    model(ids, **({} if read is None else {"source": read}))
    again, other = random_inputs(model, rows, tokens), random_inputs(model, rows, tokens, 1)
    assert torch.equal(again[0], ids) and not torch.equal(other[0], ids)
    if read is not None:
        assert again[1] is not None and torch.equal(again[1], read)
        assert read.is_floating_point() or int(read.max()) >= 11  # of its own vocabulary
