// The page: loads the models, offers the tools, and updates the live numbers.

import { call } from "./api.js";
import { classify } from "./classify.js";
import { counted, number } from "./elements.js";
import { explain } from "./explain.js";
import * as key from "./key.js";
import { Live } from "./live.js";
import { Models } from "./models.js";
import { rerank } from "./rerank.js";
import { similarity } from "./similarity.js";
import { Tabs } from "./tabs.js";
import { tokens } from "./tokens.js";

const at = (id) => document.getElementById(id);
const tools = [similarity, rerank, classify, tokens, explain].map((make) => make(at(make.name)));
const RARE = ["tokens", "explain"];
const tabs = new Tabs(document.querySelector("[role=tablist]"));
const models = new Models(at("model-list"), at("models-note"));
const live = new Live({ heard, lost });
const asked = tabs.address;
tabs.open(tabs.named(asked) ?? tabs.shown[0]);
let untouched = tabs.address;

/** Load the models, then poll the statistics. */
async function connect() {
  let cards, indexes;
  try {
    const answers = await Promise.all([call("v1/models"), call("v1/indexes")]);
    [cards, indexes] = answers.map((answer) => answer.content.data);
    indexes = indexes.filter(({ state }) => state === "ready");
  } catch (error) {
    if (error.status === 401) return lock(key.get() ? "The server does not accept this key." : "");
    pulse("off", "Not connected");
    for (const tool of tools) tool.lock("Nothing can be tried while the server does not answer.");
    say(`${error.message} `, "Try again");
    at("models-note").textContent = "Not known while the server does not answer.";
    return undefined;
  }
  at("key-form").hidden = true;
  at("trouble").hidden = true;
  at("forget").hidden = !key.get();
  models.show(cards);
  for (const tool of tools) tool.offer(cards, indexes);
  offerTabs();
  return live.start();
}

/** Open the first tool with a model, unless the address names another; without a model for it a rare tool is hidden. */
function offerTabs() {
  for (const { panel, cards } of tools) {
    if (RARE.includes(panel.id)) at(`tab-${panel.id}`).hidden = !cards.length;
  }
  if (tabs.address === untouched) tabs.open(tabs.named(asked) ?? tabs.named(tools.find((tool) => tool.cards.length)?.panel.id));
  untouched = null; // the user chooses from now on
}

/** Show the key form, with what was wrong with the last key. */
function lock(words) {
  live.stop();
  key.set("");
  at("forget").hidden = true;
  pulse("off", "Locked");
  models.show([]);
  for (const tool of tools) tool.lock("Type the API key first.");
  at("models-note").textContent = "Shown once a key was given.";
  at("key-form").hidden = false;
  at("key-error").textContent = words;
  at("key").focus();
}

function heard(stats) {
  pulse("on", `${rate(stats.requests_per_second)} requests/s · up ${duration(stats.uptime_seconds)}`);
  models.sample(stats.models);
}

function lost(error) {
  if (error.status === 401) return lock("The server does not accept this key any more.");
  return pulse("off", error.status ? "No live numbers" : "Not connected");
}

function pulse(state, words) {
  at("pulse-dot").dataset.state = state;
  at("pulse-words").textContent = words;
}

function say(words, action) {
  const button = document.createElement("button");
  button.type = "button";
  button.className = "quiet";
  button.textContent = action;
  button.addEventListener("click", connect);
  at("trouble").replaceChildren(words, button);
  at("trouble").hidden = false;
}

function rate(value) {
  return number(value, value < 10 ? 1 : 0);
}

function duration(seconds) {
  const minutes = Math.floor(seconds / 60);
  if (minutes < 1) return counted(Math.floor(seconds), "second");
  if (minutes < 60) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h ${minutes % 60} min` : counted(Math.floor(hours / 24), "day");
}

at("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const typed = at("key").value.trim();
  const fault = key.fault(typed);
  at("key-error").textContent = fault;
  if (fault) return;
  key.set(typed);
  at("key").value = "";
  connect();
});

at("forget").addEventListener("click", () => {
  key.set("");
  connect();
});

document.addEventListener("millpond:locked", () => lock("The server does not accept this key any more."));

connect();
