// Search over headings and words (INDEX: address, page, heading, words), copying of code, links to headings.
"use strict";

const root = document.body.dataset.root + "/";
const query = document.getElementById("query");
const hits = document.getElementById("hits");

// As docs/website.py writes the words: small letters and digits, singular.
function plain(text) {
  const found = text.toLowerCase().replaceAll("isation", "ization").match(/[\p{L}\p{N}]+/gu) || [];
  return found.map((word) => word.replace(/(?<=[\p{L}\p{N}]{3})(?<!s)s$/u, ""));
}

// Sections that have every word, the last one perhaps only begun, or else most of them: those whose heading has them first.
function search(text) {
  const words = plain(text);
  if (!words.length) return [];
  const count = INDEX.map((row) => words.filter((word) => row[3].includes(" " + word)).length);
  const most = Math.max(1, ...count), rows = [];
  INDEX.forEach(([address, page, heading, all], at) => {
    if (count[at] < most) return;
    const said = plain(heading), title = plain(page), has = ` ${all} `;
    let score = 0;
    for (const word of words) {
      score += has.includes(` ${word} `) ? 1 : 0;
      score += said.includes(word) ? 8 : said.some((other) => other.startsWith(word)) ? 3 : 0;
      score += title.includes(word) ? 5 : 0;
    }
    if (said.join(" ") === words.join(" ")) score += 30;
    if (page === heading && words.every((word) => said.includes(word))) score += 40;
    if (title.join(" ").startsWith(words.join(" "))) score += 6;
    rows.push([score - said.length / 10, at, address, page, heading, all]);
  });
  return rows.sort((a, b) => b[0] - a[0] || a[1] - b[1]).slice(0, 30);
}

function show() {
  const found = search(query.value);
  hits.replaceChildren();
  hits.hidden = !query.value.trim();
  for (const [, , address, page, heading] of found) {
    const link = document.createElement("a"), small = document.createElement("small"), row = document.createElement("li");
    link.href = root + address;
    link.textContent = heading;
    small.textContent = page;
    if (page !== heading) link.append(small);
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
