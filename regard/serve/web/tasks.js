// What a model can be asked for, one class each: a text goes in, an answer comes out, and its tokens can be looked into.

import { ask, stream } from "./api.js";
import { make, say } from "./dom.js";
import { Settings } from "./settings.js";
import { bars, entries, Tokens } from "./tokens.js";
import { Alignment } from "./words.js";

class Task {
  // `desk`: the model as the server lists it, and `look` to open the look inside.
  constructor(desk, { label, action, rows = 4 }) {
    Object.assign(this, desk);
    this.input = make("textarea", { rows, dir: "auto" });
    this.input.onkeydown = (event) => {
      if (event.key !== "Enter" || event.isComposing || !(this.sends(event))) return;
      event.preventDefault();
      this.submit();
    };
    this.go = make("button", { type: "button", className: "go", onclick: () => this.submit() }, action);
    this.stop = make("button", { type: "button", hidden: true, onclick: () => this.control.abort() }, "Stop");
    this.buttons = make("div", { className: "buttons" }, this.go, this.stop);
    this.hint = make("p", { className: "shown" }, "Ctrl + Enter: " + action.toLowerCase());
    this.composer = make("div", { className: "composer" }, make("label", { className: "above-field" }, label, this.input), this.buttons, this.hint);
    this.output = make("section", { className: "output", "aria-label": "answers" });
    this.node = make("div", { className: "task" }, this.composer, this.output);
  }

  sends(event) {
    return event.ctrlKey || event.metaKey;
  }

  async submit() {
    const text = this.input.value;
    if (this.control || (this.settings && !this.settings.fit)) return;
    if (!text.trim()) this.input.focus();
    else await this.attempt(text);
  }

  // Runs the task on a text; what goes wrong is said below what came, with a button to try again.
  async attempt(text) {
    this.control = new AbortController();
    this.stop.hidden = false;
    this.go.disabled = true;
    try {
      await this.run(text, this.control.signal);
    } catch (error) {
      if (error.name === "AbortError") this.end("stopped");
      else this.fail(error, text);
    } finally {
      if (document.activeElement === this.stop) this.input.focus();
      this.control = undefined;
      this.stop.hidden = true;
      this.go.disabled = false;
    }
  }

  // A place for one answer.
  begin(...inside) {
    this.place = make("div", { className: "answer" }, ...inside);
    this.output.replaceChildren(this.place);
  }

  end(words) {
    this.place.append(make("p", { className: "shown done" }, words));
  }

  fail(error, text) {
    const again = make("button", { type: "button" }, "Try again");
    const line = make("p", { className: "trouble", role: "alert" }, `${error.message} `, again);
    again.onclick = () => {
      line.remove();
      this.attempt(text);
    };
    this.place.append(line);
  }

  // Writes an answer as it comes.
  async write(path, body, signal) {
    const answer = {};
    const look = (k, entry) => {
      const row = answer.prompt === undefined ? undefined : answer.prompt - 1 + k;
      this.look({ of: { model: this.model.id, id: answer.id }, row, entry, writes: true });
    };
    const tokens = new Tokens("the answer", look);
    this.place.append(tokens.node);
    const began = performance.now();
    let [text, finish] = ["", ""];
    say("writing");
    for await (const event of stream(path, { model: this.model.id, ...body, ...this.settings.values }, signal)) {
      answer.id = event.id;
      if (event.usage) answer.prompt = event.usage.prompt_tokens;
      const [choice] = event.choices;
      if (!choice) continue;
      text += choice.delta?.content ?? choice.text ?? "";
      for (const entry of entries(choice.logprobs)) tokens.add(entry);
      finish = choice.finish_reason ?? finish;
    }
    tokens.end(text);
    const seconds = (performance.now() - began) / 1000;
    this.end(`${tokens.count} tokens, ${(tokens.count / seconds).toFixed(1)} per second, finish reason: ${finish}; a stronger tint is a less probable token`);
    say(`answer complete: ${text}`);
    return text;
  }

  // The tokens that a model read, each of which can be looked into.
  async read(text, signal) {
    const model = this.model.id;
    const { texts } = await ask("/tokenize", { model, prompt: text }, signal);
    const tokens = new Tokens("the text", (k, entry) => this.look({ of: { model, input: text }, row: k, entry, writes: false }));
    for (const token of texts) tokens.add({ token });
    return make("div", { className: "readings" }, make("h2", {}, "What the model read"), tokens.node);
  }
}

