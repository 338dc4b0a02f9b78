// Recommendations and where they come from.

import { bar, byId, element } from "./elements.js";

const FEATURES = {
  model: "The language model with the client's adapter.",
  text: "Titles and descriptions that are near those of the history.",
  counts: "What this client's users had near the items of the history.",
  successors: "What this client's users had right after the newest items of the history.",
  followers: "What they had right after any item of the history.",
  popularity: "How many events the item has in the counts, whoever asks.",
  "bought before": "Whether the history holds the item.",
  habit: "How often and how lately the history holds the item.",
};

const SMALLEST = 0.01; // what nobody would act on

const largest = (values) =>
  Object.entries(values)
    .filter(([, value]) => Math.abs(value) >= SMALLEST)
    .sort(([, one], [, other]) => Math.abs(other) - Math.abs(one));

const signed = ([name, value]) => `${name} ${value < 0 ? "\u2212" : "+"}${Math.abs(value).toFixed(2)}`;

function recommended(item) {
  const score = element("span", { class: "number" }, item.score.toFixed(3));
  const name = element("span", { class: "name" }, item.title);
  const made = element("li", {}, name, element("div", { class: "soft" }, `${item.key}, score `, score));
  if (item.picture) made.prepend(picture(item.picture));
  const added = largest(item.features);
  if (added.length) made.append(element("div", { class: "soft features" }, added.map(signed).join(", ")));
  return made;
}

function picture(address) {
  const made = element("img", { src: address, alt: "", class: "picture", loading: "lazy", referrerpolicy: "no-referrer" });
  made.addEventListener("error", () => made.remove());
  return made;
}

export function show(answer) {
  byId("answer-heading").textContent = `Next in ${answer.domain}`;
  byId("notes").replaceChildren(...answer.notes.map((note) => element("li", {}, note)));
  byId("notes").hidden = answer.notes.length === 0;
  byId("found").replaceChildren(...answer.items.map(recommended));
  const names = new Set(answer.items.flatMap((item) => largest(item.features).map(([name]) => name)));
  const features = Object.keys(FEATURES).filter((name) => names.has(name));
  byId("features").hidden = features.length === 0;
  byId("features-text").hidden = features.length === 0;
  byId("feature-texts").replaceChildren(
    ...features.flatMap((name) => [element("dt", {}, name), element("dd", {}, FEATURES[name])]),
  );
  const alpha = largest(answer.alpha_shares);
  byId("alpha-text").hidden = alpha.length === 0;
  byId("alpha-none").hidden = alpha.length > 0;
  byId("alpha").replaceChildren(...alpha.map(([name, share]) => bar(name, share)));
  byId("alpha").hidden = alpha.length === 0;
  byId("answer").hidden = false;
  byId("answer-heading").focus();
}

export function hide() {
  byId("answer").hidden = true;
}
