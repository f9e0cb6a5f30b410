"""Windows in some layers, whatever else these differ in: a rule that stands after the one for that."""

from __future__ import annotations

from collections.abc import Callable

from regard.checkpoint.rules import Data, Group, need, wrong

_WORDS = ("full_attention", "sliding_attention")


def windows_by_layer(slides: Callable[[Data, Data], bool], switch: str) -> Group:
    """A window in some layers, whatever else these differ in; it stands after the rule for that. `slides`: whether one
    of ours does where `layer_types` is missing; `switch`: the key that turns it on."""

    def window_of(theirs: Data) -> int | None:
        return theirs.get("sliding_window") if theirs.get(switch) else None

    def kinds_of(theirs: Data, each: list[Data]) -> list[str]:
        on = window_of(theirs) is not None
        words = [_WORDS[on and slides(theirs, one)] for one in each]
        kinds = theirs.get("layer_types") or words
        if len(kinds) != len(each) or set(kinds) - set(_WORDS):
            listed = f"layer_types must list as many words, {' or '.join(_WORDS)}, got {kinds}"
            raise wrong(f"num_hidden_layers is {len(each)}; {listed}")
        if not on and _WORDS[1] in kinds:
            raise wrong(f"layer_types slides, but sliding_window or {switch} is off")
        return kinds

    def layers(ours: Data) -> list[Data]:
        tower = ours["tower"]
        part = tower["attention"]
        return part if isinstance(part, list) else [part] * tower["layers"]

    def put_back(ours: Data, each: list[Data]) -> None:
        ours["tower"]["attention"] = each[0] if all(one == each[0] for one in each) else each

    def read(theirs: Data, ours: Data) -> None:
        each, size = layers(ours), window_of(theirs)
        pairs = zip(each, kinds_of(theirs, each), strict=True)
        put_back(
            ours, [{**one, "window": size if kind == _WORDS[1] else None} for one, kind in pairs]
        )

    def write(ours: Data, theirs: Data) -> None:
        each = layers(ours)
        sizes = [need(one, "window") for one in each]
        put_back(ours, [{**one, "window": None} for one in each])
        kinds = [_WORDS[size is not None] for size in sizes]
        size = next((size for size in sizes if size is not None), None)
        fits = len(theirs.get("layer_types") or kinds) == len(kinds)
        if fits and size in (None, window_of(theirs)) and kinds_of(theirs, each) == kinds:
            return
        theirs["layer_types"], theirs["sliding_window"] = kinds, size
        theirs[switch] = size is not None

    return Group(("layer_types", "sliding_window", switch), read, write, last=True)
