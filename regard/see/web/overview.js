// The whole of a map that is too large to be shown at once, with a frame around the part that is.

import { make } from "./dom.js";

const SIZE = 160;

export class Overview {
  constructor(choose) {
    this.choose = choose; // (row, column)
    this.line = make("p", { className: "shown" });
    this.canvas = make("canvas", { className: "overview", "aria-hidden": "true" });
    this.canvas.onclick = (event) => this.jump(event);
    this.node = make("div", {}, this.line, this.canvas);
  }

  // `from` and `place`: where the part begins, and how many rows and columns it has; `cells(pen, size)` draws the whole.
  draw(grid, from, place, cells) {
    this.grid = grid;
    const whole = place.rows === grid.rows && place.columns === grid.columns;
    const span = (first, count, all) => `${first + 1}–${first + count} of ${all}`;
    const part = `Rows ${span(from.row, place.rows, grid.rows)}, columns ${span(from.column, place.columns, grid.columns)}`;
    const pooled = grid.pooled ? `A cell is the largest of ${grid.rowStep} × ${grid.columnStep} tokens. ` : "";
    this.line.textContent = pooled + (whole ? "" : `${part}; below, the whole: click where to look.`);
    this.line.hidden = whole && !grid.pooled;
    this.canvas.hidden = whole;
    if (whole) return;
    const ratio = window.devicePixelRatio || 1;
    this.canvas.width = this.canvas.height = Math.round(SIZE * ratio);
    this.canvas.style.width = this.canvas.style.height = `${SIZE}px`;
    const pen = this.canvas.getContext("2d");
    pen.scale(ratio, ratio);
    pen.imageSmoothingEnabled = false;
    cells(pen, SIZE);
    const wide = Math.max((SIZE * place.columns) / grid.columns, 8);
    const high = Math.max((SIZE * place.rows) / grid.rows, 8);
    const x = Math.min((SIZE * from.column) / grid.columns, SIZE - wide);
    const y = Math.min((SIZE * from.row) / grid.rows, SIZE - high);
    const style = getComputedStyle(document.documentElement);
    for (const [name, width] of [["--back", 4], ["--mark", 2]]) {
      pen.strokeStyle = style.getPropertyValue(name);
      pen.lineWidth = width;
      pen.strokeRect(x + 2, y + 2, wide - 4, high - 4);
    }
  }

  jump(event) {
    const box = this.canvas.getBoundingClientRect();
    const row = Math.floor(((event.clientY - box.top) / box.height) * this.grid.rows);
    const column = Math.floor(((event.clientX - box.left) / box.width) * this.grid.columns);
    this.choose(row, column);
  }
}
