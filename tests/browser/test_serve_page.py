"""The server's page in a real browser, against a real server: every view by mouse and by keyboard."""

import base64
import json
import math
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("msgspec", reason="needs the server: pip install 'regard[serve]'")
pytest.importorskip("uvicorn", reason="needs the server: pip install 'regard[serve]'")

from regard.serve.edge import new_key
from tests.serve.running import Client, running
from tests.test_cli import folder
from tests.test_cli_eval import encoder

ROOT = Path(__file__).resolve().parents[2]
AXE = Path(os.environ.get("AXE", ROOT / "build/node_modules/axe-core/axe.min.js"))
SHOTS = os.environ.get("REGARD_SHOTS")  # a folder for screenshots
# Task and model: the field, what is written into it, the button, and what an answer has.
VIEWS = {
    "chat/gpt2": ("Message", "Hi there", "Send", ".turn .done"),
    "completions/gpt2": ("Text to go on from", "The king", "Complete", ".answer .done"),
    "translations/marian": ("Text to translate", "Ein kleiner Hund läuft", "Translate", ".aligned"),
    "classify/classify": ("Text to classify", "a little ball", "Classify", ".answer .bars"),
    "fill/mlm": ("Text with [MASK]", "the [MASK] plays", "Fill", ".answer .bars"),
}


@pytest.fixture(scope="module")
def site() -> Iterator[Client]:
    models = {name: folder(name) for name in ("gpt2", "marian")}
    heads = {name: encoder(name) for name in ("classify", "mlm")}
    with running({**models, **heads}) as client:
        yield client


@contextmanager
def opened(browser: Any, url: str, view: str = "", width: int = 1440, **more: Any) -> Iterator[Any]:
    """A tab with the page; an error on the console, or a request to another host, fails the test."""
    context = browser.new_context(viewport={"width": width, "height": 900}, **more)
    tab, wrong = context.new_page(), []
    tab.on("console", lambda said: wrong.append(said.text))
    tab.on("pageerror", lambda error: wrong.append(str(error)))
    tab.on("request", lambda r: r.url.startswith(url + "/") or wrong.append(r.url))
    tab.wrong = wrong
    tab.goto(f"{url}/#{view}")
    tab.wait_for_selector("html[data-ready]")
    yield tab
    assert not wrong, wrong
    context.close()


def asked(tab: Any, view: str) -> None:
    """Ask what this view is for, and wait for the answer."""
    label, text, button, found = VIEWS[view]
    for seed in tab.get_by_label("Seed", exact=True).all():
        seed.evaluate("e => (e.value ||= 1)")
    tab.get_by_label(label, exact=label == "Message").fill(text)
    tab.get_by_role("button", name=button, exact=True).click()
    tab.wait_for_selector(found)


def looked(tab: Any) -> None:
    """Wait until both maps are drawn."""
    tab.wait_for_selector("#inside .part:nth-of-type(3) .map", state="visible")


def floats(text: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), "<f4")


# --- every view -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("view", VIEWS)
def test_view_by_mouse(browser: Any, site: Client, view: str) -> None:
    with opened(browser, site.url, view) as tab:
        asked(tab, view)
        tokens = tab.locator(".token")
        assert tokens.count() > 1
        tokens.nth(1).click()
        looked(tab)
        assert "every head" in tab.locator("#inside h2").inner_text()
        assert "sum to 1.0000" in tab.locator("#inside .bars:not(.odds) caption").inner_text()
        tab.get_by_role("button", name="Close").click()
        assert not tab.locator("#inside").is_visible()


@pytest.mark.parametrize("view", VIEWS)
def test_view_by_keyboard(browser: Any, site: Client, view: str) -> None:
    label, text, _, found = VIEWS[view]
    with opened(browser, site.url, view) as tab:
        field = tab.get_by_label(label, exact=label == "Message")
        until(tab, "Tab", lambda: field.evaluate("e => e === document.activeElement"))
        tab.keyboard.type(text)
        tab.keyboard.press("Enter" if view.startswith("chat") else "Control+Enter")
        tab.wait_for_selector(found)
        back = view.startswith("chat")  # its answers stand before the field
        key = "Shift+Tab" if back else "Tab"
        until(tab, key, lambda: focused(tab, "e.classList.contains('token')"))
        assert focused(tab, "getComputedStyle(e).outlineStyle !== 'none'")
        tab.keyboard.press("ArrowRight")
        here = focused(tab, "[...e.parentNode.children].indexOf(e)")
        tab.keyboard.press("Enter")
        looked(tab)
        assert focused(tab, "e.tagName") == "H2"
        until(tab, "Tab", lambda: focused(tab, "e.classList.contains('map')"))
        before = tab.locator("#inside .readout").first.inner_text()
        tab.keyboard.press("ArrowDown")
        tab.keyboard.press("Home")
        assert tab.locator("#inside .readout").first.inner_text() != before
        tab.keyboard.press("Escape")
        assert focused(tab, "[...e.parentNode.children].indexOf(e)") == here


