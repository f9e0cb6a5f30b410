// All heads of a view as thumbnails: a row for each layer. One tab stop; arrows move between heads and layers.

import { gridOf } from "./data.js";
import { make, say } from "./dom.js";
import { paint, picture } from "./palette.js";

const ACROSS = 16; // heads of a layer in one line

export class Thumbs {
  constructor(choose) {
    this.choose = choose; // (layer, head)
    this.grid = make("div", { className: "thumbs", role: "grid" });
    this.grid.onkeydown = (event) => this.key(event);
    const hint = make("p", { className: "shown" }, "Click, or arrow keys, Home and End: another head.");
    this.node = make("div", {}, this.grid, hint);
    this.seen = new IntersectionObserver((entries) => {
      for (const entry of entries) if (entry.isIntersecting) this.paint(entry.target);
    });
  }

  // Builds the cells of a view; what they show is painted when they come into sight.
  build(view) {
    this.view = view;
    this.seen.disconnect();
    this.cells = view.layers.map((layer, l) =>
      layer.heads.map((_, h) => {
        const canvas = make("canvas", { className: "thumb", role: "gridcell", tabIndex: -1, title: this.name(l, h) });
        canvas.setAttribute("aria-label", this.name(l, h));
        canvas.onclick = () => this.choose(l, h);
        canvas.place = [l, h];
        return canvas;
      }),
    );
    const most = Math.max(...view.layers.map((layer) => layer.heads.length));
    const rows = this.cells.map((cells, l) => this.line(String(view.layers[l].number), cells));
    this.grid.replaceChildren(this.header(most), ...rows);
    this.grid.setAttribute("aria-label", `${view.title}: layers and their heads; arrows choose`);
    this.grid.classList.toggle("wrapped", most > ACROSS);
    this.grid.style.setProperty("--count", Math.min(most, ACROSS));
  }

  line(name, cells) {
    const header = make("span", { className: "layer", role: "rowheader" }, name);
    return make("div", { className: "line", role: "row" }, header, make("div", { className: "heads", role: "presentation" }, ...cells));
  }

  // The heads' numbers above their columns, where a layer takes one line.
  header(most) {
    const count = most > ACROSS ? 1 : most;
    const names = Array.from({ length: count }, (_, h) => make("span", {}, String(h)));
    const line = this.line("", most > ACROSS ? [make("span", { className: "all-heads" }, `heads 0–${most - 1}`)] : names);
    line.className = "line numbers";
    line.setAttribute("aria-hidden", "true");
    return line;
  }

  name(l, h) {
    return `layer ${this.view.layers[l].number}, head ${h}`;
  }

  draw(view, at, { measure, bare, rowwise, averaged }) {
    if (this.view !== view) this.build(view);
    const look = `${measure} ${bare} ${rowwise} ${matchMedia("(prefers-color-scheme: dark)").matches}`;
    if (this.look !== look || this.painted !== view) {
      Object.assign(this, { look, painted: view, measure, bare, rowwise });
      this.seen.disconnect();
      for (const canvas of this.cells.flat()) this.seen.observe(canvas);
    }
    for (const canvas of this.cells.flat()) {
      const [inside, chosen] = [canvas.place[0] === at.layer, canvas.place[1] === at.head];
      canvas.setAttribute("aria-selected", String(inside && (chosen || averaged)));
      canvas.tabIndex = inside && chosen ? 0 : -1;
    }
  }

  paint(canvas) {
    this.seen.unobserve(canvas);
    const [l, h] = canvas.place;
    const grid = gridOf(this.view, this.view.layers[l], h, false);
    const measure = grid.measures.includes(this.measure) ? this.measure : "weight";
    const { rows, columns, cells, most } = grid.thumbnail(measure, this.bare, this.rowwise);
    paint(canvas, picture(cells, rows, columns, measure, most));
  }

  key(event) {
    const [l, h] = event.target.place ?? [0, 0];
    const to = {
      ArrowUp: [l - 1, h],
      ArrowDown: [l + 1, h],
      ArrowLeft: [l, h - 1],
      ArrowRight: [l, h + 1],
      Home: [l, 0],
      End: [l, Infinity],
    }[event.key];
    if (!to || event.altKey || event.metaKey) return;
    event.preventDefault();
    const layer = Math.min(Math.max(to[0], 0), this.cells.length - 1);
    const head = Math.min(Math.max(to[1], 0), this.cells[layer].length - 1);
    this.choose(layer, head);
    this.cells[layer][head].focus();
    say(this.name(layer, head));
  }
}
