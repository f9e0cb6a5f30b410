// The page: a panel for each model, what they share above them.

import { gridOf, NAMES, readPage } from "./data.js";
import { choice, group, make, tick } from "./dom.js";
import { Heads } from "./heads.js";
import { Photo } from "./image.js";
import { Lines } from "./lines.js";
import { HeadMap } from "./map.js";
import { onScheme } from "./palette.js";
import { Row } from "./row.js";
import { read, written } from "./state.js";
import { tableOf } from "./table.js";
import { Thumbs } from "./thumbs.js";

class Panel {
  constructor(app, model, index) {
    Object.assign(this, { app, model, index });
    // A head that is chosen has lines.
    const drawn = (head) => this.state.off?.filter((h) => h !== head) ?? null;
    this.thumbs = new Thumbs((layer, head) => app.set(index, { layer, head, off: drawn(head) }));
    this.map = new HeadMap((row, column) => this.move(row, column));
    this.lines = new Lines((row, column) => this.move(row, column), (off) => app.set(index, { off }));
    this.row = new Row((column) => this.move(this.at.row, column));
    this.photo = new Photo((token) => this.pick(token));
    this.title = make("h3");
    this.part = make("p", { className: "shown" });
    this.table = make("div", { className: "wide", tabIndex: 0, role: "region" });
    this.table.setAttribute("aria-label", "values of the map");
    const heads = make("section", { className: "all" }, make("h3", {}, "Layers down, heads across"), this.part, this.thumbs.node);
    const large = make("section", { className: "large" }, this.title, this.photo.node, this.map.node, this.lines.node, this.table);
    this.whose = make("h3");
    const bars = make("section", { className: "steps" }, this.whose, this.row.node);
    this.views = make("div", { className: "views" });
    this.heads = new Heads(model, (view, layer, head) => this.show(view, layer, head), (list) => app.share({ list }));
    this.node = make("section", { className: "panel" }, make("h2", {}, model.name), this.views);
    this.node.append(make("p", { className: "shown" }, model.note), this.heads.node, make("div", { className: "inside" }, heads, large, bars));
  }

  get state() {
    return this.app.state.panels[this.index];
  }

  get view() {
    return this.model.views.find((view) => view.name === this.state.view);
  }

  // The chosen cell as the grid counts, which may be blocks of tokens.
  get at() {
    const { row, column } = this.state;
    return { row: Math.floor(row / this.grid.rowStep), column: Math.floor(column / this.grid.columnStep) };
  }

  move(row, column) {
    const { rowStep, columnStep } = this.grid;
    this.app.set(this.index, { row: row * rowStep, column: column * columnStep });
  }

  pick(token) {
    this.app.set(this.index, this.view.textRows ? { column: token } : { row: token });
  }

  // Where this panel is when it follows another.
  following({ state, view }) {
    const own = { ...this.state };
    if (this.model.views.some(({ name }) => name === state.view)) own.view = state.view;
    const mine = this.model.views.find(({ name }) => name === own.view);
    const fit = (n, count) => Math.min(n, count - 1);
    own.layer = fit(mine.name === view.name ? state.layer : own.layer, mine.layers.length);
    own.head = fit(mine.name === view.name ? state.head : own.head, mine.layers[own.layer].heads.length);
    const same = (a, b) => a.length === b.length && a.every((name, i) => name === b[i]);
    if (same(mine.rows, view.rows)) own.row = state.row;
    if (same(mine.columns, view.columns)) own.column = state.column;
    return { ...own, row: fit(own.row, mine.rows.length), column: fit(own.column, mine.columns.length) };
  }

  draw() {
    const { app, view } = this;
    const { layer, head } = this.state;
    const shared = app.state;
    this.grid = gridOf(view, view.layers[layer], head, shared.averaged);
    const measure = this.grid.measures.includes(shared.measure) ? shared.measure : "weight";
    this.tabs();
    this.heads.node.hidden = !shared.list;
    if (shared.list) this.heads.draw(shared.list, this.state);
    this.thumbs.draw(view, this.state, shared);
    const lined = shared.as === "lines";
    const whose = shared.averaged ? "mean of its heads" : lined ? "its heads" : `head ${head}`;
    const lacking = measure === shared.measure ? "" : `: weight, as its ${NAMES[shared.measure]} is not in the page`;
    this.title.textContent = `${view.title}, layer ${view.layers[layer].number}, ${whose}${lacking}`;
    this.whose.textContent = shared.averaged ? "One row of the mean" : `One row of head ${head}`;
    this.part.textContent = view.note;
    this.part.hidden = !view.note;
    this.photo.draw(view, this.grid, this.at, measure, shared.bare);
    this.map.node.hidden = lined;
    this.lines.node.hidden = !lined;
    if (lined) this.lines.draw(view, view.layers[layer], this.state, this.grid, this.at, shared);
    this.map.draw(this.grid, this.at, measure, shared.bare, shared.rowwise);
    this.row.draw(this.grid, this.at, measure, shared.bare, shared.order);
    this.table.hidden = !shared.table;
    this.table.replaceChildren(...(shared.table ? [tableOf(this.map)] : []));
  }

