// A layer as lines from the tokens that read, on the left, to those that are read: a colour for each head, the chosen
// row strong and the others faint. Of a long text the rows around the chosen one, and the keys that it weighs most.

import { gridOf, NAMES } from "./data.js";
import { make, quoted, say, short } from "./dom.js";
import { clamp, follow, font, KEYS, moved, sized } from "./map.js";
import { scheme } from "./palette.js";

const PITCH = 24; // pixels from token to token
const SHOWN = 26; // tokens on a side, at most
const MANY = 8; // heads above which the chosen one is drawn alone at first
const DASHES = [[], [7, 3], [2, 3]]; // colours come again after six heads

export class Lines {
  // `move(row, column)` chooses a cell of the grid, `turn(off)` the heads that are not drawn.
  constructor(move, turn) {
    Object.assign(this, { move, turn, from: 0 });
    this.canvas = make("canvas", { className: "lines", tabIndex: 0, role: "application" });
    this.canvas.setAttribute("aria-roledescription", "lines of attention");
    this.canvas.onkeydown = (event) => this.key(event);
    this.canvas.onclick = (event) => this.pick(this.under(event));
    this.canvas.onmousemove = (event) => this.point(this.under(event));
    this.canvas.onmouseleave = () => this.point(null);
    this.line = make("p", { className: "readout" });
    this.chips = make("div", { className: "chips", role: "group", "aria-label": "heads that are drawn" });
    const hint = `Left reads right; a stronger line is a larger weight. Point at a token, click, or ${KEYS}: another row or column.`;
    this.node = make("div", {}, this.chips, this.line, this.canvas, make("p", { className: "shown" }, hint));
  }

  draw(view, layer, state, grid, at, { measure, bare, averaged }) {
    const used = grid.measures.includes(measure) && measure !== "score" ? measure : "weight"; // scores have no strength
    Object.assign(this, { grid, at, bare, used, hover: null });
    // Heads that are pooled differ in their tokens from one in full.
    const all = layer.heads.map((_, h) => ({ h, grid: gridOf(view, layer, h, false) }));
    const alike = all.filter((each) => each.grid.rowStep === grid.rowStep);
    const off = state.off ?? (all.length > MANY ? alike.map(({ h }) => h).filter((h) => h !== state.head) : []);
    this.heads = averaged ? [{ h: 0, grid, name: "the mean" }] : alike.filter(({ h }) => !off.includes(h));
    this.most = Math.max(...this.heads.map((each) => each.grid.most(used, bare)), 1e-9);
    this.toggles(alike.map(({ h }) => h), off, state.head);
    this.chips.hidden = averaged || alike.length < 2;
    this.place();
    this.paint();
  }

  // A button for each head, in its colour; one for all, one for the chosen head alone.
  toggles(named, off, chosen) {
    const drawn = named.filter((h) => !off.includes(h));
    const button = (text, name, on, without) => {
      const given = { type: "button", className: "chip", "aria-pressed": String(on), onclick: () => this.turn(without) };
      return make("button", { ...given, "aria-label": name }, text);
    };
    const alone = named.filter((h) => h !== chosen);
    const buttons = [
      button("all heads", "all heads", drawn.length === named.length, []),
      button(`head ${chosen} alone`, `head ${chosen} alone`, drawn.join() === String(chosen), alone),
    ];
    for (const h of named) {
      const on = drawn.includes(h);
      const chip = button(String(h), `head ${h}`, on, on ? [...off, h] : off.filter((other) => other !== h));
      chip.prepend(make("span", { className: `swatch dash${Math.floor(h / 6) % 3}` }));
      chip.firstChild.style.borderColor = this.colour(h);
      buttons.push(chip);
    }
    const focus = [...this.chips.children].indexOf(document.activeElement);
    this.chips.replaceChildren(...buttons);
    this.chips.children[focus]?.focus();
  }

  colour(h) {
    return SERIES[scheme()][h % 6];
  }

  value(each, row, column) {
    const value = each.grid.values(this.used, this.bare)[row * this.grid.columns + column];
    return this.grid.hidden(column, this.bare) || Number.isNaN(value) ? 0 : value;
  }

  // Which tokens are shown, and where.
  place() {
    const { grid, at } = this;
    const count = Math.min(grid.rows, SHOWN);
    this.from = follow(this.from, at.row, count, grid.rows);
    this.rows = Array.from({ length: count }, (_, i) => this.from + i);
    this.columns = Array.from({ length: grid.columns }, (_, j) => j);
    if (grid.columns > SHOWN) {
      const weight = (j) => (j === at.column ? Infinity : Math.max(0, ...this.heads.map((each) => this.value(each, at.row, j))));
      this.columns = this.columns.sort((a, b) => weight(b) - weight(a)).slice(0, SHOWN).sort((a, b) => a - b);
    }
    const width = Math.min(this.node.clientWidth || 320, 760);
    const pen = this.canvas.getContext("2d");
    pen.font = font(true);
    const widest = (names) => Math.ceil(Math.max(...names.map((name) => pen.measureText(short(name, 18)).width))) + 12;
    const left = Math.min(widest(this.rows.map((i) => grid.rowName(i))), width * 0.35);
    const right = Math.min(widest(this.columns.map((j) => grid.columnName(j))), width * 0.35);
    this.box = { width, left, right: width - right, height: PITCH * Math.max(this.rows.length, this.columns.length) + 8 };
  }

