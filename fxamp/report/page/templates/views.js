// @ts-check
// What is beside the drawing: the explanation of a node or a module, and the tabs of nodes, comparison and source.

import {
  data, text, total, sum, nodes, several, keyOf, byKey, styleOf, short, differs, unlike, costsKnown, amount, counted,
  percent, shares, dtypesOf,
} from "./data.js";
import { element, button, list, terms, bar } from "./elements.js";

// What choosing a node or a line does: the page says so, since it is drawn by what is here.
/** @type {{ node: (place: number, follow?: boolean) => void, line: (places: number[]) => void }} */
export const choose = { node() {}, line() {} };

const LONG = 5; // causes of a chain that are all shown; of a longer one only its ends
const CHUNK = 150; // rows of a table that are made at a time

export const link = (i, words = keyOf(nodes[i])) => button("link", () => choose.node(i, true), words);
export const pill = (dtype) => (dtype ? element(`span.pill.${styleOf(dtype)}`, { title: dtype }, short(dtype)) : "–");
export const lineOf = (node) => (node.file ? `${node.file}:${node.line}` : "");
export const why = ({ because, reason }) => (reason && reason !== because ? `${because}: ${reason}` : because);
const some = (n, unit = "B") => (n ? amount(n, unit) : "");
const ofLoss = (error) => data.error && `${amount(error, "%")} of that of the loss (of its variance)`;

// What is said of something in the panel, below where it is and its name.
export function panelOf(where, name, key, ...content) {
  return [element("p.where", where), element("h2", { tabindex: -1, "data-key": key }, name), ...content];
}

// The causes of a node one after the other, as far as each has one; then those of the last, if there are several.
function causesOf(i) {
  const known = new Set([i]);
  let { causes } = nodes[i];
  while (causes.length === 1 && causes[0] >= 0 && !known.has(causes[0])) {
    known.add(causes[0]);
    ({ causes } = nodes[causes[0]]);
  }
  const item = (at) => (at < 0 ? text(-1 - at) : [link(at), ` ${short(nodes[at].colour)}: ${why(nodes[at])}`]);
  const [, ...chain] = known;
  const inner = chain.slice(1, -1);
  const folded = () => element("details", element("summary", `${inner.length} nodes follow`), list("ol", inner, item));
  const shown = chain.length > LONG ? [item(chain[0]), folded(), item(chain.at(-1))] : chain.map(item);
  const last = causes.filter((at) => !known.has(at)).map(item);
  return list("ol.chain", [...shown, ...last], (content) => content, shown.length + 6);
}

export function explained(i) {
  const node = nodes[i];
  const cast = ({ operand, before, after, bytes, shared }) => [`${operand}: ${short(before)} → ${short(after)}`,
    bytes !== null && `, moves ${amount(bytes, "B")}`, shared > 1 && `, read by ${shared}`];
  const read = ({ kind, value, name, cast: to }) => [
    value >= 0 ? link(value) : `${name} (${kind === "attribute" ? "weight or constant" : kind})`,
    to && ` → ${short(to)}`];
  const meaning = data.meanings[node.because];
  const { bytes, flops, saved_bytes: saved } = node;
  return panelOf(`${node.module || data.model}${several ? `, graph ${node.graph}` : ""}`, node.key.split("/").at(-1),
    keyOf(node), terms(
      ["runs in", pill(node.colour), differs(node) && element("span.mark", " torch.autocast: ", pill(node.autocast))],
      ["why", element("strong", node.because), why(node).slice(node.because.length),
        meaning && element("p.meaning", meaning)],
      ["because of", causesOf(i)],
      ["your line", node.file && element("code", lineOf(node)), node.code && element("pre", node.code),
        node.inside && element("p.meaning", `inside torch: ${node.inside}`)],
      ["casts in front of it", list("ul", node.casts, cast)],
      ["reads", list("ul", node.reads, read)],
      ["read by", list("ul", node.readers, (at) => link(at), 12)],
      ["gives", node.gives],
      ["costs", bytes !== null && [`${amount(bytes, "B")} of results, `, `${amount(flops, "FLOPs")}, `,
        `${amount(saved, "B")} kept for backward`]],
      ["predicted error", ofLoss(node.error)]));
}

