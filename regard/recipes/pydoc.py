"""English prose that every Python carries: the texts of help("topic"), as plain text.

Topics repeat each other; a paragraph is taken once, so that none of the held-out topics' text is learned from.
"""

from __future__ import annotations

from pathlib import Path


def make(folder: Path, share: int = 10) -> str:
    """Write train.txt, and valid.txt with topics that are one part in `share` of all text; what was made."""
    from pydoc_data.topics import topics

    seen: set[str] = set()
    learned: list[str] = []
    held: list[str] = []
    sizes = [0, 0]
    for name in sorted(topics):
        parts = dict.fromkeys(part.strip("\n") for part in topics[name].split("\n\n"))
        text = "\n\n".join(part for part in parts if part and part not in seen) + "\n"
        seen.update(parts)
        aside = (sizes[1] + len(text)) * share <= sum(sizes) + len(text)
        (held if aside else learned).append(text)
        sizes[aside] += len(text)
    folder.mkdir(parents=True, exist_ok=True)
    for name, texts in (("train.txt", learned), ("valid.txt", held)):
        (folder / name).write_text("\n".join(texts), encoding="utf-8")
    return f"{sizes[0]:,} characters of Python's own help, and {sizes[1]:,} of other topics"