  tabs() {
    const { views } = this.model;
    if (views.length < 2) return;
    if (!this.views.firstChild) {
      const options = views.map((view) => [view.name, view.title]);
      const turn = (name) => this.app.set(this.index, this.home(name));
      this.views.append(choice("Attention of", `view${this.index}`, options, this.state.view, turn));
    }
    for (const input of this.views.querySelectorAll("input")) input.checked = input.value === this.state.view;
  }

  // A head that is chosen in the table, which has those of all views.
  show(name, layer, head) {
    const there = name === this.state.view ? {} : this.home(name);
    this.app.set(this.index, { ...there, view: name, layer, head });
  }

  // Another view, at the place where it was left.
  home(name) {
    this.left ??= {};
    this.left[this.state.view] = { ...this.state };
    const fresh = read(`#at${this.index}=${name}.`, this.app.models).panels[this.index];
    return this.left[name] ?? fresh;
  }
}

class App {
  constructor() {
    const page = readPage();
    this.models = page.models;
    this.state = read(location.hash, this.models);
    this.panels = this.models.map((model, i) => new Panel(this, model, i));
    // Models that are compared open on the same row of the same head.
    if (!location.hash) this.state.panels = this.panels.map((panel, i) => (i ? panel.following(this.panels[0]) : panel.state));
    this.bar = make("div", { className: "bar-of-choices" });
    const both = make("div", { className: this.panels.length > 1 ? "panels two" : "panels" });
    both.append(...this.panels.map((panel) => panel.node));
    document.getElementById("main").replaceChildren(this.bar, both);
    this.choices();
    addEventListener("hashchange", () => this.restore());
    addEventListener("popstate", () => this.restore());
    onScheme(() => this.draw());
    let width = innerWidth;
    addEventListener("resize", () => {
      if (innerWidth !== width) this.draw();
      width = innerWidth;
    });
    this.draw();
    document.documentElement.dataset.ready = "yes";
  }

  choices() {
    const all = (change) => (value) => this.share({ [change]: value });
    const { measure, as, bare, averaged, order, rowwise, apart, table, list } = this.state;
    const listed = (value) => this.share({ list: value ? "entropy" : "" });
    const together = tick("move both panels together", "together", !apart, (value) => this.share({ apart: !value }));
    this.bar.replaceChildren(
      choice("Draw as", "as", [["map", "map"], ["lines", "lines"]], as, all("as")),
      choice("Values", "measure", Object.entries(NAMES), measure, all("measure")),
      group(
        "Heads",
        tick("average the heads", "averaged", averaged, all("averaged")),
        tick("in numbers", "list", Boolean(list), listed),
      ),
      group(
        "Map",
        tick("hide the first token", "bare", bare, all("bare")),
        tick("colours by row", "rowwise", rowwise, all("rowwise")),
        tick("show as table", "table", table, all("table")),
      ),
      choice("Bars of the row", "order", [["place", "in order"], ["value", "largest first"]], order, all("order")),
      ...(this.panels.length > 1 ? [group("Panels", together)] : []),
    );
  }

  // A change of one panel. The others follow as far as they have such a view, layer and head, and the same tokens.
  set(index, change) {
    this.state.panels[index] = { ...this.state.panels[index], ...change };
    this.panels.forEach((panel, i) => {
      if (i !== index && !this.state.apart) this.state.panels[i] = panel.following(this.panels[index]);
    });
    this.keep("view" in change || "layer" in change);
    this.draw();
  }

  share(change) {
    Object.assign(this.state, change);
    this.keep(true);
    this.draw();
  }

  // Into the address: a step of Back for what changes the picture, none for a move of the cell.
  keep(step) {
    const hash = written(this.state);
    if (hash !== location.hash) history[step ? "pushState" : "replaceState"](null, "", hash);
  }

  restore() {
    if (written(this.state) === location.hash) return;
    this.state = read(location.hash, this.models);
    this.choices();
    this.draw();
  }

  draw() {
    for (const panel of this.panels) panel.draw();
  }
}

new App();
