"use strict";

const { nodes, views, meanings } = JSON.parse(document.getElementById("data").textContent);
const LOW = ["bfloat16", "float16"];
const CHAIN = 8; // reasons that are followed up
const byId = (id) => document.getElementById(id);
const byKey = new Map(nodes.map((node, i) => [`${node.graph}:${node.key}`, i]));
const placeOf = (key, graph) => byKey.get(`${graph}:${key}`) ?? byKey.get(`0:${key}`);
const readers = nodes.map(() => []);
nodes.forEach((node, i) => node.reads.forEach((read) => read.kind === "node" && readers[placeOf(read.value, node.graph)]?.push(i)));

let module = "";
let chosen = -1;
let tab = "graph";
let words = [];

// What is shown is put together of elements and texts, never of markup.
function element(name, attributes, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes || {})) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value !== false) made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

const inside = (node, path) => path === "" || node.module === path || node.module.startsWith(`${path}.`);
const textOf = (node) =>
  [node.key, node.op, node.colour, node.reason_code, node.reason, node.file, `${node.file}:${node.line}`, node.code].join("\n").toLowerCase();
const texts = nodes.map(textOf);
const matches = (i) => words.every((word) => texts[i].includes(word));
const styleOf = (dtype) => (LOW.includes(dtype) ? "low" : dtype === "float32" ? "fp32" : "other");
const place = (node) => (node.file ? `${node.file}:${node.line}` : "");
const amount = (n, unit) => (n === null ? "not known" : n >= 1e9 ? `${(n / 1e9).toPrecision(3)} G${unit}` : n >= 1e6 ? `${(n / 1e6).toPrecision(3)} M${unit}` : n >= 1e3 ? `${(n / 1e3).toPrecision(3)} k${unit}` : `${n} ${unit}`);
const dtype = (name) => (name ? element("span", { class: `dtype ${styleOf(name)}` }, name) : "–");
const link = (i, text, follow = true) => element("button", { type: "button", class: "link", onclick: () => chooseNode(i, follow) }, text || nodes[i].key);
const keyOf = (node) => (several ? `${node.graph}:${node.key}` : node.key);
// The key of a node as seen from the chosen module.
const shortOf = (node) => (!words.length && module && node.key.startsWith(`${module}.`) ? keyOf(node).replace(`${module}.`, "") : keyOf(node));
const several = new Set(nodes.map((node) => node.graph)).size > 1;

function listed() {
  // A search goes through the whole model, else what is in the chosen module is shown.
  const all = nodes.map((_, i) => i);
  return words.length ? all.filter(matches) : all.filter((i) => inside(nodes[i], module));
}

function table(caption, heads, rows) {
  return element("table", { class: "nodes" }, element("caption", {}, caption),
    element("thead", {}, element("tr", {}, ...heads.map((head) => element("th", { scope: "col" }, head)))),
    element("tbody", {}, ...rows));
}

function nodeTable() {
  const found = listed();
  const rows = found.map((i) => {
    const node = nodes[i];
    return element("tr", { "data-node": i, class: i === chosen ? "chosen" : "" },
      element("th", { scope: "row" }, link(i, shortOf(node), false)), element("td", {}, dtype(node.colour)),
      element("td", {}, node.casts.length ? `${node.casts.length}` : ""), element("td", {}, `${node.reason_code}: ${node.reason}`),
      element("td", {}, element("code", {}, place(node))));
  });
  const where = words.length ? "in the whole model" : module ? `in ${module}` : "in the model";
  byId("node-table").replaceChildren(table(`${found.length} nodes ${where}`, ["node", "runs in", "casts", "why", "line"], rows));
}

