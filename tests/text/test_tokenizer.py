"""Files of a model folder -> the ids and the text that transformers makes of them."""

import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Library

from regard.errors import Fault, UsageError
from regard.text import Special, Tokenizer, needed, special_ids
from tests.text import tiny
from tests.text.tiny import ALL, TEXTS, Files, dump

MASK = {"__type": "AddedToken", "content": "<mask>", "lstrip": True, "rstrip": False}
every = pytest.mark.parametrize("name", ALL)


def load(files: Files, config: dict[str, Any] | None = None) -> Tokenizer:
    return needed(Tokenizer.from_files(files, config))


def folder(path: Path, files: Files) -> Path:
    for name, data in files.items():
        (path / name).write_bytes(data)
    return path


def unlike(ours: Tokenizer, theirs: Any) -> list[str]:
    """Texts that the two encode or decode differently."""
    wrong = []
    for text in TEXTS:
        for special in (True, False):
            ids = theirs(text, add_special_tokens=special)["input_ids"]
            if ours.encode(text, special=special) != ids:
                wrong.append(f"encode {text!r}")
            said = theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            if ours.decode(ids) != said:
                wrong.append(f"decode {text!r}: {ours.decode(ids)!r}, theirs {said!r}")
    return wrong


@pytest.mark.parametrize(
    "name, settings, class_name",
    [
        ("gpt2", {}, "GPT2Tokenizer"),
        ("gpt2", {"add_prefix_space": True}, "GPT2Tokenizer"),
        ("gpt2", {"add_bos_token": True, "add_eos_token": False}, "GPT2Tokenizer"),
        ("gpt2", {"pad_token": "<pad>", "additional_special_tokens": ["<x>"]}, "GPT2Tokenizer"),
        ("roberta", {}, "RobertaTokenizer"),
        ("roberta", {"add_prefix_space": True}, "BartTokenizer"),
        ("roberta", {"mask_token": MASK}, "RobertaTokenizer"),
        ("qwen2", {}, "Qwen2Tokenizer"),
        ("bert", {}, "BertTokenizer"),
        ("bert", {"do_lower_case": False}, "BertTokenizer"),
        ("bert", {"do_lower_case": False, "strip_accents": True}, "DistilBertTokenizer"),
        ("bert", {"tokenize_chinese_chars": False}, "BertTokenizer"),
    ],
)
def test_older_files_give_the_ids_of_transformers(
    name: str, settings: dict[str, Any], class_name: str, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    files = ALL[name](**settings, tokenizer_class=class_name)
    theirs = getattr(transformers, class_name).from_pretrained(folder(tmp_path, files))
    assert unlike(load(files), theirs) == []


@pytest.mark.parametrize(
    "name, class_name", [("t5", "T5Tokenizer"), ("xlm_roberta", "XLMRobertaTokenizer")]
)
def test_sentencepiece_files_give_the_ids_of_the_class_with_the_same_pieces(
    name: str, class_name: str
) -> None:
    transformers = pytest.importorskip("transformers")
    scores = [(text, score) for text, score, _ in getattr(tiny, f"{name[:3].rstrip('_')}_pieces")()]
    if name == "t5":
        scores += [(f"<extra_id_{i}>", 0.0) for i in reversed(range(10))]
    else:
        scores = [*((text, 0.0) for text in tiny.FAIRSEQ[:4]), *scores[3:], ("<mask>", 0.0)]
    more = {"extra_ids": 10} if name == "t5" else {}
    theirs, ours = getattr(transformers, class_name)(vocab=scores, **more), load(ALL[name]())
    assert unlike(ours, theirs) == []
    text = "Once <extra_id_0> time <extra_id_9> <mask>"
    assert ours.encode(text) == theirs(text)["input_ids"]


def test_llama_files_give_the_ids_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("sentencepiece", reason="transformers reads these files with it")
    pytest.importorskip("google.protobuf", reason="transformers reads these files with it")
    files = tiny.llama()
    theirs = transformers.LlamaTokenizer.from_pretrained(folder(tmp_path, files))
    assert unlike(load(files), theirs) == []


def test_marian_files_give_the_ids_of_transformers(tmp_path: Path) -> None:
    pytest.importorskip("sentencepiece", reason="MarianTokenizer needs it")
    transformers = pytest.importorskip("transformers")
    files = tiny.marian()
    theirs = transformers.MarianTokenizer.from_pretrained(folder(tmp_path, files))
    ours = load(files)
    for text in [*TEXTS, ">>fr<< Once upon", ">>xx<< Once"]:
        ids = theirs(text)["input_ids"]
        assert (text, ours.encode(text)) == (text, ids)
        assert ours.encode_target(text) == theirs(text_target=text)["input_ids"], text
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True), text


