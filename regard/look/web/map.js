// One head, large: a canvas with its tokens, of which as many cells are shown as fit; the rest scrolls with the cell.

import { make, number, say, short } from "./dom.js";
import { paint, picture, ramp, shade } from "./palette.js";

const LEAST = 12; // pixels of a cell
const MOST = 34;
const TALL = 620;
const FONT = "12px system-ui, sans-serif";
export const NAMES = { weight: "weight", score: "score", norm: "weight × ‖v‖" };

// A canvas whose pixels are those of the screen, and its context in CSS pixels.
function sized(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  return pen;
}

export function valueText(value, measure) {
  return Number.isNaN(value) ? "masked" : number(value, measure === "score" ? 3 : 4);
}

export class HeadMap {
  // `move(row, column)` is called when a cell is chosen, in cells of the grid.
  constructor(move) {
    this.move = move;
    this.window = { row: 0, column: 0 };
    this.canvas = make("canvas", {
      className: "map",
      tabIndex: 0,
      role: "application",
      "aria-roledescription": "attention map",
    });
    this.canvas.onkeydown = (event) => this.key(event);
    this.canvas.onclick = (event) => this.click(event);
    this.canvas.onmousemove = (event) => this.hover(event);
    this.canvas.onmouseleave = () => this.tell(this.at.row, this.at.column);
    this.overview = make("canvas", { className: "overview", "aria-hidden": "true" });
    this.overview.onclick = (event) => this.jump(event);
    this.line = make("p", { className: "readout" });
    this.shown = make("p", { className: "shown" });
    this.legend = make("canvas", { className: "ramp", "aria-hidden": "true" });
    this.ends = [make("span"), make("span")];
    const scale = make("p", { className: "scale" }, this.ends[0], this.legend, this.ends[1]);
    this.node = make("div", { className: "head" }, this.line, this.canvas, scale, this.shown, this.overview);
  }

  draw(grid, at, measure, bare) {
    Object.assign(this, { grid, at, measure, bare });
    this.fit();
    const { left, top, cell, rows, columns } = this.place;
    const pen = sized(this.canvas, left + cell * columns + 1, top + cell * rows + 1);
    const style = getComputedStyle(document.documentElement);
    this.ink = style.getPropertyValue("--ink");
    this.cells(pen);
    this.labels(pen);
    this.marks(pen, style.getPropertyValue("--mark"), style.getPropertyValue("--back"));
    this.canvas.setAttribute("aria-label", this.summary());
    this.tell(at.row, at.column);
    this.colours();
    this.around();
  }

  // How large cells are, how many of them, and from where on.
  fit() {
    const { grid, at } = this;
    const width = this.node.clientWidth || 320;
    if (this.measured !== grid) {
      this.measured = grid;
      this.names = [this.wide(grid.rows, (i) => grid.rowName(i)), this.wide(grid.columns, (j) => grid.columnName(j))];
    }
    const left = Math.min(this.names[0], Math.floor(width * 0.3));
    const top = Math.min(this.names[1], 110);
    const room = width - left - 1;
    const columns = Math.max(1, Math.min(grid.columns, Math.floor(room / LEAST)));
    const cell = Math.min(MOST, Math.max(LEAST, Math.floor(room / columns)));
    const rows = Math.min(grid.rows, Math.floor(TALL / cell));
    this.place = { left, top, cell, rows, columns };
    this.window.row = this.follow(this.window.row, at.row, rows, grid.rows);
    this.window.column = this.follow(this.window.column, at.column, columns, grid.columns);
  }

  // Pixels that the longest name takes.
  wide(count, name) {
    const pen = this.canvas.getContext("2d");
    pen.font = `bold ${FONT}`;
    let most = 0;
    for (let i = 0; i < Math.min(count, 400); i++) most = Math.max(most, pen.measureText(short(name(i), 16)).width);
    return Math.ceil(most) + 10;
  }

