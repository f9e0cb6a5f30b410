// Elements by function call. Text is only ever put in as text nodes, so that no token can be markup.

export function make(tag, given = {}, ...inside) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(given)) {
    if (name in node && !name.startsWith("aria")) node[name] = value;
    else node.setAttribute(name, value);
  }
  node.append(...inside);
  return node;
}

// Says a sentence to screen readers.
export function say(text) {
  document.getElementById("live").textContent = text;
}

// A choice of one out of several, as radio buttons: [[value, label], ...].
export function choice(legend, name, options, chosen, change) {
  const labels = options.map(([value, label]) => {
    const given = { type: "radio", name, value, checked: value === chosen };
    const input = make("input", { ...given, onchange: () => change(value) });
    return make("label", {}, input, make("span", {}, label));
  });
  return group(legend, ...labels);
}

// Controls that belong together, under a name.
export function group(legend, ...inside) {
  return make("fieldset", { className: "group" }, make("legend", {}, legend), ...inside);
}

export function tick(label, name, chosen, change) {
  const input = make("input", { type: "checkbox", name, checked: chosen });
  input.onchange = () => change(input.checked);
  return make("label", { className: "tick" }, input, make("span", {}, label));
}

// 0.4213, -12.346, 1.2e-7: as many places as are worth reading.
export function number(value, places = 4) {
  if (value === -Infinity) return "−∞";
  if (!Number.isFinite(value)) return "–";
  const small = value !== 0 && Math.abs(value) < 0.5 / 10 ** places;
  const text = small ? value.toExponential(1) : value.toFixed(places);
  return text.replace("-", "−");
}

// A token in a sentence; what is written from right to left stays apart from the rest.
export function quoted(token) {
  return /[\u0590-\u08ff\ufb1d-\ufefc]/.test(token) ? `“\u2068${token}\u2069”` : `“${token}”`;
}

export function short(text, most) {
  const letters = [...text];
  return letters.length > most ? letters.slice(0, most - 1).join("") + "…" : text;
}