export function described(name, places) {
  const { low, fp32, other } = shares(places);
  const known = costsKnown(places);
  return panelOf("module", name, null, terms(
    ["nodes", `${places.length}: ${low} in 16 bit, ${fp32} in FP32, ${other} in neither`],
    ["casts", sum(places, "cast_count"), known && `, which move ${amount(sum(places, "cast_bytes"), "B")}`],
    ["kept for backward", known && amount(sum(places, "saved_bytes"), "B")],
    ["predicted error", ofLoss(sum(places, "error"))],
    ["differ from torch.autocast", unlike(places).length ? counted(unlike(places).length, "node") : "none"]));
}

// Make the elements of a long list as they are scrolled to. Returns what makes more, and says whether there were any.
function lazily(host, parent, items, make) {
  const more = () => {
    const made = parent.childElementCount;
    parent.append(...items.slice(made, made + CHUNK).map(make));
    return made < items.length;
  };
  more();
  host.onscroll = () => host.scrollTop + host.clientHeight > host.scrollHeight - 600 && more();
  return more;
}

// A table whose rows are made as they are scrolled to. `columns`: [name, what an item has there, and the words of that
// if it is a number, by which the table can then be sorted].
/**
 * @typedef {[string, (item: any) => any, ((n: number) => any)?]} Column
 * @type {(host: any, caption: string, columns: Column[], items: any[], attributes?: (item: any) => object) => void}
 */
function longTable(host, caption, columns, items, attributes = () => ({})) {
  const body = element("tbody");
  const cell = ([, value, words], at) => (item) => (
    at ? element(words ? "td.number" : "td", words ? words(value(item)) : value(item))
      : element("th.name", { scope: "row" }, value(item)));
  const cells = columns.map(cell);
  const row = (item) => element("tr", attributes(item), ...cells.map((made) => made(item)));
  const fill = (list) => {
    body.replaceChildren();
    lazily(host, body, list, row);
  };
  const heads = columns.map(([name, value, words], at) => {
    const sort = () => fill(items.toSorted((a, b) => value(b) - value(a)));
    const sorter = words && element("button.sort", { title: `sort by ${name}`, onclick: sort }, name);
    return element(sorter ? "th.number" : at ? "th" : "th.name", { scope: "col" }, sorter ?? name);
  });
  fill(items);
  const head = element("thead", element("tr", ...heads));
  host.replaceChildren(element("table", caption && element("caption", caption), head, body));
}

export function nodeTable(host, caption, places, module, chosen) {
  const within = (node) => module && node.key.startsWith(`${module}.`);
  longTable(host, caption, [
    ["node", (node) => link(node.place, within(node) ? `…${node.key.slice(module.length)}` : keyOf(node))],
    ["runs in", (node) => pill(node.colour)],
    ["autocast", (node) => (differs(node) ? pill(node.autocast) : "same")],
    ["casts", (node) => node.cast_count, (n) => n || ""],
    ["cast", (node) => node.cast_bytes, some], ["kept", (node) => node.saved_bytes, some],
    ["why", why], ["your line", (node) => element("code", lineOf(node))],
  ], places.map((i) => nodes[i]), ({ place }) => ({ "data-node": place, class: place === chosen && "chosen" }));
}

// The totals of a state without mixed precision, under autocast, and under this policy.
export function totalsTable(host, totals, places) {
  const columns = ["original", "autocast", "colour"];
  const flops = sum(places, "flops");
  const low = (column, weight) => shares(places, (node) => node[column], weight).low;
  const share = (column) => (flops ? `${Math.round((100 * low(column, (node) => node.flops)) / flops)} %` : "–");
  const rows = [["operations in 16 bit", ...columns.map((column) => low(column))],
    ["arithmetic in 16 bit", ...columns.map(share)]];
  const saved = [totals.saved_bytes_fp32, totals.saved_bytes_autocast, totals.saved_bytes];
  if (totals.saved_bytes !== null) rows.push(["kept for backward", ...saved.map((n) => amount(n, "B"))]);
  const heads = ["", "without fxamp", "torch.autocast", "this policy"];
  longTable(host, "", heads.map((name, at) => [name, (row) => row[at]]), rows);
}

