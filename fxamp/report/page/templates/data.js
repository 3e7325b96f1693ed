// @ts-check
// The data of the page: nodes, the tree of modules, and what a box of the drawing holds.

/**
 * @typedef {{ operand: string, before: string, after: string, bytes: number | null, shared: number }} Cast
 * @typedef {{ kind: "node" | "input" | "attribute", value: number, name: string, cast: string, bytes: number }} Read
 * @typedef {{ place: number, graph: number, key: string, op: string, module: string, parts: string[],
 *   file: string, line: number, code: string, inside: string, colour: string, autocast: string, original: string,
 *   because: string, reason: string, causes: number[], gives: string, casts: Cast[], reads: Read[], readers: number[],
 *   bytes: number | null, flops: number | null, saved_bytes: number | null, error?: number, cast_count: number,
 *   cast_bytes: number, alike: string }} PageNode
 * @typedef {{ dtype?: (node: PageNode) => string, cast?: (read: Read, node: PageNode) => string, differs?: boolean,
 *   amount?: "cast_bytes" | "saved_bytes" | "error", unit?: string }} Mode
 * @typedef {Mode["amount"] | "bytes" | "flops" | "cast_count"} Amount
 * @typedef {{ id: string, kind: "node" | "module" | "stack" | "group", label: string, path: string, places: number[],
 *   node?: PageNode, count?: number, each?: number, children?: () => Box[], signature?: string }} Box
 */

export const data = JSON.parse(document.getElementById("data").textContent);
const TEXTS = "key op module file code inside colour autocast original because reason gives".split(" ");
/** @type {["node", "input", "attribute"]} */
const KINDS = ["node", "input", "attribute"]; // of what a node reads
const MOST_BOXES = 60; // boxes of one level; longer lists are cut into groups

/** @type {(number: number) => string} */
export const text = (number) => data.strings[number];
/** @type {<T>(list: T[], value: (one: T) => number | null | undefined) => number} */
export const total = (list, value) => list.reduce((sum, one) => sum + (value(one) ?? 0), 0);
/** @type {(places: number[], name: Amount) => number} */
export const sum = (places, name) => total(places, (i) => nodes[i][name]);

/** @type {PageNode[]} */
export const nodes = data.columns.key.map((_, place) => {
  const node = { place, error: data.error?.[place], readers: [] };
  for (const [name, column] of Object.entries(data.columns)) {
    node[name] = TEXTS.includes(name) ? text(column[place]) : column[place];
  }
  if (node.key.startsWith("/") && node.module) node.key = node.module + node.key;
  node.parts = node.module ? node.module.split(".") : [];
  node.casts = node.casts.map(([operand, before, after, bytes, shared]) => (
    { operand: text(operand), before: text(before), after: text(after), bytes, shared }));
  node.cast_count = node.casts.length;
  node.alike = [node.op, node.colour, node.autocast].join("|"); // as it is compared in equal modules
  node.cast_bytes = total(node.casts, (cast) => cast.bytes);
  return node;
});
nodes.forEach((node, place) => {
  // A value is the place of a node, or the number of a name below zero.
  node.reads = data.columns.reads[place].map(([kind, value, cast]) => {
    const name = value < 0 ? text(-1 - value) : nodes[value].key;
    if (value >= 0) nodes[value].readers.push(node.place);
    const bytes = node.casts.find((made) => made.operand === name)?.bytes ?? 0;
    return { kind: KINDS[kind], value, name, cast: text(cast), bytes };
  });
});
export const several = new Set(nodes.map((node) => node.graph)).size > 1;
export const keyOf = (node) => (several ? `${node.graph}:${node.key}` : node.key);
export const byKey = new Map(nodes.map((node) => [keyOf(node), node.place]));
export const styleOf = (dtype) => data.styles[dtype] || "other";
export const short = (dtype) => dtype.replace("bfloat16", "bf16").replace("float16", "fp16").replace("float32", "fp32");
export const differs = (node) => node.autocast !== node.colour;
export const unlike = (places) => places.filter((i) => differs(nodes[i]));
export const costsKnown = (places) => places.some((i) => nodes[i].bytes !== null);
export const inside = (path, outer) => outer === "" || path === outer || path.startsWith(`${outer}.`);

