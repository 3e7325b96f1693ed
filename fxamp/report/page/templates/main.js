// The page: tiles, the tree of modules, tabs, and what is chosen.
const byId = (id) => document.getElementById(id);
const link = (i, words) => element("button", { type: "button", class: "link", onclick: () => chooseNode(i, true) }, words || keyOf(nodes[i]));
const texts = nodes.map((n) => [n.key, n.op, n.colour, why(n), n.file, place(n), n.code].join("\n").toLowerCase());

let state = data.states[0];
let places = [];
let module = "";
let chosen = -1;
let tab = "graph";
let words = [];
let stale = new Set();

function tiles() {
  const t = state.totals;
  const unlike = places.filter((i) => differs(nodes[i])).length;
  const instead = [["FP32", t.saved_bytes_fp32], ["torch.autocast", t.saved_bytes_autocast]].filter(([, n]) => n !== null).map(([name, n]) => `${name} would keep ${amount(n, "B")}`).join(", ");
  const made = [
    t.low_flops !== null ? ["policy", percent(t.low_flops), "in 16 bit", `of the arithmetic; ${t.low_ops} of ${t.nodes} operations run in 16 bit, ${t.fp32_ops} in FP32.`] : ["policy", `${t.low_ops} of ${t.nodes}`, "in 16 bit", `operations run in 16 bit, ${t.fp32_ops} in FP32.`],
    ["cast", t.casts ?? "?", "casts", t.cast_bytes === null ? "conversions between precisions in one call." : `convert between precisions in one call and move ${amount(t.cast_bytes, "B")}.`],
    t.saved_bytes !== null ? ["saved", amount(t.saved_bytes, "B"), "kept", `until the backward pass${instead ? `; ${instead}` : ""}.`] : null,
    ["differs", unlike, "differ", `${unlike === 1 ? "operation runs" : "operations run"} in another precision than under torch.autocast.`],
    ["deviations", t.deviations, "deviations", "where values may not be those of torch.autocast: your own casts, numbers out of range."],
    t.unknown_ops ? ["policy", t.unknown_ops, "unknown operations", "have no rule; they get what torch.autocast would give them."] : null,
  ];
  byId("tiles").replaceChildren(...made.filter(Boolean).map(([mode, figure, name, sentence]) => element("button",
    { type: "button", class: "tile", "data-tile": name, onclick: () => (mode in MODES ? (colour(mode), show("graph")) : search(`deviation`)) },
    element("span", { class: "figure" }, String(figure)), element("span", { class: "name" }, ` ${name} `), element("span", { class: "sentence" }, sentence))));
  const kept = state.kept_bytes === null ? "" : `; measured, it kept ${amount(state.kept_bytes, "B")} for the backward pass`;
  byId("stage").textContent = `Planned: ${t.bytes === null ? "decisions alone, without costs" : "figures of one call of the emitted graph as PyTorch runs it"}.`
    + (state.compiler ? ` ${state.compiler} behind it may fuse casts and recompute what is kept${kept}.` : "");
}

// --- the tree of modules ---

