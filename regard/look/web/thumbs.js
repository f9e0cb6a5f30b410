// All heads of a view as thumbnails: a row for each layer. One tab stop; arrows move between heads and layers.

import { gridOf } from "./data.js";
import { make, say } from "./dom.js";
import { paint, picture } from "./palette.js";

const ACROSS = 16; // heads of a layer in one line

export class Thumbs {
  constructor(choose) {
    this.choose = choose; // (layer, head)
    this.node = make("div", { className: "thumbs", role: "grid" });
    this.node.onkeydown = (event) => this.key(event);
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
        const canvas = make("canvas", { className: "thumb", role: "gridcell", tabIndex: -1 });
        canvas.onclick = () => this.choose(l, h);
        canvas.place = [l, h];
        return canvas;
      }),
    );
    const rows = this.cells.map((cells, l) => {
      const name = make("span", { className: "layer", role: "rowheader" }, String(view.layers[l].number));
      const heads = make("div", { className: "heads", role: "presentation" }, ...cells);
      return make("div", { className: "line", role: "row" }, name, heads);
    });
    this.node.replaceChildren(...rows);
    this.node.setAttribute("aria-label", `${view.title}: layers and their heads; arrows choose`);
    const most = Math.max(...view.layers.map((layer) => layer.heads.length));
    this.node.style.setProperty("--count", Math.min(most, ACROSS));
  }

  draw(view, at, measure, bare) {
    if (this.view !== view) this.build(view);
    const look = `${measure} ${bare} ${matchMedia("(prefers-color-scheme: dark)").matches}`;
    if (this.look !== look || this.painted !== view) {
      Object.assign(this, { look, painted: view, measure, bare });
      this.seen.disconnect();
      for (const canvas of this.cells.flat()) this.seen.observe(canvas);
    }
    for (const canvas of this.cells.flat()) {
      const chosen = canvas.place[0] === at.layer && canvas.place[1] === at.head;
      canvas.setAttribute("aria-selected", String(chosen));
      canvas.tabIndex = chosen ? 0 : -1;
    }
  }

  paint(canvas) {
    this.seen.unobserve(canvas);
    const [l, h] = canvas.place;
    const layer = this.view.layers[l];
    const grid = gridOf(this.view, layer, h, false);
    const measure = grid.measures.includes(this.measure) ? this.measure : "weight";
    const { rows, columns, cells } = grid.thumbnail(measure, this.bare);
    paint(canvas, picture(cells, rows, columns, measure, grid.most(measure, this.bare)));
    canvas.setAttribute("aria-label", `layer ${layer.number}, head ${h}`);
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
    if (!to) return;
    event.preventDefault();
    const layer = Math.min(Math.max(to[0], 0), this.cells.length - 1);
    const head = Math.min(Math.max(to[1], 0), this.cells[layer].length - 1);
    this.choose(layer, head);
    this.cells[layer][head].focus();
    say(`layer ${this.view.layers[layer].number}, head ${head}`);
  }
}
