// How an answer is drawn. What is left empty is not sent, so that the server's or the model folder's default holds.

import { make } from "./dom.js";

// name, label, what it does, and the limits of its number.
const FIELDS = [
  ["temperature", "Temperature", "0: always the most probable token", { min: 0, max: 2, step: 0.05 }],
  ["top_p", "Top-p", "draw from the most probable tokens that make up this share", { min: 0.01, max: 1, step: 0.01 }],
  ["min_p", "Min-p", "leave out tokens below this share of the most probable one's", { min: 0, max: 1, step: 0.01 }],
  ["max_tokens", "Max tokens", "an answer ends here", { min: 1, step: 1 }],
  ["seed", "Seed", "the same number, the same answer", { min: 0, step: 1 }],
  ["frequency_penalty", "Frequency penalty", "against tokens by how often they came", { min: -2, max: 2, step: 0.1 }],
  ["presence_penalty", "Presence penalty", "against tokens that came at all", { min: -2, max: 2, step: 0.1 }],
];

export class Settings {
  // `chat`: with a message that the model is told first; `most`: tokens, at first.
  constructor({ chat = false, most = "" }) {
    this.inputs = new Map();
    const fields = FIELDS.map(([name, label, hint, limits]) => this.field(name, label, hint, "input", { type: "number", ...limits }));
    const stop = this.field("stop", "Stop texts", "one per line; an answer ends before the first that comes", "textarea", { rows: 2 });
    const system = this.field("system", "System message", "what the model is told first", "textarea", { rows: 2 });
    this.inputs.get("max_tokens").value = most;
    this.summary = make("span", { className: "shown" });
    const head = make("summary", {}, "Settings ", this.summary);
    this.node = make("details", { className: "settings" }, head, make("div", { className: "fields" }, ...fields, stop, ...(chat ? [system] : [])));
    this.node.oninput = () => this.tell();
    this.tell();
  }

  field(name, label, hint, tag, given) {
    const id = `${name}-hint`;
    const input = make(tag, { ...given, placeholder: "default", "aria-describedby": id });
    this.inputs.set(name, input);
    return make("div", { className: tag === "input" ? "setting" : "setting long" }, make("label", {}, label, input), make("p", { className: "shown", id }, hint));
  }

  // What is set, as the request says it.
  get values() {
    const found = {};
    for (const [name] of FIELDS) if (this.inputs.get(name).value !== "") found[name] = Number(this.inputs.get(name).value);
    const stop = this.inputs.get("stop").value.split("\n").filter(Boolean);
    return stop.length ? { ...found, stop } : found;
  }

  get system() {
    return this.inputs.get("system").value.trim();
  }

  // The first field whose number is out of its limits gets the focus.
  get fit() {
    const wrong = [...this.inputs.values()].find((input) => !input.checkValidity());
    if (!wrong) return true;
    this.node.open = true;
    return wrong.reportValidity();
  }

  tell() {
    const set = Object.entries(this.values).map(([name, value]) => `${name.replaceAll("_", " ")} ${value}`);
    this.summary.textContent = set.join(", ") || "all at their defaults";
  }
}