def test_marian_source_and_target_are_cut_apart_and_numbered_together() -> None:
    ours = load(tiny.marian())
    text = tiny.CORPUS[0]
    source, target = ours.encode(text), ours.encode_target(text)
    assert source != target and source[-1] == target[-1] == 0
    assert source == ours.encode(text)


@pytest.mark.parametrize("model", ["unigram", "bpe"])
def test_sentencepiece_trained_model_gives_the_ids_of_transformers(
    model: str, tmp_path: Path
) -> None:
    """A real file: with the compiled normaliser, byte fallback and user-defined symbols."""
    spm = pytest.importorskip("sentencepiece")
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("google.protobuf")
    target = tmp_path / ("spiece" if model == "unigram" else "tokenizer")
    extra = (
        dict(pad_id=0, eos_id=1, unk_id=2, bos_id=-1)
        if model == "unigram"
        else dict(
            byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False
        )
    )
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(tiny.CORPUS),
        model_prefix=str(target),
        model_type=model,
        vocab_size=140 if model == "unigram" else 450,
        user_defined_symbols=["<sep>"],
        minloglevel=2,
        **extra,
    )
    files = {f"{target.name}.model": target.with_suffix(".model").read_bytes()}
    name = "T5Tokenizer" if model == "unigram" else "LlamaTokenizer"
    files["tokenizer_config.json"] = dump(
        {"tokenizer_class": name, "add_bos_token": model == "bpe"}
        if model == "bpe"
        else {"tokenizer_class": name}
    )
    theirs = getattr(transformers, name).from_pretrained(folder(tmp_path, files))
    ours = load(files)
    assert unlike(ours, theirs) == []
    assert ours.encode("a<sep>b") == theirs("a<sep>b")["input_ids"]


def test_stories_tokenizer_gives_the_ids_and_text_of_its_file(shared: Path) -> None:
    path = shared / "weights" / "stories260K"
    ours, theirs = Tokenizer.from_folder(path), Library.from_file(str(path / "tokenizer.json"))
    assert ours is not None and (ours.vocab, ours.special) == (512, Special(bos=1, eos=(2,), unk=0))
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == theirs.encode(text).ids
        assert ours.decode(ids) == theirs.decode(ids)
    for case in json.loads((path / "expected.json").read_text())["greedy"]:
        assert ours.encode(case["prompt"]) == case["prompt_ids"] or not case["prompt"]


@every
def test_tokenizer_json_equals_the_older_files(name: str) -> None:
    """What the older files make, saved as tokenizer.json, reads back equal."""
    files = ALL[name]()
    old = load(files)
    if old.parts.source is not None:
        pytest.skip("two vocabularies do not fit into one tokenizer.json")
    new = load({**files, "tokenizer.json": old.core.to_str().encode()})
    assert [new.encode(t) for t in TEXTS] == [old.encode(t) for t in TEXTS]


@every
def test_text_comes_back_from_its_ids(name: str) -> None:
    ours = load(ALL[name]())
    texts = [
        t
        for t in tiny.CORPUS[:2]
        if name in ("gpt2", "roberta", "qwen2", "llama", "t5", "xlm_roberta")
    ]
    assert [ours.decode(ours.encode(t)) for t in texts] == texts


@every
def test_decode_after_a_prompt_continues_it(name: str) -> None:
    """decode(a) + decode(b, after=a) == decode(a + b)"""
    ours = load(ALL[name]())
    ids = ours.encode("the dog 😀 and a ball café", special=False)
    for cut in range(len(ids) + 1):
        a, b = ids[:cut], ids[cut:]
        if "\ufffd" not in ours.decode(a) + ours.decode(b):
            assert ours.decode(a) + ours.decode(b, after=a) == ours.decode(ids), (cut, a)