def until(tab: Any, key: str, holds: Any) -> None:
    for _ in range(40):
        tab.keyboard.press(key)
        if holds():
            return
    raise AssertionError(f"{key} does not lead there")


def focused(tab: Any, what: str) -> Any:
    return tab.evaluate(f"(e => {what})(document.activeElement)")


def test_tabs_models_and_address_say_the_same(browser: Any, site: Client) -> None:
    with opened(browser, site.url) as tab:
        chosen = tab.get_by_role("tab", selected=True)
        assert chosen.inner_text() == "Chat"
        chosen.focus()
        tab.keyboard.press("ArrowRight")
        # The address comes first, and the view follows it.
        tab.get_by_role("tab", name="Complete", selected=True).wait_for()
        assert tab.url.endswith("#completions/gpt2")
        assert focused(tab, "e.textContent") == "Complete"
        tab.get_by_label("Text to go on from").fill("kept")
        tab.get_by_label("Model", exact=True).select_option("marian")
        tab.wait_for_url("**/#completions/marian")
        tab.get_by_role("tab", name="Translate").click()
        tab.get_by_label("Text to translate").wait_for()
        tab.go_back()
        tab.go_back()
        tab.get_by_role("tab", name="Complete", selected=True).wait_for()
        tab.wait_for_function("document.querySelector('select').value === 'gpt2'")
        assert tab.get_by_label("Text to go on from").input_value() == "kept"
        assert tab.get_by_label("Model", exact=True).input_value() == "gpt2"


# --- numbers ----------------------------------------------------------------------------------------------------------


def test_heads_map_shows_what_the_server_computes(browser: Any, site: Client) -> None:
    with opened(browser, site.url, "completions/gpt2") as tab:
        with tab.expect_response("**/v1/look") as answer:
            asked(tab, "completions/gpt2")
            tab.locator(".token").nth(2).click()
        view = answer.value.json()["views"][0]
        looked(tab)
        for layer, head, column in ((0, 0, 0), (0, 1, 2), (1, 0, 1)):
            tab.locator("#inside .map").first.focus()
            tab.keyboard.press("Control+Home")
            for _ in range(layer * len(view["layers"][0]["heads"]) + head):
                tab.keyboard.press("ArrowDown")
            for _ in range(column):
                tab.keyboard.press("ArrowRight")
            said = tab.locator("#inside .readout").first.inner_text()
            want = floats(view["layers"][layer]["heads"][head]["weight"])[column]
            assert said.startswith(f"layer {layer}, head {head}")
            assert float(said.split()[-1]) == pytest.approx(float(want), abs=6e-5)


def test_row_is_the_one_that_wrote_the_token(browser: Any, site: Client) -> None:
    prompt = site.post("/tokenize", {"model": "gpt2", "prompt": "The king"})["count"]
    with opened(browser, site.url, "completions/gpt2") as tab:
        asked(tab, "completions/gpt2")
        with tab.expect_request("**/v1/look") as request:
            tab.locator(".token").nth(3).click()
        assert request.value.post_data_json["rows"] == [prompt - 1 + 3]
        looked(tab)
        # Another row of the whole map is another question to every head.
        whole = tab.locator("#inside .part:nth-of-type(3) .map")
        with tab.expect_request("**/v1/look") as request:
            whole.press("ArrowUp")
        assert request.value.post_data_json["rows"] == [prompt - 1 + 2]