// The lines that made nodes, those first whose casts move most, and the files that they are in.
export function sourceTab(ranks, files, state, places) {
  const found = Map.groupBy(places.filter((i) => nodes[i].file), (i) => lineOf(nodes[i]));
  const lines = [...found].map(([key, made]) => {
    const { file, code } = nodes[made[0]];
    return { key, file, code, places: made, cast: sum(made, "cast_bytes"), saved: sum(made, "saved_bytes") };
  });
  const cast = state.output_bytes;
  const outputs = { file: "(outputs)", code: "casts of what the model returns", places: [], cast, saved: 0 };
  const ranked = (cast ? [...lines, outputs] : lines).sort((a, b) => b.cast - a.cast || b.saved - a.saved);
  const go = (line) => {
    const find = () => files.querySelector(`[data-line="${CSS.escape(line.key)}"]`);
    while (!find() && more());
    find()?.scrollIntoView({ block: "center" });
    find()?.querySelector("button").focus({ preventScroll: true });
    choose.line(line.places);
  };
  const caption = costsKnown(places) ? "Your lines, those first whose casts move most"
    : "Costs of lines are known only for a model that was converted with example inputs.";
  const named = (line) => (line.key ? button("link", () => go(line), line.key) : line.file);
  longTable(ranks, caption, [
    ["line", (line) => [named(line), element("code", line.code)]],
    ["cast", (line) => line.cast, some], ["kept", (line) => line.saved, some],
    ["nodes", (line) => line.places.length, (n) => n || ""],
  ], ranked);
  const byLine = new Map(lines.map((line) => [line.key, line]));
  const most = Math.max(1, ...lines.map((line) => line.cast));
  const cost = (file) => total(lines.filter((line) => line.file === file), (line) => line.cast + line.saved / 1e3);
  const costs = new Map(Object.keys(data.files).map((file) => [file, cost(file)]));
  const all = [...costs.keys()].sort((a, b) => costs.get(b) - costs.get(a)).flatMap((file) => [
    () => element("h3", file),
    ...data.files[file].map(([number, code], at, shown) => () => (
      sourceLine(byLine.get(`${file}:${number}`), number, code, at && shown[at - 1][0] !== number - 1, most))),
  ]);
  files.replaceChildren();
  const more = lazily(files, files, all, (make) => make());
}

function sourceLine(line, number, code, gap, most) {
  const row = gap ? "div.row.gap" : "div.row";
  const margin = ["span.number", "span.margin", "span.cost"];
  if (!line) return element(row, ...margin.map((part, i) => element(part, i ? "" : number)), element("code", code));
  const counts = counted(line.places.length, "node");
  const title = `${counts}, ${amount(line.cast, "B")} cast, ${amount(line.saved, "B")} kept`;
  const heat = { width: `${Math.round(56 * Math.sqrt(line.cast / most))}px` };
  return element(`${row}.made`, { "data-line": line.key },
    element("button.number", { title, onclick: () => choose.line(line.places) }, number),
    bar("span.margin", "height", shares(line.places), line.places.length),
    element("span.cost", { title }, element("span.heat", { style: heat }), element("span", some(line.cast))),
    element("code", code));
}

// What ran in one step, beside what was planned.
export function censusTab(host, dtypes, table, { share, casts, differences, notes, ran }) {
  const planned = share === null ? "There is no plan to compare with."
    : `${percent(100 * share)} of the arithmetic ran as planned.`;
  const said = `One step: ${planned} ${counted(casts.count, "cast")} moved ${amount(casts.bytes, "B")}.`;
  host.replaceChildren(element("p", { id: "share" }, said), element("h2", "What did not run as planned"),
    list("ul", differences, (one) => one.text) || element("p", "Nothing."),
    ...(notes.length ? [element("h2", "Notes"), list("ul", notes)] : []));
  const rows = dtypesOf({ ran });
  const all = total(rows, ([, , flops]) => flops) || 1;
  longTable(dtypes, "The arithmetic of the step, by dtype", [
    ["dtype", ([dtype]) => pill(dtype)], ["of the arithmetic", (row) => row[2], (n) => percent((100 * n) / all)],
    ["arithmetic", (row) => row[2], (n) => some(n, "FLOPs")], ["products", (row) => row[3], (n) => n || ""],
    ["operations", (row) => row[1], (n) => n],
  ], rows);
  const nodeOf = ({ graph, where }) => (graph < 0 ? undefined : byKey.get(keyOf({ graph, key: where })));
  longTable(table, "What ran, most arithmetic first", [
    ["where", (row) => (nodeOf(row) === undefined ? row.where : link(nodeOf(row)))],
    ["when", (row) => row.phase], ["operation", (row) => row.op],
    ["ran in", (row) => [...new Set([...row.operands, ...row.results])].map((dtype) => pill(dtype))],
    ["times", (row) => row.count, (n) => n],
    ["arithmetic", (row) => row.flops, (n) => some(n, "FLOPs")],
    ["moved", (row) => row.bytes, some], ["cast", (row) => row.cast_bytes, some],
  ], ran.toSorted((a, b) => b.flops - a.flops));
}