  follow(from, at, shown, all) {
    if (at < from || at >= from + shown) from = at - Math.floor(shown / 2);
    return Math.max(0, Math.min(from, all - shown));
  }

  cells(pen) {
    const { grid, measure, bare, window: from, place } = this;
    const values = grid.values(measure, bare);
    const part = new Float32Array(place.rows * place.columns);
    for (let i = 0; i < place.rows; i++) {
      for (let j = 0; j < place.columns; j++) {
        const column = from.column + j;
        const value = values[(from.row + i) * grid.columns + column];
        part[i * place.columns + j] = grid.hidden(column, bare) ? NaN : value;
      }
    }
    const small = document.createElement("canvas");
    paint(small, picture(part, place.rows, place.columns, measure, grid.most(measure, bare)));
    pen.imageSmoothingEnabled = false;
    pen.drawImage(small, place.left, place.top, place.cell * place.columns, place.cell * place.rows);
  }

  labels(pen) {
    const { grid, at, window: from, place } = this;
    const { left, top, cell } = place;
    pen.font = FONT;
    pen.fillStyle = this.ink;
    pen.textBaseline = "middle";
    const name = (text, x, y, chosen, room) => {
      pen.font = chosen ? `bold ${FONT}` : FONT;
      let shown = short(text, 16);
      while (shown.length > 2 && pen.measureText(shown).width > room) shown = short(shown, [...shown].length - 1);
      pen.fillText(shown, x, y);
    };
    pen.textAlign = "right";
    for (let i = 0; i < place.rows; i++) {
      const row = from.row + i;
      name(grid.rowName(row), left - 6, top + cell * (i + 0.5), row === at.row, left - 8);
    }
    pen.textAlign = "left";
    for (let j = 0; j < place.columns; j++) {
      const column = from.column + j;
      pen.save();
      pen.translate(left + cell * (j + 0.5), top - 5);
      pen.rotate(-Math.PI / 2);
      name(grid.columnName(column), 0, 0, column === at.column, top - 8);
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
    pen.strokeStyle = colour;
    pen.lineWidth = 1;
    pen.strokeRect(left + 0.5, y + 0.5, cell * place.columns, cell);
    for (const [line, width] of [[ground, 6], [colour, 3]]) {
      pen.strokeStyle = line;
      pen.lineWidth = width;
      pen.strokeRect(x + 0.5, y + 0.5, cell, cell);
    }
  }

  summary() {
    const { grid, measure } = this;
    return (
      `${NAMES[measure]}, ${grid.rows} rows by ${grid.columns} columns; ` +
      "arrows move the cell, Home and End go to the ends of a row, Page Up and Page Down move by ten rows"
    );
  }

  sentence(row, column) {
    const { grid, measure, bare } = this;
    const value = grid.values(measure, bare)[row * grid.columns + column];
    const what = grid.hidden(column, bare) ? `hidden, ${valueText(value, measure)}` : valueText(value, measure);
    return `${grid.rowSaid(row)}, ${grid.columnSaid(column)}, ${what}`;
  }

  tell(row, column) {
    this.line.textContent = this.sentence(row, column);
  }

  colours() {
    const { grid, measure, bare } = this;
    const { stops } = ramp(measure);
    const image = new ImageData(128, 1);
    for (let i = 0; i < 128; i++) image.data.set([...shade(stops, i / 127), 255], 4 * i);
    paint(this.legend, image);
    const most = grid.most(measure, bare);
    const places = measure === "score" ? 2 : 3;
    this.ends[0].textContent = number(measure === "score" ? -most : 0, places);
    const root = measure === "score" ? "" : " (root scale)";
    this.ends[1].textContent = `${number(most, places)} ${NAMES[measure]}${root}`;
  }

  // Where the shown part lies in the whole, if it is a part.
  around() {
    const { grid, measure, bare, window: from, place } = this;
    const whole = place.rows === grid.rows && place.columns === grid.columns;
    this.overview.hidden = whole;
    const span = (first, count, all) => `${first + 1}–${first + count} of ${all}`;
    const pooled = grid.pooled ? `Each cell is the largest of ${grid.rowStep} × ${grid.columnStep} tokens. ` : "";
    const part = `Rows ${span(from.row, place.rows, grid.rows)}, columns ${span(from.column, place.columns, grid.columns)}`;
    this.shown.textContent = pooled + (whole ? "" : `${part}; below, the whole map: click where to look.`);
    this.shown.hidden = whole && !grid.pooled;
    if (whole) return;
    const { rows, columns, cells } = grid.thumbnail(measure, bare);
    const pen = sized(this.overview, 160, 160);
    const small = document.createElement("canvas");
    paint(small, picture(cells, rows, columns, measure, grid.most(measure, bare)));
    pen.imageSmoothingEnabled = false;
    pen.drawImage(small, 0, 0, 160, 160);
    pen.strokeStyle = getComputedStyle(document.documentElement).getPropertyValue("--mark");
    pen.lineWidth = 2;
    const x = (160 * from.column) / grid.columns;
    const y = (160 * from.row) / grid.rows;
    pen.strokeRect(x, y, (160 * place.columns) / grid.columns, (160 * place.rows) / grid.rows);
  }

  // --- mouse and keys ---

  cellAt(event) {
    const { left, top, cell, rows, columns } = this.place;
    const row = Math.floor((event.offsetY - top) / cell);
    const column = Math.floor((event.offsetX - left) / cell);
    const clamp = (x, most) => Math.min(Math.max(x, 0), most - 1);
    return [this.window.row + clamp(row, rows), this.window.column + clamp(column, columns)];
  }

  hover(event) {
    this.tell(...this.cellAt(event));
  }

  click(event) {
    this.choose(...this.cellAt(event));
  }

  jump(event) {
    const { grid } = this;
    const box = this.overview.getBoundingClientRect();
    const row = Math.floor(((event.clientY - box.top) / box.height) * grid.rows);
    const column = Math.floor(((event.clientX - box.left) / box.width) * grid.columns);
    this.choose(row, column);
  }

  key(event) {
    const { row, column } = this.at;
    const { rows, columns } = this.grid;
    const to = {
      ArrowUp: [row - 1, column],
      ArrowDown: [row + 1, column],
      ArrowLeft: [row, column - 1],
      ArrowRight: [row, column + 1],
      Home: [event.ctrlKey ? 0 : row, 0],
      End: [event.ctrlKey ? rows - 1 : row, columns - 1],
      PageUp: [row - 10, column],
      PageDown: [row + 10, column],
    }[event.key];
    if (!to || event.altKey || event.metaKey) return;
    event.preventDefault();
    this.choose(...to);
  }

  choose(row, column) {
    const clamp = (x, most) => Math.min(Math.max(x, 0), most - 1);
    this.move(clamp(row, this.grid.rows), clamp(column, this.grid.columns));
    say(this.sentence(this.at.row, this.at.column));
  }

  // The cells that are shown, as a table.
  table() {
    const { grid, measure, window: from, place } = this;
    const values = grid.values(measure, this.bare);
    const head = make("tr", {}, make("td"));
    for (let j = 0; j < place.columns; j++) {
      head.append(make("th", { scope: "col", dir: "auto" }, grid.columnName(from.column + j)));
    }
    const body = make("tbody");
    for (let i = 0; i < place.rows; i++) {
      const row = from.row + i;
      const line = make("tr", {}, make("th", { scope: "row", dir: "auto" }, grid.rowName(row)));
      for (let j = 0; j < place.columns; j++) {
        const value = values[row * grid.columns + from.column + j];
        line.append(make("td", { className: "n" }, Number.isNaN(value) ? "–" : valueText(value, measure)));
      }
      body.append(line);
    }
    const caption = make("caption", {}, `${NAMES[measure]}: rows look at columns; – is masked`);
    return make("table", { className: "values" }, caption, make("thead", {}, head), body);
  }
}