function tree() {
  const root = moduleTree(places);
  const body = byId("tree").tBodies[0];
  const share = (within, name) => {
    const total = sum(within, name);
    const part = (style) => within.reduce((n, i) => n + (styleOf(nodes[i].colour) === style ? nodes[i][name] ?? 0 : 0), 0);
    return total ? [part("low") / total, part("fp32") / total] : null;
  };
  const bar = (parts) => {
    if (!parts) return "–";
    const made = element("span", { class: "bar", title: `${Math.round(100 * parts[0])} % in 16 bit, ${Math.round(100 * parts[1])} % in FP32` });
    for (const [i, style] of ["low", "fp32"].entries()) {
      const part = element("i", { class: style });
      part.style.width = `${100 * parts[i]}%`;
      made.append(part);
    }
    return made;
  };
  function row(branch, level, at, siblings) {
    const casts = branch.places.reduce((n, i) => n + nodes[i].casts.length, 0);
    const known = branch.places.some((i) => nodes[i].bytes !== null);
    const name = element("td", { role: "gridcell", class: "name", title: branch.path || data.model }, element("span", { class: "fold" }), branch.name, branch.count ? element("span", { class: "quiet" }, ` ${branch.count} ×`) : "");
    name.style.paddingLeft = `${6 + 12 * Math.min(level - 1, 9)}px`;
    const made = element("tr", { role: "row", "data-path": branch.path, "aria-level": level, "aria-posinset": at, "aria-setsize": siblings, tabindex: -1, "aria-expanded": branch.children.size ? "false" : null },
      name, element("td", { role: "gridcell", class: "number" }, branch.count ? branch.places.length / branch.count : branch.places.length), element("td", { role: "gridcell", class: "number" }, casts || ""),
      element("td", { role: "gridcell" }, bar(known ? share(branch.places, "bytes") : null)));
    made.branch = branch;
    return made;
  }
  const level = (tr) => Number(tr.getAttribute("aria-level"));
  function fold(tr, expanded) {
    if (!tr.hasAttribute("aria-expanded") || (tr.getAttribute("aria-expanded") === "true") === expanded) return;
    tr.setAttribute("aria-expanded", String(expanded));
    if (expanded) {
      const children = [...tr.branch.children.values()];
      tr.after(...children.map((child, i) => row(child, level(tr) + 1, i + 1, children.length)));
    } else { while (tr.nextElementSibling && level(tr.nextElementSibling) > level(tr)) tr.nextElementSibling.remove(); }
  }
  function move(tr, focus = true) {
    if (!tr) return;
    for (const other of body.rows) other.tabIndex = other === tr ? 0 : -1;
    if (focus) tr.focus();
  }
  const parent = (tr) => {
    let up = tr.previousElementSibling;
    while (up && level(up) >= level(tr)) up = up.previousElementSibling;
    return up;
  };
  // Unfold what is round a module, and mark its row.
  function reveal(path) {
    const holds = ({ branch }) => inside(path, branch.path) || [...branch.children.values()].some((child) => branch.count && inside(path, child.path));
    for (let at = 0; at < body.rows.length && body.rows[at].dataset.path !== path; at++) if (holds(body.rows[at])) fold(body.rows[at], true);
    for (const tr of body.rows) {
      tr.setAttribute("aria-selected", String(tr.dataset.path === path));
      if (tr.dataset.path !== path) continue;
      move(tr, false);
      tr.scrollIntoView({ block: "nearest" });
    }
  }
  body.replaceChildren(row(root, 1, 1, 1));
  for (let left = 28, at = 0; at < body.rows.length; at++) {
    if (body.rows[at].branch.count) continue;
    left -= body.rows[at].branch.children.size;
    if (left < 0) break;
    fold(body.rows[at], true);
  }
  byId("tree").tFoot.replaceChildren(...state.elsewhere.map(([name, n]) => element("tr", {}, element("td", {}, name), element("td", {}), element("td", { class: "number" }, n), element("td", {}))));
  const pick = (tr) => (reveal(tr.dataset.path), tr.branch.count ? fold(tr, true) : chooseModule(tr.dataset.path));
  body.onclick = (event) => {
    const tr = event.target.closest("tr");
    if (event.target.classList.contains("fold") && tr.hasAttribute("aria-expanded")) {
      fold(tr, tr.getAttribute("aria-expanded") !== "true");
      move(tr);
    } else if (tr) pick(tr);
  };
  body.onkeydown = (event) => {
    const tr = event.target.closest("tr");
    if (!tr || event.altKey || event.ctrlKey || event.metaKey) return;
    const expanded = tr.getAttribute("aria-expanded") === "true";
    const keys = {
      ArrowDown: () => move(tr.nextElementSibling), ArrowUp: () => move(tr.previousElementSibling), Home: () => move(body.rows[0]), End: () => move(body.rows[body.rows.length - 1]),
      ArrowRight: () => (tr.hasAttribute("aria-expanded") && !expanded ? fold(tr, true) : expanded && move(tr.nextElementSibling)),
      ArrowLeft: () => (expanded ? fold(tr, false) : move(parent(tr))), Enter: () => pick(tr), " ": () => pick(tr),
    };
    if (!(event.key in keys)) return;
    event.preventDefault();
    keys[event.key]();
  };
  reveal("");
  return { reveal };
}

// --- what is chosen ---

function say(content, focus) {
  byId("panel").hidden = false;
  byId("explained").replaceChildren(...content);
  byId("panel").scrollTop = 0;
  const heading = byId("explained").querySelector("h2");
  byId("said").textContent = heading.textContent;
  if (focus) heading.focus({ preventScroll: true });
}

function chooseNode(i, follow = false) {
  chosen = i;
  say(explained(i, link), follow);
  for (const row of document.querySelectorAll("#node-table tr[data-node]")) row.classList.toggle("chosen", Number(row.dataset.node) === i);
  if (follow && tab === "graph") canvas.node(i, true);
  else stale.add("graph");
  try { history.replaceState(null, "", `#${encodeURIComponent(keyOf(nodes[i]))}`); } catch { /* in the frame of a notebook */ }
  crumbs();
}