function compareTable() {
  const against = byId("which").value;
  const found = listed().filter((i) => against === "all" || nodes[i][against] !== nodes[i].colour);
  const rows = found.map((i) => {
    const node = nodes[i];
    const differs = node.autocast !== node.colour;
    return element("tr", { class: differs ? "differs" : "" },
      element("th", { scope: "row" }, link(i, shortOf(node), false), differs ? element("span", { class: "mark" }, " differs") : null),
      element("td", {}, dtype(node.original)), element("td", {}, dtype(node.autocast)), element("td", {}, dtype(node.colour)),
      element("td", {}, differs ? `${node.reason_code}: ${node.reason}` : ""));
  });
  const differing = found.filter((i) => nodes[i].autocast !== nodes[i].colour).length;
  byId("compare-table").replaceChildren(table(`${found.length} nodes, ${differing} of them in another dtype than under autocast`,
    ["node", "FP32", "autocast", "this policy", "why it differs"], rows));
}

function fill() {
  if (tab === "nodes") nodeTable();
  if (tab === "compare") compareTable();
}

// Reasons, each with those it follows from inside.
function chain(i, left, seen) {
  const node = nodes[i];
  const list = node.causes.map((key) => {
    const cause = placeOf(key, node.graph);
    if (cause === undefined) return element("li", {}, key);
    if (seen.has(cause)) return element("li", {}, link(cause), " (above)");
    seen.add(cause);
    const says = element("span", {}, ` ${nodes[cause].colour}, ${nodes[cause].reason_code}: ${nodes[cause].reason}`);
    return element("li", {}, link(cause), says, left > 0 ? chain(cause, left - 1, seen) : null);
  });
  return list.length ? element("ul", { class: "chain" }, ...list) : null;
}

const term = (name, ...values) => (values.some((v) => v !== null && v !== "") ? [element("dt", {}, name), element("dd", {}, ...values)] : []);
const several_links = (found) => found.flatMap((i, at) => (at ? [", ", link(i)] : [link(i)]));

function panel() {
  const node = nodes[chosen];
  const casts = node.casts.map((cast) => {
    const size = cast.bytes === null ? "" : `, ${amount(cast.bytes, "B")} moved`;
    const shared = cast.shared > 1 ? `, read by ${cast.shared}` : "";
    return element("li", {}, `${cast.operand}: ${cast.before} to ${cast.after}${size}${shared}`);
  });
  const given = node.reads.map((read) => {
    const from = read.kind === "node" ? placeOf(read.value, node.graph) : undefined;
    return element("li", {}, from === undefined ? `${read.value} (${read.kind === "attribute" ? "weight or constant" : read.kind})` : link(from), read.cast ? `, cast to ${read.cast}` : null);
  });
  const shapes = node.shapes.map((shape) => `[${shape.join(", ")}]`).join(" ");
  byId("panel").replaceChildren(
    element("h2", { tabindex: -1 }, keyOf(node)),
    element("dl", {},
      ...term("op", node.op),
      ...term("runs in", dtype(node.colour), node.autocast !== node.colour ? element("span", { class: "mark" }, ` autocast: ${node.autocast}`) : null),
      ...term("why", element("strong", {}, node.reason_code), `: ${node.reason}`, meanings[node.reason_code] ? element("p", { class: "meaning" }, meanings[node.reason_code]) : null),
      ...term("because of", chain(chosen, CHAIN, new Set([chosen]))),
      ...term("line", node.file ? element("code", {}, place(node)) : null, node.code ? element("pre", {}, node.code) : null, node.torch_source ? element("p", { class: "meaning" }, `inside torch: ${node.torch_source}`) : null),
      ...term("casts here", casts.length ? element("ul", {}, ...casts) : null),
      ...term("reads", given.length ? element("ul", {}, ...given) : null),
      ...term("read by", ...several_links(readers[chosen])),
      ...term("gives", [node.dtypes.join(", "), shapes].filter(Boolean).join(" ")),
      ...term("size", node.bytes === null ? "" : `${amount(node.bytes, "B")}, ${amount(node.flops, "FLOPs")}, ${amount(node.saved_bytes, "B")} saved for backward`)));
}

// Explain a node; follow it to its drawing too, where it was chosen by a link from elsewhere.
function chooseNode(i, follow = false) {
  chosen = i;
  panel();
  byId("said").textContent = `${keyOf(nodes[i])} runs in ${nodes[i].colour}. ${nodes[i].reason_code}: ${nodes[i].reason}`;
  byId("node-table").querySelectorAll("tr[data-node]").forEach((row) => row.classList.toggle("chosen", Number(row.dataset.node) === i));
  if (!canvas.mark(i) && follow) {
    chooseModule(nodes[i].module);
    canvas.mark(i);
  }
  if (follow) byId("panel").firstElementChild.focus();
  history.replaceState(null, "", `#${encodeURIComponent(keyOf(nodes[i]))}`);
}

