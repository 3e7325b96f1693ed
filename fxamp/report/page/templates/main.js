// @ts-check
// The page: tiles, the tree of modules, tabs, and what is chosen.

import {
  data, total, sum, nodes, keyOf, byKey, styleOf, unlike, inside, amount, counted, percent, MODES, shares,
  dtypesOf, moduleTree,
} from "./data.js";
import { bar, button, byId, element, keys, list, query, terms } from "./elements.js";
import { drawing } from "./drawing.js";
import {
  choose, link, pill, lineOf, why, panelOf, explained, described, nodeTable, totalsTable, sourceTab, censusTab,
} from "./views.js";

const texts = nodes.map((n) => [n.key, n.op, n.colour, why(n), n.file, lineOf(n), n.code].join("\n").toLowerCase());

let state = data.states[0];
let places = [];
let module = "";
let chosen = -1;
let behind = false; // whether a node was chosen that the drawing is still to show
let tab = "graph";
let words = [];

// The share of the arithmetic of a census that ran in 16 bit; null without one.
function ranLow() {
  const rows = data.census ? dtypesOf(data.census) : [];
  const all = total(rows, ([, , flops]) => flops);
  const low = rows.filter(([dtype]) => styleOf(dtype) === "low");
  return all ? percent((100 * total(low, ([, , flops]) => flops)) / all) : null;
}

// Fill in the page's sentences what is known of the model and its state, and hide those of what is not.
function fillIn() {
  const { low_flops: low, unknown_ops: unknown } = state.totals;
  const count = unlike(places).length;
  const facts = {
    ...data, ...state, ...state.totals, low: low === null ? null : percent(low), unknown: unknown || null,
    differ: count, runs: count === 1 ? "operation runs" : "operations run", compiler: state.compiler || null,
    ran: ranLow(),
  };
  for (const part of query("[data-if]")) part.hidden = facts[part.dataset.if] === null;
  for (const part of query("[data-unless]")) part.hidden = facts[part.dataset.unless] !== null;
  for (const slot of query("[data-shows]")) {
    const { shows, unit } = slot.dataset;
    slot.textContent = unit ? amount(facts[shows], unit) : facts[shows] ?? "?";
  }
}

// --- the tree of modules ---

const levelOf = (tr) => Number(tr?.ariaLevel);

function treeRow(branch, up, at, siblings) {
  const { path, name, places: within, count, children } = branch;
  const level = up ? levelOf(up) + 1 : 1;
  const indent = { "padding-left": `${6 + 12 * Math.min(level - 1, 9)}px` };
  const { low, fp32 } = shares(within, (node) => node.colour, (node) => node.bytes);
  const all = sum(within, "bytes");
  const title = `${Math.round((100 * low) / all)} % in 16 bit, ${Math.round((100 * fp32) / all)} % in FP32`;
  const tr = element("tr", {
    "data-path": path, "aria-level": level, "aria-posinset": at, "aria-setsize": siblings, tabindex: -1,
    "aria-expanded": children.length ? "false" : null,
  },
  element("td.name", { title: path || data.model, style: indent },
    element("span.fold"), name, count && element("span.quiet", ` ${count} ×`)),
  element("td.number", within.length / (count ?? 1)),
  element("td.number", sum(within, "cast_count") || ""),
  element("td", all ? bar("span.bar", "width", { low, fp32 }, all, title) : "–"));
  return Object.assign(tr, { branch, up });
}

function fold(tr, unfold) {
  if (tr.ariaExpanded !== String(!unfold)) return;
  tr.ariaExpanded = unfold;
  const { children } = tr.branch;
  if (unfold) tr.after(...children.map((child, i) => treeRow(child, tr, i + 1, children.length)));
  else while (levelOf(tr.nextElementSibling) > levelOf(tr)) tr.nextElementSibling.remove();
}

function focusRow(tr) {
  for (const other of byId("tree").tBodies[0].rows) other.tabIndex = other === tr ? 0 : -1;
  tr?.focus();
}

function pickRow(tr) {
  for (const other of byId("tree").tBodies[0].rows) other.ariaSelected = other === tr;
  focusRow(tr);
  if (tr.branch.count) fold(tr, true);
  else chooseModule(tr.dataset.path);
}

