"""Quantised folders, format by format. Each is made here number by number, from the format's definition, and what it
means is computed beside it in Python's numbers; where a package has the format's own unpacking, that is asked too."""

import itertools
import json
import math
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import regard
from regard.checkpoint import hf
from regard.checkpoint.families import FAMILIES
from regard.checkpoint.quantised import QUANTISATIONS
from regard.decode.engine import Engine
from regard.decode.settings import Request, Settings
from regard.errors import Notice
from regard.fast.cuda import quantised as cuda_quantised
from regard.kernels.packed import PackedLinear
from regard.models.init import initialize
from tests.checkpoint.spoil import configure, refused
from tests.kernels.plain import answer, served
from tests.wide import wide

Tensors = dict[str, torch.Tensor]
HALF, BRAIN, FULL = torch.float16, torch.bfloat16, torch.float32
FP8, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def rounded(x: float, dtype: torch.dtype) -> float:
    """A number of a type; what is rounded twice here, by way of float32, has few enough bits for that."""
    return float(torch.tensor(x, dtype=torch.float64).float().to(dtype))


def table(rows: int, columns: int, number: Callable[[int, int], float]) -> list[list[float]]:
    return [[number(i, j) for j in range(columns)] for i in range(rows)]


def words(numbers: list[int], bits: int) -> list[int]:
    """Numbers in words of 32 bits with a sign, the first in the lowest bits."""
    each, found = 32 // bits, []
    for first in range(0, len(numbers), each):
        word = sum(q << bits * i for i, q in enumerate(numbers[first : first + each]))
        found.append(word - (1 << 32) if word >> 31 else word)
    return found


def turned(rows: list[list[Any]]) -> list[list[Any]]:
    return [list(column) for column in zip(*rows, strict=True)]


def int32(rows: list[list[int]]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int64).to(torch.int32)


@dataclass
class Made:
    """What a format stores for one weight, by what follows the module's name, and what that means."""

    stored: Tensors
    means: torch.Tensor


# A format's weight of n outputs and k inputs.
Maker = Callable[[random.Random, int, int], Made]


def scales_of(rng: random.Random, n: int, count: int, dtype: torch.dtype) -> list[list[float]]:
    return table(n, count, lambda i, j: rounded(rng.uniform(0.001, 0.02), dtype))


