// Words of a text above those of its translation, and lines between those that belong together.

import { make } from "./dom.js";

const SVG = "http://www.w3.org/2000/svg";

export class Alignment {
  // `pairs`: [source word, target word], counted from 0 between white space.
  constructor(source, target, pairs) {
    this.pairs = pairs;
    this.sides = [source, target].map((text, side) => text.split(/\s+/).filter(Boolean).map((word, i) => this.word(word, side, i)));
    this.lines = document.createElementNS(SVG, "svg");
    this.lines.setAttribute("aria-hidden", "true");
    const names = ["words of the text", "words of the translation"];
    const rows = this.sides.map((words, side) => make("div", { className: "words", dir: "auto", role: "toolbar", "aria-label": `${names[side]}; arrow keys move` }, ...words));
    rows.forEach((row, side) => {
      if (this.sides[side][0]) this.sides[side][0].tabIndex = 0;
      row.onkeydown = (event) => this.key(event, side);
    });
    this.figure = make("div", { className: "aligned" }, this.lines, ...rows);
    this.line = make("p", { className: "readout" }, "Point at a word, or move with the arrow keys.");
    this.node = make("div", {}, make("h2", {}, "Which word belongs to which"), this.line, this.figure);
    new ResizeObserver(() => this.draw()).observe(this.figure);
  }

  word(text, side, i) {
    const partners = this.pairs.filter((pair) => pair[side] === i).map((pair) => pair[1 - side]);
    const node = make("span", { className: "word", role: "button", tabIndex: -1 }, text);
    node.onmouseenter = node.onfocus = node.onclick = () => this.choose(side, i, partners);
    return node;
  }

  // Lights up a word and those that belong to it, and says so.
  choose(side, i, partners) {
    this.chosen = (pair) => pair[side] === i;
    this.sides.forEach((words, s) => words.forEach((node, k) => node.classList.toggle("lit", s === side ? k === i : partners.includes(k))));
    const others = partners.map((k) => `“${this.sides[1 - side][k]?.textContent}”`).join(", ");
    this.line.textContent = `“${this.sides[side][i].textContent}”: ${others || "no word of its own"}`;
    this.sides[side][i].setAttribute("aria-label", this.line.textContent);
    this.draw();
  }

  key(event, side) {
    const words = this.sides[side];
    const i = words.indexOf(event.target);
    const to = { ArrowLeft: i - 1, ArrowRight: i + 1, Home: 0, End: words.length - 1 }[event.key];
    if (to === undefined || !words[to]) return;
    event.preventDefault();
    words.forEach((word, k) => (word.tabIndex = k === to ? 0 : -1));
    words[to].focus();
  }

  draw() {
    const box = this.figure.getBoundingClientRect();
    this.lines.setAttribute("viewBox", `0 0 ${box.width} ${box.height}`);
    this.lines.replaceChildren();
    for (const pair of this.pairs) {
      const [from, to] = pair.map((i, side) => this.sides[side][i]?.getBoundingClientRect());
      if (!from || !to) continue;
      const path = document.createElementNS(SVG, "path");
      const [x, y] = [from.left + from.width / 2 - box.left, from.bottom - box.top];
      const [u, v] = [to.left + to.width / 2 - box.left, to.top - box.top];
      path.setAttribute("d", `M${x} ${y}C${x} ${(y + v) / 2} ${u} ${(y + v) / 2} ${u} ${v}`);
      path.setAttribute("class", this.chosen?.(pair) ? "strong" : "");
      this.lines.append(path);
    }
  }
}
