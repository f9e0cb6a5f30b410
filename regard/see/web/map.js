// One head, large: a canvas with its tokens, of which as many cells are shown as fit; the rest scrolls with the cell.

import { NAMES } from "./data.js";
import { make, say, short } from "./dom.js";
import { Overview } from "./overview.js";
import { paint, picture } from "./palette.js";
import { Scale } from "./scale.js";

const SMALL = 12; // pixels of a cell, if all fit so
const LEAST = 14; // if they do not
const MOST = 34;
const TALL = 620;
export const KEYS = "arrow keys, Home, End, Page Up and Page Down";

// The page's letters, as a canvas wants them.
export function font(bold) {
  return `${bold ? "bold " : ""}12px ${getComputedStyle(document.body).fontFamily}`;
}

// A canvas whose pixels are those of the screen, and its context in CSS pixels.
export function sized(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  return pen;
}

export function clamp(x, count) {
  return Math.min(Math.max(x, 0), count - 1);
}

// The first of `shown` places out of `all`, so that `at` is among them.
export function follow(from, at, shown, all) {
  if (at < from || at >= from + shown) from = at - Math.floor(shown / 2);
  return Math.max(0, Math.min(from, all - shown));
}

// Where a key leads from a cell; undefined for keys that move nothing.
export function moved(event, { row, column }, { rows, columns }) {
  if (event.altKey || event.metaKey) return undefined;
  return {
    ArrowUp: [row - 1, column],
    ArrowDown: [row + 1, column],
    ArrowLeft: [row, column - 1],
    ArrowRight: [row, column + 1],
    Home: [event.ctrlKey ? 0 : row, 0],
    End: [event.ctrlKey ? rows - 1 : row, columns - 1],
    PageUp: [row - 10, column],
    PageDown: [row + 10, column],
  }[event.key];
}

export class HeadMap {
  // `move(row, column)` is called when a cell is chosen, in cells of the grid; `told`: what rows are, and how to move.
  constructor(move, told = `A row reads, the columns are read. Click, or ${KEYS}: another cell.`) {
    this.move = move;
    this.window = { row: 0, column: 0 };
    this.canvas = make("canvas", {
      className: "map",
      tabIndex: 0,
      role: "application",
      "aria-roledescription": "attention map",
    });
    this.canvas.onkeydown = (event) => this.key(event);
    this.canvas.onclick = (event) => this.choose(...this.cellAt(event));
    this.canvas.onmousemove = (event) => this.tell(...this.cellAt(event));
    this.canvas.onmouseleave = () => this.tell(this.at.row, this.at.column);
    this.line = make("p", { className: "readout" });
    const hint = make("p", { className: "shown" }, told);
    this.scale = new Scale();
    this.overview = new Overview((row, column) => this.choose(row, column));
    this.node = make("div", { className: "head" }, this.line, this.canvas, this.scale.node, hint, this.overview.node);
  }

  draw(grid, at, measure, bare, rowwise) {
    Object.assign(this, { grid, at, measure, bare, rowwise });
    this.fit();
    const { left, top, cell, rows, columns } = this.place;
    const pen = sized(this.canvas, left + cell * columns + 2, top + cell * rows + 2);
    const style = getComputedStyle(document.documentElement);
    this.ink = style.getPropertyValue("--ink");
    this.cells(pen);
    this.labels(pen);
    this.marks(pen, style.getPropertyValue("--mark"), style.getPropertyValue("--back"));
    this.canvas.setAttribute("aria-label", this.summary());
    this.tell(at.row, at.column);
    const most = rowwise ? grid.tops(measure, bare)[at.row] : grid.most(measure, bare);
    this.scale.draw(measure, most, rowwise);
    this.overview.draw(grid, this.window, this.place, (to, size) => this.whole(to, size));
  }

  // How large cells are, how many of them, and from where on.
  fit() {
    const { grid, at } = this;
    const width = this.node.clientWidth || this.node.parentElement?.clientWidth || 320;
    if (this.measured !== grid) {
      this.measured = grid;
      this.names = [this.wide(grid.rows, (i) => grid.rowName(i)), this.wide(grid.columns, (j) => grid.columnName(j))];
    }
    const left = Math.min(this.names[0] + 10, Math.floor(width * 0.3));
    const room = width - left - 2;
    const all = room >= SMALL * grid.columns;
    const columns = all ? grid.columns : Math.max(1, Math.min(grid.columns, Math.floor(room / LEAST)));
    const cell = Math.min(MOST, Math.max(SMALL, Math.floor(room / columns)));
    const rows = Math.min(grid.rows, Math.floor(TALL / cell));
    const upright = this.names[1] <= cell - 2; // above its column, else turned
    const top = upright ? 22 : Math.min(this.names[1] + 10, 110);
    this.place = { left, top, cell, rows, columns, upright };
    this.window.row = follow(this.window.row, at.row, rows, grid.rows);
    this.window.column = follow(this.window.column, at.column, columns, grid.columns);
  }

