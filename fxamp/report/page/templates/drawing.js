// Put together elements and texts, never markup.
function element(name, attributes, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes || {})) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== ""));
  return made;
}

function shape(name, attributes, parent, words) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (words !== undefined) made.textContent = words;
  parent?.append(made);
  return made;
}

const pen = document.createElement("canvas").getContext("2d");
const widths = new Map();
function textWidth(words, font) {
  const key = font + words;
  if (!widths.has(key)) { pen.font = `${font} system-ui, sans-serif`; widths.set(key, pen.measureText(words).width); }
  return widths.get(key);
}
const shortened = (words, most = 34) => (words.length > most ? `…${words.slice(1 - most)}` : words);

const [LEAF, CLOSED, TITLE, PADDING, PORT] = [40, 58, 30, 16, 20]; // heights: a node, a closed module, the title of an open one, its padding, its inputs
const PORTS = 3; // values from outside that have a place each; more share one
const EASY = 14; // boxes that are unfolded at first

// One drawing: boxes that unfold in place, which are moved and zoomed. `told` hears what was chosen and how it is seen.
function drawing(host, told) {
  let roots = [];
  let open = new Set();
  let mode = MODES.policy;
  let shown = new Map(); // the boxes that are drawn, by id: {box, x, y, width, height, within, open}
  let view = { x: 0, y: 0, scale: 1 };
  let bounds = { x: 0, y: 0, width: 1, height: 1 };
  let chosen = null; // id of a box
  let seen = null; // places of the nodes that are not faded; null for all
  const past = [];
  const svg = shape("svg", { class: "drawing", role: "group", "aria-label": "Drawing of the model: arrows move, Enter unfolds, Escape goes to the module round it" }, host);
  const defs = shape("defs", {}, svg);
  for (const kind of ["plain", "cast", "near"]) {
    const marker = shape("marker", { id: `arrow-${kind}-${host.id}`, class: `arrow ${kind}`, viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 8, markerHeight: 8, markerUnits: "userSpaceOnUse", orient: "auto" }, defs);
    shape("path", { d: "M0 0L8 4L0 8Z" }, marker);
  }
  const world = shape("g", {}, svg);
  const [back, lines, front] = ["containers", "edges", "boxes"].map((name) => shape("g", { class: name }, world));
  const small = shape("svg", { class: "minimap", "aria-hidden": "true" }, host);
  const elements = new Map();

  const sized = (box) => {
    const label = shortened(box.label);
    const below = shortened(belowOf(box));
    const wide = Math.max(textWidth(label, box.kind === "node" ? "13px" : "600 13px"), textWidth(below, "11px"));
    return { width: Math.max(84, Math.ceil(wide) + 34), height: box.kind === "node" ? LEAF : CLOSED };
  };

  function belowOf(box) {
    if (mode.amount) return amount(sum(box.places, mode.amount), mode.unit);
    if (box.kind === "node") return `${short((mode.dtype || MODES.policy.dtype)(nodes[box.node]))} ${nodes[box.node].gives.replace(/^[^[]*/, "")}`;
    const casts = box.places.reduce((n, i) => n + nodes[i].casts.length, 0);
    const size = box.kind === "stack" ? `${box.count} × ${counted(box.each, "node")}` : counted(box.places.length, "node");
    return casts ? `${size} · ${counted(casts, "cast")}` : size;
  }

  // Lay out one level: boxes, and places for the values that come in and go out, if it is the inside of a box.
  function level(boxes, within) {
    const at = new Map();
    boxes.forEach((box, i) => box.places.forEach((place) => at.set(place, i)));
    const joined = joins(boxes, at, within);
    const inner = boxes.map((box) => (open.has(box.id) && box.children ? level(box.children(), box) : null));
    const sizes = boxes.map((box, i) => (inner[i] ? frame(box, inner[i]) : sized(box)));
    const ports = joined.ports.map((name) => ({ width: Math.max(16, textWidth(shortened(name, 22), "11px") + 10), height: PORT }));
    const first = ports.length;
    const number = (end) => (end < 0 ? -1 - end : end === boxes.length ? first + boxes.length : first + end);
    const ends = joined.edges.map((edge) => [number(edge.from), number(edge.to)]);
    const made = layered([...ports, ...sizes, ...(joined.leaves ? [{ width: 16, height: 1 }] : [])], ends);
    return { boxes, inner, sizes, first, made, edges: joined.edges, ports: joined.ports };
  }

  function frame(box, made) {
    return { width: Math.max(made.made.width + 2 * PADDING, textWidth(shortened(box.label), "600 13px") + 140), height: made.made.height + TITLE + 2 * PADDING };
  }

  // The edges of a level, with the bytes and the casts of what they carry. A port has a number below 0.
  function joins(boxes, at, within) {
    const [edges, outer] = [new Map(), new Map()];
    const add = (from, to, reader, read) => {
      const key = `${from} ${to}`;
      if (!edges.has(key)) edges.set(key, { from, to, values: new Map(), casts: [] });
      const edge = edges.get(key);
      edge.values.set(read.node >= 0 ? read.node : read.name, read.node >= 0 ? nodes[read.node].bytes ?? 0 : 0);
      if (read.cast) edge.casts.push({ to: read.cast, bytes: castBytes(reader, read) });
    };
    const later = [];
    for (const [place, i] of at) {
      for (const read of nodes[place].reads) {
        if (read.kind === "attribute") continue;
        const start = read.node >= 0 ? at.get(read.node) : undefined;
        if (start === undefined) later.push([read, i, nodes[place]]);
        else if (start !== i) add(start, i, nodes[place], read);
      }
    }
    const valueOf = (read) => (read.node >= 0 ? `n${read.node}` : read.name);
    for (const [read] of later) outer.set(valueOf(read), read.node >= 0 ? nodes[read.node].op : read.name);
    const many = within && outer.size > PORTS;
    const order = [...outer.keys()];
    const ports = many ? [counted(outer.size, "input")] : [...outer.values()];
    for (const [read, i, reader] of later) add(many ? -1 : -1 - order.indexOf(valueOf(read)), i, reader, read);
    let leaves = false;
    for (const [place, i] of within ? at : []) {
      if (!readers[place].some((reader) => !at.has(reader))) continue;
      leaves = true;
      add(i, boxes.length, nodes[place], { node: place, name: "", cast: "" });
    }
    return { edges: [...edges.values()], ports, leaves };
  }

  const castBytes = (reader, read) => {
    const name = read.node >= 0 ? nodes[read.node].key : read.name;
    return reader.casts.find((cast) => cast.operand === name)?.bytes ?? 0;
  };

  // Draw all. The middle of the head of `still`, a box, stays where it is.
  function render(still = null) {
    const [before, made] = [still && shown.get(still), level(roots, null)];
    let [dx, dy] = [0, 0];
    if (before) {
      const spots = new Map();
      measure(made, 0, 0, (box, spot) => spots.set(box.id, spot));
      const after = spots.get(still);
      if (after) [dx, dy] = [before.x + before.width / 2 - after.x - after.width / 2, before.y - after.y];
    }
    shown = new Map();
    lines.replaceChildren();
    bounds = { x: dx, y: dy, width: Math.max(1, made.made.width), height: Math.max(1, made.made.height) };
    measure(made, dx, dy, (box, spot) => shown.set(box.id, { ...spot, box }));
    const scale = scaleOf();
    drawEdges(made, dx, dy);
    for (const [id, old] of elements) {
      if (!shown.has(id)) old.remove();
      if (!shown.has(id)) elements.delete(id);
    }
    for (const [id, spot] of shown) drawBox(id, spot, scale);
    mark();
    drawMinimap();
  }

  function measure(made, x, y, each, within = null) {
    made.boxes.forEach((box, i) => {
      const { width, height } = made.sizes[i];
      const middle = made.made.places[made.first + i];
      const spot = { x: x + middle.x - width / 2, y: y + middle.y - height / 2, width, height, within, open: made.inner[i] !== null };
      each(box, spot);
      if (made.inner[i]) measure(made.inner[i], spot.x + (width - made.inner[i].made.width) / 2, spot.y + TITLE + PADDING, each, box.id);
    });
  }

  // The largest amount of a box that is not unfolded, against which others are tinted.
  function scaleOf() {
    return mode.amount ? Math.max(1e-30, ...[...shown.values()].filter((spot) => !spot.open).map((spot) => sum(spot.box.places, mode.amount))) : 0;
  }

  function drawBox(id, spot, scale) {
    elements.get(id)?.replaceChildren();
    const group = elements.get(id) || shape("g", { "data-id": id, role: "button", tabindex: -1 });
    const { box, width, height } = spot;
    elements.set(id, group);
    (spot.open ? back : front).append(group);
    group.style.transform = `translate(${spot.x}px, ${spot.y}px)`;
    const style = box.kind === "node" && mode.dtype ? styleOf(mode.dtype(nodes[box.node])) : "plain";
    const marked = mode.differs && box.places.some((i) => differs(nodes[i]));
    const faded = seen && !box.places.some((i) => seen.has(i));
    group.setAttribute("class", `box ${box.kind} ${style}${spot.open ? " open" : ""}${marked ? " marked" : ""}${faded ? " faded" : ""}`);
    group.setAttribute("aria-label", spoken(box, spot.open));
    if (box.children) group.setAttribute("aria-expanded", String(spot.open));
    if (box.kind === "stack" && !spot.open) {
      for (const by of [8, 4]) shape("rect", { class: "behind", x: by, y: by, width, height, rx: 8 }, group);
    }
    const face = shape("rect", { class: "face", width, height, rx: box.kind === "node" ? 7 : 9 }, group);
    if (mode.amount && !spot.open) face.style.setProperty("--heat", `${Math.round(100 * Math.sqrt(sum(box.places, mode.amount) / scale))}%`);
    if (mode.amount && !spot.open) group.classList.add("heated");
    if (box.kind === "node") {
      if (mode.dtype) shape("path", { class: "strip", d: `M7 0h-1a6 6 0 0 0-6 6v${height - 12}a6 6 0 0 0 6 6h1z` }, group);
      shape("text", { class: "label", x: width / 2 + 2, y: 17 }, group, shortened(box.label));
      shape("text", { class: "below", x: width / 2 + 2, y: 31 }, group, shortened(belowOf(box)));
      badge(group, nodes[box.node], width);
    } else {
      shape("text", { class: "label", x: 14, y: 20 }, group, `${shortened(box.label)}`);
      shape("path", { class: "fold", d: spot.open ? "M-4 -2L0 3L4 -2" : "M-2 -4L3 0L-2 4", transform: `translate(${width - 14} 15)` }, group);
      if (!spot.open) shape("text", { class: "below", x: 14, y: 37 }, group, shortened(belowOf(box)));
      if (!spot.open && !mode.amount) shares(group, box, width, height);
    }
    shape("title", {}, group, `${box.kind === "node" ? keyOf(nodes[box.node]) : box.path || data.model}\n${belowOf(box)}`);
  }

  // How much of a module runs in which precision, or differs.
  function shares(group, box, width, height) {
    const all = box.places.length;
    const count = (style) => box.places.filter((i) => styleOf(mode.dtype(nodes[i])) === style).length;
    const unlike = mode.differs ? box.places.filter((i) => differs(nodes[i])).length : 0;
    const parts = mode.differs ? [["mark", unlike], ["none", all - unlike]] : ["low", "fp32", "other"].map((s) => [s, count(s)]);
    let x = 14;
    for (const [style, n] of parts) {
      const part = ((width - 28) * n) / all;
      if (part > 0) shape("rect", { class: `part ${style}`, x, y: height - 13, width: part, height: 5, rx: 1 }, group);
      x += part;
    }
  }

  // The casts of a node's weights, which no edge shows.
  function badge(group, node, width) {
    const casts = node.reads.filter((read) => read.kind === "attribute" && read.cast);
    if (!casts.length) return;
    const bytes = casts.reduce((total, read) => total + castBytes(node, read), 0);
    const mark = shape("g", { class: "weights", transform: `translate(${width - 5} 5)` }, group);
    diamond(mark, bytes);
    shape("title", {}, mark, `${counted(casts.length, "cast")} of weights, ${amount(bytes, "B")}`);
  }

  const largest = Math.max(1, ...nodes.flatMap((node) => node.casts.map((cast) => cast.bytes ?? 0)));
  const widest = Math.max(1, ...nodes.map((node) => node.bytes ?? 0));
  const diamond = (parent, bytes) => {
    const r = 4 + 5 * Math.sqrt(bytes / largest);
    return shape("path", { d: `M0 ${-r}L${r} 0L0 ${r}L${-r} 0Z` }, parent);
  };

  function spoken(box, unfolded) {
    const node = nodes[box.node];
    if (node) return `${box.label} in ${box.path || data.model}, ${node.colour}${differs(node) ? `, autocast ${node.autocast}` : ""}`;
    return `${box.label}, ${counted(box.places.length, "node")}, ${unfolded ? "unfolded" : "folded"}`;
  }

  function drawEdges(made, x, y) {
    made.ports.forEach((name, i) => {
      const at = made.made.places[i];
      const port = shape("text", { class: "port", x: x + at.x, y: y + at.y + 4 }, lines, shortened(name, 22));
      shape("title", {}, port, name);
    });
    const routes = spread(made);
    made.edges.forEach((edge, i) => drawEdge(made, edge, routes[i].map(([a, b]) => [x + a, y + b])));
    made.inner.forEach((inner, i) => {
      if (!inner) return;
      const { x: cx, y: cy } = made.made.places[made.first + i];
      const { width, height } = made.sizes[i];
      drawEdges(inner, x + cx - width / 2 + (width - inner.made.width) / 2, y + cy - height / 2 + TITLE + PADDING);
    });
  }

  // Edges that end at one box end side by side, in the order in which they come.
  function spread(made) {
    const routes = made.made.routes.map((points) => points.map((point) => [...point]));
    made.boxes.forEach((box, to) => {
      const ends = routes.filter((_, i) => made.edges[i].to === to).sort((a, b) => a[a.length - 2][0] - b[b.length - 2][0]);
      const step = Math.min(46, (made.sizes[to].width - 30) / ends.length);
      ends.forEach((points, i) => (points[points.length - 1][0] += (i - (ends.length - 1) / 2) * step));
    });
    return routes;
  }

  function drawEdge(made, edge, points) {
    const bytes = [...edge.values.values()].reduce((a, b) => a + b, 0);
    const casts = edge.casts;
    const kind = casts.length ? "cast" : "plain";
    const group = shape("g", { class: `edge ${kind}`, "data-ends": `${made.boxes[edge.from]?.id} ${made.boxes[edge.to]?.id}` }, lines);
    if (edge.to === made.boxes.length) points[points.length - 1][1] += PADDING; // it leaves the box round it
    const line = shape("path", { d: curve(points) }, group);
    if (edge.to < made.boxes.length) line.setAttribute("marker-end", `url(#arrow-${kind}-${host.id})`);
    line.style.strokeWidth = `${1 + 4 * Math.sqrt(bytes / widest)}px`;
    const total = casts.reduce((a, cast) => a + cast.bytes, 0);
    shape("title", {}, group, [counted(edge.values.size, "value"), bytes && amount(bytes, "B"), casts.length && `${counted(casts.length, "cast")}, ${amount(total, "B")}`].filter(Boolean).join(", "));
    if (!casts.length) return;
    const [px, py] = points[points.length - 1];
    const up = points[points.length - 2][1] > py;
    const mark = shape("g", { class: "mark", transform: `translate(${px} ${py + (up ? 18 : -18)})` }, group);
    diamond(mark, total);
    const targets = [...new Set(casts.map((cast) => short(cast.to)))];
    shape("text", { x: 12, y: 4 }, mark, casts.length > 1 ? `${casts.length} → ${targets.join(", ")}` : targets[0]);
  }

  function curve(points) {
    return points.reduce((words, [x, y], i) => {
      if (!i) return `M${x} ${y}`;
      const [px, py] = points[i - 1];
      return x === px ? `${words}L${x} ${y}` : `${words}C${px} ${(py + y) / 2} ${x} ${(py + y) / 2} ${x} ${y}`;
    }, "");
  }

  function mark() {
    const current = shown.has(chosen) ? chosen : shown.keys().next().value;
    for (const [id, group] of elements) {
      group.classList.toggle("chosen", id === chosen);
      group.setAttribute("tabindex", id === current ? 0 : -1);
    }
    for (const edge of lines.querySelectorAll(".edge")) edge.classList.toggle("near", edge.dataset.ends.split(" ").includes(chosen));
  }

  // --- how it is seen ---

  const size = () => ({ width: host.clientWidth || 1, height: host.clientHeight || 1 });

  function look(to, smooth = false) {
    view = to;
    world.classList.toggle("smooth", smooth);
    world.style.transform = `translate(${view.x}px, ${view.y}px) scale(${view.scale})`;
    frameMinimap();
    told.looked?.(view);
  }

  function fit() {
    const { width, height } = size();
    const scale = Math.max(0.02, Math.min(1, (width - 40) / bounds.width, (height - 40) / bounds.height));
    look({ scale, x: (width - bounds.width * scale) / 2 - bounds.x * scale, y: Math.max(20, (height - bounds.height * scale) / 2) - bounds.y * scale }, true);
  }

  // At first it is as large as can be read: what does not fit is below.
  function begin() {
    const { width } = size();
    const scale = Math.max(0.45, Math.min(1, (width - 40) / bounds.width));
    look({ scale, x: (width - bounds.width * scale) / 2 - bounds.x * scale, y: 20 - bounds.y * scale });
  }

  function zoom(factor, x = size().width / 2, y = size().height / 2) {
    const scale = Math.min(4, Math.max(0.02, view.scale * factor));
    const by = scale / view.scale;
    look({ scale, x: x - (x - view.x) * by, y: y - (y - view.y) * by });
  }

  // Move a box into the part that is seen; a large one is made to fit.
  function show(id) {
    const spot = shown.get(id);
    if (!spot) return;
    const { width, height } = size();
    const [left, top] = [spot.x * view.scale + view.x, spot.y * view.scale + view.y];
    const [wide, high] = [spot.width * view.scale, spot.height * view.scale];
    if (left >= 8 && top >= 8 && left + wide <= width - 8 && top + high <= height - 8 && view.scale > 0.4) return;
    const scale = Math.max(0.3, Math.min(Math.max(view.scale, 0.7), (width - 40) / spot.width, 1));
    look({ scale, x: width / 2 - (spot.x + spot.width / 2) * scale, y: Math.max(20, (height - spot.height * scale) / 2) - spot.y * scale }, true);
  }

  let mapScale = 1;
  let area = null;
  function drawMinimap() {
    small.replaceChildren();
    mapScale = Math.min(150 / bounds.width, 130 / bounds.height);
    small.setAttribute("width", Math.ceil(bounds.width * mapScale) + 8);
    small.setAttribute("height", Math.ceil(bounds.height * mapScale) + 8);
    const inner = shape("g", { transform: `translate(4 4) scale(${mapScale}) translate(${-bounds.x} ${-bounds.y})` }, small);
    for (const { x, y, width, height, box, open: unfolded } of shown.values()) {
      const style = box.kind === "node" && mode.dtype ? styleOf(mode.dtype(nodes[box.node])) : unfolded ? "open" : "plain";
      shape("rect", { class: style, x, y, width, height }, inner);
    }
    area = shape("rect", { class: "seen" }, inner);
    frameMinimap();
  }

  function frameMinimap() {
    if (!area) return;
    const { width, height } = size();
    const frame = { x: -view.x / view.scale, y: -view.y / view.scale, width: width / view.scale, height: height / view.scale };
    for (const [key, value] of Object.entries(frame)) area.setAttribute(key, value);
    area.style.strokeWidth = `${2 / mapScale}px`;
    const whole = frame.x <= bounds.x && frame.y <= bounds.y && frame.x + frame.width >= bounds.x + bounds.width && frame.y + frame.height >= bounds.y + bounds.height;
    small.classList.toggle("useless", whole);
  }

  // --- what is chosen, and what is unfolded ---

  const remember = () => past.push({ open: new Set(open), view, chosen });

  function choose(id, quiet = false) {
    chosen = id;
    mark();
    if (!quiet && shown.has(id)) told.chose?.(shown.get(id).box);
  }

  function toggle(id) {
    const spot = shown.get(id);
    if (!spot?.box.children) return;
    remember();
    if (open.has(id)) open.delete(id);
    else open.add(id);
    render(id);
    told.unfolded?.();
  }

  // Unfold what is round a node or a module, and choose its box.
  function reveal(holds, quiet = false) {
    remember();
    let boxes = roots;
    let found = null;
    for (;;) {
      const next = boxes.find(holds.inside);
      if (!next) break;
      found = next;
      if (holds.itself(next) || !next.children) break;
      open.add(next.id);
      boxes = next.children();
    }
    if (!found) return false;
    render(shown.has(found.id) ? found.id : null);
    show(found.id);
    choose(found.id, quiet);
    return true;
  }

  // Move the box that a node is seen in into the middle, and return how it is seen.
  function showNode(i) {
    const holding = [...shown.values()].filter((spot) => !spot.open && spot.box.places.includes(i))[0];
    const { width, height } = size();
    const scale = Math.max(0.55, Math.min(1, (width - 40) / bounds.width));
    look({ scale, x: width / 2 - (holding.x + holding.width / 2) * scale, y: height / 2 - (holding.y + holding.height / 2) * scale });
    return view;
  }

  function pathOf(id) {
    const out = [];
    for (let at = shown.get(id); at; at = shown.get(at.within)) out.unshift(at.box);
    return out;
  }

  // Unfold the largest boxes until there is enough to see, but no list of equal layers.
  function unfoldSome() {
    open = new Set();
    for (let visible = roots.slice(); visible.length < EASY; ) {
      const ways = visible.filter((box) => box.kind === "module" && box.children().length <= EASY);
      if (!ways.length) break;
      const largest = ways.reduce((a, b) => (b.places.length > a.places.length ? b : a));
      const inner = largest.children();
      if (visible.length - 1 + inner.length > EASY) break;
      open.add(largest.id);
      visible = [...visible.filter((box) => box !== largest), ...inner];
    }
  }

  // Unfold what holds some nodes, of a list of equal layers the first.
  function unfoldWhere(wanted, most = 60) {
    const some = new Set(wanted);
    let left = most;
    const walk = (boxes) => boxes.filter((box) => box.children && box.places.some((i) => some.has(i))).forEach((box, at) => {
      const inner = box.children();
      if (left < inner.length || (at && box.signature !== undefined && box.signature === boxes[0].signature)) return;
      left -= inner.length;
      open.add(box.id);
      walk(inner);
    });
    open = new Set();
    walk(roots);
    render();
  }

  // --- hands and keys ---

  const pointers = new Map();
  let moved = 0;
  const spotOf = (event) => {
    const { left, top } = svg.getBoundingClientRect();
    return [event.clientX - left, event.clientY - top];
  };
  svg.addEventListener("pointerdown", (event) => { pointers.set(event.pointerId, spotOf(event)); moved = 0; });
  svg.addEventListener("pointermove", (event) => {
    const before = pointers.get(event.pointerId);
    if (!before) return;
    const now = spotOf(event);
    const other = [...pointers].find(([id]) => id !== event.pointerId)?.[1];
    moved += Math.abs(now[0] - before[0]) + Math.abs(now[1] - before[1]);
    if (moved > 4 && !svg.hasPointerCapture(event.pointerId)) svg.setPointerCapture(event.pointerId);
    if (other) zoom(Math.hypot(now[0] - other[0], now[1] - other[1]) / Math.max(1, Math.hypot(before[0] - other[0], before[1] - other[1])), (now[0] + other[0]) / 2, (now[1] + other[1]) / 2);
    else if (moved > 4) look({ ...view, x: view.x + now[0] - before[0], y: view.y + now[1] - before[1] });
    pointers.set(event.pointerId, now);
  });
  for (const name of ["pointerup", "pointercancel", "pointerleave"]) svg.addEventListener(name, (event) => pointers.delete(event.pointerId));
  svg.addEventListener("wheel", (event) => {
    event.preventDefault();
    zoom(Math.exp(-event.deltaY * (event.ctrlKey ? 0.01 : 0.0015)), ...spotOf(event));
  }, { passive: false });
  svg.addEventListener("click", (event) => {
    const id = event.target.closest("[data-id]")?.dataset.id;
    if (!id || moved > 4) return;
    toggle(id);
    choose(id);
    elements.get(id).focus({ preventScroll: true });
  });
  small.addEventListener("pointerdown", (event) => {
    const { left, top } = small.getBoundingClientRect();
    const { width, height } = size();
    const [x, y] = [(event.clientX - left - 4) / mapScale + bounds.x, (event.clientY - top - 4) / mapScale + bounds.y];
    look({ ...view, x: width / 2 - x * view.scale, y: height / 2 - y * view.scale }, true);
  });

  // What is above or beside may grow: the drawing stays where it is on the screen.
  let corner = [host.offsetLeft, host.offsetTop];
  new ResizeObserver(() => {
    const now = [host.offsetLeft, host.offsetTop];
    if (host.clientWidth) look({ ...view, x: view.x + corner[0] - now[0], y: view.y + corner[1] - now[1] });
    if (host.clientWidth) corner = now;
  }).observe(host);

  // The nearest box in a direction, as seen from the middle of another's head.
  function beside(id, [right, down]) {
    const middle = ({ x, y, width, height, open: unfolded }) => [x + width / 2, unfolded ? y + TITLE / 2 : y + height / 2];
    const [x, y] = middle(shown.get(id));
    let best = null;
    for (const [other, spot] of shown) {
      const [dx, dy] = middle(spot).map((value, i) => value - [x, y][i]);
      const along = dx * right + dy * down;
      const cost = along + 2.5 * Math.abs(dx * down + dy * right);
      if (other !== id && along > 1 && (best === null || cost < best.cost)) best = { other, cost };
    }
    return best?.other;
  }

  svg.addEventListener("keydown", (event) => {
    const id = event.target.dataset?.id;
    if (!id || event.altKey || event.ctrlKey || event.metaKey) return;
    const go = (to) => {
      if (!to) return;
      show(to);
      choose(to);
      elements.get(to).focus({ preventScroll: true });
    };
    const keys = {
      ArrowDown: () => go(beside(id, [0, 1])), ArrowUp: () => go(beside(id, [0, -1])),
      ArrowRight: () => go(beside(id, [1, 0])), ArrowLeft: () => go(beside(id, [-1, 0])),
      Enter: () => (toggle(id), go(id)), " ": () => (toggle(id), go(id)), Escape: () => go(shown.get(id).within),
    };
    if (!(event.key in keys)) return;
    event.preventDefault();
    event.stopPropagation();
    keys[event.key]();
  });

  return {
    // Show some nodes.
    load(places) {
      roots = simple(boxesOf(places, 0, ""));
      unfoldSome();
      render();
      begin();
    },
    colour(name) { mode = MODES[name]; render(chosen); },
    // Fade all but some nodes.
    only(places) { seen = places; render(chosen); },
    node: (i, quiet) => reveal({ inside: (box) => box.places.includes(i), itself: (box) => box.kind === "node" }, quiet),
    module: (path) => reveal({
      inside: (box) => box.places.some((i) => inside(nodes[i].module, path)),
      itself: (box) => box.kind !== "stack" && box.kind !== "group" && box.path.length >= path.length,
    }),
    back() {
      const last = past.pop();
      if (!last) return;
      open = last.open;
      render();
      look(last.view, true);
      choose(last.chosen);
    },
    unfold(ids) { open = new Set(ids); render(); },
    canGoBack: () => past.length > 0, unfolded: () => open, choose, show, zoom, fit, look, pathOf, unfoldWhere, showNode,
  };
}