/** @type {[number, string][]} */
const UNITS = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"], [1, ""]];
export function amount(n, unit) {
  if (n === null || n === undefined) return "not known";
  const [size, prefix] = UNITS.find(([least]) => n >= least) || UNITS[4];
  return `${Number((n / size).toPrecision(3))} ${prefix}${unit}`;
}
export const counted = (n, what) => `${n} ${what}${n === 1 ? "" : "s"}`;
export const percent = (n) => `${Number(n.toFixed(1))} %`;

// To which dtype torch.autocast casts what a node reads, "" if it does not: a weight of a product, or a value that was
// made in another floating dtype.
const FLOATING = /^b?float/;
function castOfAutocast({ kind, value }, node) {
  const from = value >= 0 ? nodes[value].autocast : kind === "attribute" && node.flops ? "float32" : "";
  return [from, node.autocast].every((dtype) => FLOATING.test(dtype)) && from !== node.autocast ? node.autocast : "";
}

// To which dtype what a node reads is cast in a drawing that is coloured so, and how many casts some nodes have.
export const castIn = (mode, read, node) => (mode.cast ? mode.cast(read, node) : read.cast);
export const castsIn = (mode, places) => (!mode.cast ? sum(places, "cast_count")
  : total(places, (i) => nodes[i].reads.filter((read) => mode.cast(read, nodes[i])).length));

// What a drawing is coloured by: a dtype of each node, whether two differ, or an amount.
/** @type {Record<string, Mode>} */
export const MODES = {
  policy: { dtype: (node) => node.colour },
  autocast: { dtype: (node) => node.autocast, cast: castOfAutocast },
  original: { dtype: (node) => node.original || node.colour, cast: () => "" },
  differs: { differs: true },
  cast: { amount: "cast_bytes", unit: "B" },
  saved: { amount: "saved_bytes", unit: "B" },
  error: { amount: "error", unit: "%" },
};

// How many of some nodes run in 16 bit, in FP32 and in neither; or how much of what each weighs.
/**
 * @type {(places: number[], dtype?: Mode["dtype"], weight?: (node: PageNode) => number | null) =>
 *   Record<string, number>}
 */
export function shares(places, dtype = MODES.policy.dtype, weight = () => 1) {
  const out = { low: 0, fp32: 0, other: 0 };
  for (const i of places) out[styleOf(dtype(nodes[i]))] += weight(nodes[i]) ?? 0;
  return out;
}

// How much of the arithmetic of a census ran in each dtype, the most first: [[dtype, ops, FLOPs, products], ...].
export function dtypesOf({ ran }) {
  const ops = ran.filter((row) => !row.casts);
  const by = Map.groupBy(ops, ({ product, operands, results }) => {
    const dtypes = operands.length ? operands : results;
    return product ? dtypes[0] : [...new Set(dtypes)].join(" and ");
  });
  const rows = [...by].map(([dtype, some]) => [dtype, total(some, (row) => row.count), total(some, (row) => row.flops),
    total(some.filter((row) => row.product), (row) => row.count)]);
  return rows.sort((a, b) => b[2] - a[2]);
}

// Cut a list into runs of neighbours that belong together.
function runs(list, together) {
  const out = [];
  for (const one of list) {
    if (out.length && together(out.at(-1).at(-1), one)) out.at(-1).push(one);
    else out.push([one]);
  }
  return out;
}