  y(index) {
    return 4 + PITCH * (index + 0.5);
  }

  paint() {
    const { grid, at, box, rows, columns } = this;
    const pen = sized(this.canvas, box.width, box.height);
    const style = getComputedStyle(document.documentElement);
    const focus = this.hover ?? { row: at.row };
    const strong = (i, j) => (focus.row === undefined ? j === focus.column : i === focus.row);
    const apart = Math.min(4, (PITCH - 6) / this.heads.length); // heads that read the same token stay side by side
    for (const bold of [false, true]) {
      for (const [k, each] of this.heads.entries()) {
        const aside = (k - (this.heads.length - 1) / 2) * apart;
        pen.strokeStyle = this.colour(each.h);
        pen.setLineDash(DASHES[Math.floor(each.h / 6) % 3]);
        rows.forEach((i, a) => columns.forEach((j, b) => {
          const part = this.value(each, i, j) / this.most;
          if (strong(i, j) !== bold || part < (bold ? 0.01 : 0.1)) return;
          pen.globalAlpha = bold ? Math.sqrt(part) : 0.14 * part;
          pen.lineWidth = bold ? 1 + Math.max(apart, 1) * part : 1;
          pen.beginPath();
          pen.moveTo(box.left, this.y(a) + aside);
          pen.lineTo(box.right, this.y(b) + aside);
          pen.stroke();
        }));
      }
    }
    pen.globalAlpha = 1;
    pen.setLineDash([]);
    pen.textBaseline = "middle";
    const token = (name, x, y, align, here, room) => {
      if (here) {
        pen.fillStyle = style.getPropertyValue("--fill");
        pen.fillRect(align === "right" ? 0 : x - 4, y - PITCH / 2 + 1, room + 8, PITCH - 2);
        pen.fillStyle = style.getPropertyValue("--mark");
        pen.fillRect(align === "right" ? 0 : box.width - 3, y - PITCH / 2 + 1, 3, PITCH - 2);
      }
      pen.fillStyle = style.getPropertyValue("--ink");
      pen.textAlign = align;
      pen.font = font(here);
      pen.fillText(short(name, 18), x, y, room);
    };
    rows.forEach((i, a) => token(grid.rowName(i), box.left - 6, this.y(a), "right", i === (focus.row ?? at.row), box.left - 10));
    columns.forEach((j, b) => token(grid.columnName(j), box.right + 6, this.y(b), "left", j === (focus.column ?? at.column), box.width - box.right - 10));
    this.line.textContent = this.sentence(focus);
    this.canvas.setAttribute("aria-label", `${this.line.textContent}; ${KEYS} move`);
  }

  // The three largest weights of a row, or of a column, and whose they are.
  sentence({ row, column }) {
    const { grid, rows, columns, used } = this;
    const found = [];
    for (const each of this.heads) {
      for (const other of row === undefined ? rows : columns) {
        const value = row === undefined ? this.value(each, other, column) : this.value(each, row, other);
        if (value > 0) found.push({ value, other, who: each.name ?? `head ${each.h}` });
      }
    }
    const said = found.sort((a, b) => b.value - a.value).slice(0, 3).map(({ value, other, who }) => {
      const name = row === undefined ? grid.rowName(other) : grid.columnName(other);
      return `${quoted(short(name, 24))} ${grid.text(value, used)} (${who})`;
    });
    const what = used === "weight" ? "" : `, ${NAMES[used]}`;
    if (row === undefined) return `column ${quoted(grid.columnName(column))} is read by ${said.join(", ") || "no row here"}${what}`;
    return `row ${quoted(grid.rowName(row))} reads ${said.join(", ") || "nothing here"}${what}`;
  }

  // The token under the mouse.
  under(event) {
    const index = Math.floor((event.offsetY - 4) / PITCH);
    const left = event.offsetX < this.box.width / 2;
    const token = (left ? this.rows : this.columns)[Math.max(0, index)];
    return token === undefined ? null : left ? { row: token } : { column: token };
  }

  point(token) {
    this.hover = token;
    this.paint();
  }

  pick(token) {
    if (token) this.move(token.row ?? this.at.row, token.column ?? this.at.column);
  }

  key(event) {
    const to = moved(event, this.at, this.grid);
    if (!to) return;
    event.preventDefault();
    this.move(clamp(to[0], this.grid.rows), clamp(to[1], this.grid.columns));
    say(this.line.textContent);
  }
}