@every
def test_literal_text_never_becomes_a_special_token(name: str) -> None:
    ours = load(ALL[name]())
    named = {i for i in map(ours.core.token_to_id, ours.tokens.values())} - {ours.special.unk}
    for text in ours.tokens.values():
        ids = ours.encode(f"a {text} b", special=False, literal=True)
        assert not named & set(ids)
        if text not in ("<unk>", "[UNK]"):
            assert named & set(
                ours.encode(f"a {text} b", special=False)
            ) or text == ours.tokens.get("unk_token")


def test_file_settings_of_special_tokens_are_obeyed() -> None:
    files = tiny.gpt2(
        bos_token={"content": "<bos>", "lstrip": False}, pad_token="<pad>", unk_token=None
    )
    ours = load({**files, "special_tokens_map.json": dump({"eos_token": "<eos>"})})
    assert ours.tokens == {"eos_token": "<eos>", "bos_token": "<bos>", "pad_token": "<pad>"}
    assert ours.decode(ours.encode("a<eos>b<pad>")) == "ab"
    assert ours.vocab == 403


@pytest.mark.parametrize(
    "generation, config, expected",
    [
        (
            {"eos_token_id": [7, 9], "pad_token_id": 1},
            {"eos_token_id": 3},
            Special(eos=(7, 9), pad=1),
        ),
        ({}, {"eos_token_id": 3, "decoder_start_token_id": 0}, Special(eos=(3,), start=0)),
        ({"pad_token_id": -1}, {"bos_token_id": None}, Special()),
    ],
)
def test_special_ids_need_no_tokenizer(
    generation: dict[str, Any], config: dict[str, Any], expected: Special
) -> None:
    assert special_ids({"generation_config.json": dump(generation)}, config) == expected


@pytest.mark.parametrize("value", ["2", 2.5, True, [1, None], {"a": 1}])
def test_special_ids_of_another_type_are_refused(value: Any) -> None:
    with pytest.raises(UsageError, match="eos_token_id must be an id"):
        special_ids({}, {"eos_token_id": value})


def test_added_tokens_keep_their_ids() -> None:
    token = {"content": "<|im_end|>", "special": True}
    ours = load(tiny.qwen2(added_tokens_decoder={"400": token, "401": {"content": "<tool>"}}))
    assert ours.encode("a<|im_end|><tool>")[1:] == [400, 401]
    assert ours.decode([400, 401]) == "<tool>"


def test_added_tokens_with_other_ids_are_refused() -> None:
    with pytest.raises(UsageError, match="'<x>' has id 500 .* gives it 400"):
        load(tiny.qwen2(added_tokens_decoder={"500": {"content": "<x>"}}))


@pytest.mark.parametrize(
    "name, model_type, tokens",
    [
        ("gpt2", None, "bos eos unk"),
        ("roberta", None, "bos eos sep cls unk pad mask"),
        ("bert", "distilbert", "unk sep pad cls mask"),
        ("t5", None, "eos unk pad"),
        ("llama", "mistral", "bos eos unk"),
        ("marian", None, "eos unk pad"),
        ("qwen2", "qwen3", "eos unk pad"),
    ],
)
def test_files_or_model_type_decide_where_no_class_is_named(
    name: str, model_type: str | None, tokens: str
) -> None:
    files = {k: v for k, v in ALL[name](extra_ids=10).items() if k != "tokenizer_config.json"}
    if name == "t5":
        files["tokenizer_config.json"] = b'{"extra_ids": 10}'
    bare, named = load(files, {"model_type": model_type} if model_type else None), load(ALL[name]())
    assert [bare.encode(t) for t in TEXTS] == [named.encode(t) for t in TEXTS]
    assert sorted(bare.tokens) == sorted(f"{t}_token" for t in tokens.split())