def test_probabilities_on_hover_and_on_focus(browser: Any, site: Client) -> None:
    body = {"model": "gpt2", "prompt": "The king", "logprobs": 5, "max_tokens": 6, "seed": 7}
    want = site.post("/v1/completions", body)["choices"][0]["logprobs"]
    with opened(browser, site.url, "completions/gpt2") as tab:
        set_to(tab, {"Seed": "7", "Max tokens": "6"})
        asked(tab, "completions/gpt2")
        assert tab.locator(".token").count() == len(want["tokens"])
        card = tab.locator("#card")
        for k, act in ((1, "hover"), (2, "focus")):
            getattr(tab.locator(".token").nth(k), act)()
            shown = card.locator("caption").inner_text()
            p = 100 * math.exp(want["token_logprobs"][k])
            assert float(re.findall(r"[\d.e-]+(?= %)", shown)[0]) == pytest.approx(p, rel=0.06)
            parts = [float(x.split()[0]) for x in card.locator(".n").all_inner_texts()]
            assert sum(parts) == pytest.approx(100, abs=0.5)
        tab.keyboard.press("Escape")
        assert not card.is_visible()


def set_to(tab: Any, settings: dict[str, str]) -> None:
    tab.locator("summary").click()
    for label, value in settings.items():
        tab.get_by_label(label, exact=True).fill(value)


def test_settings_are_sent_and_empty_ones_are_not(browser: Any, site: Client) -> None:
    given = {"Temperature": "0.5", "Top-p": "0.9", "Min-p": "0.05", "Max tokens": "5", "Seed": "3"}
    given |= {"Presence penalty": "0.5", "Stop texts": "END\nSTOP"}
    with opened(browser, site.url, "chat/gpt2") as tab:
        set_to(tab, {**given, "System message": "Be brief."})
        with tab.expect_request("**/v1/chat/completions") as request:
            asked(tab, "chat/gpt2")
        body = request.value.post_data_json
        want: dict[str, Any] = {"temperature": 0.5, "top_p": 0.9, "min_p": 0.05, "max_tokens": 5}
        want |= {"seed": 3, "presence_penalty": 0.5, "stop": ["END", "STOP"]}
        assert body | want == body and "frequency_penalty" not in body
        assert [m["role"] for m in body["messages"]] == ["system", "user"]
        tab.get_by_label("Temperature").fill("9")
        tab.get_by_label("Message", exact=True).fill("again")
        tab.keyboard.press("Enter")
        assert focused(tab, "e.validity.rangeOverflow") and tab.locator(".turn").count() == 1


def test_conversation_goes_on(browser: Any, site: Client) -> None:
    with opened(browser, site.url, "chat/gpt2") as tab:
        set_to(tab, {"Max tokens": "4"})
        asked(tab, "chat/gpt2")
        with tab.expect_request("**/v1/chat/completions") as request:
            tab.get_by_label("Message", exact=True).fill("and then?")
            tab.keyboard.press("Enter")
        roles = [m["role"] for m in request.value.post_data_json["messages"]]
        assert roles == ["user", "assistant", "user"]
        tab.wait_for_selector(".turn:nth-of-type(2) .done")
        tab.get_by_role("button", name="New chat").click()
        assert tab.locator(".turn").count() == 0


def test_words_that_belong_together_light_up(browser: Any, site: Client) -> None:
    text = VIEWS["translations/marian"][1]
    body = {"model": "marian", "input": text, "align": True}
    want = site.post("/v1/translations", body)["data"][0]["align"]
    with opened(browser, site.url, "translations/marian") as tab:
        asked(tab, "translations/marian")
        assert tab.locator(".aligned path").count() == len(want)
        words = tab.locator(".words").first.locator(".word")
        words.nth(want[0][0]).hover()
        partners = {t for s, t in want if s == want[0][0]}
        lit = tab.locator(".words").nth(1).locator(".word")
        found = {
            i for i in range(lit.count()) if "lit" in (lit.nth(i).get_attribute("class") or "")
        }
        assert found == partners


# --- what goes wrong --------------------------------------------------------------------------------------------------


def test_text_is_never_markup(browser: Any, site: Client) -> None:
    text = "<script>alert(1)</script><img src=x>"
    entry = {"token": text, "logprob": -0.1, "bytes": list(text.encode()), "top_logprobs": []}
    choice = {"index": 0, "delta": {"content": text}, "logprobs": {"content": [entry]}}
    events = [{"id": "x", "choices": [{**choice, "finish_reason": "stop"}]}]
    with opened(browser, site.url, "chat/gpt2") as tab:
        tab.route("**/v1/chat/completions", lambda r: r.fulfill(body=sse(*events, end=True)))
        tab.get_by_label("Message", exact=True).fill(text)
        tab.keyboard.press("Enter")
        tab.wait_for_selector(".done")
        assert tab.locator(".said").inner_text().endswith(text)
        assert tab.locator(".token").inner_text() == text


