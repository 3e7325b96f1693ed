"use strict";

// The data of the page: nodes, the tree of modules, and what a box of the drawing holds.
const data = JSON.parse(document.getElementById("data").textContent);
const TEXTS = ["key", "op", "module", "file", "code", "inside", "colour", "autocast", "original", "because", "reason", "gives"];
const MOST_BOXES = 60; // boxes of one level; longer lists are cut into groups

const text = (number) => data.strings[number];
const percent = (n) => `${Number(n.toFixed(1))} %`;
const nodes = data.columns.key.map((_, i) => {
  const node = { place: i };
  for (const [name, column] of Object.entries(data.columns)) node[name] = TEXTS.includes(name) ? text(column[i]) : column[i];
  if (node.key.startsWith("/") && node.module) node.key = node.module + node.key;
  node.casts = node.casts.map(([operand, before, after, bytes, shared]) => (
    { operand: text(operand), before: text(before), after: text(after), bytes, shared }));
  node.reads = node.reads.map(([kind, at, cast]) => (
    { kind: ["node", "input", "attribute"][kind], node: at >= 0 ? at : -1, name: at >= 0 ? "" : text(-1 - at), cast: text(cast) }));
  node.cast_bytes = node.casts.reduce((sum, cast) => sum + (cast.bytes ?? 0), 0);
  node.time = data.time ? data.time[i] : null;
  node.error = data.error ? data.error[i] : null;
  return node;
});
const readers = nodes.map(() => []);
for (const node of nodes) for (const read of node.reads) if (read.node >= 0) readers[read.node].push(node.place);
const several = new Set(nodes.map((node) => node.graph)).size > 1;
const keyOf = (node) => (several ? `${node.graph}:${node.key}` : node.key);
const byKey = new Map(nodes.map((node) => [keyOf(node), node.place]));
const styleOf = (dtype) => data.styles[dtype] || "other";
const short = (dtype) => dtype.replace("bfloat16", "bf16").replace("float16", "fp16").replace("float32", "fp32");
const differs = (node) => node.autocast !== node.colour;
const inside = (path, outer) => outer === "" || path === outer || path.startsWith(`${outer}.`);
const sum = (places, name) => places.reduce((total, i) => total + (nodes[i][name] ?? 0), 0);

const UNITS = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"], [1, ""]];
function amount(n, unit) {
  if (n === null || n === undefined) return "not known";
  const [size, prefix] = UNITS.find(([least]) => n >= least) || UNITS[4];
  return `${Number((n / size).toPrecision(3))} ${prefix}${unit}`;
}
const counted = (n, what) => `${n} ${what}${n === 1 ? "" : "s"}`;

// What a drawing is coloured by: a dtype of each node, whether two differ, or an amount.
const MODES = {
  policy: { label: "this policy", dtype: (node) => node.colour, says: "the precision that each operation runs in" },
  autocast: { label: "torch.autocast", dtype: (node) => node.autocast, says: "the precision that torch.autocast would give it" },
  original: { label: "without fxamp", dtype: (node) => node.original || node.colour, says: "the precision without mixed precision" },
  differs: { label: "differs from autocast", differs: true, says: "marked where this policy and torch.autocast differ" },
  cast: { label: "bytes cast", amount: "cast_bytes", unit: "B", says: "bytes moved by the conversions in front of it" },
  saved: { label: "bytes saved", amount: "saved_bytes", unit: "B", says: "bytes kept until the backward pass" },
  time: { label: "time", amount: "time", unit: "s", says: "time, where it was measured", absent: !data.time && " (not measured)" },
  error: { label: "predicted error", amount: "error", unit: "%", says: "its roundings' share in the predicted error of the loss (of its variance)", absent: !data.error && " (to_html(errors=...))" },
};

// Cut the nodes of a box into boxes: a node, or what follows each other in one module. `depth` counts parts of the path.
function boxesOf(places, depth, outer) {
  const runs = [];
  for (const i of places) {
    const parts = nodes[i].module ? nodes[i].module.split(".") : [];
    let end = depth + 1;
    if (/^\d+$/.test(parts[end] || "")) end += 1; // `layer.0`: a list of modules is no box of its own
    const path = parts.length > depth ? parts.slice(0, end).join(".") : null;
    const last = runs[runs.length - 1];
    if (path !== null && last && last.path === path) last.places.push(i);
    else runs.push({ path, depth: end, places: [i] });
  }
  const boxes = runs.map((run) => (run.places.length === 1 ? leaf(run.places[0]) : moduleBox(run, outer)));
  return grouped(stacked(boxes, outer), outer);
}

