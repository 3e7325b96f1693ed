// Lay out boxes in layers from top to bottom, with few crossings and straight edges, in the usual four steps: a layer for
// each box; a dummy in each layer that an edge passes; layers ordered by the mean place of neighbours; and boxes placed
// in that order, as near to their neighbours as possible.
const GAP = 26; // between two boxes of a layer
const LAYER_GAP = 34; // between two layers
const SWEEPS = 6;
const DUMMY = 10; // width of an edge in a layer that it passes

// `sizes`: [{width, height}], in the order in which they run; `edges`: [[from, to]]. Returns {width, height, places: the
// middle of each box, routes: points of each edge}.
function layered(sizes, edges) {
  const forward = edges.map(([a, b]) => (a < b ? [a, b] : [b, a])); // an edge to an earlier box is drawn upwards
  const depth = layersOf(sizes.length, forward);
  const items = sizes.map((size, i) => ({ ...size, depth: depth[i], box: true, beside: [] }));
  const trunks = new Map(); // long edges from one box share their dummies, and so their way
  const chains = forward.map(([a, b]) => {
    const chain = [items[a]];
    for (let d = depth[a] + 1; d < depth[b]; d++) {
      const key = `${a} ${d}`;
      if (!trunks.has(key)) trunks.set(key, { width: DUMMY, height: 0, depth: d, box: false, beside: [] });
      chain.push(trunks.get(key));
    }
    chain.push(items[b]);
    for (let i = 1; i < chain.length; i++) {
      if (chain[i].beside.includes(chain[i - 1])) continue;
      chain[i - 1].beside.push(chain[i]);
      chain[i].beside.push(chain[i - 1]);
    }
    return chain;
  });
  const layers = [];
  for (const item of new Set([...items, ...chains.flat()])) (layers[item.depth] ??= []).push(item);
  order(layers);
  settle(layers);
  let top = 0;
  for (const layer of layers) {
    const height = Math.max(...layer.map((item) => item.height));
    for (const item of layer) [item.top, item.bottom, item.y] = [top, top + height, top + height / 2];
    top += height + LAYER_GAP;
  }
  const all = layers.flat();
  const left = Math.min(0, ...all.map((item) => item.x - item.width / 2));
  for (const item of all) item.x -= left;
  return {
    width: Math.max(0, ...all.map((item) => item.x + item.width / 2)), height: Math.max(0, top - LAYER_GAP),
    places: items.map((item) => ({ x: item.x, y: item.y })),
    routes: chains.map((chain, i) => route(chain, edges[i][0] > edges[i][1])),
  };
}

// Return the points of an edge: from the foot of a box to the head of another, straight through the layers between.
function route(chain, upwards) {
  const [from, to] = [chain[0], chain[chain.length - 1]];
  const points = [[from.x, from.y + from.height / 2]];
  for (const item of chain.slice(1, -1)) points.push([item.x, item.top], [item.x, item.bottom]);
  points.push([to.x, to.y - to.height / 2]);
  return upwards ? points.reverse() : points;
}

function layersOf(count, edges) {
  const depth = new Array(count).fill(0);
  const [into, out] = [[], []];
  for (const [a, b] of edges) { (into[b] ??= []).push(a); (out[a] ??= []).push(b); }
  for (let i = 0; i < count; i++) for (const a of into[i] || []) depth[i] = Math.max(depth[i], depth[a] + 1);
  for (let i = count - 1; i >= 0; i--) { // a box that reads nothing stands right above its readers
    if (!into[i] && out[i]) depth[i] = Math.max(0, Math.min(...out[i].map((b) => depth[b])) - 1);
  }
  return depth;
}

function order(layers) {
  for (let sweep = 0; sweep < SWEEPS; sweep++) {
    const down = sweep % 2 === 0;
    for (let step = 1; step < layers.length; step++) {
      const at = down ? step : layers.length - 1 - step;
      const beside = new Map(layers[down ? at - 1 : at + 1].map((item, i) => [item, i]));
      const means = new Map(layers[at].map((item, i) => {
        const found = item.beside.filter((other) => beside.has(other)).map((other) => beside.get(other));
        return [item, found.length ? found.reduce((a, b) => a + b, 0) / found.length : i];
      }));
      layers[at].sort((a, b) => means.get(a) - means.get(b));
    }
  }
}

function settle(layers) {
  for (const layer of layers) apart(layer, () => 0, () => 1);
  const weight = (item) => (!item.box ? 0.02 : item.beside.length < 2 ? 0.05 : 1); // what has one neighbour gives way
  for (let sweep = 0; sweep < 2 * SWEEPS; sweep++) {
    const down = sweep % 2 === 0;
    for (const layer of down ? layers : layers.slice().reverse()) {
      apart(layer, (item) => {
        const near = item.beside.filter((other) => sweep >= SWEEPS || (other.depth < item.depth) === down);
        const pull = near.map((other) => (!item.box ? (other.box ? 0.2 : 8) : weight(other))); // long edges are kept straight
        const total = pull.reduce((a, b) => a + b, 0);
        return total ? near.reduce((x, other, i) => x + other.x * pull[i], 0) / total : item.x;
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
    at += i ? layer[i - 1].width / 2 + (item.box && layer[i - 1].box ? GAP : GAP / 2) + item.width / 2 : 0;
    offsets.push(at);
    let block = { mean: wanted(item) - at, heavy: weight(item), count: 1 };
    while (blocks.length && blocks[blocks.length - 1].mean > block.mean) {
      const before = blocks.pop();
      const heavy = before.heavy + block.heavy;
      block = { mean: (before.mean * before.heavy + block.mean * block.heavy) / heavy, heavy, count: before.count + block.count };
    }
    blocks.push(block);
  });
  const starts = blocks.flatMap((block) => new Array(block.count).fill(block.mean));
  layer.forEach((item, i) => (item.x = starts[i] + offsets[i]));
}
