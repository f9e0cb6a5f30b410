"""Pictures from folders, npz, npy and idx files; nothing that could run code is read."""

import gzip
import lzma
import struct
import sys
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from regard.data import pictures as reading
from regard.data.read import DataError, Source, pictures
from regard.errors import UsageError

X = np.arange(3 * 4 * 5, dtype=np.uint8).reshape(3, 4, 5)
Y = np.array([1, 0, 1], dtype=np.uint8)


def npy(x: np.ndarray) -> bytes:
    stream = BytesIO()
    np.save(stream, x)
    return stream.getvalue()


def idx(x: np.ndarray) -> bytes:
    return struct.pack(f">2xBB{x.ndim}I", 8, x.ndim, *x.shape) + x.tobytes()


def read(path: Path, *beside: Path, **settings: Any) -> tuple[np.ndarray, list[str]]:
    return pictures(Source((str(path),), tuple(map(str, beside)), **settings))


def put(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def check(found: tuple[np.ndarray, list[str]]) -> None:
    assert np.array_equal(found[0], X[..., None]) and found[1] == ["1", "0", "1"]


def test_arrays_of_every_format_give_the_same_pictures(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=X, y=Y)
    check(read(tmp_path / "a.npz"))
    np.savez_compressed(tmp_path / "b.npz", pics=X, kinds=Y)
    check(read(tmp_path / "b.npz", columns={"image": "pics", "label": "kinds"}))
    x = put(tmp_path / "x.npy.xz", lzma.compress(npy(X)))
    check(read(x, put(tmp_path / "y.npy", npy(Y))))
    x = put(tmp_path / "x-idx3-ubyte.gz", gzip.compress(idx(X)))
    check(read(x, put(tmp_path / "y-idx1-ubyte", idx(Y))))


def test_folder_has_a_folder_for_each_class(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    for name, x in (("cat", X[0]), ("dog", X[1]), ("dog", X[2])):
        (tmp_path / name).mkdir(exist_ok=True)
        image.fromarray(x).save(tmp_path / name / f"{int(x[0, 0])}.png")
    (tmp_path / "dog" / "notes.txt").write_text("no picture")
    x, y = read(tmp_path)
    assert y == ["cat", "dog", "dog"] and x.shape == (3, 4, 5, 1)
    assert np.array_equal(x[0, :, :, 0], X[0])
    assert read(tmp_path, size=8)[0].shape == (3, 8, 8, 1)
    image.fromarray(np.zeros((6, 6, 3), np.uint8)).save(tmp_path / "cat" / "z.png")
    with pytest.raises(DataError, match=r"z.png is 6 x 6, 0.png 5 x 4; say size = 4"):
        read(tmp_path)
    assert read(tmp_path, size=4)[0].shape == (4, 4, 4, 1)  # grey as the first one is
    (tmp_path / "cat" / "a.jpg").write_bytes(b"\xff\xd8\xff broken")
    with pytest.raises(DataError, match=r"a.jpg is not a picture that can be read"):
        read(tmp_path, size=4)


def test_folder_without_pillow_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(UsageError, match="pip install pillow") as caught:
        read(tmp_path)
    assert getattr(caught.value, "code", 2) == 3


@pytest.mark.parametrize(
    "x, y, sentence",
    [
        (npy(X), npy(Y[:2]), "3 pictures and 2 classes"),
        (npy(X.astype(np.float32)), npy(Y), "must hold bytes of shape .* float32"),
        (npy(X), npy(Y[:, None]), "classes of .* must be n numbers or names"),
        (npy(X)[:-5], npy(Y), "is not an npy file of numbers"),
        (npy(X[:0]), npy(Y[:0]), "is empty"),
        (npy(np.array([{}], dtype=object)), npy(Y), "is not an npy file of numbers"),
    ],
    ids=range(6),
)
def test_wrong_arrays_are_one_sentence(x: bytes, y: bytes, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=sentence):
        read(put(tmp_path / "x.npy", x), put(tmp_path / "y.npy", y))


def test_other_mistakes_are_one_sentence(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=X)
    with pytest.raises(UsageError, match="no array 'y' for the role label; it has: x"):
        read(tmp_path / "a.npz")
    with pytest.raises(DataError, match="is not an npz file"):
        read(put(tmp_path / "b.npz", b"PK nothing"))
    with pytest.raises(DataError, match="is cut off: it has 73 bytes, its head says 76"):
        read(put(tmp_path / "x-ubyte", idx(X)[:-3]), tmp_path / "x-ubyte")
    with pytest.raises(UsageError, match="holds pictures only"):
        read(put(tmp_path / "x.npy", npy(X)))
    with pytest.raises(UsageError, match="holds no pictures"):
        read(put(tmp_path / "x.txt", b"x"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="has no pictures: make a folder"):
        read(tmp_path / "empty")


def test_damaged_npy_file_is_the_datas_fault(tmp_path: Path) -> None:
    """Every byte of the header, set to others: an array or a DataError, never another exception."""
    np.save(tmp_path / "a.npy", np.zeros((2, 3, 3), np.uint8))
    whole, read = (tmp_path / "a.npy").read_bytes(), 0
    for at in range(0, 128):
        for value in (0, 10, 39, 40, 57, 255):
            (tmp_path / "b.npy").write_bytes(whole[:at] + bytes([value]) + whole[at + 1 :])
            with suppress(DataError):
                reading.load_arrays(tmp_path / "b.npy")
                read += 1
    assert read > 0
