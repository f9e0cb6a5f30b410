// What is looked at, kept in the address, so that a view can be sent to somebody and Back returns to the last one.

const MEASURES = ["weight", "score", "norm"];

// "cross.3.5.7.2.0-1": view, layer, head, row, column, and heads without lines; what the page does not have falls back to
// the nearest it has.
function readPanel(text, model) {
  const [name, ...numbers] = (text ?? "").split(".");
  const asked = model.views.find((view) => view.name === name);
  const view = asked ?? model.views[model.start];
  const given = asked ? numbers : [];
  const { start } = view;
  const pick = (i, usual, count) => {
    const n = given[i] === undefined || given[i] === "" ? usual : Number(given[i]);
    return Number.isInteger(n) ? Math.min(Math.max(n, 0), count - 1) : 0;
  };
  const layer = pick(0, start.layer, view.layers.length);
  const heads = view.layers[layer].heads.length;
  // Without a word of them, the page chooses.
  const off = given[4] === undefined ? null : given[4].split("-").filter(Boolean).map(Number).filter((h) => h < heads);
  const cell = { row: pick(2, start.row, view.rows.length), column: pick(3, start.column, view.columns.length) };
  return { view: view.name, layer, head: pick(1, start.head, heads), ...cell, off };
}

// A row over many keys is pale beside the first rows of a text, which have few: its colours are its own at first.
function long(model) {
  return model.views.some((view) => view.columns.length > 64);
}

export function read(hash, models) {
  const given = new URLSearchParams(hash.replace(/^#/, ""));
  const measure = given.get("measure");
  return {
    measure: MEASURES.includes(measure) ? measure : "weight",
    as: given.get("as") === "lines" ? "lines" : "map",
    bare: given.get("first") === "hidden",
    averaged: given.get("heads") === "mean",
    rowwise: given.has("colours") ? given.get("colours") === "row" : models.some(long),
    apart: given.get("panels") === "apart",
    order: given.get("order") === "value" ? "value" : "place",
    table: given.get("table") === "1",
    list: given.get("list") ?? models[0].sort, // the column by which the table of heads is sorted; "": no table
    panels: models.map((model, i) => readPanel(given.get(`at${i}`), model)),
  };
}

export function written(state) {
  const parts = [["measure", state.measure]];
  if (state.as === "lines") parts.push(["as", "lines"]);
  if (state.bare) parts.push(["first", "hidden"]);
  if (state.averaged) parts.push(["heads", "mean"]);
  parts.push(["colours", state.rowwise ? "row" : "head"]);
  if (state.apart) parts.push(["panels", "apart"]);
  if (state.order === "value") parts.push(["order", "value"]);
  if (state.table) parts.push(["table", "1"]);
  parts.push(["list", state.list]);
  state.panels.forEach((p, i) => {
    const off = p.off ? [p.off.join("-")] : [];
    parts.push([`at${i}`, [p.view, p.layer, p.head, p.row, p.column, ...off].join(".")]);
  });
  return "#" + new URLSearchParams(parts).toString();
}
