// Look inside: where every head looked at one token of an answer, exactly; then one head's whole map and its row, step by
// step. The server computes the maps when they are asked for, beside the answers it is writing.

import { ask } from "./api.js";
import { floats, Grid, gridOf, NAMES } from "./data.js";
import { choice, make, quoted, say, tick } from "./dom.js";
import { HeadMap, KEYS } from "./map.js";
import { onScheme } from "./palette.js";
import { Row } from "./row.js";
import { odds } from "./tokens.js";

const CARE = "An attention weight is not an explanation: it says how much a head reads of a token, not what for.";

// One row of every head: a row for each head, a column for each token.
class Heads extends Grid {
  constructor(view) {
    const heads = view.layers.flatMap((layer, l) => layer.heads.map((head, h) => ({ layer, head, l, h, number: layer.head_numbers[h] })));
    const rows = heads.map(({ layer, number }) => `${layer.number}.${number}`);
    // What comes after the row is masked in every head, and left out.
    const last = Math.max(...heads.map(({ head }) => floats(head.score).findLastIndex((x) => x !== -Infinity)));
    super({ rows, columns: view.columns.slice(0, last + 1), step: [1, 1] }, {}, [heads[0].head]);
    this.each = heads;
  }

  rowSaid(i) {
    return `layer ${this.each[i].layer.number}, head ${this.each[i].number}`;
  }

  mean(measure) {
    const cells = new Float32Array(this.rows * this.columns);
    this.each.forEach(({ head }, i) => {
      const [weight, score, norm] = [floats(head.weight), floats(head.score), floats(head.norm)];
      for (let j = 0; j < this.columns; j++) {
        const value = { weight: weight[j], score: score[j], norm: weight[j] * norm[j] }[measure];
        cells[i * this.columns + j] = score[j] === -Infinity ? NaN : value;
      }
    });
    return cells;
  }

  // The largest weight that goes neither to the first token nor to the reading one, or else the largest.
  start(row) {
    const weight = this.values("weight");
    let best = 0;
    const worth = (i) => (Number.isNaN(weight[i]) ? -2 : weight[i] - (i % this.columns === 0 || i % this.columns === row ? 1 : 0));
    for (let i = 1; i < weight.length; i++) if (worth(i) > worth(best)) best = i;
    return { at: Math.floor(best / this.columns), column: best % this.columns };
  }
}

export class Inside {
  constructor(node) {
    Object.assign(this, { node, measure: "weight", bare: false });
    this.title = make("h2", { tabIndex: -1 });
    this.close = make("button", { type: "button", onclick: () => this.shut() }, "Close");
    this.odds = make("div");
    this.message = make("p", { className: "shown" });
    this.controls = make("div", { className: "bar-of-choices" });
    this.heads = new HeadMap((i, column) => this.set({ at: i, column }), `A row is a layer and a head. Click, or ${KEYS}: another head or token.`);
    this.map = new HeadMap((row, column) => this.move(row, column));
    this.row = new Row((column) => this.set({ column }));
    this.headTitle = make("h3");
    this.mapNote = make("p", { className: "shown" });
    const part = (...inside) => make("section", { className: "part" }, ...inside);
    this.body = make("div", {}, this.controls, part(make("h3", {}, "Every head, at this token"), this.heads.node));
    this.body.append(part(this.headTitle, this.row.node), part(make("h3", {}, "The whole map of this head"), this.mapNote, this.map.node));
    node.append(make("div", { className: "inside-top" }, this.title, this.close), this.odds, this.message, this.body);
    node.onkeydown = (event) => {
      if (event.key === "Escape") this.shut();
    };
    onScheme(() => this.draw());
    addEventListener("resize", () => this.draw());
  }

