// One row of a head as bars, with the numbers that lead to its weights: q·k, scaled, masked, softmax.

import { make, number } from "./dom.js";
import { NAMES, valueText } from "./map.js";

const LISTED = 48; // keys that are listed

export class Row {
  constructor(choose) {
    this.choose = choose; // (column)
    this.node = make("div", { className: "row" });
  }

  draw(grid, at, measure, bare, order) {
    const all = grid.values(measure, bare).subarray(at.row * grid.columns, (at.row + 1) * grid.columns);
    const shown = this.listed(all, at, order, bare);
    const most = shown.reduce((top, j) => Math.max(top, Math.abs(all[j]) || 0), 0) || 1;
    const table = make("table", { className: "bars" });
    table.append(this.caption(grid, at, all, shown, measure), this.header(grid, measure));
    const body = make("tbody");
    for (const j of shown) body.append(this.line(grid, at, j, all[j], measure, most, bare));
    table.append(body);
    this.node.replaceChildren(make("div", { className: "wide" }, table), this.told(grid));
  }

  // Which keys: all, or the nearest to the chosen one, or the largest.
  listed(values, at, order, bare) {
    const every = Array.from(values.keys()).filter((j) => !(bare && j === 0 && values.length > 1));
    if (order === "value") {
      const size = (j) => (Number.isNaN(values[j]) ? -1 : Math.abs(values[j]));
      return every.sort((a, b) => size(b) - size(a)).slice(0, LISTED);
    }
    const from = Math.max(0, Math.min(at.column - LISTED / 2, every.length - LISTED));
    return every.slice(from, from + LISTED);
  }

  caption(grid, at, all, shown, measure) {
    let sum = 0;
    for (const value of all) if (!Number.isNaN(value)) sum += value;
    const total = measure === "weight" && !grid.pooled ? `; its weights sum to ${number(sum)}` : "";
    const part = shown.length < all.length ? `; ${shown.length} of ${all.length} columns` : "";
    const name = make("strong", { dir: "auto" }, grid.rowName(at.row));
    return make("caption", {}, "Row ", name, total + part);
  }

  // The names of the columns, by what this head has.
  header(grid, measure) {
    const names = this.steps(grid).map(([name]) => name);
    const cells = ["column", NAMES[measure], ...names].map((name) => make("th", { scope: "col" }, name));
    for (const cell of cells.slice(2)) cell.className = "n";
    return make("thead", {}, make("tr", {}, ...cells));
  }

  // [name, value at (row, column)] of each step that this page holds for this head.
  steps(grid) {
    if (grid.pooled || grid.heads.length > 1) return [["largest", null]];
    const { scale, biased, capped } = grid.layer;
    const [raw, score, weight] = ["raw", "score", "weight"].map((name) => grid.part(name));
    const found = [];
    if (raw) found.push(["q·k", (i) => raw[i]], [`× ${number(scale, 3)}`, (i) => raw[i] * scale]);
    const more = [capped ? "capped" : "", biased ? "+ bias" : "", "masked"].filter(Boolean).join(", ");
    if (score) found.push([more, (i) => score[i]]);
    found.push(["softmax", (i) => weight[i]]);
    return found;
  }

  line(grid, at, j, value, measure, most, bare) {
    const bar = make("span", { className: value < 0 ? "bar below" : "bar" });
    bar.style.width = `${Number.isNaN(value) ? 0 : Math.min(100, (100 * Math.abs(value)) / most)}%`;
    const cells = [make("th", { scope: "row", dir: "auto" }, grid.columnName(j)), make("td", { className: "track" }, bar)];
    const i = at.row * grid.columns + j;
    for (const [name, step] of this.steps(grid)) {
      const shown = step === null ? valueText(value, measure) : number(step(i), name === "softmax" ? 4 : 3);
      cells.push(make("td", { className: "n" }, shown));
    }
    const line = make("tr", { className: j === at.column ? "chosen" : "" }, ...cells);
    line.onclick = () => this.choose(j);
    return line;
  }

  told(grid) {
    const { layer } = grid;
    const note = { className: "shown" };
    if (grid.pooled) return make("p", note, "This head is in the page pooled, without the steps to its weights.");
    if (grid.heads.length > 1) return make("p", note, `The mean of ${grid.heads.length} heads has no steps of its own.`);
    const sinks = layer.sinks ? " A sink takes what the weights lack to 1." : "";
    const raw = grid.part("raw") ? "" : " Scores here are not q·k of every key times one scale, so that is left out.";
    return make("p", note, `softmax over a row: e^score / Σ e^score; −∞ is masked and gets 0.${raw}${sinks}`);
  }
}
