// What is beside the drawing: the explanation of a node or a module, and the tabs of nodes, comparison and source.
const ENDS = 2; // causes that are shown at either end of a chain
const CHUNK = 150; // rows of a table that are made at a time

const pill = (dtype) => (dtype ? element("span", { class: `pill ${styleOf(dtype)}`, title: dtype }, short(dtype)) : "–");
const place = (node) => (node.file ? `${node.file}:${node.line}` : "");
const why = (node) => (node.reason && node.reason !== node.because ? `${node.because}: ${node.reason}` : node.because);
const nameIn = (node, module) => (module && node.key.startsWith(`${module}.`) ? `…${node.key.slice(module.length)}` : keyOf(node));
const mega = (n) => (n ? amount(n, "B") : "");
const term = (name, ...values) => (values.flat().some((v) => v !== null && v !== "" && v !== undefined) ? [element("dt", {}, name), element("dd", {}, ...values)] : []);

// The causes of a node one after the other, as far as each has one; then those of the last, if there are several.
function chainOf(i) {
  const [chain, known] = [[], new Set([i])];
  let causes = nodes[i].causes;
  while (causes.length === 1 && causes[0] >= 0 && !known.has(causes[0])) {
    chain.push(causes[0]);
    known.add(causes[0]);
    causes = nodes[causes[0]].causes;
  }
  return { chain, last: causes.filter((at) => !known.has(at)) };
}

function causesOf(i, link) {
  const { chain, last } = chainOf(i);
  const item = (at) => element("li", {}, link(at), element("span", {}, ` ${short(nodes[at].colour)}: ${why(nodes[at])}`));
  const shown = chain.length <= 2 * ENDS + 1 ? chain.map(item) : [
    ...chain.slice(0, 1).map(item),
    element("li", {}, element("details", {}, element("summary", {}, `${chain.length - 2} nodes follow`), element("ol", {}, ...chain.slice(1, -1).map(item)))),
    ...chain.slice(-1).map(item),
  ];
  const ends = last.slice(0, 6).map((at) => (at >= 0 ? item(at) : element("li", {}, text(-1 - at))));
  if (last.length > 6) ends.push(element("li", {}, `and ${last.length - 6} more`));
  return shown.length + ends.length ? element("ol", { class: "chain" }, ...shown, ...ends) : null;
}

// Explain a node. `link(i)` makes a button that chooses another node.
function explained(i, link) {
  const node = nodes[i];
  const casts = node.casts.map((cast) => element("li", {}, `${cast.operand}: ${short(cast.before)} → ${short(cast.after)}${cast.bytes === null ? "" : `, moves ${amount(cast.bytes, "B")}`}${cast.shared > 1 ? `, read by ${cast.shared}` : ""}`));
  const reads = node.reads.map((read) => element("li", {}, read.node >= 0 ? link(read.node) : `${read.name} (${read.kind === "attribute" ? "weight or constant" : read.kind})`, read.cast ? ` → ${short(read.cast)}` : ""));
  const meaning = data.meanings[node.because];
  return [
    element("p", { class: "where" }, `${node.module || data.model}${several ? `, graph ${node.graph}` : ""}`),
    element("h2", { tabindex: -1, "data-key": keyOf(node) }, node.key.slice(node.key.lastIndexOf("/") + 1)),
    element("dl", {},
      ...term("runs in", pill(node.colour), differs(node) ? element("span", { class: "mark" }, " torch.autocast: ", pill(node.autocast)) : ""),
      ...term("why", element("strong", {}, node.because), node.reason && node.reason !== node.because ? `: ${node.reason}` : "", meaning ? element("p", { class: "meaning" }, meaning) : ""),
      ...term("because of", causesOf(i, link)),
      ...term("your line", node.file ? element("code", {}, place(node)) : "", node.code ? element("pre", {}, node.code) : "", node.inside ? element("p", { class: "meaning" }, `inside torch: ${node.inside}`) : ""),
      ...term("casts in front of it", casts.length ? element("ul", {}, ...casts) : ""),
      ...term("reads", reads.length ? element("ul", {}, ...reads) : ""),
      ...term("read by", readers[i].length ? element("ul", {}, ...readers[i].slice(0, 12).map((at) => element("li", {}, link(at)))) : "", readers[i].length > 12 ? `and ${readers[i].length - 12} more` : ""),
      ...term("gives", node.gives),
      ...term("costs", node.bytes === null ? "" : `${amount(node.bytes, "B")} of results, ${amount(node.flops, "FLOPs")}, ${amount(node.saved_bytes, "B")} kept for backward`),
      ...term("predicted error", node.error === null ? "" : `${amount(node.error, "%")} of that of the loss (of its variance)`)),
  ];
}

