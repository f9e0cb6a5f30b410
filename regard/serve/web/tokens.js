// Tokens, tinted by how unlikely they were. One tab stop for each text; arrows move, Enter looks inside. What a token's
// rivals were is shown beside it on hover and on focus.

import { make, quoted } from "./dom.js";

const VISIBLE = { "\n": "⏎\n", "\t": "⇥\t", "\r": "␍" };
// Every token is seen, so that it can be pointed at: control characters, accents that stand on another letter, nothing.
const seen = (text) => text.replace(/[\n\t\r]/g, (letter) => VISIBLE[letter])
  .replace(/[\0-\x08\x0b\x0c\x0e-\x1f]/g, (letter) => String.fromCharCode(0x2400 + letter.charCodeAt()))
  .replace(/^\p{M}/u, "◌$&").replace(/^\p{Cf}*$/u, "·");
const percent = (p) => (p >= 0.9995 ? "100 %" : p >= 0.0995 ? `${(100 * p).toFixed(1)} %` : `${(100 * p).toPrecision(2)} %`);
const plain = (text) => text.replace(/[\n\t\r]/g, (letter) => VISIBLE[letter].trim());

// Chat's entries are {token, logprob, top_logprobs}; those of completions are brought to the same form.
export function entries(logprobs) {
  if (!logprobs) return [];
  if (logprobs.content) return logprobs.content;
  return logprobs.tokens.map((token, i) => {
    const top = Object.entries(logprobs.top_logprobs?.[i] ?? {});
    return { token, logprob: logprobs.token_logprobs[i], top_logprobs: top.map(([other, logprob]) => ({ token: other, logprob })) };
  });
}

// The bytes of a token: a part of a character is written as bytes:\xe2\x80.
function bytesOf({ token, bytes }) {
  if (bytes) return Uint8Array.from(bytes);
  if (!/^bytes:(\\x[0-9a-f]{2})+$/.test(token)) return new TextEncoder().encode(token);
  return Uint8Array.from(token.slice(6).split("\\x").slice(1), (hex) => parseInt(hex, 16));
}

// Bars of [name, probability, chosen].
export function bars(rows, caption) {
  const body = rows.map(([name, p, chosen]) => {
    const bar = make("span", { className: "bar" });
    bar.style.width = `${100 * p}%`;
    const cells = [make("th", { scope: "row", dir: "auto" }, plain(name).replace(/^ | $/g, "␣")), make("td", { className: "track" }, bar), make("td", { className: "n" }, percent(p))];
    return make("tr", { className: chosen ? "chosen" : "" }, ...cells);
  });
  return make("table", { className: "bars odds" }, make("caption", {}, caption), make("tbody", {}, ...body));
}

// The rivals of a token, most probable first, the token itself among them, and what is left for all others.
export function odds({ token, logprob, top_logprobs: top = [] }) {
  const rows = top.map((each) => [each.token, Math.exp(each.logprob), each.token === token]);
  if (!rows.some(([, , chosen]) => chosen)) rows.push([token, Math.exp(logprob), true]);
  const rest = 1 - rows.reduce((sum, [, p]) => sum + p, 0);
  rows.sort((a, b) => b[1] - a[1]);
  if (rest > 5e-4 && top.length) rows.push(["all others", rest, false]);
  return bars(rows, `${quoted(plain(token).trim() || "␣")} had ${percent(Math.exp(logprob))}`);
}

const card = make("div", { className: "card", id: "card", role: "tooltip", hidden: true });

function show(node, entry) {
  if (entry.logprob === undefined || entry.logprob === null) return;
  card.replaceChildren(odds(entry), make("p", { className: "shown" }, "Enter or click: look inside"));
  if (!card.parentNode) document.body.append(card);
  card.hidden = false;
  const box = node.getBoundingClientRect();
  const left = Math.min(box.left, document.documentElement.clientWidth - card.offsetWidth - 8);
  const below = box.bottom + 6 + card.offsetHeight < innerHeight;
  card.style.left = `${Math.max(8, left) + scrollX}px`;
  card.style.top = `${(below ? box.bottom + 6 : box.top - card.offsetHeight - 6) + scrollY}px`;
  node.setAttribute("aria-describedby", "card");
}

function hide(node) {
  card.hidden = true;
  node.removeAttribute("aria-describedby");
}

export class Tokens {
  // `look(k, entry)` opens token k; `name` says to a screen reader whose tokens these are.
  constructor(name, look) {
    this.look = look;
    this.node = make("div", { className: "tokens", role: "toolbar", dir: "auto", "aria-label": `tokens of ${name}; arrow keys move, Enter looks inside` });
    this.node.onkeydown = (event) => this.key(event);
    this.decoder = new TextDecoder();
    this.text = "";
  }

  get count() {
    return this.node.children.length;
  }

  // A token shows what its bytes complete; a dot stands for one that completes no character yet.
  add(entry) {
    const text = this.decoder.decode(bytesOf(entry), { stream: true });
    const k = this.count;
    const p = typeof entry.logprob === "number" ? Math.exp(entry.logprob) : undefined;
    const label = p === undefined ? plain(text) || "part of a character" : `${plain(text) || "part of a character"}, ${percent(p)}`;
    const node = make("span", { className: text ? "token" : "token part", role: "button", tabIndex: k ? -1 : 0, "aria-label": label }, seen(text));
    if (p !== undefined) node.style.setProperty("--doubt", `${Math.round(42 * (1 - p))}%`);
    node.onclick = () => this.open(k, entry);
    node.onmouseenter = node.onfocus = () => show(node, entry);
    node.onmouseleave = node.onblur = () => hide(node);
    Object.assign(node, { entry, from: this.text.length });
    this.node.append(node);
    this.text += text;
  }

  // Pale: the tokens behind the end of the answer's text, which are those of a stop text or of the end itself.
  end(text) {
    const space = this.text.startsWith(" ") && !text.startsWith(" ");
    for (const node of this.node.children) node.classList.toggle("part", node.from >= text.length + space);
  }

  focus(k) {
    for (const [i, node] of [...this.node.children].entries()) node.tabIndex = i === k ? 0 : -1;
    this.node.children[k].focus();
  }

  open(k, entry) {
    hide(this.node.children[k]);
    for (const node of document.querySelectorAll(".token[aria-pressed]")) node.removeAttribute("aria-pressed");
    this.node.children[k].setAttribute("aria-pressed", "true");
    this.look(k, { ...entry, back: () => this.focus(k) });
  }

  key(event) {
    const k = [...this.node.children].indexOf(event.target);
    if (k < 0 || event.altKey || event.metaKey || event.ctrlKey) return;
    const to = { ArrowLeft: k - 1, ArrowUp: k - 1, ArrowRight: k + 1, ArrowDown: k + 1, Home: 0, End: this.count - 1 }[event.key];
    if (event.key === "Escape") hide(event.target);
    if (event.key === "Enter" || event.key === " ") this.open(k, event.target.entry);
    else if (to === undefined) return;
    else this.focus(Math.min(Math.max(to, 0), this.count - 1));
    event.preventDefault();
  }
}