function chooseBox(box) {
  if (box.kind === "node") chooseNode(box.node);
  else { say(described(box.kind === "module" ? box.path : box.label, box.places), false); crumbs(); }
}

function chooseModule(path) {
  module = path;
  if (tab === "graph" && path) canvas.module(path);
  fill();
}

function chooseLine(found) {
  if (found.length === 1) chooseNode(found[0]);
  else say([element("p", { class: "where" }, "your line"), element("h2", { tabindex: -1 }, place(nodes[found[0]])), element("pre", {}, nodes[found[0]].code),
    element("ul", { class: "nodes" }, ...found.slice(0, 60).map((i) => element("li", {}, pill(nodes[i].colour), " ", link(i)))), found.length > 60 ? element("p", {}, `and ${found.length - 60} more`) : ""], false);
}

function crumbs() {
  const last = document.querySelector("#canvas .box.chosen")?.dataset.id;
  const boxes = last ? canvas.pathOf(last) : [];
  const link = (words, onclick) => element("button", { type: "button", class: "link", onclick }, words);
  byId("crumbs").replaceChildren(link(data.model, () => canvas.fit()), ...boxes.map((box) => link(box.label, () => (canvas.show(box.id), canvas.choose(box.id)))));
  byId("back").disabled = !canvas.canGoBack();
}

function colour(mode) {
  byId("colour").value = mode;
  canvas.colour(mode);
  byId("legend").replaceChildren(...legend(MODES[mode]), element("span", { class: "says" }, MODES[mode].says));
}

const legend = (mode) => (mode.amount ? [element("span", { class: "key ramp" }, "none … most")]
  : mode.differs ? [element("span", { class: "key differs" }, "differs")]
    : [["low", "16-bit"], ["fp32", "FP32"], ["other", "other"]].map(([style, name]) => element("span", { class: `key ${style}` }, name)));

// --- tabs ---

byId("tab-census").hidden = !data.census;
const tabs = [...document.querySelectorAll("[role=tab]:not([hidden])")];
function show(name, focus = false) {
  tab = name;
  for (const other of tabs) {
    const selected = other.getAttribute("aria-controls") === name;
    other.setAttribute("aria-selected", String(selected));
    other.tabIndex = selected ? 0 : -1;
    byId(other.getAttribute("aria-controls")).hidden = !selected;
    if (selected && focus) other.focus();
  }
  if (name === "graph" && stale.delete("graph") && chosen >= 0) { canvas.node(chosen, true); crumbs(); }
  fill();
}

let sides = null;
function compare() {
  byId("totals").replaceChildren(totalsTable(state.totals, places));
  const against = MODES[byId("against").value];
  const unlike = places.filter((i) => against.dtype(nodes[i]) !== nodes[i].colour);
  byId("unlike").textContent = unlike.length ? `${counted(unlike.length, "node")} of ${places.length} run${unlike.length === 1 ? "s" : ""} in another precision than ${against.label}.` : `Nothing differs: every operation runs in the precision of ${against.label}.`;
  byId("sides").hidden = !unlike.length;
  byId("left-title").textContent = against.label;
  if (unlike.length) {
    if (!sides) {
      const twin = (at) => ({
        looked: (view) => sides && !sides.busy && alone(() => sides[1 - at].look(view)),
        unfolded: () => alone(() => sides[1 - at].unfold(sides[at].unfolded())),
        chose: (box) => (alone(() => sides[1 - at].choose(box.id, true)), chooseBox(box)),
      });
      sides = [drawing(byId("left"), twin(0)), drawing(byId("right"), twin(1))];
    }
    alone(() => {
      for (const side of sides) {
        side.load(places);
        side.only(new Set(unlike));
        side.unfoldWhere(unlike);
      }
      sides[0].colour(byId("against").value);
      sides[1].look(sides[0].showNode(unlike[0]));
    });
  }
  nodeTable(byId("compare-table"), unlike.length ? "What differs, and why" : "", unlike, "", link, chosen);
}

// Do what both sides would otherwise tell each other.
function alone(action) {
  if (sides.busy) return;
  sides.busy = true;
  action();
  sides.busy = false;
}

