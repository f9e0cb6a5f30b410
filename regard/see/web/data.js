// The numbers of the page: heads in full, or their weights alone, or pooled where the text is too long for that.

import { number, quoted } from "./dom.js";

export const NAMES = { weight: "weight", score: "score", norm: "weight × ‖v‖" };

export const SIDE = 64; // cells of a thumbnail, at most

export function bytes(text) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text);
  const letters = atob(text);
  const found = new Uint8Array(letters.length);
  for (let i = 0; i < found.length; i++) found[i] = letters.charCodeAt(i);
  return found;
}

export function floats(text) {
  return new Float32Array(bytes(text).buffer);
}

// The largest magnitude of each row of cells, from a column on.
export function rowTops(cells, rows, columns, from = 0) {
  const tops = new Float32Array(rows);
  for (let i = 0; i < rows; i++) {
    for (let j = from; j < columns; j++) {
      const size = Math.abs(cells[i * columns + j]);
      if (size > tops[i]) tops[i] = size;
    }
  }
  return tops.map((top) => top || 1);
}

// How many tokens a cell stands for when `count` of them are shown in `most` cells.
function stride(count, most) {
  return Math.max(1, Math.ceil(count / most));
}

// One head, or the mean of a layer's: `values(measure)` is a grid of rows x columns, NaN where nothing may be seen.
export class Grid {
  constructor(view, layer, heads) {
    this.view = view;
    this.layer = layer;
    this.heads = heads; // as they are in the page: one, or all that are averaged
    this.packed = heads[0].cells !== undefined; // weights in 16 bits and nothing else
    this.pooled = this.packed && Math.max(...view.step) > 1;
    [this.rowStep, this.columnStep] = this.pooled ? view.step : [1, 1];
    this.rows = Math.ceil(view.rows.length / this.rowStep);
    this.columns = Math.ceil(view.columns.length / this.columnStep);
    this.made = new Map();
  }

  // A value as it is read.
  text(value, measure) {
    if (Number.isNaN(value)) return this.packed ? "0 or masked" : "masked";
    return number(value, measure === "score" ? 3 : 4);
  }

  // The measures that this page holds for this head.
  get measures() {
    return ["weight", "score", "norm"].filter((m) => m === "weight" || this.heads[0][m]);
  }

  rowName(i) {
    return this.name(this.view.rows, i, this.rowStep);
  }

  columnName(j) {
    return this.name(this.view.columns, j, this.columnStep);
  }

  name(names, i, step) {
    if (step === 1) return names[i] ?? "";
    return `${i * step}–${Math.min((i + 1) * step, names.length) - 1}`;
  }

  // What a screen reader or the line above the map calls a place: its token, and its number where tokens repeat.
  rowSaid(i) {
    return this.said("row", this.view.rows, i, this.rowStep);
  }

  columnSaid(j) {
    return this.said("column", this.view.columns, j, this.columnStep);
  }

  said(what, names, i, step) {
    if (step > 1) return `${what}s ${this.name(names, i, step)}`;
    const twice = names.indexOf(names[i]) !== names.lastIndexOf(names[i]);
    return `${what} ${quoted(names[i])}${twice ? ` (${i})` : ""}`;
  }

  part(name, head = this.heads[0]) {
    const key = `${name} ${this.heads.indexOf(head)}`;
    if (!this.made.has(key)) this.made.set(key, head[name] ? floats(head[name]) : this.derived(name, head));
    return this.made.get(key);
  }

  // A large head is in the page as its scores and, for each row, the logarithm of the sum of their exponentials.
  derived(name, head) {
    if (!head.total) return undefined;
    const score = this.part("score", head);
    const total = this.part("total", head);
    const { scale, biased, capped } = this.layer;
    if (name === "weight") return score.map((x, i) => Math.exp(x - total[Math.floor(i / this.columns)]));
    if (name !== "raw" || biased || capped) return undefined;
    return score.map((x) => (x === -Infinity ? NaN : x / scale));
  }

