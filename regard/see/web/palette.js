// Colours of values, by the table RAMPS that stands before all modules: regard/see/page.py has it.

const darkness = matchMedia("(prefers-color-scheme: dark)");

export function scheme() {
  return darkness.matches ? "dark" : "light";
}

export function ramp(measure) {
  const { plain, signed, masked } = RAMPS[scheme()];
  return { stops: measure === "score" ? signed : plain, masked: masked[0] };
}

export function onScheme(change) {
  darkness.addEventListener("change", change);
}

// The colour at `part` of a ramp, 0 to 1.
export function shade(stops, part) {
  const at = Math.min(Math.max(part, 0), 1) * (stops.length - 1);
  const i = Math.min(Math.floor(at), stops.length - 2);
  return stops[i].map((low, k) => Math.round(low + (stops[i + 1][k] - low) * (at - i)));
}

// Where a value lies on its ramp: from -most to most, or from 0 to `most` by its root, so that small weights show.
export function place(measure, value, most) {
  return measure === "score" ? (value / most + 1) / 2 : Math.sqrt(Math.max(value, 0) / most);
}

// Cells as a picture of one pixel each; what is masked or hidden has a ground of its own. `most`: the largest magnitude,
// of all cells or of each row.
export function picture(cells, rows, columns, measure, most) {
  const { stops, masked } = ramp(measure);
  const table = Array.from({ length: 256 }, (_, i) => shade(stops, i / 255));
  const image = new ImageData(columns, rows);
  for (let i = 0; i < cells.length; i++) {
    const known = !Number.isNaN(cells[i]);
    const top = typeof most === "number" ? most : most[Math.floor(i / columns)];
    const level = known ? Math.round(255 * Math.min(Math.max(place(measure, cells[i], top), 0), 1)) : 0;
    image.data.set(known ? table[level] : masked, 4 * i);
    image.data[4 * i + 3] = 255;
  }
  return image;
}

export function paint(canvas, image) {
  canvas.width = image.width;
  canvas.height = image.height;
  canvas.getContext("2d").putImageData(image, 0, 0);
}