const leaf = (i) => ({ id: `n${i}`, kind: "node", node: i, places: [i], label: nodes[i].op, path: nodes[i].module });

function moduleBox({ path, depth, places }, outer) {
  const box = { id: `m${places[0]}.${depth}`, kind: "module", path, places, label: labelOf(path, outer), inner: null };
  box.children = () => (box.inner ??= simple(boxesOf(places, depth, path)));
  return box;
}

// A box in which there is one module and nothing else shows what is in that module.
function simple(boxes) { return boxes.length === 1 && boxes[0].kind === "module" ? boxes[0].children() : boxes; }

function labelOf(path, outer) { return outer && path.startsWith(`${outer}.`) ? path.slice(outer.length + 1) : path; }

// Equal modules of a list that follow each other are one box: `layer.0-11`.
function stacked(boxes, outer) {
  const out = [];
  for (let at = 0; at < boxes.length; ) {
    let end = at + 1;
    while (end < boxes.length && follows(boxes[end - 1], boxes[end])) end += 1;
    const equal = boxes.slice(at, end);
    out.push(equal.length > 1 ? stack(equal, outer) : boxes[at]);
    at = end;
  }
  return out;
}

const NUMBERED = /^(.*?)(\d+)$/;
function follows(a, b) {
  const [one, two] = [a, b].map((box) => (box.kind === "module" || box.name) && NUMBERED.exec(box.path));
  return one && two && one[1] === two[1] && Number(two[2]) === Number(one[2]) + 1 && signature(a) === signature(b);
}

function signature(box) {
  box.signature ??= box.places.map((i) => {
    const { module, op, colour, autocast } = nodes[i];
    return [module.slice(box.path.length), op, colour, autocast].join("|");
  }).join("\n");
  return box.signature;
}

function stack(boxes, outer) {
  const first = boxes[0];
  const number = NUMBERED.exec(boxes[boxes.length - 1].path)[2];
  return {
    id: `s${first.id}`, kind: "stack", path: first.path, label: `${labelOf(first.path, outer)}-${number}`, count: boxes.length,
    each: first.places.length, places: boxes.flatMap((box) => box.places), children: () => boxes,
  };
}

// No level of a drawing has more boxes than can be read: a longer one is cut into groups that unfold likewise.
function grouped(boxes, outer) {
  if (boxes.length <= MOST_BOXES) return boxes;
  const size = Math.ceil(boxes.length / Math.min(MOST_BOXES / 2, Math.ceil(boxes.length / 24)));
  const out = [];
  for (let at = 0; at < boxes.length; at += size) {
    const part = boxes.slice(at, at + size);
    const places = part.flatMap((box) => box.places);
    const inner = grouped(part, outer);
    out.push({ id: `g${part[0].id}.${size}`, kind: "group", path: outer, label: `${part[0].label} to ${part[part.length - 1].label}`, places, children: () => inner });
  }
  return out;
}

// The tree of the modules that some nodes are in. Equal modules of a list share a branch: `0-11`.
function moduleTree(places) {
  const root = { path: "", name: data.model, places: [], children: new Map() };
  for (const i of places) {
    let at = root;
    at.places.push(i);
    for (const part of nodes[i].module ? nodes[i].module.split(".") : []) {
      if (!at.children.has(part)) {
        at.children.set(part, { path: at.path ? `${at.path}.${part}` : part, name: part, places: [], children: new Map() });
      }
      at = at.children.get(part);
      at.places.push(i);
    }
  }
  return joined(root);
}

function joined(branch) {
  const out = new Map();
  const children = [...branch.children.values()].map(joined);
  for (let at = 0; at < children.length; ) {
    let end = at + 1;
    while (end < children.length && follows(children[end - 1], children[end])) end += 1;
    const equal = children.slice(at, end);
    const [first, last] = [equal[0].name, equal[equal.length - 1].name];
    if (equal.length < 3) for (const one of equal) out.set(one.name, one);
    else out.set(first, { path: `${branch.path}.${first}-${last}`, name: `${first}-${last}`, count: equal.length, places: equal.flatMap((one) => one.places), children: new Map(equal.map((one) => [one.name, one])) });
    at = end;
  }
  return { ...branch, children: out };
}