function tree() {
  const { tBodies: [body], tFoot: foot } = byId("tree");
  const root = treeRow(moduleTree(places), null, 1, 1);
  [root.tabIndex, root.ariaSelected] = [0, "true"];
  body.replaceChildren(root);
  for (let left = 28, at = 0; at < body.rows.length; at++) {
    if (body.rows[at].branch.count) continue;
    left -= body.rows[at].branch.children.length;
    if (left < 0) break;
    fold(body.rows[at], true);
  }
  foot.replaceChildren(...state.elsewhere.map(([name, n]) => (
    element("tr", element("td", name), element("td"), element("td.number", n), element("td")))));
  body.onclick = ({ target }) => {
    const tr = target.closest("tr");
    if (!target.matches("[aria-expanded] .fold")) return pickRow(tr);
    fold(tr, tr.ariaExpanded === "false");
    return focusRow(tr);
  };
  keys(body, (tr) => {
    const expanded = tr.ariaExpanded === "true";
    return {
      ArrowDown: () => focusRow(tr.nextElementSibling), ArrowUp: () => focusRow(tr.previousElementSibling),
      Home: () => focusRow(root), End: () => focusRow(body.lastChild),
      ArrowRight: () => (expanded ? focusRow(tr.nextElementSibling) : fold(tr, true)),
      ArrowLeft: () => (expanded ? fold(tr, false) : focusRow(tr.up)),
      Enter: () => pickRow(tr), " ": () => pickRow(tr),
    };
  });
}

// --- what is chosen ---

function say(content, focus = false) {
  byId("panel").hidden = false;
  byId("explained").replaceChildren(...content);
  byId("panel").scrollTop = 0;
  const heading = byId("explained").querySelector("h2");
  byId("said").textContent = heading.textContent;
  if (focus) heading.focus({ preventScroll: true });
}

function chooseNode(i, follow = false) {
  chosen = i;
  say(explained(i), follow);
  for (const row of query("tr[data-node]")) {
    row.classList.toggle("chosen", Number(row.dataset.node) === i);
  }
  behind = follow || tab !== "graph" || narrow();
  try {
    history.replaceState(null, "", `#${encodeURIComponent(keyOf(nodes[i]))}`);
  } catch { /* in the frame of a notebook */ }
  catchUp();
}

// Whether the panel covers the lower part of the window.
const narrow = () => innerWidth < 900;

// Show in the drawing what was chosen beside it, and where that is.
function catchUp() {
  if (behind && tab === "graph" && narrow()) byId("canvas").scrollIntoView({ block: "start" });
  if (behind && tab === "graph") canvas.node(chosen, true);
  behind &&= tab !== "graph";
  byId("crumbs").replaceChildren(button("link", canvas.fit, data.model),
    ...canvas.path().map((box) => button("link", () => canvas.go(box.id), box.label)));
  byId("back").disabled = !canvas.canGoBack();
}

function chooseBox(box) {
  if (box?.node) return chooseNode(box.node.place);
  if (box) say(described(box.kind === "module" ? box.path : box.label, box.places));
  return catchUp();
}

function chooseModule(path) {
  module = path;
  if (tab === "graph" && path) canvas.module(path);
  fill();
}

function chooseLine(made) {
  if (made.length === 1) return chooseNode(made[0]);
  const first = nodes[made[0]];
  const all = list("ul.nodes", made, (i) => [pill(nodes[i].colour), " ", link(i)], 60);
  return say(panelOf("your line", lineOf(first), null, element("pre", first.code), all));
}

function colour(name, to = tab) {
  byId("colour").value = name;
  canvas.colour(name);
  byId("legend").className = MODES[name].amount ? "ramp" : MODES[name].differs ? "differs" : "dtypes";
  byId("says").textContent = byId("colour").selectedOptions[0].title;
  if (to !== tab) show(to);
}

// --- tabs ---

byId("tab-census").hidden = !data.census;
const tabs = query("[role=tab]:not([hidden])");

function show(name) {
  tab = name;
  for (const one of tabs) {
    const panel = byId(one.getAttribute("aria-controls"));
    panel.hidden = panel.id !== name;
    one.ariaSelected = !panel.hidden;
    one.tabIndex = panel.hidden ? -1 : 0;
  }
  catchUp();
  fill();
}

let sides = null;
function compare() {
  totalsTable(byId("totals"), state.totals, places);
  const [{ value, text: label }] = byId("against").selectedOptions;
  const found = places.filter((i) => MODES[value].dtype(nodes[i]) !== nodes[i].colour);
  const run = `${counted(found.length, "node")} of ${places.length} ${found.length === 1 ? "runs" : "run"}`;
  byId("unlike").textContent = found.length ? `${run} in another precision than ${label}.`
    : `Nothing differs: every operation runs in the precision of ${label}.`;
  byId("sides").hidden = !found.length;
  byId("left-title").textContent = label;
  if (found.length) {
    sides ??= [drawing(byId("left"), chooseBox), drawing(byId("right"), chooseBox)];
    sides.forEach((side, i) => side.pair(sides[1 - i]));
    sides[0].colour(value);
    sides[1].load(places, found);
    sides[0].load(places, found);
  }
  nodeTable(byId("compare-table"), found.length ? "What and why" : "", found, "", chosen);
}

