// Colours of values: lightness runs one way from the page's ground, so they read without hue; signed values run to
// blue below zero and to orange above it.

const RAMPS = {
  light: {
    plain: [[255, 255, 255], [205, 232, 190], [90, 180, 180], [44, 100, 160], [26, 16, 62]],
    signed: [[10, 60, 140], [120, 170, 225], [250, 250, 250], [240, 170, 100], [160, 70, 0]],
    masked: [226, 229, 233],
  },
  dark: {
    plain: [[20, 23, 26], [44, 62, 122], [24, 134, 142], [116, 192, 92], [250, 236, 120]],
    signed: [[130, 195, 255], [45, 95, 150], [20, 23, 26], [150, 85, 30], [255, 180, 100]],
    masked: [52, 57, 63],
  },
};
const darkness = matchMedia("(prefers-color-scheme: dark)");

export function ramp(measure) {
  const scheme = RAMPS[darkness.matches ? "dark" : "light"];
  return { stops: measure === "score" ? scheme.signed : scheme.plain, masked: scheme.masked };
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
