// The history: a list whose entries move up and down and leave, with focus on what comes next.

import { announce, byId, element } from "./elements.js";

let entries = [];

export const keys = () => entries.map((item) => item.key);

export function clear() {
  entries = [];
  draw();
}

export function add(item) {
  entries.push(item);
  draw();
  announce(`${item.title} picked, ${entries.length} in the history`);
}

function button(sign, text, enabled, act) {
  const made = element("button", { type: "button", "aria-label": text, "aria-disabled": String(!enabled) }, sign);
  made.addEventListener("click", () => enabled && act());
  return made;
}

function move(place, step) {
  const [item] = entries.splice(place, 1);
  entries.splice(place + step, 0, item);
  draw();
  byId("picked").children[place + step].querySelectorAll("button")[step < 0 ? 0 : 1].focus();
  announce(`${item.title} is now number ${place + step + 1} of ${entries.length}`);
}

function remove(place) {
  const [item] = entries.splice(place, 1);
  draw();
  const next = byId("picked").children[Math.min(place, entries.length - 1)];
  (next ? next.querySelectorAll("button")[2] : byId("title")).focus();
  announce(`${item.title} removed, ${entries.length} left`);
}

function draw() {
  byId("picked-empty").hidden = entries.length > 0;
  byId("picked").replaceChildren(
    ...entries.map((item, at) =>
      element(
        "li",
        {},
        element(
          "span",
          { class: "entry" },
          element("span", { class: "name" }, item.title),
          element(
            "span",
            { class: "moves" },
            button("↑", `Move up: ${item.title}`, at > 0, () => move(at, -1)),
            button("↓", `Move down: ${item.title}`, at + 1 < entries.length, () => move(at, 1)),
            button("×", `Remove: ${item.title}`, true, () => remove(at)),
          ),
        ),
      ),
    ),
  );
}