  values(measure, bare = false) {
    const key = `values ${measure} ${bare}`;
    if (!this.made.has(key)) this.made.set(key, this.packed ? this.unpack(bare) : this.mean(measure));
    return this.made.get(key);
  }

  // Roots of shares of the largest; 0 is what is masked.
  unpack(bare) {
    const { cells, first, most } = this.heads[0];
    const value = (x) => (x ? (x / 65535) ** 2 * most : NaN);
    const found = Float32Array.from(new Uint16Array(bytes(cells).buffer), value);
    if (!bare || !this.pooled) return found;
    new Uint16Array(bytes(first).buffer).forEach((x, i) => (found[i * this.columns] = value(x)));
    return found;
  }

  mean(measure) {
    const size = this.rows * this.columns;
    const sum = new Float32Array(size);
    for (const head of this.heads) {
      const weight = this.part("weight", head);
      const score = this.part("score", head);
      const norm = this.part("norm", head);
      for (let i = 0; i < size; i++) {
        if (score && score[i] === -Infinity) sum[i] = NaN;
        else if (measure === "weight") sum[i] += weight[i];
        else if (measure === "score") sum[i] += score[i];
        else sum[i] += weight[i] * norm[i % this.columns];
      }
    }
    return this.heads.length === 1 ? sum : sum.map((x) => x / this.heads.length);
  }

  // The largest magnitude, so that colours span what is there; the first column does not count when it is hidden.
  most(measure, bare) {
    const key = `most ${measure} ${bare}`;
    if (this.made.has(key)) return this.made.get(key);
    const values = this.values(measure, bare);
    let most = 0;
    for (let i = 0; i < values.length; i++) {
      if (bare && !this.pooled && i % this.columns === 0) continue;
      if (Math.abs(values[i]) > most) most = Math.abs(values[i]);
    }
    this.made.set(key, most || 1);
    return most || 1;
  }

  // The same of each row.
  tops(measure, bare) {
    const key = `tops ${measure} ${bare}`;
    if (!this.made.has(key)) {
      const from = bare && !this.pooled && this.columns > 1 ? 1 : 0;
      this.made.set(key, rowTops(this.values(measure, bare), this.rows, this.columns, from));
    }
    return this.made.get(key);
  }

  hidden(j, bare) {
    return bare && !this.pooled && j === 0;
  }

  // The same with at most SIDE cells a side: of each block its value of largest magnitude; with that of all or of each row.
  thumbnail(measure, bare, rowwise) {
    const key = `thumbnail ${measure} ${bare}`;
    if (!this.made.has(key)) this.made.set(key, this.shrunk(measure, bare));
    const { rows, columns, cells } = this.made.get(key);
    return { rows, columns, cells, most: rowwise ? rowTops(cells, rows, columns) : this.most(measure, bare) };
  }

  shrunk(measure, bare) {
    const down = stride(this.rows, SIDE);
    const across = stride(this.columns, SIDE);
    const rows = Math.ceil(this.rows / down);
    const columns = Math.ceil(this.columns / across);
    const values = this.values(measure, bare);
    const cells = new Float32Array(rows * columns).fill(NaN);
    for (let i = 0; i < this.rows; i++) {
      for (let j = 0; j < this.columns; j++) {
        const value = values[i * this.columns + j];
        const at = Math.floor(i / down) * columns + Math.floor(j / across);
        if (this.hidden(j, bare) || Number.isNaN(value)) continue;
        if (!(Math.abs(cells[at]) >= Math.abs(value))) cells[at] = value;
      }
    }
    return { rows, columns, cells };
  }
}

const grids = new WeakMap();

// The grid of a head, or of all heads of its layer together; the ones of earlier looks are kept with their layer.
export function gridOf(view, layer, head, averaged) {
  const whole = layer.heads.every((h) => h.cells === undefined);
  const heads = !averaged ? [layer.heads[head]] : whole ? layer.heads : [layer.mean];
  const key = averaged ? layer : layer.heads[head];
  if (!grids.has(key)) grids.set(key, new Grid(view, layer, heads));
  return grids.get(key);
}

export function readPage() {
  return JSON.parse(document.getElementById("data").textContent);
}