function fill() {
  const named = (i) => Number(words.some((word) => nodes[i].op.includes(word))); // these come first
  const found = words.length
    ? places.filter((i) => words.every((word) => texts[i].includes(word))).sort((a, b) => named(b) - named(a))
    : places.filter((i) => inside(nodes[i].module, module));
  const [where, within] = words.length ? ["the whole model", ""] : [module || "the model", module];
  const caption = `${counted(found.length, "node")} in ${where}`;
  if (tab === "nodes") nodeTable(byId("node-table"), caption, found, within, chosen);
  if (tab === "compare") compare();
  if (tab === "source") sourceTab(byId("ranks"), byId("files"), state, places);
  if (tab === "census") censusTab(byId("verdict"), byId("dtypes"), byId("ran"), data.census);
  byId("found").textContent = words.length ? `${counted(found.length, "node")} found` : "";
}

function search(typed = byId("search").value) {
  byId("search").value = typed;
  words = typed.toLowerCase().split(/\s+/).filter(Boolean);
  if (words.length && tab !== "nodes") show("nodes");
  else fill();
}

function enter(name) {
  state = data.states.find((other) => other.name === name);
  places = state.nodes ?? nodes.map((_, i) => i);
  module = "";
  fillIn();
  tree();
  canvas.load(places);
  catchUp();
  fill();
}

// --- begin ---

Object.assign(choose, { node: chooseNode, line: chooseLine });
for (const option of byId("colour").querySelectorAll("[data-absent]")) {
  option.disabled = !data[option.value];
  if (option.disabled) option.text += option.dataset.absent;
}
const canvas = drawing(byId("canvas"), chooseBox);
for (const tile of byId("tiles").children) {
  const { colour: mode, tab: to } = tile.dataset;
  tile.onclick = () => (to ? show(to) : mode ? colour(mode, "graph") : search("deviation"));
}
byId("said-first").append(...data.said.map((words) => element("p.cut", { role: "note" }, words)));
byId("more").append(...[[counted(data.notes.length, "note"), list("ul", data.notes)],
  ["training", data.training.length > 0 && terms(...data.training)],
].filter(([, content]) => content).map(([title, content]) => element("details", element("summary", title), content)));
byId("state").append(...data.states.map(({ name }) => element("option", name)));
byId("states").hidden = data.states.length < 2;
byId("empty").hidden = nodes.some((node) => node.reads.length);
byId("state").onchange = (event) => enter(event.target.value);
byId("colour").onchange = (event) => colour(event.target.value);
byId("against").onchange = compare;
byId("search").oninput = () => search();
byId("closer").onclick = () => canvas.zoom(1.3);
byId("farther").onclick = () => canvas.zoom(1 / 1.3);
byId("whole").onclick = canvas.fit;
byId("back").onclick = canvas.back;
byId("close").onclick = () => (byId("panel").hidden = true);
byId("aside").onclick = ({ target }) => (target.ariaExpanded = !document.body.classList.toggle("narrow"));
for (const one of tabs) one.onclick = () => show(one.getAttribute("aria-controls"));
keys(document.querySelector("[role=tablist]"), (one) => {
  const go = (to) => () => {
    tabs.at(to % tabs.length).click();
    tabs.at(to % tabs.length).focus();
  };
  const at = tabs.indexOf(one);
  return { ArrowRight: go(at + 1), ArrowLeft: go(at - 1), Home: go(0), End: go(-1) };
});
keys(document, (target) => ({
  Escape: () => (target === byId("search") ? search("") : byId("close").click()),
  ...(target.matches("input, select") ? {} : {
    "/": () => byId("search").focus(), "+": () => byId("closer").click(), "-": () => byId("farther").click(),
    0: canvas.fit, b: () => byId("back").click(),
  }),
}));

if (narrow()) byId("aside").click();
enter(data.states[0].name);
colour("policy");
// A fragment that names nothing, or cannot be read, is ignored.
const wanted = byKey.get(new URLSearchParams(location.hash.replace("#", "node=")).get("node"));
if (wanted !== undefined) chooseNode(wanted, true);