  // `of`: the model, and the answer's id or the text; `row`: the row that wrote the token, or the token's own where the
  // model only reads; `writes`: which of these it is.
  async open(asked) {
    this.asked = asked;
    this.node.hidden = false;
    this.views = undefined;
    const name = quoted(asked.entry.token.trim() || "space");
    this.title.textContent = asked.writes ? `Where every head looked to write ${name}` : `Where every head looks from ${name}`;
    this.odds.replaceChildren(...(typeof asked.entry.logprob === "number" ? [odds(asked.entry)] : []));
    this.title.focus();
    this.title.scrollIntoView({ block: "nearest" });
    await this.load(asked.row, asked.view);
  }

  shut() {
    this.node.hidden = true;
    this.asked.entry.back?.();
  }

  async fetch(which) {
    return (await ask("/v1/look", { ...this.asked.of, encoding_format: "base64", ...which })).views;
  }

  // All heads of one row.
  async load(row, name) {
    const asked = (this.newest = {});
    this.message.hidden = false;
    this.message.textContent = "Looking …";
    this.body.hidden = !this.views;
    let views;
    try {
      if (row === undefined) throw new Error("This answer can be looked into as soon as it is complete.");
      views = await this.fetch({ rows: [row] });
    } catch (error) {
      if (asked === this.newest) this.message.textContent = error.message;
      return;
    }
    if (asked !== this.newest) return;
    this.message.textContent = CARE;
    const first = !this.views;
    this.views = views.map((view) => ({ ...view, grid: new Heads(view) }));
    const view = this.views.find((each) => each.name === name) ?? this.views[0];
    Object.assign(this, { view, number: row });
    if (first) Object.assign(this, view.grid.start(row));
    this.body.hidden = false;
    this.choices();
    this.draw();
    if (first) say(`${this.title.textContent}: ${this.heads.sentence(this.at, this.column)}`);
    await this.whole();
  }

  // The map of the chosen head, once for each head.
  async whole() {
    const { layer, number } = this.view.grid.each[this.at];
    const key = [JSON.stringify(this.asked.of), layer.site, number].join();
    if (this.key === key) return this.draw();
    Object.assign(this, { key, full: undefined });
    this.map.node.hidden = true;
    this.mapNote.hidden = false;
    this.mapNote.textContent = "Looking …";
    try {
      const [view] = await this.fetch({ layers: [layer.site], heads: [number] });
      if (this.key !== key) return undefined;
      this.full = gridOf(view, view.layers[0], 0, false);
      this.mapNote.hidden = true;
      this.map.node.hidden = false;
    } catch (error) {
      if (this.key === key) this.mapNote.textContent = error.message;
    }
    return this.draw();
  }

  choices() {
    const set = (name) => (value) => this.set({ [name]: value });
    const views = this.views.map((view) => [view.name, view.title]);
    const turn = (name) => this.set({ view: this.views.find((view) => view.name === name), at: 0, column: 0 });
    this.controls.replaceChildren(
      ...(views.length > 1 ? [choice("Attention of", "view", views, this.view.name, turn)] : []),
      choice("Values", "measure", Object.entries(NAMES), this.measure, set("measure")),
      tick("hide the first token", "bare", this.bare, set("bare")),
    );
  }

  set(change) {
    Object.assign(this, change);
    this.draw();
    if ("at" in change) this.whole();
  }

  // Another row is another question to every head.
  async move(row, column) {
    this.column = column;
    if (row === this.number) return this.draw();
    this.number = row;
    this.draw();
    const name = this.full.rowName(row);
    this.title.textContent = `Where every head looks from ${quoted(name)}`;
    this.odds.replaceChildren();
    return this.load(row, this.view.name);
  }

  draw() {
    if (this.node.hidden || !this.views) return;
    const { view, at, column, measure, bare } = this;
    const { layer, h, number } = view.grid.each[at];
    this.heads.draw(view.grid, { row: at, column: Math.min(column, view.grid.columns - 1) }, measure, bare, false);
    this.headTitle.textContent = `Layer ${layer.number}, head ${number}, step by step`;
    this.row.draw(gridOf(view, layer, h, false), { row: 0, column }, measure, bare, "place");
    if (this.full) this.map.draw(this.full, { row: this.number, column }, measure, bare, true);
  }
}