def sse(*events: Any, end: bool = False) -> str:
    lines = [f"data: {json.dumps(event)}\n\n" for event in events]
    return "".join([*lines, "data: [DONE]\n\n"] if end else lines)


@pytest.mark.parametrize("fault", ["broken off", "an error in the stream", "refused"])
def test_answer_that_fails_is_told_and_tried_again(browser: Any, site: Client, fault: str) -> None:
    told = {"error": {"message": "the engine is down", "type": "server_error"}}
    answers = {
        "broken off": {"body": sse({"id": "x", "choices": []})},
        "an error in the stream": {"body": sse(told)},
        "refused": {"status": 429, "body": json.dumps(told)},
    }
    with opened(browser, site.url, "chat/gpt2") as tab:
        tab.route("**/v1/chat/completions", lambda r: r.fulfill(**answers[fault]), times=1)
        tab.get_by_label("Message", exact=True).fill("Hi")
        tab.keyboard.press("Enter")
        trouble = tab.locator(".answer .trouble")
        trouble.wait_for()
        message = "before it was complete" if fault == "broken off" else "the engine is down"
        assert message in trouble.inner_text()
        trouble.get_by_role("button").click()
        tab.wait_for_selector(".turn .done")
        assert tab.locator(".turn").count() == 1 and not trouble.is_visible()
        # Chromium tells of a status by itself.
        tab.wrong[:] = [said for said in tab.wrong if "429" not in said]


def test_stop_ends_the_answer_here_and_there(browser: Any, site: Client) -> None:
    with opened(browser, site.url, "chat/gpt2") as tab:
        # An answer that never comes.
        tab.route("**/v1/chat/completions", lambda r: None)
        tab.get_by_label("Message", exact=True).fill("Hi")
        tab.keyboard.press("Enter")
        tab.get_by_role("button", name="Stop").click()
        tab.wait_for_selector(".done:text('stopped')")
        assert not tab.get_by_role("button", name="Stop").is_visible()
        assert tab.get_by_role("button", name="Send", exact=True).is_enabled()
    site.idle()


def test_key_is_asked_for_and_kept_nowhere(browser: Any, tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    secret = new_key(keys, "ann", False)
    with running({"gpt2": folder("gpt2")}, keys=keys) as site:
        context = browser.new_context()
        tab = context.new_page()
        tab.goto(site.url)
        tab.wait_for_selector("#trouble:visible")
        assert focused(tab, "e.id") == "key"
        tab.keyboard.type(secret)
        tab.keyboard.press("Enter")
        tab.wait_for_selector("html[data-ready]")
        asked(tab, "chat/gpt2")
        kept = tab.evaluate(
            "[location.href, ...Object.values({...localStorage, ...sessionStorage}), document.cookie]"
        )
        assert secret not in " ".join(kept)
        context.close()


# --- for everybody ----------------------------------------------------------------------------------------------------


SIZES = [(view, *size) for view in VIEWS for size in ((360, "dark"), (1440, "light"))]
SIZES += [("chat/gpt2", 360, "light"), ("chat/gpt2", 1440, "dark")]


@pytest.mark.parametrize("view,width,scheme", SIZES)
def test_everything_fits_and_can_be_read(
    browser: Any, site: Client, view: str, width: int, scheme: str
) -> None:
    """No sideways scroll, and no serious finding of axe-core."""
    with opened(browser, site.url, view, width, color_scheme=scheme) as tab:
        for summary in tab.locator("summary").all():
            summary.click()
        asked(tab, view)
        tab.locator(".token").nth(1).click()
        looked(tab)
        assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
        if SHOTS:
            name = f"{view.replace('/', '-')}-{width}-{scheme}.png"
            tab.screenshot(path=Path(SHOTS) / name, full_page=width < 1000)
        if not AXE.is_file():
            pytest.skip("axe-core: npm install --prefix build axe-core, or AXE=its file")
        tab.evaluate(AXE.read_text(encoding="utf-8"))
        found = tab.evaluate("axe.run()")["violations"]
        serious = [
            (v["id"], [node["html"] for node in v["nodes"]][:3])
            for v in found
            if v["impact"] in ("serious", "critical")
        ]
        assert not serious, serious
