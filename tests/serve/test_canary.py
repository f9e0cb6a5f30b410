"""The canary law in short: the nastiest attacks, four at a time, and a part of the walk over the schema."""

from pathlib import Path

from tests.serve.attacks import ATTACKS, NASTIEST, walk
from tests.serve.canary import ALLOWED, GROWTH, WALK, law, models, serving


def test_nobody_waits_for_somebody_elses_work(tmp_path: Path) -> None:
    assert len(ATTACKS) >= 40 and ALLOWED == 1.0 and GROWTH == 200.0
    with serving(models(tmp_path)) as server, law(server, quiet=1.0) as held:
        places = {(path, place) for path, place, _ in walk(server.port)}
        # The walk finds what lies deep, in every body.
        assert ("/v1/chat/completions", ("response_format", "json_schema", "schema")) in places
        assert {path for path, _ in places} >= {"/v1/look", "/v1/fill", "/detokenize"}
        for name in NASTIEST:
            print(held.run(name, 4, patience=0.8))
        print(held.run(WALK, 4, patience=60.0, every=13))
        held.memory()
    assert not held.broken, "\n".join(held.broken)
