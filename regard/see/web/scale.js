// What the colours of a map mean.

import { NAMES } from "./data.js";
import { make } from "./dom.js";
import { paint, ramp, shade } from "./palette.js";

export class Scale {
  constructor() {
    this.ramp = make("canvas", { className: "ramp", "aria-hidden": "true" });
    this.ends = [make("span"), make("span")];
    this.words = make("span");
    const bar = make("span", { className: "colours" }, this.ends[0], this.ramp, this.ends[1]);
    this.node = make("p", { className: "scale" }, bar, this.words);
  }

  // `most`: the value of the last colour; `rowwise`: each row has its own, and this is the chosen one's.
  draw(measure, most, rowwise) {
    const { stops } = ramp(measure);
    const image = new ImageData(128, 1);
    for (let i = 0; i < 128; i++) image.data.set([...shade(stops, i / 127), 255], 4 * i);
    paint(this.ramp, image);
    const signed = measure === "score";
    const text = (value) => String(Number(value.toPrecision(3))).replace("-", "−");
    this.ends[0].textContent = signed ? text(-most) : "0";
    this.ends[1].textContent = text(most);
    const middle = signed ? "" : `; the middle is ${text(most / 4)}`;
    this.words.textContent = `${NAMES[measure]}${middle}${rowwise ? ", in the chosen row" : ""}; grey: masked or hidden`;
  }
}