function fill() {
  const found = words.length ? places.filter((i) => words.every((word) => texts[i].includes(word))) : places.filter((i) => inside(nodes[i].module, module));
  const where = words.length ? "in the whole model" : module ? `in ${module}` : "in the model";
  if (tab === "nodes") nodeTable(byId("node-table"), `${counted(found.length, "node")} ${where}`, found, words.length ? "" : module, link, chosen);
  if (tab === "compare") compare();
  if (tab === "source") sourceTab(byId("ranks"), byId("files"), state, places, chooseLine);
  if (tab === "census") censusTab(byId("verdict"), byId("ran"), data.census, link);
  byId("found").textContent = words.length ? `${counted(found.length, "node")} found` : "";
}

function search(typed) {
  if (typed !== undefined) byId("search").value = typed;
  words = byId("search").value.toLowerCase().split(/\s+/).filter(Boolean);
  if (words.length && tab !== "nodes") show("nodes");
  else fill();
}

function enter(name) {
  state = data.states.find((other) => other.name === name) || data.states[0];
  places = state.nodes || nodes.map((_, i) => i);
  module = "";
  tiles();
  branches = tree();
  canvas.load(places);
  crumbs();
  fill();
}

// --- begin ---

let branches = null;
const canvas = drawing(byId("canvas"), { chose: chooseBox, unfolded: crumbs });
document.querySelector("h1").textContent = data.model;
byId("policy").textContent = data.policy;
byId("made").textContent = data.made;
for (const words of data.said) byId("said-first").append(element("p", { class: "cut", role: "note" }, words));
const folded = (title, content) => element("details", {}, element("summary", {}, title), content);
if (data.notes.length) byId("more").append(folded(counted(data.notes.length, "note"), element("ul", {}, ...data.notes.map((note) => element("li", {}, note)))));
if (data.training.length) byId("more").append(folded("training", element("dl", {}, ...data.training.flatMap(([name, words]) => term(name, words)))));
for (const [name, mode] of Object.entries(MODES)) byId("colour").append(element("option", { value: name, disabled: Boolean(mode.absent) }, mode.label + (mode.absent || "")));
byId("state").replaceChildren(...data.states.map((other) => element("option", {}, other.name)));
byId("states").hidden = data.states.length < 2;
byId("empty").hidden = nodes.some((node) => node.reads.length);
byId("state").addEventListener("change", (event) => enter(event.target.value));
byId("colour").addEventListener("change", (event) => colour(event.target.value));
byId("against").addEventListener("change", compare);
byId("search").addEventListener("input", () => search());
byId("closer").addEventListener("click", () => canvas.zoom(1.3));
byId("farther").addEventListener("click", () => canvas.zoom(1 / 1.3));
byId("whole").addEventListener("click", () => canvas.fit());
byId("back").addEventListener("click", () => (canvas.back(), crumbs()));
byId("close").addEventListener("click", () => (byId("panel").hidden = true));
byId("aside").addEventListener("click", (event) => event.target.setAttribute("aria-expanded", String(!document.body.classList.toggle("narrow"))));
document.querySelector("[role=tablist]").addEventListener("click", (event) => event.target.matches("[role=tab]") && show(event.target.getAttribute("aria-controls")));
document.querySelector("[role=tablist]").addEventListener("keydown", (event) => {
  const at = tabs.indexOf(event.target);
  const to = { ArrowRight: at + 1, ArrowLeft: at - 1 + tabs.length, Home: 0, End: tabs.length - 1 }[event.key];
  if (to === undefined) return;
  event.preventDefault();
  show(tabs[to % tabs.length].getAttribute("aria-controls"), true);
});
document.addEventListener("keydown", (event) => {
  if (event.altKey || event.ctrlKey || event.metaKey) return;
  const keys = { "/": () => byId("search").focus(), "+": () => canvas.zoom(1.3), "-": () => canvas.zoom(1 / 1.3), 0: () => canvas.fit(), b: () => byId("back").click() };
  if (event.key === "Escape" && event.target === byId("search")) search("");
  else if (event.key === "Escape") byId("panel").hidden = true;
  else if (!event.target.matches("input, select") && event.key in keys) { event.preventDefault(); keys[event.key](); }
});

// A fragment that names nothing, or cannot be read, is ignored.
function wanted() {
  try {
    return byKey.get(decodeURIComponent(location.hash.slice(1)));
  } catch { return undefined; }
}

if (innerWidth < 900) byId("aside").click();
enter(data.states[0].name);
colour("policy");
if (wanted() !== undefined) chooseNode(wanted(), true);
