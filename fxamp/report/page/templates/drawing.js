// @ts-check
import {
  data, total, sum, nodes, keyOf, styleOf, short, differs, unlike, inside, amount, counted, castIn, castsIn, MODES,
  shares, boxesOf, simple,
} from "./data.js";
import { set, shape, keys, textWidth, shortened, clamp, bar } from "./elements.js";
import { layered } from "./layout.js";

// Heights: a node, a closed module, the title of an open one, its padding, its inputs.
const [LEAF, CLOSED, TITLE, PADDING, PORT] = [40, 58, 30, 16, 20];
const PORTS = 3; // values from outside that have a place each; more share one
const EASY = 14; // boxes that are unfolded at first
const MOST_UNFOLDED = 60; // boxes that are unfolded to show some nodes

const largestCast = Math.max(1, ...nodes.flatMap((node) => node.casts.map((cast) => cast.bytes ?? 0)));
const largestValue = Math.max(1, ...nodes.map((node) => node.bytes ?? 0));

function diamond(bytes) {
  const r = 4 + 5 * Math.sqrt(bytes / largestCast);
  return shape("path", { d: `M0 ${-r}L${r} 0L0 ${r}L${-r} 0Z` });
}

// What runs between the boxes of a level: edges, with what they carry, and ports for values from outside. In a box many
// share one port, and an edge to `out` is of values that others read.
function joined(spots, within, mode) {
  const at = new Map(spots.flatMap((spot) => spot.box.places.map((place) => [place, spot])));
  const edges = new Map();
  const add = (from, to, read, node) => {
    const ends = `${from.id} ${to.id}`;
    if (!edges.has(ends)) edges.set(ends, { ends, from, to, values: new Map(), casts: [] });
    edges.get(ends).values.set(read.value, nodes[read.value]?.bytes ?? 0);
    const cast = node && castIn(mode, read, node);
    if (cast) edges.get(ends).casts.push({ cast, bytes: mode.cast ? 0 : read.bytes });
  };
  const outer = [];
  for (const [place, spot] of at) {
    for (const read of nodes[place].reads.filter(({ kind }) => kind !== "attribute")) {
      const from = at.get(read.value);
      if (!from) outer.push([read, spot, nodes[place]]);
      else if (from !== spot) add(from, spot, read, nodes[place]);
    }
  }
  const port = (id, label) => (
    { id, label, width: Math.max(16, textWidth(shortened(label, 22), "11px") + 10), height: PORT });
  const ports = new Map(outer.map(([{ value, name }]) => [value, port(`p${value}`, nodes[value]?.op ?? name)]));
  const shared = within && ports.size > PORTS ? port("p", counted(ports.size, "input")) : null;
  for (const [read, spot, node] of outer) add(shared ?? ports.get(read.value), spot, read, node);
  const out = { id: "out", width: 16, height: 1 };
  for (const [place, spot] of within ? at : []) {
    if (nodes[place].readers.some((reader) => !at.has(reader))) add(spot, out, { value: place });
  }
  return { edges: [...edges.values()], ports: shared ? [shared] : [...ports.values()], out };
}

// Edges that end at one box end side by side, in the order in which they come.
function spread(spot, edges) {
  const ends = edges.filter((edge) => edge.to === spot).map((edge) => edge.points);
  const step = Math.min(46, (spot.width - 30) / ends.length);
  ends.sort((a, b) => a.at(-2).x - b.at(-2).x);
  ends.forEach((points, i) => (points.at(-1).x += (i - (ends.length - 1) / 2) * step));
}

function curve([first, ...points]) {
  const part = ({ x, y }, i) => {
    const before = points[i - 1] ?? first;
    const half = (before.y + y) / 2;
    return x === before.x ? `L${x} ${y}` : `C${before.x} ${half} ${x} ${half} ${x} ${y}`;
  };
  return `M${first.x} ${first.y}${points.map(part).join("")}`;
}

function edgeShape({ ends, to, values, casts, points }) {
  const bytes = total([...values.values()], (n) => n);
  const moved = total(casts, (read) => read.bytes);
  const said = [counted(values.size, "value"), bytes && amount(bytes, "B")];
  if (casts.length) said.push(counted(casts.length, "cast"), moved && amount(moved, "B"));
  const [end, before] = [points.at(-1), points.at(-2)];
  const targets = [...new Set(casts.map((read) => short(read.cast)))];
  return shape(`g.edge.${casts.length ? "cast" : "plain"}${to.box ? "" : ".out"}`, { "data-ends": ends },
    shape("path", { d: curve(points), style: { "stroke-width": `${1 + 4 * Math.sqrt(bytes / largestValue)}px` } }),
    shape("title", said.filter(Boolean).join(", ")),
    casts.length > 0 && shape("g.mark", { transform: `translate(${end.x} ${end.y + (before.y > end.y ? 18 : -18)})` },
      diamond(moved),
      shape("text", { x: 12, y: 4 }, casts.length > 1 ? `${casts.length} → ${targets.join(", ")}` : targets[0])));
}

