// The page: the domain, the history, the question, the answer.

import * as answer from "./answer.js";
import { combobox } from "./combobox.js";
import { announce, byId, element } from "./elements.js";
import * as picked from "./picked.js";
import * as service from "./service.js";

const WRONG_KEY = 401;
let known = [];
let question = 0; // the last one; answers of earlier ones come too late

function tell(text) {
  byId("alert").textContent = text;
  byId("alert").hidden = !text;
}

function fail(error) {
  tell(`Not answered: ${error.message}.`);
  if (error.status === WRONG_KEY) {
    byId("key-form").hidden = false;
    byId("key").focus();
  }
}

function tellDomain() {
  const { num_items: items, ensemble } = known.find((one) => one.name === byId("domain").value);
  byId("domain-items").textContent = items;
  byId("domain-ensemble").textContent = ensemble ? "with" : "without";
}

async function start() {
  try {
    if (await service.needsKey()) {
      byId("key-form").hidden = false;
      return;
    }
    const told = await service.domains();
    known = told.domains;
    byId("k").max = told.max_k;
  } catch (error) {
    fail(error);
    return;
  }
  tell("");
  byId("key-form").hidden = true;
  byId("domain").replaceChildren(...known.map((one) => element("option", { value: one.name }, one.name)));
  byId("ask").hidden = false;
  tellDomain();
}

const titles = combobox(
  byId("title"),
  byId("matches"),
  async (text, signal) => {
    const found = await service.items(byId("domain").value, text, signal);
    tell("");
    return found;
  },
  picked.add,
  fail,
);

byId("domain").addEventListener("change", () => {
  titles.close();
  byId("title").value = "";
  picked.clear();
  question += 1;
  answer.hide();
  tellDomain();
});

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  service.useKey(byId("key").value.trim());
  byId("key").value = "";
  start();
});

byId("ask").addEventListener("submit", async (event) => {
  event.preventDefault();
  const history = picked.keys();
  if (!history.length) {
    tell("Pick at least one title first.");
    byId("title").focus();
    return;
  }
  const request = { domain: byId("domain").value, history, k: byId("k").valueAsNumber, repeats: byId("repeats").value };
  announce("Asking the model");
  question += 1;
  const own = question;
  try {
    const found = await service.recommend(request);
    if (own !== question) return;
    tell("");
    answer.show(found);
    announce(`${found.items.length} recommendations`);
  } catch (error) {
    if (own === question) fail(error);
  }
});

start();