function described(name, places) {
  const count = (style) => places.filter((i) => styleOf(nodes[i].colour) === style).length;
  const known = places.some((i) => nodes[i].bytes !== null);
  const unlike = places.filter((i) => differs(nodes[i])).length;
  return [
    element("p", { class: "where" }, "module"),
    element("h2", { tabindex: -1 }, name),
    element("dl", {},
      ...term("nodes", `${places.length}: ${count("low")} in 16 bit, ${count("fp32")} in FP32, ${count("other")} in neither`),
      ...term("casts", `${places.reduce((n, i) => n + nodes[i].casts.length, 0)}${known ? `, which move ${amount(sum(places, "cast_bytes"), "B")}` : ""}`),
      ...term("kept for backward", known ? amount(sum(places, "saved_bytes"), "B") : ""),
      ...term("predicted error", data.error ? `${amount(sum(places, "error"), "%")} of that of the loss (of its variance)` : ""),
      ...term("differ from torch.autocast", unlike ? counted(unlike, "node") : "none")),
  ];
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

// A table whose rows are made as they are scrolled to. `heads`: [name, class, sort key or null].
function longTable(host, caption, heads, items, row) {
  const body = element("tbody", {});
  const sort = (key) => { body.replaceChildren(); lazily(host, body, [...items].sort((a, b) => key(b) - key(a)), row); };
  const head = ([name, kind, key]) => element("th", { scope: "col", class: kind }, key ? element("button", { type: "button", class: "sort", onclick: () => sort(key), title: `sort by ${name}` }, name) : name);
  lazily(host, body, items, row);
  host.replaceChildren(element("table", {}, element("caption", {}, caption), element("thead", {}, element("tr", {}, ...heads.map(head))), body));
}

function nodeTable(host, caption, places, module, link, chosen) {
  const heads = [["node", "name"], ["runs in", ""], ["autocast", ""], ["casts", "number", (i) => nodes[i].casts.length],
    ["cast", "number", (i) => nodes[i].cast_bytes], ["kept", "number", (i) => nodes[i].saved_bytes ?? 0], ["why", "wide"], ["your line", "wide"]];
  longTable(host, caption, heads, places, (i) => {
    const node = nodes[i];
    return element("tr", { "data-node": i, class: i === chosen ? "chosen" : "" },
      element("th", { scope: "row", class: "name" }, link(i, nameIn(node, module))), element("td", {}, pill(node.colour)),
      element("td", { class: differs(node) ? "mark" : "" }, differs(node) ? pill(node.autocast) : "same"),
      element("td", { class: "number" }, node.casts.length || ""), element("td", { class: "number" }, mega(node.cast_bytes)),
      element("td", { class: "number" }, mega(node.saved_bytes)), element("td", { class: "wide" }, why(node)),
      element("td", { class: "wide" }, element("code", {}, place(node))));
  });
}

// The totals of a state without mixed precision, under autocast, and under this policy.
function totalsTable(totals, places) {
  const columns = ["original", "autocast", "colour"];
  const low = (column, name) => places.reduce((n, i) => n + (styleOf(nodes[i][column]) === "low" ? (name ? nodes[i][name] ?? 0 : 1) : 0), 0);
  const share = (column, name) => (sum(places, name) ? `${Math.round((100 * low(column, name)) / sum(places, name))} %` : "–");
  const rows = [["operations in 16 bit", ...columns.map((c) => String(low(c)))], ["arithmetic in 16 bit", ...columns.map((c) => share(c, "flops"))]];
  if (totals.saved_bytes !== null) rows.push(["kept for backward", ...[totals.saved_bytes_fp32, totals.saved_bytes_autocast, totals.saved_bytes].map((n) => amount(n, "B"))]);
  return element("table", { class: "totals" }, element("thead", {}, element("tr", {}, ...["", "without fxamp", "torch.autocast", "this policy"].map((h) => element("th", { scope: "col" }, h)))),
    element("tbody", {}, ...rows.map(([name, ...cells]) => element("tr", {}, element("th", { scope: "row" }, name), ...cells.map((c) => element("td", { class: "number" }, c))))));
}

// The lines that made nodes, the costliest first.
function costlyLines(places) {
  const lines = new Map();
  for (const i of places) {
    const { file, line } = nodes[i];
    const key = `${file}:${line}`;
    if (!lines.has(key)) lines.set(key, { key, file, line, code: nodes[i].code, places: [] });
    lines.get(key).places.push(i);
  }
  for (const line of lines.values()) [line.cast, line.saved] = [sum(line.places, "cast_bytes"), sum(line.places, "saved_bytes")];
  return [...lines.values()].sort((a, b) => b.cast - a.cast || b.saved - a.saved);
}

function sourceTab(ranks, files, state, places, choose) {
  const lines = costlyLines(places);
  const most = Math.max(1, ...lines.map((line) => line.cast));
  const known = places.some((i) => nodes[i].bytes !== null);
  const go = (key) => {
    const find = () => files.querySelector(`[data-line="${CSS.escape(key)}"]`);
    while (!find() && more());
    const row = find();
    row?.scrollIntoView({ block: "center" });
    row?.querySelector("button")?.focus({ preventScroll: true });
  };
  const items = lines.filter((line) => line.file);
  if (state.output_bytes) items.push({ key: "", file: "(outputs)", line: 0, code: "casts of what the model returns", places: [], cast: state.output_bytes, saved: 0 });
  items.sort((a, b) => b.cast - a.cast || b.saved - a.saved);
  const caption = known ? "Your lines, those first whose casts move most" : "Costs of lines are known only for a model that was converted with example inputs.";
  longTable(ranks, caption, [["line", "name"], ["cast", "number"], ["kept", "number"], ["nodes", "number"]], items, (line) => element("tr", {},
    element("th", { scope: "row", class: "name" }, line.key ? element("button", { type: "button", class: "link", onclick: () => (go(line.key), choose(line.places)) }, `${line.file}:${line.line}`) : line.file, element("code", {}, line.code)),
    element("td", { class: "number" }, mega(line.cast)), element("td", { class: "number" }, mega(line.saved)), element("td", { class: "number" }, line.places.length || "")));
  const byKey = new Map(lines.map((line) => [line.key, line]));
  const costs = new Map(Object.keys(data.files).map((file) => [file, 0]));
  for (const line of lines) costs.set(line.file, (costs.get(line.file) || 0) + line.cast + line.saved / 1e3);
  const all = Object.keys(data.files).sort((a, b) => costs.get(b) - costs.get(a)).flatMap((file) => [
    () => element("h3", {}, file), ...data.files[file].map(([number, code], at, found) => () => sourceLine(byKey.get(`${file}:${number}`), number, code, at && found[at - 1][0] !== number - 1, most, choose)),
  ]);
  files.replaceChildren();
  const more = lazily(files, files, all, (make) => make());
}

function sourceLine(line, number, code, gap, most, choose) {
  const share = (style) => line.places.filter((i) => styleOf(nodes[i].colour) === style).length / line.places.length;
  const bar = element("span", { class: "margin" });
  if (line) {
    for (const style of ["low", "fp32", "other"]) {
      const part = element("i", { class: style });
      part.style.height = `${100 * share(style)}%`;
      bar.append(part);
    }
  }
  const heat = element("span", { class: "heat" });
  if (line) heat.style.width = `${Math.round(56 * Math.sqrt(line.cast / most))}px`;
  const words = line ? `${counted(line.places.length, "node")}, ${amount(line.cast, "B")} cast, ${amount(line.saved, "B")} kept` : "";
  const said = element("span", { class: "cost", title: words }, heat, element("span", {}, line ? mega(line.cast) : ""));
  return element("div", { class: `row${line ? " made" : ""}${gap ? " gap" : ""}`, "data-line": line ? line.key : null },
    line ? element("button", { type: "button", class: "number", title: words, onclick: () => choose(line.places) }, number) : element("span", { class: "number" }, number),
    bar, said, element("code", {}, code));
}

// What ran in one step, beside what was planned.
function censusTab(host, table, found, link) {
  const said = (title, lines, none) => [element("h2", {}, title), lines.length ? element("ul", {}, ...lines.map((line) => element("li", {}, line))) : element("p", {}, none)];
  const share = found.share === null ? "There is no plan to compare with." : `${percent(100 * found.share)} of the arithmetic ran as planned.`;
  host.replaceChildren(element("p", { id: "share" }, `One step: ${share} ${counted(found.casts.count, "cast")} moved ${amount(found.casts.bytes, "B")}.`),
    ...said("What did not run as planned", found.differences.map((d) => d.text), "Nothing."), ...(found.notes.length ? said("Notes", found.notes, "") : []));
  longTable(table, "What ran, most arithmetic first", [["where", "name"], ["when", ""], ["operation", ""], ["ran in", ""], ["times", "number"], ["arithmetic", "number"], ["moved", "number"], ["cast", "number"]],
    [...found.ran].sort((a, b) => b.flops - a.flops), (row) => element("tr", {},
    element("th", { scope: "row", class: "name" }, row.graph >= 0 && byKey.has(row.where) ? link(byKey.get(row.where)) : row.where),
    ...[row.phase, row.op].map((word) => element("td", {}, word)), element("td", {}, ...[...new Set(row.operands.concat(row.results))].map(pill)),
    ...[row.count, row.flops ? amount(row.flops, "FLOPs") : "", mega(row.bytes), mega(row.cast_bytes)].map((number) => element("td", { class: "number" }, number))));
}