function portShape({ label, x, y, width, height }) {
  return shape("text.port", { x: x + width / 2, y: y + height / 2 + 4 }, shortened(label, 22), shape("title", label));
}

// The casts of a node's weights, which no edge shows.
function weightsShape(node, width, mode) {
  const casts = node.reads.filter((read) => read.kind === "attribute" && castIn(mode, read, node));
  const bytes = mode.cast ? 0 : total(casts, (read) => read.bytes);
  return casts.length > 0 && shape("g.weights", { transform: `translate(${width - 5} 5)` }, diamond(bytes),
    shape("title", `${counted(casts.length, "cast")} of weights${bytes ? `, ${amount(bytes, "B")}` : ""}`));
}

function spoken({ box, inner }) {
  const { node, label, places } = box;
  if (!node) return `${label}, ${counted(places.length, "node")}, ${inner ? "unfolded" : "folded"}`;
  return `${label} in ${box.path || data.model}, ${node.colour}${differs(node) ? `, autocast ${node.autocast}` : ""}`;
}

// One drawing: boxes that unfold in place, which are moved and zoomed. `chose` is told which box was chosen, if any.
export function drawing(host, chose) {
  let roots = [];
  let open = new Set();
  let mode = MODES.policy;
  let shown = new Map(); // the boxes that are drawn, by id: {box, x, y, width, height, within, inner, group}
  let bounds = { x: 0, y: 0, width: 1, height: 1 };
  let view = { x: 0, y: 0, scale: 1 };
  let chosen = null; // id of a box
  let seen = null; // places of the nodes that are not faded; null for all
  let twin = null; // another drawing, which does the same
  const past = [];
  const [back, lines, front] = ["containers", "edges", "boxes"].map((name) => shape(`g.${name}`));
  const world = shape("g", back, lines, front);
  const says = "Drawing of the model: arrows move, Enter unfolds, Escape goes to the module round it";
  const svg = shape("svg.drawing", { role: "group", "aria-label": says }, world);
  const area = shape("rect.seen");
  const small = /** @type {any} */ (shape("svg.minimap", { "aria-hidden": "true" }));
  host.append(svg, small);

  function belowOf({ kind, node, places, count, each }) {
    if (mode.amount) return amount(sum(places, mode.amount), mode.unit);
    if (node) return `${short((mode.dtype ?? MODES.policy.dtype)(node))} ${node.gives.replace(/^[^[]*/, "")}`;
    const casts = castsIn(mode, places);
    const size = kind === "stack" ? `${count} × ${counted(each, "node")}` : counted(places.length, "node");
    return casts ? `${size} · ${counted(casts, "cast")}` : size;
  }

  function sizeOf(box, inner) {
    const label = textWidth(shortened(box.label), box.node ? "13px" : "600 13px");
    if (inner) {
      return { width: Math.max(inner.width + 2 * PADDING, label + 140), height: inner.height + TITLE + 2 * PADDING };
    }
    const wide = Math.max(label, textWidth(shortened(belowOf(box)), "11px"));
    return { width: Math.max(84, Math.ceil(wide) + 34), height: box.node ? LEAF : CLOSED };
  }

  // Lay out one level: boxes, with what is in those that are unfolded, and what runs between them.
  function level(boxes, within = null) {
    const spots = boxes.map((box) => {
      const inner = open.has(box.id) ? level(box.children(), box.id) : null;
      return { id: box.id, box, within, inner, ...sizeOf(box, inner) };
    });
    const { ports, edges, out } = joined(spots, within, mode);
    const leaving = edges.filter((edge) => edge.to === out);
    const size = layered([...ports, ...spots, ...(leaving.length ? [out] : [])], edges);
    for (const spot of spots) spread(spot, edges);
    for (const edge of leaving) edge.points.at(-1).y += PADDING; // it leaves the box round it
    return { spots, ports, edges, ...size };
  }

  // Draw a level at its place, with what is unfolded in it.
  function draw({ spots, ports, edges }, x, y) {
    for (const point of [...spots, ...ports, ...edges.flatMap((edge) => edge.points)]) {
      point.x += x;
      point.y += y;
    }
    lines.append(...ports.map(portShape), ...edges.map(edgeShape));
    for (const spot of spots) {
      const { id, inner, width } = spot;
      shown.set(id, spot);
      if (inner) draw(inner, spot.x + (width - inner.width) / 2, spot.y + TITLE + PADDING);
    }
  }

  // Draw all. The middle of the head of `still`, a box, stays where it is.
  function render(still = null) {
    const before = shown.get(still);
    const { width, height, ...made } = level(roots);
    bounds = { x: 0, y: 0, width: Math.max(1, width), height: Math.max(1, height) };
    shown = new Map();
    lines.replaceChildren();
    draw(made, 0, 0);
    const spots = [...shown.values()];
    const closed = spots.filter((spot) => !spot.inner);
    // The largest amount of a box that is not unfolded, against which others are tinted.
    const most = mode.amount ? Math.max(1e-30, ...closed.map((spot) => sum(spot.box.places, mode.amount))) : 0;
    for (const spot of spots) spot.group = boxShape(spot, most);
    back.replaceChildren(...spots.filter((spot) => spot.inner).map((spot) => spot.group));
    front.replaceChildren(...closed.map((spot) => spot.group));
    mark();
    drawMinimap();
    const after = shown.get(still);
    if (!before || !after) return;
    const [dx, dy] = [before.x + before.width / 2 - after.x - after.width / 2, before.y - after.y];
    look({ ...view, x: view.x + dx * view.scale, y: view.y + dy * view.scale });
  }

  const styleIn = ({ node }) => (node && mode.dtype ? styleOf(mode.dtype(node)) : "plain");

  function boxShape(spot, most) {
    const { box, inner, x, y, width, height } = spot;
    const { node, places } = box;
    const heated = mode.amount && !inner;
    const marked = mode.differs ? unlike(places).length : 0;
    const parts = mode.differs ? { mark: marked, none: places.length - marked } : shares(places, mode.dtype);
    const kinds = ["box", box.kind, styleIn(box), inner && "open", marked && "marked", heated && "heated",
      seen && !places.some((i) => seen.has(i)) && "faded"];
    const heat = heated ? `${Math.round(100 * Math.sqrt(sum(places, mode.amount) / most))}%` : null;
    const [left, below] = [node ? width / 2 + 2 : 14, belowOf(box)];
    const arrow = inner ? "M-4 -2L0 3L4 -2" : "M-2 -4L3 0L-2 4";
    return shape("g", {
      "data-id": box.id, class: kinds.filter(Boolean).join(" "), style: { transform: `translate(${x}px, ${y}px)` },
      role: "button", "aria-label": spoken(spot), "aria-expanded": box.children ? String(Boolean(inner)) : null,
    },
    box.kind === "stack" && !inner && [8, 4].map((by) => shape("rect.behind", { x: by, y: by, width, height, rx: 8 })),
    shape("rect.face", { width, height, rx: node ? 7 : 9, style: { "--heat": heat } }),
    node && mode.dtype && shape("path.strip", { d: `M7 0h-1a6 6 0 0 0-6 6v${height - 12}a6 6 0 0 0 6 6h1z` }),
    shape("text.label", { x: left, y: node ? 17 : 20 }, shortened(box.label)),
    !node && shape("path.fold", { d: arrow, transform: `translate(${width - 14} 15)` }),
    !inner && shape("text.below", { x: left, y: node ? 31 : 37 }, shortened(below)),
    node ? weightsShape(node, width, mode) : !inner && !mode.amount && shape("foreignObject",
      { x: 14, y: height - 13, width: width - 28, height: 5 }, bar("span.parts", "width", parts, places.length)),
    shape("title", `${node ? keyOf(node) : box.path || data.model}\n${below}`));
  }

  function mark() {
    const current = shown.has(chosen) ? chosen : shown.keys().next().value;
    for (const [id, { group }] of shown) {
      group.classList.toggle("chosen", id === chosen);
      group.setAttribute("tabindex", id === current ? 0 : -1);
    }
    for (const edge of lines.children) edge.classList.toggle("near", edge.matches(`[data-ends~="${chosen}"]`));
  }

  // --- how it is seen ---

  function look(to, smooth = false) {
    if (to === view) return; // as a twin says in return
    view = to;
    world.classList.toggle("smooth", smooth);
    world.style.transform = `translate(${view.x}px, ${view.y}px) scale(${view.scale})`;
    frameMinimap();
    twin?.look(view);
  }

  // Move something into the middle. What is too high begins at the upper edge.
  function centre({ x, y, width, height }, scale, smooth = false, top = (host.clientHeight - height * scale) / 2) {
    look({ scale, x: (host.clientWidth - width * scale) / 2 - x * scale, y: Math.max(20, top) - y * scale }, smooth);
  }

  const scaleTo = ({ width }) => (host.clientWidth - 40) / width;

  function fit() {
    centre(bounds, clamp(0.02, Math.min(scaleTo(bounds), (host.clientHeight - 40) / bounds.height), 1), true);
  }

  function zoom(factor, x = host.clientWidth / 2, y = host.clientHeight / 2) {
    const scale = clamp(0.02, view.scale * factor, 4);
    const by = scale / view.scale;
    look({ scale, x: x - (x - view.x) * by, y: y - (y - view.y) * by });
  }

  // Move a box into the part that is seen; a large one is made to fit.
  function show(id) {
    const spot = shown.get(id);
    if (!spot) return;
    const { scale } = view;
    const [left, top] = [spot.x * scale + view.x, spot.y * scale + view.y];
    const [right, bottom] = [left + spot.width * scale, top + spot.height * scale];
    const { clientWidth: width, clientHeight: height } = host;
    if (left >= 8 && top >= 8 && right <= width - 8 && bottom <= height - 8 && scale > 0.4) return;
    centre(spot, clamp(0.3, Math.min(Math.max(scale, 0.7), scaleTo(spot)), 1), true);
  }

  // The minimap's units are those of the drawing.
  function drawMinimap() {
    const { width, height } = bounds;
    const scale = Math.min(150 / width, 130 / height);
    const [wide, high] = [Math.ceil(width * scale) + 8, Math.ceil(height * scale) + 8];
    set(small, { viewBox: `0 0 ${width} ${height}`, width: wide, height: high });
    const boxes = [...shown.values()].map((spot) => shape(`rect.${spot.inner ? "open" : styleIn(spot.box)}`,
      { x: spot.x, y: spot.y, width: spot.width, height: spot.height }));
    small.replaceChildren(...boxes, area);
    frameMinimap();
  }

  function frameMinimap() {
    const [x, y] = [-view.x / view.scale, -view.y / view.scale];
    const [width, height] = [host.clientWidth / view.scale, host.clientHeight / view.scale];
    set(area, { x, y, width, height });
    small.classList.toggle("useless", x <= 0 && y <= 0 && x + width >= bounds.width && y + height >= bounds.height);
  }

  // --- what is chosen, and what is unfolded ---

  const remember = () => past.push({ open: new Set(open), view, chosen });

  function choose(id, quiet = false) {
    chosen = id;
    mark();
    if (quiet) return;
    twin?.choose(id, true);
    chose(shown.get(id)?.box);
  }

  // Unfold a box or fold it, if it can be. A twin that follows is moved by the other.
  function toggle(id, follows = false) {
    if (!shown.get(id)?.box.children) return id;
    remember();
    if (!open.delete(id)) open.add(id);
    render(follows ? null : id);
    if (!follows) twin?.toggle(id, true);
    return id;
  }

  // Choose a box and bring it into view, unless that is to stay as it is.
  function go(id, stay = false) {
    if (!id) return;
    if (!stay) show(id);
    choose(id);
    shown.get(id).group.focus({ preventScroll: true });
  }

  // Unfold what is round a node or a module, and choose its box.
  function reveal(holds, isIt, quiet) {
    remember();
    let found = null;
    for (let boxes = roots, next; (next = boxes.find(holds)); boxes = found.children()) {
      found = next;
      if (isIt(found) || !found.children) break;
      open.add(found.id);
    }
    if (!found) return;
    render(shown.has(found.id) ? found.id : null);
    show(found.id);
    choose(found.id, quiet);
  }

  // Unfold the largest boxes until there is enough to see, but no list of equal layers.
  function unfoldSome() {
    for (let visible = roots; visible.length < EASY; ) {
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
  function unfoldWhere(wanted) {
    let left = MOST_UNFOLDED;
    const walk = (boxes) => {
      const holding = boxes.filter((box) => box.children && box.places.some((i) => wanted.has(i)));
      holding.forEach((box, at) => {
        const inner = box.children();
        if (left < inner.length || (at && box.signature !== undefined && box.signature === boxes[0].signature)) return;
        left -= inner.length;
        open.add(box.id);
        walk(inner);
      });
    };
    walk(roots);
  }

  // --- hands and keys ---

  const pointers = new Map();
  let moved = 0;
  const spotOf = (event) => {
    const { left, top } = svg.getBoundingClientRect();
    return { x: event.clientX - left, y: event.clientY - top };
  };
  const apartBy = (a, b) => Math.hypot(a.x - b.x, a.y - b.y);
  svg.onpointerdown = (event) => {
    pointers.set(event.pointerId, spotOf(event));
    moved = 0;
  };
  svg.onpointermove = (event) => {
    const { pointerId } = event;
    const before = pointers.get(pointerId);
    if (!before) return;
    const now = spotOf(event);
    const other = [...pointers].find(([id]) => id !== pointerId)?.[1];
    const [dx, dy] = [now.x - before.x, now.y - before.y];
    moved += Math.abs(dx) + Math.abs(dy);
    if (moved > 4 && !svg.hasPointerCapture(pointerId)) svg.setPointerCapture(pointerId);
    const wider = other && apartBy(now, other) / Math.max(1, apartBy(before, other));
    if (other) zoom(wider, (now.x + other.x) / 2, (now.y + other.y) / 2);
    else if (moved > 4) look({ ...view, x: view.x + dx, y: view.y + dy });
    pointers.set(pointerId, now);
  };
  svg.onpointerup = svg.onpointercancel = svg.onpointerleave = (event) => pointers.delete(event.pointerId);
  svg.addEventListener("wheel", (event) => {
    event.preventDefault();
    const { x, y } = spotOf(event);
    zoom(Math.exp(-event.deltaY * (event.ctrlKey ? 0.01 : 0.0015)), x, y);
  }, { passive: false });
  svg.onclick = (/** @type {any} */ event) => {
    const id = event.target.closest("[data-id]")?.dataset.id;
    if (id && moved <= 4) go(toggle(id), true);
  };
  small.onpointerdown = ({ clientX, clientY }) => {
    const { x, y } = new DOMPoint(clientX, clientY).matrixTransform(small.getScreenCTM().inverse());
    centre({ x, y, width: 0, height: 0 }, view.scale, true);
  };

  // What is above or beside may grow: the drawing stays where it is on the screen.
  let corner = [host.offsetLeft, host.offsetTop];
  new ResizeObserver(() => {
    if (!host.clientWidth) return;
    const now = [host.offsetLeft, host.offsetTop];
    look({ ...view, x: view.x + corner[0] - now[0], y: view.y + corner[1] - now[1] });
    corner = now;
  }).observe(host);

  // The nearest box in a direction, as seen from the middle of another's head.
  function beside(id, right, down) {
    const middle = ({ x, y, width, height, inner }) => [x + width / 2, y + (inner ? TITLE : height) / 2];
    const [x, y] = middle(shown.get(id));
    const costs = [...shown].map(([other, spot]) => {
      const [dx, dy] = [middle(spot)[0] - x, middle(spot)[1] - y];
      const along = dx * right + dy * down;
      return { other, along, cost: along + 2.5 * Math.abs(dx * down + dy * right) };
    });
    return costs.filter(({ along }) => along > 1).sort((a, b) => a.cost - b.cost)[0]?.other;
  }

  keys(svg, ({ dataset: { id } }) => id && {
    ArrowDown: () => go(beside(id, 0, 1)), ArrowUp: () => go(beside(id, 0, -1)),
    ArrowRight: () => go(beside(id, 1, 0)), ArrowLeft: () => go(beside(id, -1, 0)),
    Enter: () => go(toggle(id)), " ": () => go(toggle(id)), Escape: () => go(shown.get(id).within),
  });

  return {
    // Show some nodes. Of those that differ all others are faded, and they are unfolded.
    load(places, wanted = null) {
      roots = simple(boxesOf(places, 0, ""));
      open = new Set();
      seen = wanted && new Set(wanted);
      if (seen) unfoldWhere(seen);
      else unfoldSome();
      render();
      const holding = [...shown.values()].find(({ box, inner }) => !inner && box.places.includes(wanted?.[0]));
      if (holding) centre(holding, clamp(0.55, scaleTo(bounds), 1));
      else centre(bounds, clamp(0.45, scaleTo(bounds), 1), false, 20); // what does not fit is below
    },
    colour(name) {
      mode = MODES[name];
      render(chosen);
    },
    node: (i, quiet) => reveal((box) => box.places.includes(i), () => false, quiet),
    module: (path) => reveal((box) => box.places.some((i) => inside(nodes[i].module, path)),
      (box) => ["node", "module"].includes(box.kind) && box.path.length >= path.length),
    back() {
      const last = past.pop();
      if (!last) return;
      open = last.open;
      render();
      look(last.view, true);
      choose(last.chosen);
    },
    // The boxes round the chosen one, and itself.
    path() {
      const out = [];
      for (let at = shown.get(chosen); at; at = shown.get(at.within)) out.unshift(at.box);
      return out;
    },
    pair: (other) => (twin = other), canGoBack: () => past.length > 0, choose, toggle, go, zoom, fit, look,
  };
}
