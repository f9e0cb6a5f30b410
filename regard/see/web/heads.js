// Every head in numbers, as a table: sorted by the column whose name is clicked; a click on a head shows its map.

import { make, number } from "./dom.js";

const ORDER = "layer"; // the model's own, beside the measures

export class Heads {
  // `choose(view, layer, head)`; `sort(column)`.
  constructor(model, choose, sort) {
    Object.assign(this, { model, choose, sort });
    this.node = make("section", { className: "measures", tabIndex: 0, role: "region" });
    this.node.setAttribute("aria-label", "every head in numbers");
    this.heads = model.views.flatMap((view) =>
      view.layers.flatMap((layer, l) => (layer.measures ?? []).map((values, head) => ({ view, layer, l, head, values }))),
    );
    // What applies to no head is left out.
    this.columns = model.measures
      .map(([name, says, largest], i) => ({ name, says, largest, i }))
      .filter(({ i }) => this.heads.some(({ values }) => values[i] !== null));
  }

  // `sorted`: the column; `at`: the view, layer and head that are shown.
  draw(sorted, at) {
    if (this.sorted !== sorted) this.build(sorted);
    for (const { view, l, head, line, button } of this.lines) {
      const shown = view.name === at.view && l === at.layer && head === at.head;
      line.className = shown ? "chosen" : "";
      button.setAttribute("aria-pressed", String(shown));
    }
  }

  build(sorted) {
    this.sorted = sorted;
    const column = this.columns.find(({ name }) => name === sorted);
    const order = { name: ORDER, says: "layer and head, in the model's own order", largest: false };
    const names = [order, ...this.columns].map((each) => this.header(each, each === (column ?? order)));
    this.lines = this.ranked(column).map((head) => ({ ...head, ...this.line(head) }));
    const body = make("tbody", {}, ...this.lines.map(({ line }) => line));
    const table = make("table", {}, make("thead", {}, make("tr", {}, ...names)), body);
    const hint = "Click a head: its map. Click the name of a column: sorted by it. –: does not apply.";
    const told = make("p", { className: "shown" }, `${hint} ${this.model.without}`);
    this.node.replaceChildren(told, make("div", { className: "wide" }, table));
  }

  header({ name, says, largest }, chosen) {
    const title = name === ORDER ? says : `${says}; ${largest ? "largest" : "smallest"} first`;
    const button = make("button", { type: "button", className: "link", title, onclick: () => this.sort(name) }, name === ORDER ? "layer.head" : name);
    const cell = make("th", { scope: "col", className: name === ORDER ? "" : "n" }, button);
    if (chosen) cell.setAttribute("aria-sort", largest ? "descending" : "ascending");
    return cell;
  }

  // Those that tell most first; what a measure does not apply to comes last.
  ranked(column) {
    if (!column) return this.heads;
    const sign = column.largest ? 1 : -1;
    const worth = ({ values }) => (values[column.i] === null ? -Infinity : sign * values[column.i]);
    return [...this.heads].sort((a, b) => worth(b) - worth(a) || 0);
  }

  line({ view, layer, l, head, values }) {
    const whose = this.model.views.length > 1 ? `${view.name} ` : "";
    const button = make("button", { type: "button", className: "link" }, `${whose}${layer.number}.${head}`);
    const cells = this.columns.map(({ i }) => make("td", { className: "n" }, values[i] === null ? "–" : number(values[i], 2)));
    const line = make("tr", {}, make("th", { scope: "row" }, button), ...cells);
    line.onclick = () => this.choose(view.name, l, head);
    return { line, button };
  }
}
