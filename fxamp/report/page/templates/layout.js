// @ts-check
// Lay out boxes in layers from top to bottom, with few crossings and straight edges, in the usual four steps: a layer
// for each box; a dummy in each layer that an edge passes; layers ordered by the mean place of neighbours; and boxes
// placed in that order, as near to their neighbours as possible.

import { total } from "./data.js";

const GAP = 26; // between two boxes of a layer
const LAYER_GAP = 34; // between two layers
const SWEEPS = 6;
const DUMMY = 10; // width of an edge in a layer that it passes

// `items`: {width, height}, in the order in which they run; `edges`: {from, to}, two of the items. Gives each item its
// upper left corner, x and y, and each edge its points; returns the width and height of all.
export function layered(items, edges) {
  items.forEach((item, order) => Object.assign(item, { order, depth: 0, readers: [], beside: new Set(), trunk: [] }));
  for (const edge of edges) {
    edge.upwards = edge.from.order > edge.to.order; // to an earlier item
    edge.chain = edge.upwards ? [edge.to, edge.from] : [edge.from, edge.to];
    edge.chain[0].readers.push(edge.chain[1]);
  }
  rank(items);
  for (const edge of edges) edge.chain = chained(...edge.chain);
  const layers = [];
  const all = [...new Set([...items, ...edges.flatMap((edge) => edge.chain)])];
  for (const item of all) (layers[item.depth] ??= []).push(item);
  order(layers);
  settle(layers);
  const left = Math.min(0, ...all.map((item) => item.middle - item.width / 2));
  let top = 0;
  for (const layer of layers) {
    const height = Math.max(...layer.map((item) => item.height));
    for (const item of layer) {
      item.middle -= left;
      [item.x, item.y] = [item.middle - item.width / 2, top + (height - item.height) / 2];
      [item.top, item.bottom] = [top, top + height];
    }
    top += height + LAYER_GAP;
  }
  for (const edge of edges) edge.points = edge.upwards ? route(edge.chain).reverse() : route(edge.chain);
  return { width: Math.max(0, ...all.map((item) => item.x + item.width)), height: Math.max(0, top - LAYER_GAP) };
}

// Give each item its layer: below all that it reads. What reads nothing stands right above its readers.
function rank(items) {
  for (const item of items) for (const reader of item.readers) reader.depth = Math.max(reader.depth, item.depth + 1);
  for (const item of items.filter(({ depth, readers }) => depth === 0 && readers.length)) {
    item.depth = Math.min(...item.readers.map((reader) => reader.depth)) - 1;
  }
}

// What an edge passes, from end to end. Long edges from one box share their dummies, and so their way.
function chained(from, to) {
  const chain = [from];
  for (let depth = from.depth + 1; depth < to.depth; depth++) {
    chain.push(from.trunk[depth] ??= { dummy: true, width: DUMMY, height: 0, depth, beside: new Set() });
  }
  chain.push(to);
  for (let i = 1; i < chain.length; i++) {
    chain[i - 1].beside.add(chain[i]);
    chain[i].beside.add(chain[i - 1]);
  }
  return chain;
}

// Return the points of an edge: from the foot of a box to the head of another, straight through the layers between.
function route(chain) {
  const [from, to] = [chain[0], chain.at(-1)];
  const between = chain.slice(1, -1).flatMap(({ middle: x, top, bottom }) => [{ x, y: top }, { x, y: bottom }]);
  return [{ x: from.middle, y: from.y + from.height }, ...between, { x: to.middle, y: to.y }];
}

function order(layers) {
  for (let sweep = 0; sweep < SWEEPS; sweep++) {
    const ordered = sweep % 2 ? layers.toReversed() : layers;
    for (let step = 1; step < ordered.length; step++) {
      const at = new Map(ordered[step - 1].map((item, i) => [item, i]));
      const means = new Map(ordered[step].map((item, i) => {
        const found = [...item.beside].filter((other) => at.has(other));
        return [item, found.length ? total(found, (other) => at.get(other)) / found.length : i];
      }));
      ordered[step].sort((a, b) => means.get(a) - means.get(b));
    }
  }
}

function settle(layers) {
  for (const layer of layers) apart(layer, () => 0, () => 1);
  const weight = (item) => (item.dummy ? 0.02 : item.beside.size < 2 ? 0.05 : 1); // what has one neighbour gives way
  // Long edges are kept straight.
  const pull = (item, other) => (!item.dummy ? weight(other) : other.dummy ? 8 : 0.2);
  for (let sweep = 0; sweep < 2 * SWEEPS; sweep++) {
    const down = sweep % 2 === 0;
    for (const layer of down ? layers : layers.toReversed()) {
      apart(layer, (item) => {
        const near = [...item.beside].filter((other) => sweep >= SWEEPS || (other.depth < item.depth) === down);
        const all = total(near, (other) => pull(item, other));
        return all ? total(near, (other) => other.middle * pull(item, other)) / all : item.middle;
      }, weight);
    }
  }
}

// Give a layer the places nearest to the wanted ones, by least squares, that keep its order without overlap.
function apart(layer, wanted, weight) {
  const blocks = []; // for each block its wanted start, weight and number of items
  const offsets = [];
  let at = 0;
  layer.forEach((item, i) => {
    const before = layer[i - 1];
    if (before) at += (before.width + item.width) / 2 + (item.dummy || before.dummy ? GAP / 2 : GAP);
    offsets.push(at);
    let block = { mean: wanted(item) - at, heavy: weight(item), count: 1 };
    while (blocks.length && blocks.at(-1).mean > block.mean) {
      const { mean, heavy, count } = blocks.pop();
      const both = heavy + block.heavy;
      block = { mean: (mean * heavy + block.mean * block.heavy) / both, heavy: both, count: count + block.count };
    }
    blocks.push(block);
  });
  const starts = blocks.flatMap((block) => new Array(block.count).fill(block.mean));
  layer.forEach((item, i) => (item.middle = starts[i] + offsets[i]));
}