def test_folder_without_tokenizer_gives_none_and_a_hint(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert Tokenizer.from_folder(tmp_path) is None
    with pytest.raises(
        UsageError, match="carries no tokenizer; give ids, or put tokenizer.json into it"
    ):
        needed(None)


@pytest.mark.parametrize(
    "files, said",
    [
        ({"tokenizer.json": b"{"}, "tokenizer.json cannot be read"),
        ({"tokenizer.json": b"\xff"}, "tokenizer.json cannot be read"),
        ({"tokenizer.json": b"[" * 100_000}, "tokenizer.json cannot be read"),
        ({"vocab.json": b"{}"}, "no merges.txt"),
        ({"vocab.json": b'{"a": "b"}', "merges.txt": b""}, "table of token: id"),
        ({"vocab.json": b'{"a": 0}', "merges.txt": b"a b\n"}, "do not make a tokenizer"),
        ({"vocab.json": b'{"a": 0}', "merges.txt": b"a b c\n"}, "do not make a tokenizer"),
        ({"vocab.txt": b"a\nb\n"}, "no cls token '\\[CLS\\]'"),
        ({"source.spm": b"", "target.spm": b""}, "no vocab.json"),
        (
            {
                **dict.fromkeys(("source.spm", "target.spm", "vocab.json"), b"{}"),
                "tokenizer_config.json": b'{"separate_vocabs": true}',
            },
            "separate_vocabs",
        ),
        (tiny.gpt2(additional_special_tokens=7), "special token .* is odd"),
        ({"vocab.txt": b"a", "tokenizer_config.json": b"[]"}, "must hold a JSON object"),
        (
            {"vocab.txt": b"a", "tokenizer_config.json": b"{,}"},
            "tokenizer_config.json is not valid JSON",
        ),
        (
            {
                "spiece.model": b"",
                "tokenizer_config.json": b'{"tokenizer_class": "AlbertTokenizer"}',
            },
            "class 'AlbertTokenizer', which Regard cannot build",
        ),
    ],
)
def test_bad_files_are_refused_with_the_reason(files: Files, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Tokenizer.from_files(files)


@pytest.mark.parametrize(
    "name, data, said",
    [
        ("spiece.model", b"", "is not a SentencePiece model .it holds no pieces"),
        ("spiece.model", b"\x0a\xff\xff", "is not a SentencePiece model"),
        ("tokenizer.model", b"IQ== 0\nIg== 1\n", "is not a SentencePiece model"),
    ],
)
def test_bad_sentencepiece_file_is_refused_with_the_reason(
    name: str, data: bytes, said: str
) -> None:
    pytest.importorskip("sentencepiece")
    with pytest.raises(UsageError, match=said):
        Tokenizer.from_files({name: data})


@pytest.mark.parametrize("name", ["t5", "llama", "marian"])
def test_cut_sentencepiece_file_never_crashes(name: str) -> None:
    """Cut anywhere, a file is refused or is a smaller model; nothing else is raised."""
    files = ALL[name]()
    file = next(n for n in files if n.endswith((".model", ".spm")))
    for end in range(0, len(files[file]), 97):
        with suppress(UsageError):
            load({**files, file: files[file][:end]}).encode("Once upon")


@every
@pytest.mark.parametrize("text", [None, 7, b"bytes", ["a"], "half \ud83d", "\udc00"])
def test_text_that_is_none_is_refused(name: str, text: Any) -> None:
    with pytest.raises(UsageError, match="a prompt is text|half a surrogate pair"):
        load(ALL[name]()).encode(text)


@every
def test_ids_outside_the_vocabulary_are_no_text(name: str) -> None:
    ours = load(ALL[name]())
    ids = ours.encode("a dog")
    assert ours.decode([*ids, ours.vocab + 5]) == ours.decode(ids)
    with pytest.raises(UsageError, match="id -1 is not a token"):
        ours.decode([-1])


@pytest.mark.parametrize("part", ["normalizer", "decoder"])
def test_replacements_that_multiply_are_refused(part: str) -> None:
    """The library would ask for terabytes, and end the process."""
    data = json.loads(needed(Tokenizer.from_files(tiny.gpt2())).core.to_str())
    step = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 100}
    kind = {"type": "Sequence", f"{part}s": [step] * 6}
    with pytest.raises(UsageError, match="times as long, at most 256"):
        Tokenizer.from_files({"tokenizer.json": dump({**data, part: kind})})
    one = {**kind, f"{part}s": [step]}
    assert Tokenizer.from_files({"tokenizer.json": dump({**data, part: one})})


@pytest.mark.parametrize("name", ["t5", "llama", "marian"])
def test_sentencepiece_file_without_the_package_says_what_to_install(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, built = ALL[name](), load(ALL[name]()).core.to_str().encode()
    monkeypatch.setitem(sys.modules, "sentencepiece.sentencepiece_model_pb2", None)
    with pytest.raises(
        Fault, match=r"pip install 'regard\[sentencepiece\]', or put the model's tok"
    ):
        load(files)
    assert load({**files, "tokenizer.json": built}).vocab
