// Elements from data. Texts are set as texts, so that no title is ever read as markup.

export const byId = (id) => document.getElementById(id);

export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

export const percent = (share) => `${(100 * share).toFixed(1)} %`;

// One bar: a name, its share as a number, and a drawing of the number.
export function bar(name, share) {
  const fill = element("span", { class: "fill" });
  fill.style.width = `${Math.max(0, Math.min(1, share)) * 100}%`;
  return element(
    "li",
    {},
    element("span", { class: "label" }, element("span", {}, name), element("span", { class: "number" }, percent(share))),
    element("span", { class: "track", "aria-hidden": "true" }, fill),
  );
}

// What assistive technology reads out without a change of focus.
export function announce(text) {
  byId("status").textContent = text;
}