// Cut the nodes of a box into boxes: a node, or what follows each other in one module. `depth`: parts of the path.
export function boxesOf(places, depth, outer) {
  const pathOf = (i) => {
    const { parts } = nodes[i];
    const list = /^\d+$/.test(parts[depth + 1] || ""); // `layer.0`: a list of modules is no box of its own
    return parts.length > depth ? parts.slice(0, depth + (list ? 2 : 1)).join(".") : null;
  };
  const found = places.map((place) => ({ place, path: pathOf(place) }));
  const parted = runs(found, (a, b) => a.path !== null && a.path === b.path);
  const boxes = parted.map((run) => (run.length === 1 ? leaf(nodes[run[0].place]) : moduleBox(run, outer)));
  return grouped(runs(boxes, follows).map((equal) => (equal.length === 1 ? equal[0] : stack(equal, outer))), outer);
}

const leaf = (node) => ({
  id: `n${node.place}`, kind: "node", node, places: [node.place], label: node.op, path: node.module,
});

function moduleBox(run, outer) {
  const { path } = run[0];
  const places = run.map(({ place }) => place);
  const depth = path.split(".").length;
  let inner = null;
  const children = () => (inner ??= simple(boxesOf(places, depth, path)));
  return { id: `m${places[0]}.${depth}`, kind: "module", path, places, label: labelOf(path, outer), children };
}

// A box in which there is one module and nothing else shows what is in that module.
export const simple = (boxes) => (boxes.length === 1 && boxes[0].kind === "module" ? boxes[0].children() : boxes);

const labelOf = (path, outer) => path.slice(outer ? outer.length + 1 : 0);

// Whether two modules, as boxes or as branches of the tree, are equal and follow each other in a list.
const NUMBERED = /^(.*?)(\d+)$/;
function follows(a, b) {
  const [one, two] = [a, b].map((module) => module.kind === "module" && NUMBERED.exec(module.path));
  return one && two && one[1] === two[1] && Number(two[2]) === Number(one[2]) + 1 && signature(a) === signature(b);
}

function signature(of) {
  const { length } = of.path;
  return (of.signature ??= of.places.map((i) => nodes[i].module.slice(length) + nodes[i].alike).join("\n"));
}

// Equal modules of a list that follow each other are one box: `layer.0-11`.
function stack(boxes, outer) {
  const { id, path, places } = boxes[0];
  return {
    id: `s${id}`, kind: "stack", path, label: `${labelOf(path, outer)}-${NUMBERED.exec(boxes.at(-1).path)[2]}`,
    count: boxes.length, each: places.length, places: boxes.flatMap((box) => box.places), children: () => boxes,
  };
}

// No level of a drawing has more boxes than can be read: a longer one is cut into groups that unfold likewise.
function grouped(boxes, path) {
  if (boxes.length <= MOST_BOXES) return boxes;
  const size = Math.ceil(boxes.length / Math.min(MOST_BOXES / 2, Math.ceil(boxes.length / 24)));
  return Array.from({ length: Math.ceil(boxes.length / size) }, (_, i) => {
    const part = boxes.slice(i * size, (i + 1) * size);
    const [label, places] = [`${part[0].label} to ${part.at(-1).label}`, part.flatMap((box) => box.places)];
    return { id: `g${part[0].id}.${size}`, kind: "group", path, label, places, children: () => grouped(part, path) };
  });
}

// The tree of the modules that some nodes are in. Equal modules of a list share a branch: `0-11`.
export function moduleTree(places, depth = 0, path = "") {
  const below = Map.groupBy(places.filter((i) => nodes[i].parts.length > depth), (i) => nodes[i].parts[depth]);
  const within = (part) => (path ? `${path}.${part}` : part);
  const children = [...below].map(([part, some]) => moduleTree(some, depth + 1, within(part)));
  return {
    kind: "module", path, places, name: path.split(".").at(-1) || data.model,
    children: runs(children, follows).flatMap((equal) => {
      if (equal.length < 3) return equal;
      const name = `${equal[0].name}-${equal.at(-1).name}`;
      const all = equal.flatMap((one) => one.places);
      return { kind: "list", path: within(name), name, count: equal.length, places: all, children: equal };
    }),
  };
}
