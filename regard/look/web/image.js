// The picture that a model reads, with what the chosen row gives each patch laid over it.

import { bytes } from "./data.js";
import { make, say } from "./dom.js";
import { valueText } from "./map.js";
import { place, ramp, shade } from "./palette.js";

const WIDE = 336;

export class Photo {
  constructor(choose) {
    this.choose = choose; // (token): the row where rows are patches, else the column
    this.canvas = make("canvas", { className: "photo", tabIndex: 0, role: "application" });
    this.canvas.setAttribute("aria-roledescription", "picture of patches");
    this.canvas.onclick = (event) => this.click(event);
    this.canvas.onkeydown = (event) => this.key(event);
    this.told = make("p", { className: "shown" });
    this.node = make("div", { className: "picture" }, this.canvas, this.told);
  }

  draw(view, grid, at, measure, bare) {
    this.node.hidden = !view.image || grid.pooled;
    if (this.node.hidden) return;
    Object.assign(this, { view, grid, at });
    const { size, patch, extra } = view.image;
    const side = size / patch;
    const wide = Math.min(WIDE, this.node.clientWidth || WIDE);
    this.canvas.width = this.canvas.height = wide * 2;
    this.canvas.style.width = this.canvas.style.height = `${wide}px`;
    const pen = this.canvas.getContext("2d");
    pen.imageSmoothingEnabled = false;
    pen.drawImage(this.pixels(view.image), 0, 0, wide * 2, wide * 2);
    const values = grid.values(measure, bare).subarray(at.row * grid.columns, (at.row + 1) * grid.columns);
    const seen = values.subarray(extra);
    const most = seen.reduce((a, b) => Math.max(a, Math.abs(b)), 0) || 1;
    const step = (wide * 2) / side;
    const { stops } = ramp(measure);
    seen.forEach((value, i) => {
      const part = place(measure, value, most);
      pen.globalAlpha = 0.3 + 0.55 * Math.sqrt(Math.abs(value / most));
      pen.fillStyle = `rgb(${shade(stops, part).join(" ")})`;
      pen.fillRect((i % side) * step, Math.floor(i / side) * step, step, step);
    });
    pen.globalAlpha = 1;
    const chosen = (view.textRows ? at.column : at.row) - extra;
    if (chosen >= 0) {
      pen.strokeStyle = getComputedStyle(document.documentElement).getPropertyValue("--mark");
      pen.lineWidth = 5;
      pen.strokeRect((chosen % side) * step, Math.floor(chosen / side) * step, step, step);
    }
    const own = extra ? `; with the ${extra > 1 ? "class tokens" : "class token"} ${valueText(values[0], measure)}` : "";
    const best = seen.reduce((top, value, i) => (value > seen[top] ? i : top), 0);
    const reads = `${grid.rowSaid(at.row)}: most on ${grid.columnName(best + extra)}, ${valueText(seen[best], measure)}${own}`;
    this.told.textContent = `${reads}. ${this.help()}`;
    this.canvas.setAttribute("aria-label", reads);
  }

  help() {
    return this.view.textRows
      ? "Click or arrows: the patch whose column is chosen."
      : "Click or arrows: the patch that reads; Home: the class token.";
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

  click(event) {
    const { size, patch, extra } = this.view.image;
    const box = this.canvas.getBoundingClientRect();
    const side = size / patch;
    const cell = (part) => Math.min(side - 1, Math.max(0, Math.floor(part * side)));
    const across = cell((event.clientX - box.left) / box.width);
    this.pick(cell((event.clientY - box.top) / box.height) * side + across + extra);
  }

  key(event) {
    const { size, patch, extra } = this.view.image;
    const side = size / patch;
    const token = this.view.textRows ? this.at.column : this.at.row;
    const step = { ArrowUp: -side, ArrowDown: side, ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (step === undefined && event.key !== "Home") return;
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
