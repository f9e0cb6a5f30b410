// The cells that a map shows, as a table of numbers.

import { NAMES } from "./data.js";
import { make } from "./dom.js";

export function tableOf({ grid, measure, bare, window: from, place }) {
  const values = grid.values(measure, bare);
  const head = make("tr", {}, make("td"));
  for (let j = 0; j < place.columns; j++) {
    head.append(make("th", { scope: "col", dir: "auto", className: "n" }, grid.columnName(from.column + j)));
  }
  const body = make("tbody");
  for (let i = 0; i < place.rows; i++) {
    const row = from.row + i;
    const line = make("tr", {}, make("th", { scope: "row", dir: "auto" }, grid.rowName(row)));
    for (let j = 0; j < place.columns; j++) {
      const value = values[row * grid.columns + from.column + j];
      line.append(make("td", { className: "n" }, Number.isNaN(value) ? "–" : grid.text(value, measure)));
    }
    body.append(line);
  }
  const caption = make("caption", {}, `${NAMES[measure]}: rows read columns; – is masked`);
  return make("table", { className: "values" }, caption, make("thead", {}, head), body);
}
