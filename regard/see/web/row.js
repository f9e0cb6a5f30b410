// One row of a head as bars, with the numbers that lead to its weights: q·k, scaled, masked, softmax.

import { NAMES } from "./data.js";
import { make, number, quoted } from "./dom.js";

const LISTED = 48; // keys that are listed

export class Row {
  constructor(choose) {
    this.choose = choose; // (column)
    this.node = make("div", { className: "row" });
  }

  draw(grid, at, measure, bare, order) {
    const all = grid.values(measure, bare).subarray(at.row * grid.columns, (at.row + 1) * grid.columns);
    const shown = this.listed(grid, all, at, order, bare);
    const most = shown.reduce((top, j) => Math.max(top, Math.abs(all[j]) || 0), 0) || 1;
    const table = make("table", { className: "bars" });
    table.append(this.caption(grid, at, all, shown, measure, order), this.header(grid, measure));
    const body = make("tbody");
    for (const j of shown) body.append(this.line(grid, at, j, all[j], measure, most));
    table.append(body);
    this.node.replaceChildren(make("div", { className: "wide" }, table), this.remark(grid));
  }

  // Which keys: all, or the nearest to the chosen one, or the largest.
  listed(grid, values, at, order, bare) {
    const every = Array.from(values.keys()).filter((j) => !grid.hidden(j, bare) || values.length === 1);
    if (order === "value") {
      const size = (j) => (Number.isNaN(values[j]) ? -1 : Math.abs(values[j]));
      return every.sort((a, b) => size(b) - size(a)).slice(0, LISTED);
    }
    const from = Math.max(0, Math.min(at.column - LISTED / 2, every.length - LISTED));
    return every.slice(from, from + LISTED);
  }

  caption(grid, at, all, shown, measure, order) {
    let sum = 0;
    for (const value of all) if (!Number.isNaN(value)) sum += value;
    const said = [];
    if (measure === "weight" && !grid.pooled) said.push(`its weights sum to ${number(sum)}`);
    const [first, last] = [shown[0], shown[shown.length - 1]];
    if (shown.length < all.length - 1) {
      const which = order === "value" ? `the ${shown.length} largest` : `columns ${first + 1}–${last + 1}`;
      said.push(`shown: ${which} of ${all.length}`);
    } else if (shown.length < all.length) said.push("the first column is hidden");
    const name = make("strong", { dir: "auto" }, grid.pooled ? grid.rowName(at.row) : quoted(grid.rowName(at.row)));
    return make("caption", {}, "Row ", name, said.length ? `: ${said.join("; ")}` : "");
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
    if (grid.pooled) return [["largest", null]];
    if (grid.packed || grid.heads.length > 1) return [["value", null]];
    const { scale, biased, capped } = grid.layer;
    const [raw, score, weight] = ["raw", "score", "weight"].map((name) => grid.part(name));
    const found = [];
    if (raw) found.push(["q·k", (i) => raw[i]], [`scaled\n× ${number(scale, 3)}`, (i) => raw[i] * scale]);
    const more = [capped ? "capped," : "", biased ? "+ bias," : "", "masked"].filter(Boolean).join("\n");
    if (score) found.push([more, (i) => score[i]]);
    found.push([grid.layer.summed ? "softmax\n× keys" : "softmax", (i) => weight[i]]);
    return found;
  }

  line(grid, at, j, value, measure, most) {
    const above = measure === "score" && value > 0; // as on the map: blue below zero, orange above
    const bar = make("span", { className: above ? "bar above" : "bar" });
    bar.style.width = `${Math.min(100, (100 * Math.abs(value)) / most)}%`;
    const track = make("td", { className: "track" }, ...(value ? [bar] : []));
    const name = grid.columnName(j);
    const cells = [make("th", { scope: "row", dir: "auto", title: name }, name), track];
    const i = at.row * grid.columns + j;
    for (const [name, step] of this.steps(grid)) {
      const shown = step === null ? grid.text(value, measure) : number(step(i), name.startsWith("softmax") ? 4 : 3);
      cells.push(make("td", { className: "n" }, shown));
    }
    const line = make("tr", { className: j === at.column ? "chosen" : "" }, ...cells);
    if (Number.isNaN(value)) line.classList.add("masked");
    line.onclick = () => this.choose(j);
    return line;
  }

  remark(grid) {
    const { layer } = grid;
    const note = { className: "shown" };
    const flags = `--layer ${layer.number} --head ${layer.heads.indexOf(grid.heads[0])}`;
    if (grid.heads.length > 1 || grid.heads[0] === layer.mean) {
      return make("p", note, `The mean of ${layer.heads.length} heads has no steps of its own.`);
    }
    if (grid.packed) return make("p", note, `The steps to this head's weights: regard look ... ${flags}`);
    const sinks = layer.sinks ? " A sink takes what the weights lack to 1." : "";
    const summed = layer.summed ? " Times the number of visible keys: this layer takes their sum." : "";
    const sparse = layer.sparse ? " Keys that were not chosen for this row are masked too; their q·k is never computed." : "";
    const raw = grid.part("raw") || sparse ? "" : " Scores here are not q·k times one scale, so that is left out.";
    return make("p", note, `softmax over a row: e^score / Σ e^score; −∞ is masked and gets 0.${sparse}${raw}${sinks}${summed}`);
  }
}