function describeModule(path) {
  const within = nodes.filter((node) => inside(node, path));
  const count = (style) => within.filter((node) => styleOf(node.colour) === style).length;
  byId("panel").replaceChildren(element("h2", {}, path),
    element("p", {}, `${within.length} nodes: ${count("low")} low, ${count("fp32")} FP32, ${count("other")} neither.`),
    element("button", { type: "button", onclick: () => chooseModule(path) }, "Open its drawing"));
}

function chooseModule(path) {
  module = path;
  byId("chosen").textContent = path || document.querySelector("h1").textContent;
  tree.reveal(path);
  const found = viewsOf(path);
  byId("parts").replaceChildren(...found.map((view, i) => element("option", { value: i }, view.title || "1")));
  byId("parts-label").hidden = found.length < 2;
  draw(found[0]);
  const only = nodes.findIndex((node) => node.module === path);
  if (found.length && found[0].module !== path && only >= 0) canvas.mark(only);
  fill();
}

// The drawings of a module, or of the one round it where it is a node alone.
function viewsOf(path) {
  const found = views.filter((view) => view.module === path);
  return found.length || path === "" ? found : viewsOf(path.slice(0, Math.max(0, path.lastIndexOf("."))));
}

function draw(view) {
  byId("near").setAttribute("aria-pressed", "false");
  canvas.show(view || null);
  byId("drawn").textContent = view
    ? `${view.boxes.length} boxes and ${view.edges.length} edges${view.title ? `, ${view.title}` : ""}.`
    : nodes.length ? "No drawing: this report was made from a plan alone, and a plan does not record which node reads which." : "";
}

function search() {
  words = byId("search").value.toLowerCase().split(/\s+/).filter(Boolean);
  if (!words.length) {
    tree.filter(null);
    byId("found").textContent = "";
    tree.reveal(module);
  } else {
    const found = listed();
    const named = [...document.querySelectorAll("#tree tbody tr")].map((row) => row.dataset.path).filter((path) => words.every((word) => path.toLowerCase().includes(word)));
    tree.filter(new Set([...found.map((i) => nodes[i].module), ...named]));
    byId("found").textContent = `${found.length} nodes found`;
    if (tab === "graph") ways.show("nodes");
  }
  fill();
}

const canvas = drawing(byId("canvas"), { chooseNode, chooseModule: describeModule, openModule: chooseModule });
const tree = treegrid(byId("tree"), chooseModule);
const ways = tabs(document.querySelector("[role=tablist]"), (name) => {
  tab = name;
  fill();
});
const toggleNear = () => byId("near").setAttribute("aria-pressed", String(canvas.toggleNear()));

byId("search").addEventListener("input", search);
byId("which").addEventListener("change", compareTable);
byId("parts").addEventListener("change", (event) => draw(viewsOf(module)[event.target.value]));
byId("closer").addEventListener("click", () => canvas.zoom(1.25));
byId("farther").addEventListener("click", () => canvas.zoom(0.8));
byId("whole").addEventListener("click", () => canvas.zoom(null));
byId("near").addEventListener("click", toggleNear);
document.addEventListener("keydown", (event) => {
  const typing = event.target.matches("input, select");
  if (event.altKey || event.ctrlKey || event.metaKey) return;
  if (event.key === "/" && !typing) {
    event.preventDefault();
    byId("search").focus();
  } else if (event.key === "Escape" && event.target === byId("search")) {
    byId("search").value = "";
    search();
  } else if (event.key === "z" && !typing) {
    toggleNear();
  }
});

const wanted = decodeURIComponent(location.hash.slice(1));
const asked = nodes.findIndex((node) => keyOf(node) === wanted);
if (asked >= 0) chooseNode(asked, true);
else chooseModule("");