export class Chat extends Task {
  constructor(desk) {
    super(desk, { label: "Message", action: "Send", rows: 2 });
    this.settings = new Settings({ chat: true });
    this.messages = [];
    const clear = make("button", { type: "button", onclick: () => this.clear() }, "New chat");
    this.buttons.append(clear);
    this.hint.textContent = "Enter: send; Shift + Enter: a new line";
    this.node.className = "task chat";
    this.node.replaceChildren(this.settings.node, this.output, this.composer);
  }

  sends(event) {
    return !event.shiftKey;
  }

  clear() {
    this.control?.abort();
    this.messages = [];
    this.output.replaceChildren();
    this.input.focus();
  }

  async run(text, signal) {
    const messages = [...this.messages, { role: "user", content: text }];
    const system = this.settings.system ? [{ role: "system", content: this.settings.system }] : [];
    this.failed?.remove();
    const turn = make("div", { className: "turn" }, make("p", { className: "said", dir: "auto" }, make("span", { className: "hidden" }, "You: "), text));
    this.place = this.failed = make("div", { className: "answer" });
    turn.append(this.place);
    this.failed = turn;
    this.output.append(turn);
    this.input.value = "";
    turn.scrollIntoView({ block: "nearest" });
    const more = { messages: [...system, ...messages], logprobs: true, top_logprobs: 5 };
    const answer = await this.write("/v1/chat/completions", more, signal);
    this.failed = undefined;
    this.messages = [...messages, { role: "assistant", content: answer }];
  }
}

export class Completion extends Task {
  constructor(desk) {
    super(desk, { label: "Text to go on from", action: "Complete" });
    this.settings = new Settings({ most: Math.min(128, Math.ceil((desk.model.context ?? 256) / 2)) });
    this.composer.prepend(this.settings.node);
  }

  run(text, signal) {
    this.begin(make("span", { className: "prompt", dir: "auto" }, text));
    return this.write("/v1/completions", { prompt: text, logprobs: 5 }, signal);
  }
}

export class Translation extends Task {
  constructor(desk) {
    super(desk, { label: "Text to translate", action: "Translate" });
  }

  async run(text, signal) {
    this.begin();
    const model = this.model.id;
    const { id, data } = await ask("/v1/translations", { model, input: text, align: true }, signal);
    const look = (k, entry) => this.look({ of: { model, id }, row: k, entry, writes: true, view: "cross" });
    const tokens = new Tokens("the translation", look);
    for (const entry of entries(data[0].logprobs)) tokens.add(entry);
    this.place.append(make("h2", {}, "Translation"), tokens.count ? tokens.node : make("p", { dir: "auto" }, data[0].text));
    if (data[0].align.length) this.place.append(new Alignment(text, data[0].text, data[0].align).node);
    say(`translation: ${data[0].text}`);
  }
}

export class Classify extends Task {
  constructor(desk) {
    super(desk, { label: "Text to classify", action: "Classify" });
  }

  async run(text, signal) {
    this.begin();
    const { data } = await ask("/v1/classify", { model: this.model.id, input: text }, signal);
    const { labels } = data[0];
    const { label } = labels[0];
    this.place.append(bars(labels.map((each, i) => [each.label, each.score, i === 0]), `Class: ${label}`), await this.read(text, signal));
    say(`class ${label}`);
  }
}

export class Fill extends Task {
  constructor(desk) {
    super(desk, { label: `Text with ${desk.model.mask} where a token is missing`, action: "Fill" });
    const insert = () => {
      this.input.setRangeText(desk.model.mask, this.input.selectionStart, this.input.selectionEnd, "end");
      this.input.focus();
    };
    this.buttons.append(make("button", { type: "button", onclick: insert }, `Insert ${desk.model.mask}`));
  }

  async run(text, signal) {
    this.begin();
    const { data } = await ask("/v1/fill", { model: this.model.id, input: text, top: 5 }, signal);
    const gaps = data.map((top, i) => bars(top.map(({ token, score }, j) => [token, score, j === 0]), `Gap ${i + 1}`));
    this.place.append(...gaps, await this.read(text, signal));
    say(data.map((top, i) => `gap ${i + 1}: ${top[0].token}`).join(", "));
  }
}