def affine(
    rng: random.Random, n: int, k: int, low: int, high: int, group: int, dtype: torch.dtype,
    zero: Callable[[], int], order: list[int],
) -> tuple[list[list[int]], list[list[int]], list[list[float]], torch.Tensor]:  # fmt: skip
    """q, zeros, scales (n each), and (q - z) s, rounded to `dtype`; `order`: the group of each input."""
    count = -(-k // group)
    q = [[rng.randint(low, high) for _ in range(k)] for _ in range(n)]
    z = [[zero() for _ in range(count)] for _ in range(n)]
    s = scales_of(rng, n, count, dtype)
    means = table(n, k, lambda i, j: (q[i][j] - z[i][order[j]]) * s[i][order[j]])
    return q, z, s, torch.tensor(means, dtype=torch.float64).float().to(dtype)


def awq(group: int) -> Maker:
    def make(rng: random.Random, n: int, k: int) -> Made:
        size = k if group == -1 else group
        order = [j // size for j in range(k)]
        q, z, s, means = affine(rng, n, k, 0, 15, size, HALF, lambda: rng.randint(0, 15), order)

        def eight_outputs(column: list[int]) -> list[int]:
            mixed = [column[8 * w + i] for w in range(n // 8) for i in (0, 2, 4, 6, 1, 3, 5, 7)]
            return words(mixed, 4)

        stored = {"qweight": int32([eight_outputs(c) for c in turned(q)])}
        stored |= {"qzeros": int32([eight_outputs(c) for c in turned(z)])}
        return Made(stored | {"scales": torch.tensor(turned(s), dtype=HALF)}, means)

    return make


def gptq(
    bits: int, group: int, *, old: bool = True, mixed: bool = False, index: bool = True
) -> Maker:
    def make(rng: random.Random, n: int, k: int) -> Made:
        size = k if group == -1 else group
        order = [j // size for j in range(k)]
        if mixed:
            rng.shuffle(order)
        top = (1 << bits) - 1
        q, z, s, means = affine(rng, n, k, 0, top, size, HALF, lambda: rng.randint(0, top), order)
        kept = [[(x - 1) % (1 << bits) if old else x for x in row] for row in z]
        stored = {"qweight": int32(turned([words(row, bits) for row in q]))}
        stored |= {"qzeros": int32([words(c, bits) for c in turned(kept)])}
        stored |= {"scales": torch.tensor(turned(s), dtype=HALF)}
        stored |= {"g_idx": int32([order])[0]} if index else {}
        return Made(stored, means)

    return make


def packed_int(bits: int, group: int, *, zeros: bool = False, mixed: bool = False) -> Maker:
    def make(rng: random.Random, n: int, k: int) -> Made:
        size, half = group or k, 1 << bits - 1
        order = [j // size for j in range(k)]
        if mixed:
            rng.shuffle(order)
        zero = (lambda: rng.randint(-half, half - 1)) if zeros else (lambda: 0)
        q, z, s, means = affine(rng, n, k, -half, half - 1, size, BRAIN, zero, order)
        lifted, risen = ([[x + half for x in row] for row in rows] for rows in (q, z))
        stored = {"weight_packed": int32([words(row, bits) for row in lifted])}
        stored |= {"weight_scale": torch.tensor(s, dtype=BRAIN)}
        stored |= {"weight_shape": torch.tensor([n, k])}
        if zeros:
            stored["weight_zero_point"] = int32(turned([words(c, bits) for c in turned(risen)]))
        return Made(stored | ({"weight_g_idx": int32([order])[0]} if mixed else {}), means)

    return make


def naive(
    kind: torch.dtype, rows: int, columns: int, dtype: torch.dtype, name: str, more: bool = False
) -> Maker:
    """Numbers of their own type, and a scale for each block of so many rows and columns; 0: for all."""

    def make(rng: random.Random, n: int, k: int) -> Made:
        r, c = rows or n, columns or k
        q = torch.tensor(table(n, k, lambda i, j: rng.randint(-127, 127)), dtype=FULL)
        q = (q if kind == torch.int8 else q * 3.1).to(kind)
        s = scales_of(rng, -(-n // r), -(-k // c), dtype)
        plain = q.double().tolist()
        means = table(n, k, lambda i, j: plain[i][j] * s[i // r][j // c])
        kept = dtype if dtype.itemsize > 1 else FULL
        scale = torch.tensor(s).to(dtype)
        scale = scale.reshape(()) if not rows and name == "weight_scale_inv" else scale
        stored = {"weight": q, name: scale} | ({"input_scale": torch.ones(1)} if more else {})
        return Made(stored, torch.tensor(means, dtype=torch.float64).float().to(kept))

    return make


E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


# The published numbers of NormalFloat4 (QLoRA, appendix E), and bitsandbytes' own of 4 bits.
NF4 = [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
       -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
       0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0]  # fmt: skip
FP4 = [x / 12 for x in (0, 0.0625, 8, 12, 4, 6, 2, 3)]
FP4 += [-x for x in FP4]


def four_bits(kind: str, block: int, *, twice: bool = False, dtype: torch.dtype = BRAIN) -> Maker:
    def make(rng: random.Random, n: int, k: int) -> Made:
        codes = torch.tensor(NF4 if kind == "nf4" else FP4)
        q = [rng.randint(0, 15) for _ in range(n * k)]
        blocks = -(-n * k // block)
        state: dict[str, Any] = dict(quant_type=kind, blocksize=block, shape=[n, k])
        state["dtype"] = str(dtype).removeprefix("torch.")
        largest = torch.tensor([rng.uniform(0, 0.1) for _ in range(blocks)])
        stored: Tensors = {"absmax": largest, "quant_map": codes}
        if twice:
            inner, levels = 4, torch.tensor([rng.uniform(-1, 1) for _ in range(256)])
            held = [rng.randint(0, 255) for _ in range(blocks)]
            outer = torch.tensor([rng.uniform(0, 0.1) for _ in range(-(-blocks // inner))])
            state |= dict(nested_blocksize=inner, nested_offset=0.0625, nested_dtype="float32")
            # Rounded after each step, as float32 is.
            largest = torch.stack(
                [levels[x] * outer[i // inner] + 0.0625 for i, x in enumerate(held)]
            )
            stored |= {"absmax": torch.tensor(held, dtype=torch.uint8), "nested_absmax": outer}
            stored |= {"nested_quant_map": levels}
        means = [float(codes[x]) * float(largest[i // block]) for i, x in enumerate(q)]
        pairs = [[q[i] << 4 | q[i + 1]] for i in range(0, n * k, 2)]
        said = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
        stored |= {f"quant_state.bitsandbytes__{kind}": said}
        stored = {f"weight.{name}": x for name, x in stored.items()}
        stored["weight"] = torch.tensor(pairs, dtype=torch.uint8)
        return Made(stored, torch.tensor(means, dtype=torch.float64).float().to(dtype).view(n, k))

    return make


def llm_int8(rng: random.Random, n: int, k: int) -> Made:
    q = torch.tensor(table(n, k, lambda i, j: rng.randint(-127, 127)), dtype=torch.int8)
    largest = torch.tensor([rng.uniform(0.1, 1) for _ in range(n)])
    # In float32, a product after the other.
    rows = zip(q, largest, strict=True)
    means = torch.stack([torch.stack([x.float() * s for x in row]) for row, s in rows])
    stored = {"weight": q, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return Made(stored, means * (1 / 127))


def tensors_group(**weights: Any) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "int", "symmetric": True} | weights
    return {"group_0": {"targets": ["Linear"], "weights": weights}}


def llm(form: str, **weights: Any) -> dict[str, Any]:
    """What llm-compressor writes; products of numbers that are not packed round activations, too."""
    groups = tensors_group(**weights)
    kind = weights.get("type", "int")
    rounds = {"num_bits": 8, "type": kind, "strategy": "token", "dynamic": True, "symmetric": True}
    groups["group_0"]["input_activations"] = None if form == "pack-quantized" else rounds
    return {
        "quant_method": "compressed-tensors", "format": form, "config_groups": groups,
        "ignore": ["lm_head", "re:.*never"], "quantization_status": "compressed",
    }  # fmt: skip


@dataclass
class Format:
    settings: dict[str, Any]
    make: Maker
    dtype: torch.dtype = BRAIN
    # What of these numbers a GPU's products hold to the bit.
    exact: str = ""
    family: str = "llama"
    sizes: dict[str, Any] = field(default_factory=dict)


def _gptq(bits: int, group: int, **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": False, **more}


BNB: dict[str, Any] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
BNB |= {"bnb_4bit_quant_type": "nf4", "llm_int8_skip_modules": ["lm_head"]}
SCALE, INVERSE = "weight_scale", "weight_scale_inv"
BLOCKS = {"quant_method": "fp8", "weight_block_size": [16, 24], "activation_scheme": "dynamic"}
WIDE_INPUTS = dict(intermediate_size=128)
PLAIN8 = {"quant_method": "fp8", "weight_block_size": None}
FBGEMM = {"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["lm_head"]}


def fours(group: int, **more: Any) -> dict[str, Any]:
    way: dict[str, Any] = dict(strategy="group", group_size=group)
    return llm("pack-quantized", num_bits=4, **(way if group else {"strategy": "channel"}), **more)


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "modules_to_not_convert": None}
OLD_AWQ = {"quant_method": "awq", "w_bit": 4, "q_group_size": -1, "version": "GEMM"}
BLOCKED = dict(type="float", strategy="block", block_structure=[16, 32])
FORMATS = {
    "fp8-blocks": Format(BLOCKS, naive(FP8, 16, 24, FULL, INVERSE)),
    "fp8-blocks-deepseek": Format(BLOCKS, naive(FP8, 16, 24, FULL, INVERSE), family="deepseek_v3"),
    "fp8-wide-blocks": Format(
        BLOCKS | {"weight_block_size": [16, 128]}, naive(FP8, 16, 128, FULL, INVERSE), exact="fp8"
    ),
    "fp8-powers": Format(
        BLOCKS, naive(FP8, 16, 24, torch.float8_e8m0fnu, INVERSE), family="deepseek_v3"
    ),
    "fp8-tensor": Format(PLAIN8, naive(FP8, 0, 0, FULL, INVERSE), exact="fp8"),
    "fp8-static": Format(
        PLAIN8 | {"activation_scheme": "static"}, naive(FP8, 0, 0, FULL, SCALE, True), exact="fp8"
    ),
    "fbgemm": Format(FBGEMM, naive(FP8, 1, 0, FULL, SCALE), exact="fp8"),
    "fp8-e5m2": Format(PLAIN8, naive(E5M2, 1, 0, FULL, SCALE)),
    "ct-fp8": Format(
        llm("float-quantized", type="float", strategy="channel"), naive(FP8, 1, 0, BRAIN, SCALE), exact="fp8"
    ),
    "ct-fp8-tensor": Format(
        llm("naive-quantized", type="float", strategy="tensor"), naive(FP8, 0, 0, BRAIN, SCALE, True), exact="fp8"
    ),
    "ct-fp8-blocks": Format(llm("float-quantized", **BLOCKED), naive(FP8, 16, 32, BRAIN, SCALE)),
    "ct-int8": Format(llm("int-quantized", strategy="channel"), naive(torch.int8, 1, 0, BRAIN, SCALE)),
    "ct-int8-groups": Format(
        llm("naive-quantized", strategy="group", group_size=32), naive(torch.int8, 1, 32, BRAIN, SCALE)
    ),
    "ct-int4-32": Format(fours(32), packed_int(4, 32), exact="int4"),
    "ct-int4-64": Format(fours(64), packed_int(4, 64), exact="int4", sizes=WIDE_INPUTS),
    "ct-int4-channel": Format(fours(0), packed_int(4, 0), exact="int4"),
    "ct-int4-16": Format(fours(16), packed_int(4, 16)),
    "ct-int4-zeros": Format(fours(32, symmetric=False), packed_int(4, 32, zeros=True)),
    "ct-int4-order": Format(fours(32, actorder="group"), packed_int(4, 32, mixed=True)),
    "ct-w8a16": Format(llm("pack-quantized", strategy="channel"), packed_int(8, 0)),
    "awq": Format(AWQ, awq(32), HALF),
    "awq-whole": Format(OLD_AWQ, awq(-1), HALF),
    "gptq": Format(_gptq(4, 32, checkpoint_format="gptq"), gptq(4, 32), HALF),
    "gptq-v2": Format(_gptq(4, 32, checkpoint_format="gptq_v2"), gptq(4, 32, old=False), HALF),
    "gptq-order": Format(_gptq(4, 32, desc_act=True), gptq(4, 32, mixed=True), HALF),
    "gptq-8": Format(_gptq(8, -1), gptq(8, -1), HALF),
    "gptq-2": Format(_gptq(2, 16), gptq(2, 16, index=False), HALF),
    "gptq-gpt2": Format(_gptq(4, 32), gptq(4, 32), HALF, family="gpt2"),
    "nf4": Format(BNB, four_bits("nf4", 64), sizes=WIDE_INPUTS),
    "nf4-across": Format(BNB, four_bits("nf4", 128)),
    "nf4-twice": Format(
        BNB | {"bnb_4bit_use_double_quant": True}, four_bits("nf4", 64, twice=True), sizes=WIDE_INPUTS
    ),
    "nf4-gpt2": Format(BNB, four_bits("nf4", 64, dtype=HALF), HALF, family="gpt2"),
    "fp4": Format(BNB | {"bnb_4bit_quant_type": "fp4"}, four_bits("fp4", 64), sizes=WIDE_INPUTS),
    "int8": Format({"quant_method": "bitsandbytes", "load_in_8bit": True}, llm_int8, HALF),
}  # fmt: skip
KEEP = """fp8-blocks-deepseek ct-int4-32 ct-int4-zeros awq gptq-order gptq-gpt2
nf4-twice""".split()  # noqa: SIM905
MATRIX = r".*(_proj|c_attn|c_proj|c_fc)\.weight"


SMALL: dict[str, dict[str, Any]] = {
    "llama": dict(
        architectures=["LlamaForCausalLM"], vocab_size=40, hidden_size=64, intermediate_size=96, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=False,
    ),
    "gpt2": dict(
        architectures=["GPT2LMHeadModel"], vocab_size=40, n_embd=64, n_inner=96, n_layer=1, n_head=4, n_positions=32,
    ),
    "deepseek_v3": dict(
        architectures=["DeepseekV3ForCausalLM"], vocab_size=40, hidden_size=64, intermediate_size=96,
        moe_intermediate_size=32, num_hidden_layers=2, first_k_dense_replace=1, num_attention_heads=4,
        n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, kv_lora_rank=32, q_lora_rank=48,
        qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=24, max_position_embeddings=32,
    ),
    "gpt_oss": dict(
        architectures=["GptOssForCausalLM"], vocab_size=40, hidden_size=64, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_local_experts=2, num_experts_per_tok=1,
        max_position_embeddings=32,
    ),
}  # fmt: skip


def base(family: str, dtype: torch.dtype, folder: Path, **sizes: Any) -> Tensors:
    """A plain folder, and its tensors."""
    said = SMALL[family] | sizes
    torch.manual_seed(0)
    model = hf.read_config(said, FAMILIES[family], said["architectures"][0]).make()
    initialize(model, FAMILIES[family].start)
    hf.cast(model, dtype).save(folder)
    return load_file(folder / "model.safetensors")


@pytest.fixture
def made(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Format, Path, Tensors]:
    """A format, a folder in it, and what its tensors mean."""
    form, folder, rng = FORMATS[request.param], tmp_path / "packed", random.Random(7)
    plain = base(form.family, form.dtype, folder, **form.sizes)
    stored, means = Tensors(), Tensors()
    for name, x in plain.items():
        if not re.fullmatch(MATRIX, name):
            stored[name] = means[name] = x
            continue
        n, k = x.shape[::-1] if form.family == "gpt2" else x.shape
        module, one = name.removesuffix(".weight"), form.make(rng, n, k)
        stored |= {f"{module}.{end}": t for end, t in one.stored.items()}
        means[name] = one.means.t() if form.family == "gpt2" else one.means
    save_file(stored, folder / "model.safetensors")
    return form, configure(folder, quantization_config=form.settings), means


def theirs(model: Any) -> Tensors:
    """A model's weights under the folder's names."""
    found = Tensors()
    for step in hf.plan(model, FAMILIES[model.origin.family]):
        ours = [model.get_parameter(name).detach() for name in step.ours]
        found |= dict(zip(step.theirs, step.save(ours), strict=True))
    return found


def read(folder: Path, **more: Any) -> Any:
    with pytest.warns(Notice, match="packed weights"):
        return regard.load(folder, dtype="stored", **more)


every = pytest.mark.parametrize("made", wide(FORMATS, KEEP), indirect=True)


@every
def test_packed_weights_are_what_their_format_says(made: Any) -> None:
    form, folder, means = made
    model = read(folder)
    found = theirs(model)
    assert set(found) <= set(means)
    for name, x in found.items():
        wide_name = "e_score" in name
        kind = FULL if wide_name else form.dtype
        assert x.dtype == kind and torch.equal(x, means[name].to(kind)), name
    with torch.no_grad():
        assert bool(model(torch.tensor([[1, 2, 3]])).isfinite().all())


@every
def test_folder_is_written_back_as_it_was(made: Any, tmp_path: Path) -> None:
    form, folder, _ = made
    again = read(folder).save(tmp_path / "again")
    old, new = (load_file(f / "model.safetensors") for f in (folder, again))
    assert sorted(old) == sorted(new)
    for name, x in old.items():
        assert x.dtype == new[name].dtype and x.shape == new[name].shape, name
        assert torch.equal(*(t.reshape(-1).view(torch.uint8) for t in (x, new[name]))), name
    said = json.loads((again / "config.json").read_text())
    assert said["quantization_config"] == form.settings
    first, second = theirs(read(folder)), theirs(read(again))
    assert all(torch.equal(x, second[name]) for name, x in first.items())


@pytest.mark.parametrize("made", ["ct-int4-32"], indirect=True)
def test_changed_weights_are_written_whole_and_a_notice_says_so(made: Any, tmp_path: Path) -> None:
    _, folder, means = made
    model = read(folder)
    with torch.no_grad():
        model.get_parameter("tower.blocks.0.ffn.up.weight")[3, 5] += 1
    with pytest.warns(Notice, match="saved with whole weights"):
        model.save(tmp_path / "again")
    assert "quantization_config" not in json.loads((tmp_path / "again/config.json").read_text())
    found = load_file(tmp_path / "again/model.safetensors")
    off = [name for name, x in found.items() if not torch.equal(x, means[name])]
    assert sorted(found) == sorted(means) and off == ["model.layers.0.mlp.up_proj.weight"]


@pytest.mark.parametrize("made", ["fp8-blocks"], indirect=True)
def test_folder_that_is_gone_is_written_whole(made: Any, tmp_path: Path) -> None:
    _, folder, means = made
    model = read(folder)
    folder.rename(tmp_path / "elsewhere")
    with pytest.warns(Notice, match="or it is gone"):
        model.save(tmp_path / "again")
    assert sorted(load_file(tmp_path / "again/model.safetensors")) == sorted(means)


@pytest.mark.parametrize("made", ["ct-int4-32"], indirect=True)
def test_folder_is_written_over_itself(made: Any) -> None:
    _, folder, _ = made
    old = load_file(folder / "model.safetensors")
    read(folder).save(folder)
    new = load_file(folder / "model.safetensors")
    assert sorted(old) == sorted(new) and all(torch.equal(x, new[name]) for name, x in old.items())


@pytest.mark.parametrize(
    "made", wide(FORMATS, ["ct-int4-32", "ct-fp8", "ct-int4-16", "fp8-blocks"]), indirect=True
)
def test_prepared_model_has_the_numbers_of_its_folder(
    made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where they are the same to the bit; what is rounded again instead, is not."""
    monkeypatch.setattr(cuda_quantised, "SMALL", 0)
    form, folder, _ = made
    model = read(folder)
    for kind in ("fp8", "int4"):
        fast = cuda_quantised.quantised(model, kind)
        packed = {n: m for n, m in fast.named_modules() if isinstance(m, PackedLinear)}
        body = {n: m for n, m in packed.items() if "head" not in n}
        same = [torch.equal(m.weight, model.get_parameter(f"{n}.weight")) for n, m in body.items()]
        assert same and all(same) if kind == form.exact else not all(same), kind
        assert ("as the folder packs" in fast.explain()) == (kind == form.exact)


@pytest.mark.parametrize("made", ["fbgemm"], indirect=True)
def test_graph_over_a_folders_numbers_gives_its_tokens(
    made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32, where no product is rounded; the head, which the folder has whole, stays so."""
    monkeypatch.setattr(cuda_quantised, "SMALL", 0)
    monkeypatch.setattr(cuda_quantised.Quantise, "head", lambda maker, head: maker.copy(head))
    with pytest.warns(Notice, match="packed weights"):
        model = regard.load(made[1], dtype=FULL)
    fast = cuda_quantised.quantised(model, "fp8")
    assert sum(isinstance(m, PackedLinear) for m in fast.modules()) == 7
    asked = [Request([3, 5, 7][:n], Settings(max_new_tokens=12)) for n in (1, 2, 3)]
    want = served(Engine(model, runner="torch", rows=3), asked)
    for row, (found, meant) in enumerate(zip(answer(fast, asked, 3), want, strict=True)):
        assert found.ids == meant.ids and len(found.ids) > 1, row
        assert found.logprobs == pytest.approx(meant.logprobs, abs=1e-4)


@pytest.mark.parametrize("made", ["ct-int4-32"], indirect=True)
def test_what_was_changed_is_rounded_again(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_quantised, "SMALL", 0)
    model = read(made[1])
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.01)
    assert "as the folder packs" not in cuda_quantised.quantised(model, "int4").explain()


# --- mxfp4 --------------------------------------------------------------------------------------------------------


@pytest.fixture
def experts(tmp_path: Path) -> tuple[Path, Tensors]:
    """A gpt-oss folder whose experts are mxfp4, and what its tensors mean."""
    plain = base("gpt_oss", BRAIN, tmp_path)
    rng, stored, means = random.Random(3), Tensors(), dict(plain)
    for name, x in plain.items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            stored[name] = x
            continue
        e, k, n = x.shape
        q = [[[rng.randint(0, 15) for _ in range(k)] for _ in range(n)] for _ in range(e)]
        s = [[[rng.randint(115, 128) for _ in range(k // 32)] for _ in range(n)] for _ in range(e)]
        for a, b, c in itertools.product(range(e), range(k), range(n)):
            code = q[a][c][b]
            value = math.ldexp(E2M1[code & 7], s[a][c][b // 32] - 127)
            means[name][a, b, c] = -value if code & 8 else value
        low_first = [[[r[i] | r[i + 1] << 4 for i in range(0, k, 2)] for r in m] for m in q]
        stored[name + "_blocks"] = torch.tensor(low_first, dtype=torch.uint8).view(
            e, n, k // 32, 16
        )
        stored[name + "_scales"] = torch.tensor(s, dtype=torch.uint8)
    save_file(stored, tmp_path / "model.safetensors")
    left = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"]
    said = {"quant_method": "mxfp4", "modules_to_not_convert": left}
    return configure(tmp_path, quantization_config=said), means


def test_mxfp4_experts_are_what_their_format_says(experts: Any, tmp_path: Path) -> None:
    folder, means = experts
    model = read(folder)
    for name, x in theirs(model).items():
        assert torch.equal(x, means[name]), name
    again = load_file(model.save(tmp_path / "again") / "model.safetensors")
    assert {n for n in again if n.endswith(("_blocks", "_scales"))} and sorted(again) == sorted(
        load_file(folder / "model.safetensors")
    )


# --- the formats' own unpacking -----------------------------------------------------------------------------------


def stored_weights(folder: Path) -> Iterator[tuple[str, Tensors]]:
    """Each packed module with its tensors, by what follows its name."""
    found = load_file(folder / "model.safetensors")
    ends = r"\.(weight_scale|weight_scale_inv|SCB|weight\.absmax)"
    modules = {m[1] for n in found if (m := re.fullmatch(rf"(.*){ends}", n))}
    for module in sorted(modules):
        mine = {n[len(module) + 1 :]: x for n, x in found.items() if n.startswith(module + ".")}
        yield module, mine


COMPRESSED = [n for n in FORMATS if n.startswith("ct-") and "order" not in n]


@pytest.mark.parametrize("made", COMPRESSED, indirect=True)
def test_compressed_tensors_unpacks_the_same(made: Any) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    form, folder, _ = made
    found = theirs(read(folder))
    compressor = BaseCompressor.get_value_from_registry(form.settings["format"])
    scheme = QuantizationScheme(**form.settings["config_groups"]["group_0"])
    for module, mine in stored_weights(folder):
        meant = compressor.decompress(mine, scheme)["weight"]
        assert torch.equal(found[f"{module}.weight"], meant.to(form.dtype)), module


@pytest.mark.parametrize("made", ["nf4", "nf4-twice", "fp4", "int8"], indirect=True)
def test_bitsandbytes_unpacks_the_same(made: Any) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    form, folder, _ = made
    for module, mine in stored_weights(folder):
        x = mine.pop("weight")
        found = theirs(read(folder))[f"{module}.weight"]
        if "SCB" in mine:
            meant = functional.int8_vectorwise_dequant(x, mine["SCB"])
        else:
            kind = form.settings["bnb_4bit_quant_type"]
            codes = functional.get_4bit_type(kind, device="cpu")
            assert torch.equal(codes, mine["weight.quant_map"])
            parts = {
                n.removeprefix("weight."): t for n, t in mine.items() if n.startswith("weight.")
            }
            state = functional.QuantState.from_dict(parts, device=torch.device("cpu"))
            meant = functional.dequantize_4bit(x, state)
        assert torch.equal(found, meant.to(form.dtype)), module


@pytest.mark.parametrize("made", ["fp8-tensor", "fp8-wide-blocks"], indirect=True)
def test_transformers_unpacks_fp8_the_same(made: Any) -> None:
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    form, folder, _ = made
    found = theirs(read(folder))
    for module, mine in stored_weights(folder):
        scale = mine["weight_scale_inv"]
        scale = scale.reshape(1, 1) if scale.dim() == 0 else scale
        meant = fp8.Fp8Dequantize(None)._dequantize_one(mine["weight"], scale, form.dtype)
        assert torch.equal(found[f"{module}.weight"], meant), module


def test_transformers_unpacks_mxfp4_the_same(experts: Any) -> None:
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    folder, _ = experts
    stored, found = load_file(folder / "model.safetensors"), theirs(read(folder))
    names = [n.removesuffix("_blocks") for n in stored if n.endswith("_blocks")]
    for name in names:
        meant = mxfp4.convert_moe_packed_tensors(stored[name + "_blocks"], stored[name + "_scales"])
        assert torch.equal(found[name], meant), name


@pytest.mark.parametrize("made", ["fp8-wide-blocks", "fp8-tensor"], indirect=True)
def test_transformers_model_of_an_fp8_folder_gives_the_same(made: Any) -> None:
    same_as_transformers(made[1])


def test_transformers_model_of_an_mxfp4_folder_gives_the_same(experts: Any) -> None:
    same_as_transformers(experts[0])


def same_as_transformers(folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    other = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=BRAIN).eval().float()
    ids = torch.tensor([[1, 2, 3, 4, 5]])
    with torch.no_grad():
        found, meant = read(folder).float()(ids), other(ids).logits
    assert meant.abs().max() > 0.1
    torch.testing.assert_close(found, meant, atol=1e-6, rtol=1e-5)


# --- what is refused ----------------------------------------------------------------------------------------------


def spoiled(folder: Path, change: Callable[[Tensors], object]) -> Path:
    found = load_file(folder / "model.safetensors")
    change(found)
    save_file(found, folder / "model.safetensors")
    return folder


UP = "model.layers.0.mlp.up_proj"


def without(end: str) -> Callable[[Tensors], object]:
    return lambda found: found.pop(f"{UP}.{end}")


def with_first(end: str, value: float) -> Callable[[Tensors], object]:
    return lambda found: found[f"{UP}.{end}"].view(-1)[:1].fill_(value)


def of_type(end: str, dtype: torch.dtype) -> Callable[[Tensors], object]:
    return lambda found: found.update({f"{UP}.{end}": found[f"{UP}.{end}"].to(dtype)})


def of_shape(end: str, *shape: int) -> Callable[[Tensors], object]:
    def change(found: Tensors) -> None:
        old = found[f"{UP}.{end}"]
        found[f"{UP}.{end}"] = torch.ones(shape).to(old.dtype)

    return change


BAD = [
    ("gptq", without("qzeros"), "qzeros is missing", "qweight is packed with it"),
    ("gptq", without("scales"), "scales is missing"),
    ("gptq", with_first("scales", 0), f"{UP}.weight has scales that are 0"),
    ("gptq", with_first("scales", math.nan), "no numbers"),
    ("gptq", of_shape("scales", 3, 96), "scales has shape (3, 96)", "groups of 32"),
    ("gptq", of_type("qzeros", HALF), "qzeros is stored as float16", "int32"),
    ("gptq", of_type("scales", torch.int8), "scales is stored as int8"),
    ("awq", of_type("qzeros", torch.int64), "qzeros is stored as int64"),
    ("ct-int4-32", of_type("weight_scale", torch.int8), "weight_scale is stored as int8"),
    ("ct-int4-zeros", of_type("weight_zero_point", BRAIN), "zero_point is stored as bfloat16"),
    ("ct-int4-order", of_type("weight_g_idx", BRAIN), "g_idx is stored as bfloat16"),
    ("fp8-blocks", of_type("weight_scale_inv", torch.int32), "is stored as int32"),
    ("nf4", of_type("weight.absmax", torch.uint8), "absmax is stored as uint8"),
    ("nf4-twice", of_type("weight.absmax", FULL), "absmax is stored as float32"),
    ("int8", of_type("weight", HALF), "up_proj.weight is stored as float16"),
    ("gptq", of_shape("qweight", 0, 96), "is missing from the weights"),
    ("gptq-order", with_first("g_idx", 9), "g_idx names groups"),
    ("gptq", of_shape("g_idx", 7), "g_idx has shape (7,)", "(64,)"),
    ("awq", without("qzeros"), "qzeros is missing"),
    ("awq", with_first("scales", math.inf), "no numbers"),
    ("awq", of_shape("qzeros", 2, 3), "qzeros has shape (2, 3)"),
    ("ct-int4-32", without("weight_scale"), "weight_scale is missing"),
    ("ct-int4-32", with_first("weight_scale", 0), "scales that are 0"),
    ("ct-int4-32", of_shape("weight_scale", 96, 4), "has shape (96, 4)", "groups of 32"),
    ("ct-int4-32", of_shape("weight_shape", 2), "weight_shape says [1, 1]"),
    ("ct-int4-zeros", without("weight_zero_point"), "weight_zero_point is missing"),
    ("ct-int4-order", with_first("weight_g_idx", -3), "g_idx names groups"),
    ("ct-int8", without("weight_scale"), "stored as int8"),
    ("fp8-blocks", without("weight_scale_inv"), "stored as float8_e4m3fn"),
    ("fp8-blocks", with_first("weight_scale_inv", math.nan), "no numbers"),
    ("fp8-blocks", of_shape("weight_scale_inv", 6, 4), "scales of shape (6, 4)", "16 x 24"),
    ("nf4", without("weight.absmax"), "absmax is missing"),
    ("nf4", with_first("weight.absmax", math.nan), "no numbers"),
    ("nf4", of_shape("weight.quant_map", 8), "quant_map has shape (8,)"),
    ("nf4", of_shape("weight", 8, 1), "has 8 bytes", "(128, 64)"),
    ("nf4", with_first("weight.quant_state.bitsandbytes__nf4", 65), "does not say shape"),
    ("nf4-twice", without("weight.nested_absmax"), "nested_absmax is missing"),
    ("int8", of_shape("SCB", 7), "SCB has shape (7,)"),
    ("int8", with_first("weight_format", 2), "not by rows"),
]


@pytest.mark.parametrize(
    "made, change, words", [(name, change, words) for name, change, *words in BAD],
    ids=[f"{i}-{row[0]}" for i, row in enumerate(BAD)], indirect=["made"],
)  # fmt: skip
def test_folder_that_does_not_fit_its_format_is_refused(made: Any, change: Any, words: Any) -> None:
    refused(spoiled(made[1], change), *words)


SETTINGS: list[tuple[str, dict[str, Any], str]] = [
    ("gptq", {"bits": 3}, "bits is 3"),
    ("gptq", {"bits": 8}, "groups of 32"),
    ("gptq", {"group_size": 0}, "group_size is 0"),
    ("gptq", {"group_size": 48}, "groups of 48"),
    ("gptq", {"checkpoint_format": "marlin"}, "'marlin'"),
    ("gptq", {"checkpoint_format": ["gptq"]}, "['gptq']"),
    ("awq", {"bits": 8}, "bits is 8"),
    ("awq", {"version": "gemv"}, "gemm"),
    ("awq", {"group_size": "128"}, "'128'"),
    ("fp8-blocks", {"weight_block_size": [128]}, "weight_block_size is [128]"),
    ("fp8-blocks", {"modules_to_not_convert": ["up_proj"]}, "leaves model.layers.0.mlp.up_proj out"),
    ("fp8-blocks", {"modules_to_not_convert": "up_proj"}, "a list of names"),
    ("ct-int4-32", {"ignore": ["re:.*mlp"]}, "ignore leaves model.layers.0.mlp."),
    ("ct-int4-32", {"ignore": ["re:("]}, "not a regular expression"),
    ("ct-int4-32", {"format": "marlin-24"}, "format is 'marlin-24'"),
    ("ct-int4-32", {"format": "int-quantized"}, "num_bits is 4"),
    ("ct-int8", {"format": "pack-quantized"}, "is not pack-quantized"),
    ("ct-int4-32", {"config_groups": {}}, "config_groups is {}"),
    ("ct-int4-32", {"config_groups": {"a": 3}}, "targets and weights"),
    ("ct-int4-32", {"config_groups": {"a": {"targets": ["q_proj"], "weights": {"num_bits": 4}}}}, "no targets are"),
    ("ct-int4-32", {"config_groups": tensors_group(num_bits=4, strategy="group", group_size=40)}, "does not divide"),
    ("ct-int4-32", {"config_groups": tensors_group(num_bits=3)}, "num_bits is 3"),
    ("ct-int4-32", {"config_groups": tensors_group(strategy="token")}, "'token'"),
    ("ct-int4-32", {"sparsity_config": {"format": "sparse-bitmask"}}, "sparse-bitmask"),
    ("ct-int4-32", {"sparsity_config": [3]}, "[3]"),
    ("nf4", {"llm_int8_skip_modules": [UP]}, f"leaves {UP} out"),
]  # fmt: skip


@pytest.mark.parametrize(
    "made, change, words", SETTINGS, ids=[f"{i}-{r[0]}" for i, r in enumerate(SETTINGS)], indirect=["made"],
)  # fmt: skip
def test_settings_that_do_not_fit_are_refused(made: Any, change: Any, words: str) -> None:
    form, folder, _ = made
    refused(configure(folder, quantization_config=form.settings | change), words)


@pytest.mark.parametrize("made", ["ct-int4-32"], indirect=True)
def test_groups_of_layers_have_formats_of_their_own(made: Any) -> None:
    """What is named goes before its class; what is left out is whole in the folder."""
    form, folder, means = made
    named = tensors_group(num_bits=4, strategy="group", group_size=32)["group_0"]
    named |= {"targets": ["re:.*self_attn.*", UP], "format": "pack-quantized"}
    rest = form.settings["config_groups"]["group_0"] | {"format": "pack-quantized"}
    other = {"targets": ["Linear"], "format": "int-quantized", "weights": {"strategy": "channel"}}
    rest |= {"targets": ["model.layers.0.mlp"]}
    groups = {"a": other, "b": named, "c": rest}
    said = form.settings | {"format": "mixed-precision", "config_groups": groups}
    found = theirs(read(configure(folder, quantization_config=said)))
    assert all(torch.equal(x, means[name]) for name, x in found.items())


@pytest.mark.parametrize("made", ["ct-int4-32"], indirect=True)
def test_old_key_of_compressed_tensors_is_read_and_written(made: Any, tmp_path: Path) -> None:
    form, folder, _ = made
    configure(folder, "quantization_config", compression_config=form.settings)
    again = read(folder).save(tmp_path / "again")
    assert json.loads((again / "config.json").read_text())["compression_config"] == form.settings


def test_unknown_method_is_refused_with_those_that_are_known(tmp_path: Path) -> None:
    base("llama", BRAIN, tmp_path)
    for method in ("hqq", None, 4):
        configure(tmp_path, quantization_config={"quant_method": method})
        refused(tmp_path, repr(method), "known: " + ", ".join(QUANTISATIONS), "dequantize()")
    refused(configure(tmp_path, quantization_config=[1]), "must be an object")


@pytest.mark.parametrize("method", QUANTISATIONS)
def test_method_with_nothing_packed_is_read_as_it_is(method: str, tmp_path: Path) -> None:
    plain = base("llama", BRAIN, tmp_path)
    groups = tensors_group(strategy="channel")
    said = {"quant_method": method, "config_groups": groups}
    said |= {"format": "int-quantized"} if method == "compressed-tensors" else {}
    with pytest.warns(Notice, match=f"says {method}, but no tensor is packed"):
        found = theirs(regard.load(configure(tmp_path, quantization_config=said), dtype="stored"))
    assert all(torch.equal(x, plain[name]) for name, x in found.items())
