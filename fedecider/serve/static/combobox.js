// A text field with a list of matches: the combobox pattern of the ARIA Authoring Practices Guide, list autocomplete
// with manual selection. Focus stays in the field; aria-activedescendant names the option.

import { announce, element } from "./elements.js";

const WAIT_MS = 150;

// search(text, signal) -> items with key and title; pick(item) when one is chosen; fail(error).
export function combobox(field, list, search, pick, fail) {
  let found = [];
  let active = -1;
  let timer = 0;
  let running = null;

  function show(open) {
    list.hidden = !open;
    field.setAttribute("aria-expanded", String(open));
    if (open) return;
    move(-1);
    found = [];
    list.replaceChildren();
  }

  function move(place) {
    active = place;
    [...list.children].forEach((option, at) => option.setAttribute("aria-selected", String(at === place)));
    if (place < 0) {
      field.removeAttribute("aria-activedescendant");
      return;
    }
    field.setAttribute("aria-activedescendant", list.children[place].id);
    list.children[place].scrollIntoView({ block: "nearest" });
  }

  function fill(items) {
    found = items;
    list.replaceChildren(
      ...items.map((item, at) => {
        const key = element("span", { class: "key" }, item.key);
        return element("li", { id: `match-${at}`, role: "option", "aria-selected": "false" }, item.title, " ", key);
      }),
    );
    move(-1);
    show(items.length > 0);
    announce(items.length === 1 ? "1 title matches" : `${items.length} titles match`);
  }

  function stop() {
    clearTimeout(timer);
    if (running) running.abort();
    running = null;
  }

  async function look() {
    stop();
    const own = new AbortController();
    running = own;
    try {
      const items = await search(field.value, own.signal);
      if (running === own) fill(items);
    } catch (error) {
      if (error.name !== "AbortError") fail(error);
    } finally {
      if (running === own) running = null;
    }
  }

  function close() {
    stop();
    show(false);
  }

  function choose(place) {
    const item = found[place];
    close();
    field.value = "";
    pick(item);
    field.focus();
  }

  field.addEventListener("input", () => {
    stop();
    if (field.value.trim()) timer = setTimeout(look, WAIT_MS);
    else close();
  });

  field.addEventListener("keydown", (event) => {
    if (event.isComposing || event.ctrlKey || event.metaKey) return;
    const open = !list.hidden;
    if (event.key === "ArrowDown" || event.key === "ArrowUp") {
      event.preventDefault();
      if (!open) look();
      else if (event.key === "ArrowDown") move((active + 1) % found.length);
      else move(active <= 0 ? found.length - 1 : active - 1);
    } else if (event.key === "Enter") {
      if (open || running || field.value.trim()) event.preventDefault(); // a title half typed asks for nothing
      if (open && active >= 0) choose(active);
    } else if (event.key === "Escape") {
      event.preventDefault();
      if (!open) field.value = "";
      close();
    } else if (event.key === "Tab") {
      close();
    }
  });

  field.addEventListener("blur", close);
  list.addEventListener("pointerdown", (event) => event.preventDefault()); // the field keeps the focus
  list.addEventListener("click", (event) => {
    const option = event.target.closest("[role=option]");
    if (option) choose([...list.children].indexOf(option));
  });

  return { close };
}
