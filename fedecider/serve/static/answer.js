// Recommendations and where they come from.

import { bar, byId, element } from "./elements.js";

const EXPERTS = {
  counts: "What this client's users had near the titles of the history.",
  text: "Titles and descriptions that are near those of the history.",
  agreement: "What counts and texts both find likely.",
  model: "The language model with the client's adapter.",
  consensus: "What the model and all others together find likely.",
  popularity: "How many events the item has in the counts, whoever asks.",
  uniform: "The same for every item, a floor.",
};

const SMALLEST = 0.01; // shares that nobody would act on, as that of the floor

const largest = (shares) =>
  Object.entries(shares).filter(([, share]) => share >= SMALLEST).sort(([, one], [, other]) => other - one);

function recommended(item) {
  const score = element("span", { class: "number" }, item.score.toFixed(3));
  const name = element("span", { class: "name" }, item.title);
  const made = element("li", {}, name, element("div", { class: "soft" }, `${item.key}, score `, score));
  if (item.picture) made.prepend(picture(item.picture));
  const shares = largest(item.expert_shares);
  if (shares.length) {
    const label = `Shares of the experts in ${item.title}`;
    made.append(element("ul", { class: "bars", "aria-label": label }, ...shares.map(([name, share]) => bar(name, share))));
  }
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
  const experts = [...new Set(answer.items.flatMap((item) => largest(item.expert_shares).map(([name]) => name)))];
  byId("experts").hidden = experts.length === 0;
  byId("shares-text").hidden = experts.length === 0;
  byId("expert-texts").replaceChildren(
    ...experts.flatMap((name) => [element("dt", {}, name), element("dd", {}, EXPERTS[name] || "")]),
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
