// @ts-check
// The elements of the page, those that it has and those that its script makes.

/** @type {(id: string) => any} */
export const byId = (id) => document.getElementById(id);
/** @type {(selector: string) => any[]} */
export const query = (selector) => [...document.querySelectorAll(selector)];

// Make elements, as in `element("td.number", { title: "bytes" }, "3 MB")`, of elements and texts, never of markup.
const ABSENT = [false, null, undefined];
export const NOTHING = [...ABSENT, ""];
export function set(made, attributes) {
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) made[key] = value;
    else if (key === "style") Object.entries(value).forEach((property) => made.style.setProperty(...property));
    else if (!ABSENT.includes(value)) made.setAttribute(key, value);
  }
}
const makerOf = (space) => (what, ...content) => {
  const [name, ...classes] = what.split(".");
  const made = document.createElementNS(space, name);
  const attributes = content[0]?.constructor === Object ? content.shift() : {};
  set(made, { class: classes.join(" ") || null, ...attributes });
  made.append(...content.flat().filter((child) => !NOTHING.includes(child)));
  return made;
};
export const element = makerOf(document.body.namespaceURI);
export const shape = makerOf("http://www.w3.org/2000/svg");

// What keys do in a part of the page. `actions`: from the element that has the focus to {key: action}.
export function keys(host, actions) {
  host.onkeydown = (event) => {
    const action = event.altKey || event.ctrlKey || event.metaKey ? null : actions(event.target)?.[event.key];
    if (!action) return;
    event.preventDefault();
    event.stopPropagation();
    action();
  };
}

const pen = document.createElement("canvas").getContext("2d");
export function textWidth(words, font) {
  pen.font = `${font} system-ui, sans-serif`;
  return pen.measureText(words).width;
}
export const shortened = (words, most = 34) => (words.length > most ? `…${words.slice(1 - most)}` : words);
export const clamp = (least, value, most) => Math.max(least, Math.min(most, value));

export const button = (kind, onclick, ...words) => element(`button.${kind}`, { onclick }, ...words);

// A list, of which no more than `most` are shown; nothing if it is empty.
export function list(what, items, item = (one) => one, most = Infinity) {
  const shown = items.slice(0, most).map((one) => element("li", item(one)));
  if (items.length > most) shown.push(element("li", `and ${items.length - most} more`));
  return shown.length > 0 && element(what, ...shown);
}

// Terms with what is known of each: [name, value, ...].
export function terms(...rows) {
  const known = rows.filter(([, ...values]) => values.flat().some((value) => !NOTHING.includes(value)));
  return element("dl", ...known.flatMap(([name, ...values]) => [element("dt", name), element("dd", ...values)]));
}

// A bar of parts, {style: n}, `all` of which would fill it.
export function bar(what, side, parts, all, title) {
  const part = ([style, n]) => element(`i.${style}`, { style: { [side]: `${(100 * n) / all}%` } });
  return element(what, { title }, ...Object.entries(parts).map(part));
}
