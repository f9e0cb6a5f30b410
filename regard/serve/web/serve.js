// The page of the server: which model, which of the things it can do; both are in the address.

import { ask, useKey } from "./api.js";
import { make } from "./dom.js";
import { Inside } from "./inside.js";
import { Chat, Classify, Completion, Fill, Translation } from "./tasks.js";

// By the names that /v1/models has for them, in the order of the tabs.
const TASKS = {
  chat: ["Chat", Chat],
  translations: ["Translate", Translation],
  completions: ["Complete", Completion],
  classify: ["Classify", Classify],
  fill: ["Fill", Fill],
};
const [picker, tabs, main, trouble] = ["model", "tasks", "main", "trouble"].map((id) => document.getElementById(id));
const inside = new Inside(document.getElementById("inside"));
const opened = new Map(); // what was written under each model and task stays
let models = [];

function offered(model) {
  return Object.keys(TASKS).filter((task) => model.serves.includes(task));
}

// "#chat/model": what is not there falls back to the first that is.
function show() {
  const [task, ...name] = decodeURIComponent(location.hash.slice(1)).split("/");
  const model = models.find(({ id }) => id === name.join("/")) ?? models.find((each) => offered(each).includes(task)) ?? models[0];
  if (!model) return;
  const tasks = offered(model);
  const chosen = tasks.includes(task) ? task : tasks[0];
  picker.value = model.id;
  const within = tabs.contains(document.activeElement);
  tabs.replaceChildren(...tasks.map((each) => tab(each, model, each === chosen)));
  if (within) document.getElementById(`tab-${chosen}`)?.focus();
  if (!chosen) return void main.replaceChildren(make("p", {}, `${model.id} gives vectors, which only programs read: POST /v1/embeddings.`));
  const key = `${chosen}/${model.id}`;
  if (!opened.has(key)) opened.set(key, new TASKS[chosen][1]({ model, look: (asked) => inside.open(asked) }));
  if (main.firstChild === opened.get(key).node) return;
  inside.node.hidden = true;
  main.replaceChildren(Object.assign(opened.get(key).node, { id: "panel", role: "tabpanel" }));
  main.firstChild.setAttribute("aria-labelledby", `tab-${chosen}`);
  document.title = `${TASKS[chosen][0]}: ${model.id} – regard`;
}

function tab(task, model, chosen) {
  const go = () => (location.hash = `${task}/${encodeURIComponent(model.id)}`);
  const given = { type: "button", role: "tab", id: `tab-${task}`, tabIndex: chosen ? 0 : -1, "aria-selected": String(chosen), "aria-controls": "panel" };
  return make("button", { ...given, onclick: go }, TASKS[task][0]);
}

tabs.onkeydown = (event) => {
  const all = [...tabs.children];
  const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (!step) return;
  event.preventDefault();
  all[(all.indexOf(event.target) + step + all.length) % all.length].click();
};

// Models as the server lists them; a key is asked for where it is needed.
async function load() {
  try {
    models = (await ask("/v1/models")).data;
    trouble.hidden = true;
  } catch (error) {
    const again = make("button", { type: "button", onclick: load }, "Try again");
    trouble.replaceChildren(`${error.message} `, again);
    trouble.hidden = false;
    if (error.status === 401) document.getElementById("key").focus();
    return;
  }
  picker.replaceChildren(...models.map(({ id }) => make("option", { value: id }, id)));
  show();
  document.documentElement.dataset.ready = "yes";
}

picker.onchange = () => {
  const task = location.hash.slice(1).split("/")[0];
  location.hash = `${task}/${encodeURIComponent(picker.value)}`;
};
document.getElementById("key").onchange = (event) => {
  useKey(event.target.value);
  load();
};
document.getElementById("access").onsubmit = (event) => event.preventDefault();
addEventListener("hashchange", show);
load();