  // Pixels that the longest name takes.
  wide(count, name) {
    const pen = this.canvas.getContext("2d");
    pen.font = font(true);
    let most = 0;
    for (let i = 0; i < Math.min(count, 400); i++) most = Math.max(most, pen.measureText(short(name(i), 16)).width);
    return Math.ceil(most);
  }

  cells(pen) {
    const { grid, measure, bare, rowwise, window: from, place } = this;
    const values = grid.values(measure, bare);
    const part = new Float32Array(place.rows * place.columns);
    for (let i = 0; i < place.rows; i++) {
      for (let j = 0; j < place.columns; j++) {
        const column = from.column + j;
        const value = values[(from.row + i) * grid.columns + column];
        part[i * place.columns + j] = grid.hidden(column, bare) ? NaN : value;
      }
    }
    const tops = () => grid.tops(measure, bare).subarray(from.row, from.row + place.rows);
    const small = document.createElement("canvas");
    paint(small, picture(part, place.rows, place.columns, measure, rowwise ? tops() : grid.most(measure, bare)));
    pen.imageSmoothingEnabled = false;
    pen.drawImage(small, place.left, place.top, place.cell * place.columns, place.cell * place.rows);
  }

  // All cells in a square of `size`.
  whole(pen, size) {
    const { grid, measure, bare, rowwise } = this;
    const { rows, columns, cells, most } = grid.thumbnail(measure, bare, rowwise);
    const small = document.createElement("canvas");
    paint(small, picture(cells, rows, columns, measure, most));
    pen.drawImage(small, 0, 0, size, size);
  }

  labels(pen) {
    const { grid, at, window: from, place } = this;
    const { left, top, cell, upright } = place;
    pen.fillStyle = this.ink;
    pen.textBaseline = "middle";
    const name = (text, x, y, chosen, room) => {
      pen.font = font(chosen);
      let shown = short(text, 16);
      while (shown.length > 2 && pen.measureText(shown).width > room) shown = short(shown, [...shown].length - 1);
      pen.fillText(shown, x, y);
    };
    pen.textAlign = "right";
    for (let i = 0; i < place.rows; i++) {
      const row = from.row + i;
      name(grid.rowName(row), left - 6, top + cell * (i + 0.5), row === at.row, left - 8);
    }
    pen.textAlign = upright ? "center" : "left";
    for (let j = 0; j < place.columns; j++) {
      const column = from.column + j;
      pen.save();
      pen.translate(left + cell * (j + 0.5), upright ? top - 11 : top - 5);
      if (!upright) pen.rotate(-Math.PI / 2);
      name(grid.columnName(column), 0, 0, column === at.column, upright ? cell : top - 8);
      pen.restore();
    }
  }

  marks(pen, colour, ground) {
    const { at, window: from, place } = this;
    const { left, top, cell } = place;
    pen.strokeStyle = this.ink;
    pen.globalAlpha = 0.4;
    pen.strokeRect(left + 0.5, top + 0.5, cell * place.columns, cell * place.rows);
    pen.globalAlpha = 1;
    const x = left + cell * (at.column - from.column);
    const y = top + cell * (at.row - from.row);
    for (const [line, width] of [[ground, 3], [colour, 1]]) {
      pen.strokeStyle = line;
      pen.lineWidth = width;
      pen.strokeRect(left + 0.5, y + 0.5, cell * place.columns, cell);
    }
    for (const [line, width] of [[ground, 6], [colour, 3]]) {
      pen.strokeStyle = line;
      pen.lineWidth = width;
      pen.strokeRect(x + 0.5, y + 0.5, cell, cell);
    }
  }

  summary() {
    const { grid, measure } = this;
    return `${NAMES[measure]}, ${grid.rows} rows by ${grid.columns} columns; ${KEYS} move the cell`;
  }

  sentence(row, column) {
    const { grid, measure, bare } = this;
    const value = grid.values(measure, bare)[row * grid.columns + column];
    const known = Number.isNaN(value) ? "" : `${NAMES[measure]} `;
    const what = `${grid.hidden(column, bare) ? "hidden, " : ""}${known}${grid.text(value, measure)}`;
    return `${grid.rowSaid(row)}, ${grid.columnSaid(column)}: ${what}`;
  }

  tell(row, column) {
    this.line.textContent = this.sentence(row, column);
  }

  // --- mouse and keys ---

  cellAt(event) {
    const { left, top, cell, rows, columns } = this.place;
    const row = clamp(Math.floor((event.offsetY - top) / cell), rows);
    const column = clamp(Math.floor((event.offsetX - left) / cell), columns);
    return [this.window.row + row, this.window.column + column];
  }

  key(event) {
    const to = moved(event, this.at, this.grid);
    if (!to) return;
    event.preventDefault();
    this.choose(...to);
  }

  choose(row, column) {
    this.move(clamp(row, this.grid.rows), clamp(column, this.grid.columns));
    say(this.sentence(this.at.row, this.at.column));
  }
}
