// Search over headings and words (INDEX: address, page, heading, text, how far behind others it stands), copying of
// code, links to headings.
"use strict";

const root = document.body.dataset.root + "/";
const query = document.getElementById("query");
const hits = document.getElementById("hits");

// As docs/website.py writes the words: small letters and digits, singular.
function plain(text) {
  const found = text.toLowerCase().replaceAll("isation", "ization").match(/[\p{L}\p{N}]+/gu) || [];
  return found.map((word) => word.replace(/(?<=[\p{L}\p{N}]{3})(?<!s)s$/u, ""));
}

// The words of each section, made when the first search is.
let words_of;
function index() {
  words_of ||= INDEX.map(([, page, heading, text]) => ` ${[...new Set(plain(`${page} ${heading} ${text}`))].join(" ")} `);
  return words_of;
}

// Sections that have every word, the last one perhaps only begun, or else most of them: those whose heading has them first.
function search(text) {
  const words = plain(text);
  if (!words.length) return [];
  const count = index().map((row) => words.filter((word) => row.includes(" " + word)).length);
  const most = Math.max(1, ...count), rows = [];
  INDEX.forEach(([address, page, heading, text, last], at) => {
    if (count[at] < most) return;
    const said = plain(heading), title = plain(page), has = index()[at];
    let score = 0;
    for (const word of words) {
      score += has.includes(` ${word} `) ? 1 : 0;
      score += said.includes(word) ? 8 : said.some((other) => other.startsWith(word)) ? 3 : 0;
      score += title.includes(word) ? 5 : 0;
    }
    if (said.join(" ") === words.join(" ")) score += 30;
    if (page === heading && words.every((word) => said.includes(word))) score += 40;
    if (title.join(" ").startsWith(words.join(" "))) score += 6;
    rows.push([score - last - said.length / 10, at, address, page, heading, snippet(text, words)]);
  });
  return rows.sort((a, b) => b[0] - a[0] || a[1] - b[1]).slice(0, 30);
}

// The text around the first place that has one of the words, in pieces: every second one is such a word.
function snippet(text, words) {
  const pattern = new RegExp(`(?<![\\p{L}\\p{N}])((?:${words.join("|").replaceAll("ization", "i[sz]ation")})[\\p{L}\\p{N}]*)`, "giu");
  const at = Math.max(text.search(pattern), 0), from = at < 60 ? 0 : text.indexOf(" ", at - 60) + 1;
  const cut = text.slice(from, from + 160);
  return `${from ? "… " : ""}${cut}${text.length > from + 160 ? " …" : ""}`.split(pattern);
}

function show() {
  const found = search(query.value);
  hits.replaceChildren();
  hits.hidden = !query.value.trim();
  for (const [, , address, page, heading, around] of found) {
    const link = document.createElement("a"), small = document.createElement("small"), row = document.createElement("li");
    link.href = root + address;
    link.textContent = heading;
    small.textContent = page;
    if (page !== heading) link.append(small);
    const text = document.createElement("p");
    around.forEach((piece, i) => {
      const part = document.createElement(i % 2 ? "mark" : "span");
      part.textContent = piece;
      text.append(part);
    });
    link.append(text);
    row.append(link);
    hits.append(row);
  }
  if (!found.length) {
    const none = document.createElement("p");
    none.textContent = "No section has any of these words.";
    hits.append(none);
  }
}

function move(step) {
  const links = [...hits.querySelectorAll("a")];
  const at = links.indexOf(document.activeElement) + step;
  (links[at] || query).focus();
}

query.addEventListener("input", show);
query.addEventListener("focus", show);
document.addEventListener("keydown", (event) => {
  const typing = /^(INPUT|TEXTAREA|SELECT)$/.test(document.activeElement.tagName);
  if (event.key === "/" && !typing) { query.focus(); query.select(); event.preventDefault(); }
  if (event.key === "Escape") { hits.hidden = true; query.blur(); }
  if (hits.hidden) return;
  if (event.key === "ArrowDown") { move(1); event.preventDefault(); }
  if (event.key === "ArrowUp") { move(-1); event.preventDefault(); }
  if (event.key === "Enter" && document.activeElement === query) hits.querySelector("a")?.click();
});
document.addEventListener("click", (event) => {
  if (!event.target.closest(".search") || event.target.closest("#hits a")) hits.hidden = true;
});

for (const heading of document.querySelectorAll("main :is(h2, h3)[id]")) {
  const link = document.createElement("a");
  link.className = "here";
  link.href = "#" + heading.id;
  link.textContent = "#";
  link.setAttribute("aria-label", "Link to " + heading.textContent);
  heading.append(link);
}
for (const block of document.querySelectorAll("main pre:not(.code)")) {
  const button = document.createElement("button");
  button.className = "copy";
  button.textContent = "Copy";
  button.addEventListener("click", () => {
    const text = block.querySelector("code").innerText.replace(/^\$ /gm, "");
    navigator.clipboard?.writeText(text).then(() => { button.textContent = "Copied"; });
  });
  block.append(button);
}
// Below the width of two columns the list of pages is closed.
if (innerWidth < 992) document.querySelector("nav .menu").open = false;
