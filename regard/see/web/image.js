// The picture that a model reads, and beside it in grey with what the chosen row gives each patch laid over it.

import { bytes, NAMES } from "./data.js";
import { make, say } from "./dom.js";
import { shade } from "./palette.js";

const WIDE = 300;
const GAP = 12;

export class Photo {
  constructor(choose) {
    this.choose = choose; // (token): the row where rows are patches, else the column
    this.plain = make("canvas", { className: "photo", role: "img", "aria-label": "the picture as the model reads it" });
    this.canvas = make("canvas", { className: "photo over", tabIndex: 0, role: "application" });
    this.canvas.setAttribute("aria-roledescription", "picture of patches");
    this.canvas.onkeydown = (event) => this.key(event);
    for (const canvas of [this.plain, this.canvas]) {
      canvas.onclick = (event) => this.pick(this.tokenAt(event));
      canvas.onmousemove = (event) => (this.line.textContent = this.sentence(this.tokenAt(event)));
      canvas.onmouseleave = () => (this.line.textContent = this.summary());
    }
    this.line = make("p", { className: "readout" });
    this.hint = make("p", { className: "shown" });
    const both = make("div", { className: "photos" }, this.plain, this.canvas);
    this.node = make("div", { className: "picture" }, this.line, both, this.hint);
  }

  draw(view, grid, at, measure, bare) {
    this.node.hidden = !view.image || grid.pooled;
    if (this.node.hidden) return;
    const { size, patch, extra } = view.image;
    const values = grid.values(measure, bare).subarray(at.row * grid.columns, (at.row + 1) * grid.columns);
    Object.assign(this, { view, grid, at, measure, values, extra, side: size / patch });
    const wide = Math.min(WIDE, Math.floor(((this.node.clientWidth || WIDE) - GAP) / 2));
    this.sheet(this.plain, wide, "none");
    const pen = this.sheet(this.canvas, wide, "grayscale(1) contrast(0.6)");
    this.heat(pen, (wide * 2) / this.side);
    this.line.textContent = this.summary();
    this.canvas.setAttribute("aria-label", this.summary());
    const choose = view.textRows ? "the patch whose column is chosen." : "the patch that reads; Home: the class token.";
    this.hint.textContent = `Brighter: read more, by the square root. Click, or arrow keys: ${choose}`;
  }

  // A canvas with the picture on it, and a frame around the chosen patch.
  sheet(canvas, wide, filter) {
    canvas.width = canvas.height = wide * 2;
    canvas.style.width = canvas.style.height = `${wide}px`;
    const pen = canvas.getContext("2d");
    pen.imageSmoothingEnabled = this.view.image.size >= 64;
    pen.filter = filter;
    pen.drawImage(this.pixels(this.view.image), 0, 0, wide * 2, wide * 2);
    pen.filter = "none";
    if (canvas === this.plain) this.frame(pen, (wide * 2) / this.side);
    return pen;
  }

  heat(pen, step) {
    const { values, extra, side, measure } = this;
    const seen = values.subarray(extra);
    const most = seen.reduce((a, b) => Math.max(a, Math.abs(b) || 0), 0) || 1;
    seen.forEach((value, i) => {
      const part = Math.sqrt(Math.abs(value || 0) / most);
      pen.globalAlpha = 0.8 * part;
      const below = measure === "score" && value < 0;
      pen.fillStyle = `rgb(${(below ? shade(RAMPS.dark.signed, (1 - part) / 2) : shade(RAMPS.dark.plain, part)).join(" ")})`;
      pen.fillRect((i % side) * step, Math.floor(i / side) * step, step, step);
    });
    pen.globalAlpha = 1;
    this.frame(pen, step);
  }

  frame(pen, step) {
    const chosen = (this.view.textRows ? this.at.column : this.at.row) - this.extra;
    if (chosen < 0) return;
    const [x, y] = [(chosen % this.side) * step, Math.floor(chosen / this.side) * step];
    for (const [colour, width] of [["#000", 7], ["#fff", 3]]) {
      pen.strokeStyle = colour;
      pen.lineWidth = width;
      pen.strokeRect(x + 3, y + 3, step - 6, step - 6);
    }
  }

  sentence(token) {
    const { grid, at, measure, values } = this;
    return `${grid.rowSaid(at.row)} reads ${grid.columnName(token)}: ${NAMES[measure]} ${grid.text(values[token], measure)}`;
  }

  summary() {
    const { grid, values, extra, measure } = this;
    let best = extra;
    for (let i = extra; i < values.length; i++) if (values[i] > values[best]) best = i;
    const own = extra ? `; the ${grid.columnName(0)} token ${grid.text(values[0], measure)}` : "";
    return `${this.sentence(best)}, the most of all patches${own}`;
  }

  pixels(image) {
    if (this.source === image) return this.small;
    const rgb = bytes(image.pixels);
    const data = new ImageData(image.size, image.size);
    for (let i = 0; i < image.size ** 2; i++) {
      data.data.set([rgb[3 * i], rgb[3 * i + 1], rgb[3 * i + 2], 255], 4 * i);
    }
    this.small = make("canvas", { width: image.size, height: image.size });
    this.small.getContext("2d").putImageData(data, 0, 0);
    this.source = image;
    return this.small;
  }

  tokenAt(event) {
    const box = event.target.getBoundingClientRect();
    const cell = (part) => Math.min(this.side - 1, Math.max(0, Math.floor(part * this.side)));
    const across = cell((event.clientX - box.left) / box.width);
    return cell((event.clientY - box.top) / box.height) * this.side + across + this.extra;
  }

  key(event) {
    const { side, extra } = this;
    const token = this.view.textRows ? this.at.column : this.at.row;
    const step = { ArrowUp: -side, ArrowDown: side, ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if ((step === undefined && event.key !== "Home") || event.altKey || event.metaKey) return;
    event.preventDefault();
    if (event.key === "Home") return this.pick(0);
    if (token < extra) return this.pick(extra);
    const next = token + step;
    this.pick(next < extra || next >= extra + side * side ? token : next);
  }

  pick(token) {
    this.choose(token);
    say(this.canvas.getAttribute("aria-label"));
  }
}
