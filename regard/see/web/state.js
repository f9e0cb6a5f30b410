// What is looked at, kept in the address, so that a view can be sent to somebody and Back returns to the last one.

const MEASURES = ["weight", "score", "norm"];

// "cross.3.5.7.2": view, layer, head, row, column; what the page does not have falls back to the nearest it has.
function readPanel(text, model) {
  const [name, ...numbers] = (text ?? "").split(".");
  const asked = model.views.find((view) => view.name === name);
  const view = asked ?? model.views[model.start.view];
  const given = asked ? numbers : [];
  const start = view === model.views[model.start.view] ? model.start : {};
  const pick = (i, usual, count) => {
    const n = given[i] === undefined || given[i] === "" ? usual : Number(given[i]);
    return Number.isInteger(n) ? Math.min(Math.max(n, 0), count - 1) : 0;
  };
  const layer = pick(0, start.layer ?? view.layers.length - 1, view.layers.length);
  const head = pick(1, start.head ?? 0, view.layers[layer].heads.length);
  const last = view.image && !view.textRows ? 0 : view.rows.length - 1;
  const row = pick(2, last, view.rows.length);
  return { view: view.name, layer, head, row, column: pick(3, start.column ?? 0, view.columns.length) };
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
    bare: given.get("first") === "hidden",
    averaged: given.get("heads") === "mean",
    rowwise: given.has("colours") ? given.get("colours") === "row" : models.some(long),
    apart: given.get("panels") === "apart",
    order: given.get("order") === "value" ? "value" : "place",
    table: given.get("table") === "1",
    panels: models.map((model, i) => readPanel(given.get(`at${i}`), model)),
  };
}

export function written(state) {
  const parts = [["measure", state.measure]];
  if (state.bare) parts.push(["first", "hidden"]);
  if (state.averaged) parts.push(["heads", "mean"]);
  parts.push(["colours", state.rowwise ? "row" : "head"]);
  if (state.apart) parts.push(["panels", "apart"]);
  if (state.order === "value") parts.push(["order", "value"]);
  if (state.table) parts.push(["table", "1"]);
  state.panels.forEach((p, i) => {
    parts.push([`at${i}`, [p.view, p.layer, p.head, p.row, p.column].join(".")]);
  });
  return "#" + new URLSearchParams(parts).toString();
}
