"use strict";

// One drawing: boxes and edges whose places are given. It tells which node or module was chosen.
function drawing(canvas, { chooseNode, chooseModule, openModule }) {
  const HEIGHT = 36;
  const LAYER = 62;
  const MARGIN = 30;
  const STEPS = 2; // edges from a box to what is shown round it
  let view = null;
  let shown = new Map(); // of the boxes that are drawn: their places and their elements, by number
  let heights = new Map(); // of the layers that are drawn: where, by where they stand in the whole
  let scale = 1;
  let current = -1; // the box that has the focus
  let chosen = false; // whether that box was chosen, and is not only where Tab leads to
  let near = false;

  function make(name, attributes, parent, text) {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    if (parent) parent.append(made);
    return made;
  }

  const diamond = (parent) => make("path", { d: "M0 -6L6 0L0 6L-6 0Z" }, parent);

  function path(points) {
    const down = points[0][1] < points[points.length - 1][1] ? 1 : -1;
    return points.reduce((text, [x, y], i) => {
      if (i === 0) return `M${x} ${y + (down * HEIGHT) / 2}`;
      const from = points[i - 1][1] + (i === 1 ? (down * HEIGHT) / 2 : 0);
      const to = y - (i === points.length - 1 ? down * (HEIGHT / 2 + 5) : 0);
      const middle = (from + to) / 2;
      return `${text}C${points[i - 1][0]} ${middle} ${x} ${middle} ${x} ${to}`;
    }, "");
  }

  function drawEdge(svg, edge) {
    const points = edge.points.filter(([, y]) => heights.has(y)).map(([x, y]) => [x, heights.get(y)]);
    const group = make("g", { class: "edge" }, svg);
    make("path", { d: path(points), "marker-end": "url(#arrow)" }, group);
    if (!edge.cast) return;
    const [x, y] = points[points.length - 1]; // right in front of the reader, where edges stand apart
    const down = y > points[points.length - 2][1] ? 1 : -1;
    const mark = make("g", { class: "cast", transform: `translate(${x} ${y - down * (HEIGHT / 2 + 13)})` }, group);
    diamond(mark);
    make("text", { x: 9, y: 4 }, mark, edge.cast);
    make("title", {}, mark, `cast to ${edge.cast}`);
  }

  function spoken(box) {
    const name = box.module ? `module ${box.module}` : box.below ? `${box.label} in ${box.below}` : box.label;
    const casts = box.casts.length ? `, ${box.casts.length} cast${box.casts.length > 1 ? "s" : ""} of weights` : "";
    return `${name}, ${box.module ? `${box.low} % low` : box.style}${casts}`;
  }

  function drawBox(svg, box, index, { x, y }) {
    const group = make("g", {
      class: `box ${box.style}`, transform: `translate(${x} ${y})`, role: "button", tabindex: -1,
      "aria-label": spoken(box), "data-box": index,
    }, svg);
    const left = -box.width / 2;
    make("rect", { x: left, y: -HEIGHT / 2, width: box.width, height: HEIGHT, rx: box.module ? 3 : 8 }, group);
    make("text", { y: box.below ? -2 : 4, class: "label" }, group, box.label);
    if (box.below) make("text", { y: 12, class: "below" }, group, box.below);
    if (box.module) {
      const bar = { y: HEIGHT / 2 - 4, height: 4 };
      make("rect", { ...bar, x: left, width: box.width, class: "part other" }, group);
      make("rect", { ...bar, x: left, width: (box.width * box.low) / 100, class: "part low" }, group);
      make("rect", { ...bar, x: left + (box.width * box.low) / 100, width: (box.width * box.fp32) / 100, class: "part fp32" }, group);
    }
    if (box.casts.length) {
      const mark = make("g", { class: "cast", transform: `translate(${-left - 3} ${-HEIGHT / 2 + 3})` }, group);
      diamond(mark);
      make("title", {}, mark, `casts of ${box.casts.join(", ")}`);
    }
    return group;
  }

  const beside = (box, from, to) =>
    view.edges.filter((edge) => edge[from] === box && shown.has(edge[to])).map((edge) => edge[to]);

  // The boxes to draw, and where: all of them, or those a few edges from the current one, moved together.
  function places() {
    const all = view.boxes.map((_, i) => i);
    let kept = new Set(near ? [current] : all);
    for (let step = 0; near && step < STEPS; step++) {
      const edges = view.edges.filter((edge) => kept.has(edge.start) || kept.has(edge.end));
      kept = new Set([...kept, ...edges.flatMap((edge) => [edge.start, edge.end])]);
    }
    const layers = [...new Set([...kept].map((i) => view.boxes[i].y))].sort((a, b) => a - b);
    heights = new Map(layers.map((y, at) => [y, near ? at * LAYER : y]));
    return new Map([...kept].map((i) => [i, { x: view.boxes[i].x, y: heights.get(view.boxes[i].y) }]));
  }

  function render() {
    canvas.replaceChildren();
    shown = new Map();
    if (view === null) return;
    shown = places();
    const svg = make("svg", {});
    const arrow = { id: "arrow", viewBox: "0 0 8 8", refX: 4, refY: 4, markerWidth: 7, markerHeight: 7, orient: "auto" };
    make("path", { d: "M0 0L8 4L0 8Z" }, make("marker", arrow, make("defs", {}, svg)));
    for (const edge of view.edges) if (shown.has(edge.start) && shown.has(edge.end)) drawEdge(svg, edge);
    for (const [i, at] of shown) at.element = drawBox(svg, view.boxes[i], i, at);
    canvas.append(svg);
    size();
    mark(current, chosen);
  }

  // Set how large the drawing is.
  function size() {
    const svg = canvas.firstElementChild;
    const half = (i) => view.boxes[i].width / 2;
    const left = Math.min(...[...shown].map(([i, at]) => at.x - half(i))) - MARGIN;
    const right = Math.max(...[...shown].map(([i, at]) => at.x + half(i))) + MARGIN;
    const top = Math.min(...[...shown].map(([, at]) => at.y)) - HEIGHT / 2 - MARGIN;
    const bottom = Math.max(...[...shown].map(([, at]) => at.y)) + HEIGHT / 2 + MARGIN;
    svg.setAttribute("viewBox", `${left} ${top} ${right - left} ${bottom - top}`);
    svg.setAttribute("width", Math.round((right - left) * scale));
    svg.setAttribute("height", Math.round((bottom - top) * scale));
  }

  const fitting = () => Math.min(1, canvas.clientWidth / (view.width + 2 * MARGIN) || 1);

  function mark(index, pick = true) {
    chosen = pick;
    for (const [i, { element }] of shown) {
      element.setAttribute("tabindex", i === index ? 0 : -1);
      element.classList.toggle("chosen", chosen && i === index);
    }
    current = index;
  }

  function choose(index) {
    mark(index);
    if (near) render();
    shown.get(index).element.focus();
    shown.get(index).element.scrollIntoView({ block: "nearest", inline: "nearest" });
    const box = view.boxes[index];
    if (box.node >= 0) chooseNode(box.node);
    else if (box.module) chooseModule(box.module);
  }

  function sideways(index, step) {
    const row = [...shown].filter(([, at]) => at.y === shown.get(index).y).sort((a, b) => a[1].x - b[1].x);
    return (row[row.findIndex(([i]) => i === index) + step] || [])[0];
  }

  const numberOf = (target) => Number(target.closest(".box")?.dataset.box ?? -1);

  canvas.addEventListener("click", (event) => numberOf(event.target) >= 0 && choose(numberOf(event.target)));
  canvas.addEventListener("focusin", (event) => numberOf(event.target) >= 0 && (current = numberOf(event.target)));
  canvas.addEventListener("dblclick", (event) => {
    const box = view?.boxes[numberOf(event.target)];
    if (box?.module) openModule(box.module);
  });
  canvas.addEventListener("keydown", (event) => {
    if (view === null || current < 0 || event.altKey || event.ctrlKey || event.metaKey) return;
    const box = view.boxes[current];
    const keys = {
      ArrowDown: () => choose(beside(current, "start", "end")[0] ?? current),
      ArrowUp: () => choose(beside(current, "end", "start")[0] ?? current),
      ArrowRight: () => choose(sideways(current, 1) ?? current),
      ArrowLeft: () => choose(sideways(current, -1) ?? current),
      Enter: () => (box.module ? openModule(box.module) : choose(current)),
      " ": () => choose(current),
    };
    if (!(event.key in keys)) return;
    event.preventDefault();
    keys[event.key]();
  });

  return {
    show(given) {
      view = given;
      near = chosen = false;
      current = view === null ? -1 : view.boxes.findIndex((box) => box.style !== "outside");
      if (view !== null) scale = Math.max(0.6, fitting());
      render();
      canvas.scrollTo(0, 0);
    },
    // Mark the box of a node; say whether there is one.
    mark(node) {
      const index = view === null ? -1 : view.boxes.findIndex((box) => box.node === node);
      if (index < 0) return false;
      mark(index);
      if (near) render();
      shown.get(index).element.scrollIntoView({ block: "nearest", inline: "nearest" });
      return true;
    },
    // Make it larger or smaller by a factor, or as wide as there is room.
    zoom(factor) {
      if (view === null) return;
      scale = factor === null ? fitting() : Math.min(4, Math.max(0.1, scale * factor));
      size();
    },
    // Show what is two steps round the chosen box, or all again; say which.
    toggleNear() {
      near = view !== null && current >= 0 && !near;
      render();
      if (current >= 0) shown.get(current).element.scrollIntoView({ block: "nearest", inline: "nearest" });
      return near;
    },
  };
}
