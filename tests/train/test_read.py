"""Files of every format give the same records, and each mistake one sentence."""

import bz2
import gzip
import io
import json
import lzma
import re
import sys
import tracemalloc
import types
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from regard.data import source as module
from regard.data.read import DataError, Record, Source, format_of, matching_files, records
from regard.data.shards import sha256
from regard.errors import Notice, UsageError

ROWS = [("good, film", "1"), ('says "no"', "0"), ("über 😀 \u2028 \x0b שלום", "1")]
CSV = 'text,label\n"good, film",1\n"says ""no""",0\nüber 😀 \u2028 \x0b שלום,1\n'
TSV = "".join(f"{text}\t{label}\n" for text, label in ROWS)
JSONL = "".join(json.dumps({"text": t, "label": y, "more": 1}) + "\n" for t, y in ROWS)
PACKED: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".bz2": bz2.compress,
    ".GZ": gzip.compress,
    ".zip": lambda data: zipped({"inside/a": data, "inside/": b"", "__MACOSX/a": b"x"}),
}


def zipped(files: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return out.getvalue()


def put(path: Path, text: str | bytes) -> str:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return str(path)


def read(*paths: str, roles: tuple[str, ...] = ("text",), **settings: Any) -> list[Record]:
    return list(records(Source(paths, **settings), roles))


def texts(path: str, **settings: Any) -> list[str]:
    return [record["text"] for record in read(path, **settings)]


@pytest.mark.parametrize("packing", PACKED)
@pytest.mark.parametrize(
    "name, text, columns",
    [
        ("a.csv", CSV, {}),
        ("a.tsv", TSV, {"text": 0, "label": "1"}),
        ("a.tsv", f"text\tlabel\n{TSV}", {}),
        ("a.tsv", f"x\ty\n{TSV}", {"text": "x", "label": "y"}),
        ("a.jsonl", JSONL, {}),
        ("a.ndjson", JSONL.replace("\n", "\r\n") + "\n", {}),
    ],
)
def test_tables_of_every_format_give_the_same_records(
    packing: str, name: str, text: str, columns: dict[str, Any], tmp_path: Path
) -> None:
    path = put(tmp_path / f"{name}{packing}", PACKED[packing](text.encode()))
    found = read(path, roles=("label", "text"), columns=columns)
    assert found == [{"text": t, "label": y} for t, y in ROWS]


def test_documents_are_files_lines_paragraphs_or_what_a_marker_parts(tmp_path: Path) -> None:
    text = "one\ntwo\n\n \nthree\n<end>\nfour<end>five\n"
    path = put(tmp_path / "a.txt", text)
    assert texts(path) == [text]
    assert texts(path, unit="line") == text.split("\n")[:-1]
    assert texts(path, unit="paragraph") == ["one\ntwo", "three\n<end>\nfour<end>five"]
    assert texts(path, marker="<end>") == ["one\ntwo\n\n \nthree", "four", "five"]


def test_lines_end_at_newlines_only(tmp_path: Path) -> None:
    path = put(tmp_path / "a.txt", "a\u2028b\x0bc\x85d\re\r\nsecond\n")
    assert texts(path, unit="line") == ["a\u2028b\x0bc\x85d\re", "second"]


def test_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    path = put(tmp_path / "a.txt", b"\xef\xbb\xbfa\nb")
    assert texts(path, unit="line") == ["a", "b"] and texts(path) == ["a\nb"]


def test_quoted_field_may_hold_a_line_break(tmp_path: Path) -> None:
    path = put(tmp_path / "a.csv", 'text\n"one\ntwo"\n' + "long " * 40_000 + "\n")
    one, two = texts(path)
    assert one == "one\ntwo" and len(two) == 200_000


def test_parallel_files_are_read_side_by_side(tmp_path: Path) -> None:
    left = put(tmp_path / "a.en.xz", lzma.compress(b"a\n\nc"))
    right = put(tmp_path / "a.de", "x\r\ny\r\nz\r\n")
    sides = read(left, roles=("source", "target"), beside=(right,))
    assert [tuple(r.values()) for r in sides] == [("a", "x"), ("", "y"), ("c", "z")]


def test_patterns_mean_files_in_order(tmp_path: Path) -> None:
    for name in ("b", "a", "c"):
        put(tmp_path / f"{name}.txt", name)
    assert texts(f"{tmp_path}/[ab]*.txt") == ["a", "b"]
    odd = put(tmp_path / "[x].txt", "odd")  # a file of that very name is no pattern
    assert matching_files([odd]) == [Path(odd)] and sha256(Path(odd)) == sha256(
        tmp_path / "[x].txt"
    )


def test_questions_are_read_with_their_answers(tmp_path: Path) -> None:
    answers = [{"text": "blue", "answer_start": 7}]
    asked = {"context": "It was blue.", "qas": [{"question": "Colour?", "answers": answers}]}
    path = put(tmp_path / "a.json", json.dumps({"data": [{"paragraphs": [asked]}]}))
    (record,) = read(path, roles=("text", "second", "start", "end"))
    assert record["second"][record["start"] : record["end"]] == "blue"
    asked["qas"].append({"question": "Size?", "answers": [], "is_impossible": True})
    path = put(tmp_path / "two.json", json.dumps({"data": [{"paragraphs": [asked]}]}))
    _, record = read(path, roles=("text", "second", "start", "end"))
    assert (record["text"], record["start"], record["end"]) == ("Size?", None, None)
    with pytest.raises(DataError, match="not JSON of the SQuAD form"):
        read(put(tmp_path / "b.json", '{"data": [{}]}'))
    # As it is published in rows, and as others write such rows.
    row: dict[str, Any] = {"id": "1", "question": "Colour?", "context": "It was blue."}
    for said in ({"text": ["blue"], "answer_start": [7]}, answers, []):
        path = put(tmp_path / "a.jsonl", json.dumps(row | {"answers": said}))
        (record,) = read(path, roles=("text", "second", "start", "end"))
        assert record["text"] == "Colour?" and (record["start"], record["end"]) == (
            (7, 11) if said else (None, None)
        )
    for wrong in ({"text": ["blue"]}, 3, ["blue"], [{"text": "blue", "answer_start": None}]):
        path = put(tmp_path / "w.jsonl", json.dumps(row | {"answers": wrong}))
        with pytest.raises(UsageError, match="line 1 of .* answers are .*answer_start"):
            read(path, roles=("text", "second", "start", "end"))


@pytest.mark.parametrize(
    "name, format",
    [("a.txt", "text"), ("a.en", "text"), ("a", "text"), ("a.tsv.gz", "tsv"), ("a.CSV", "csv")]
    + [("x-idx3-ubyte.gz", "idx"), ("a.npy.xz", "npy"), ("hub", "text"), ("a.hub", "text")]
    + [("A.TSV.GZ", "tsv"), ("a.csv.bz2", "csv"), ("a.jsonl.zst", "jsonl"), ("a.csv.zip", "csv")],
)
def test_format_is_told_by_the_name(name: str, format: str) -> None:
    assert format_of(Path(name), "auto") == format


def test_reading_lines_needs_little_memory(tmp_path: Path) -> None:
    line = b"word " * 20 + b"\n"
    path = put(tmp_path / "a.txt.gz", gzip.compress(line * 100_000))  # 10 MB
    tracemalloc.start()
    count = sum(1 for _ in records(Source((path,), unit="line"), ("text",)))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert count == 100_000 and peak < 2_000_000


def test_zip_file_is_read_as_what_it_holds(tmp_path: Path) -> None:
    path = put(tmp_path / "reviews.zip", zipped({"reviews.csv": CSV.encode()}))
    assert [row["text"] for row in read(path, roles=("text", "label"))] == [t for t, _ in ROWS]


def test_zst_is_read_or_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = put(tmp_path / "a.txt.zst", b"no archive")
    with monkeypatch.context() as patched:
        for name in ("zstandard", "compression.zstd"):
            patched.setitem(sys.modules, name, None)
        with pytest.raises(UsageError, match=r"reading \.zst files needs .* pip install zstandard"):
            texts(path)
    library = pytest.importorskip("zstandard")
    packed = library.ZstdCompressor().compress(b"one\n" * 99_999)
    # Two frames, one after the other, are one file.
    put(tmp_path / "a.txt.zst", packed + library.ZstdCompressor().compress(b"zwei\n"))
    assert texts(path, unit="line") == ["one"] * 99_999 + ["zwei"]
    for broken in (packed[:-9], b"no archive"):
        with pytest.raises(DataError, match="a.txt.zst is a broken zst file"):
            texts(put(tmp_path / "a.txt.zst", broken), unit="line")


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "cp1252", "gb18030", "utf-8-sig"])
@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 1 << 20])
def test_text_of_any_encoding_and_line_ends_is_the_same_in_every_unit(
    chunk: int, encoding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever a file is cut on the way: \\r\\n is \\n, and a \\r alone is a character."""
    monkeypatch.setattr(module, "CHUNK", chunk)
    text = "für\ndie\r\n\r\nKatz\re\r\r\nMaus"
    path = put(tmp_path / "a.txt", text.encode(encoding))
    plain = text.replace("\r\n", "\n")
    assert texts(path, encoding=encoding) == [plain]
    assert texts(path, encoding=encoding, unit="line") == plain.split("\n")
    assert texts(path, encoding=encoding, unit="paragraph") == plain.split("\n\n")
    for marker in ("Katz", "\n\n", "\r\n\r\n", "e\r", "\nMa"):
        want = [part.strip("\n") for part in plain.split(marker.replace("\r\n", "\n"))]
        assert texts(path, encoding=encoding, marker=marker) == want


def test_marker_that_does_not_occur_is_told(tmp_path: Path) -> None:
    path = put(tmp_path / "a.txt", "one\n\ntwo")
    with pytest.warns(Notice, match="the marker '<end>' does not occur in .*a.txt, which is one"):
        assert texts(path, marker="<end>") == ["one\n\ntwo"]
    with pytest.warns(Notice, match="a line break is"):
        texts(path, marker=r"\n\n")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert texts(path, marker="\n\n") == ["one", "two"]


# --- delimiters and headers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("mark", [";", "\t", "|"])
@pytest.mark.parametrize("headed", [False, True])
def test_delimiter_is_the_one_that_fits_and_is_told(
    headed: bool, mark: str, tmp_path: Path
) -> None:
    rows = [*ROWS, ("one, two, three", "0"), ('"quoted" and so on', "1")]
    quoted = ['"{}"'.format(text.replace('"', '""')) + f"{mark}{label}\n" for text, label in rows]
    head, columns = (f"text{mark}label\n", {}) if headed else ("", {"text": 0, "label": 1})
    path = put(tmp_path / "a.csv", head + "".join(quoted))
    with pytest.warns(Notice, match=f"columns of .*a.csv are parted by {re.escape(repr(mark))}"):
        found = read(path, roles=("text", "label"), columns=columns)
    assert found == [{"text": t, "label": y} for t, y in rows]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        said = read(path, roles=("text", "label"), columns=columns, delimiter=mark)
    assert said == found


HEADED = {
    "words": ["sentence\tlabel", "good film\tpos", "bad\tneg"],
    "over numbers": ["what they said\ty", "good film\t1", "bad\t0", "so so\t1"],
    "never again": ["what they said\tmood", *["good\tpos", "bad\tneg"] * 3],
}
PLAIN = {
    "numbers": ["good film\t1", "bad\t0", "so so\t1"],
    "names": ["good film\tpos", "bad\tneg", "so so\tpos", "x\tneg", "y\tpos", "z\tneg"],
    "one line": ["good film\tpos"],
    "rare class": ["fine\tneutral", *["good\tpos", "bad\tneg"] * 2],
}


@pytest.mark.parametrize("name", [*HEADED, *PLAIN])
@pytest.mark.parametrize("ending", ["tsv", "csv"])
def test_header_above_numbered_columns_is_seen_and_told(
    ending: str, name: str, tmp_path: Path
) -> None:
    lines = {**HEADED, **PLAIN}[name]
    mark = {"tsv": "\t", "csv": ","}[ending]
    path = put(tmp_path / f"a.{ending}", "\n".join(lines).replace("\t", mark) + "\n")
    every = [dict(zip(("text", "label"), line.split("\t"))) for line in lines]
    asked: dict[str, Any] = {"roles": ("text", "label"), "columns": {"text": 0, "label": 1}}
    if name in HEADED:
        with pytest.warns(
            Notice, match="the first line of .* is taken for the names .*header = fal"
        ):
            assert read(path, **asked) == every[1:]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if name in PLAIN:
            assert read(path, **asked) == every
        assert read(path, header=False, **asked) == every
        if len(every) > 1:
            assert read(path, header=True, **asked) == every[1:]


# --- mistakes -----------------------------------------------------------------------------------------------------

MISTAKES: list[tuple[str, str | bytes, dict[str, Any], str, int]] = [
    ("a.txt", "", {}, "a.txt is empty: it holds no examples", 4),
    ("a.jsonl", "\n\n", {}, "a.jsonl is empty: it holds no examples", 4),
    ("a.csv", "text\n", {}, "a.csv is empty: it holds no examples", 4),
    ("a.txt", b"fine\nab\xffc\n", {"unit": "line"}, "line 2 of .*a.txt is not UTF-8 .* byte 2 is 0xff", 4),
    ("a.txt", b"fine\nab\xffc\n", {}, "line 2 of .*a.txt is not UTF-8 .* byte 2 is 0xff", 4),
    ("a.csv", "text,b\n1,2\n3\n", {}, "line 3 of .*a.csv has 1 columns, the first line 2", 4),
    ("a.csv", 'text\n"open\n', {}, "line 2 of .*a.csv is not CSV", 4),
    ("a.tsv", "a\tb\n", {"columns": {"text": 2}}, r"no column '2' .* 0 \('a'\), 1 \('b'\)", 2),
    ("a.csv", "x,y\n1,2\n", {}, "no column 'text' .*; its first line, read as their names, has 'x', 'y'", 2),
    ("a.jsonl", '{"text": "a"}\n[1]\n', {}, r"line 2 of .*a.jsonl is not a JSON object .* list", 4),
    ("a.jsonl", '{"text": "a"}\n{\n', {}, "line 2 of .*a.jsonl is not JSON", 4),
    ("a.jsonl", '{"x": 1}', {}, "line 1 of .*a.jsonl has no 'text'; it has: 'x'", 2),
    ("a.jsonl", "[" * 100_000, {}, "line 1 of .*a.jsonl is not JSON", 4),
    ("a.txt.xz", b"no archive", {}, "a.txt.xz is a broken xz file", 4),
    ("a.txt.xz", lzma.compress(b"abc" * 999)[:-9], {}, "a.txt.xz is a broken xz file", 4),
    ("a.txt.gz", gzip.compress(b"abc" * 999)[:-9], {}, "a.txt.gz is a broken gz file", 4),
    ("a.TXT.GZ", b"no archive", {}, "a.TXT.GZ is a broken gz file", 4),
    ("a.txt.bz2", b"no archive", {}, "a.txt.bz2 is a broken bz2 file", 4),
    ("a.txt.bz2", bz2.compress(b"abc" * 999)[:-9], {}, "a.txt.bz2 is a broken bz2 file", 4),
    ("a.txt.zip", b"no archive", {}, "a.txt.zip is a broken zip file", 4),
    ("a.zip", zipped({"a": b"x", "b": b"y"}), {}, "a.zip holds 2 files, not one; unpack it", 4),
    ("a.txt", b"fi\xfcr", {}, "line 1 .* not UTF-8 text: byte 2 is 0xfc; .* encoding = 'cp1252'", 4),
    ("a.txt", "für".encode("utf-16"), {"unit": "line"}, "encoding = 'utf-16'", 4),
    ("a.txt", b"x", {"encoding": "utf8000"}, "encoding = 'utf8000' is unknown; give utf-8", 2),
    ("a.txt", b"\x81", {"encoding": "cp1252"}, "not CP1252 text: byte 0 is 0x81", 4),
    ("a.csv", "x", {"delimiter": ";;"}, "delimiter = ';;' must be one character", 2),
    ("a.jsonl", '{"text": "a"}\n{"text": "b\\ud83d"}', {}, r"line 2 of .*a.jsonl has \\ud83d alone", 4),
    ("a.json", '[{"text": "b\\uDE00"}]', {}, r"a.json has \\ude00 alone, which is half a char", 4),
    ("a.txt", "x", {"unit": "lines"}, "unit = 'lines' is unknown; did you mean 'line'", 2),
    ("a.txt", "x", {"format": "tvs"}, "format = 'tvs' is unknown; did you mean 'tsv'", 2),
    ("a.txt", "x", {"columns": {"lable": 1}}, "'lable' is not a role; did you mean 'label'", 2),
]  # fmt: skip


@pytest.mark.parametrize(
    "name, content, settings, sentence, code", MISTAKES, ids=range(len(MISTAKES))
)
def test_mistake_is_one_sentence(
    name: str,
    content: str | bytes,
    settings: dict[str, Any],
    sentence: str,
    code: int,
    tmp_path: Path,
) -> None:
    path = put(tmp_path / name, content)
    with pytest.raises(UsageError, match=sentence) as caught:
        read(path, **settings)
    assert "\n" not in str(caught.value) and getattr(caught.value, "code", 2) == code


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere.txt does not exist"):
        read(str(tmp_path / "nowhere.txt"))
    with pytest.raises(DataError, match="cannot be read"):
        read(str(tmp_path), format="text")


def test_sides_of_different_length_are_both_counted(tmp_path: Path) -> None:
    left, right = put(tmp_path / "a", "1\n2\n3\n4\n"), put(tmp_path / "b", "1\n2\n")
    for one, other in ((left, right), (right, left)):
        with pytest.raises(DataError, match="a has 4 lines, .*b 2;"):
            read(one, roles=("source", "target"), beside=(other,))


def test_plain_text_has_no_labels(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="plain text, which has no columns, but text, label"):
        read(put(tmp_path / "a.txt", "x"), roles=("text", "label"))


def test_columns_of_json_are_those_of_a_list(tmp_path: Path) -> None:
    rows = put(tmp_path / "a.json", '[{"q": "a", "b": 1}, {"q": "c", "b": 2}]')
    assert read(rows, columns={"text": "q"}) == [{"text": "a"}, {"text": "c"}]
    with pytest.raises(UsageError, match="example 1 of .*a.json has no 'd'; it has: 'q', 'b'"):
        read(rows, columns={"text": "d"})
    squad = put(tmp_path / "s.json", '{"data": []}')
    with pytest.raises(UsageError, match="is of SQuAD's form, which names its own columns"):
        read(squad, columns={"text": "q"})


# --- the hub extra ------------------------------------------------------------------------------------------------


def test_parquet_without_its_package_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UsageError, match="pip install datasets") as caught:
        read(put(tmp_path / "a.parquet", "PAR1"))
    assert getattr(caught.value, "code", 2) == 3


def test_hub_and_parquet_ask_the_package_for_a_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def load_dataset(*names: str, **settings: Any) -> list[Record]:
        asked.append((names, settings))
        return [{"sentence": "a", "label": 1}]

    fake = types.SimpleNamespace(load_dataset=load_dataset)
    monkeypatch.setitem(sys.modules, "datasets", fake)
    columns = {"text": "sentence"}
    path = put(tmp_path / "a.parquet", "PAR1")
    assert texts(path, columns=columns) == ["a"]
    assert texts("glue/sst2:validation", columns=columns, format="hub") == ["a"]
    assert asked[1] == (("glue/sst2",), {"split": "validation", "streaming": True})
    with pytest.raises(UsageError, match="has no 'text'; it has: 'sentence', 'label'"):
        read(path)


@pytest.mark.parametrize("late", [False, True])
def test_what_the_package_cannot_read_is_one_sentence(
    late: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rows() -> Iterator[Record]:
        yield {"text": "a"}
        raise RuntimeError("no magic bytes\nin the footer")

    def load_dataset(*names: str, **settings: Any) -> Iterator[Record]:
        if late:
            return rows()
        raise ConnectionError("no such host")

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    why = "RuntimeError: no magic bytes in the footer" if late else "ConnectionError: no such host"
    with pytest.raises(DataError, match=f"a.parquet: datasets cannot read it [(]{why}"):
        read(put(tmp_path / "a.parquet", "PAR1"))


def test_parquet_of_the_real_package(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    import pyarrow
    from pyarrow import parquet

    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"text": ["one", "two"], "label": [0, 1]}), path)
    assert texts(path) == ["one", "two"]
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(DataError, match="datasets cannot read it"):
        read(path)


def test_real_files_have_the_documented_numbers(shared: Path) -> None:
    def count(name: str, roles: tuple[str, ...], **settings: Any) -> int:
        beside = tuple(str(shared / b) for b in settings.pop("beside", ()))
        source = Source((str(shared / name),), beside, **settings)
        return sum(1 for _ in records(source, roles))

    sides = ("source", "target")
    assert count("multi30k/val.en.xz", sides, beside=["multi30k/val.de.xz"]) == 1014
    both = {"columns": {"source": 0, "target": 1}}
    assert count("tatoeba_ende/test.tsv.xz", sides, **both) == 996
    answers = {"columns": {"source": "question", "target": "answer"}}
    assert count("text2text/gsm8k_test.jsonl.xz", sides, **answers) == 1319
    assert count("lm/tinystories_2mb.txt.xz", ("text",), marker="<|endoftext|>") == 2317
    assert count("text2text/xquad_de.json.xz", ("text", "start")) == 1190


def test_pictures_are_no_texts(tmp_path: Path) -> None:
    for path in (put(tmp_path / "a.npz", b""), str(tmp_path)):
        with pytest.raises(UsageError, match="holds no text; text comes as text, "):
            read(path)
