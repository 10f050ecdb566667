// The data of the page: unpacked from the document, and each plan spelled out when it is looked at.

async function unpack(text) {
  const packed = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return JSON.parse(await new Response(stream).text());
}

// Every operation of a plan on the compute clock, with the bytes of each layer. An operation waits from `begin`, runs
// from `start` to `end`, waits again until it can free a value, and is done at `finish`.
function spellOut(data, packed) {
  const count = packed.steps.length;
  const numLayers = data.layers.length;
  const plan = {
    ...packed,
    count,
    effects: new Array(count),
    begin: new Float64Array(count),
    start: new Float64Array(count),
    end: new Float64Array(count),
    finish: new Float64Array(count),
    waitsFor: new Map(),
    before: new Float64Array(count * numLayers),
    during: new Float64Array(count * numLayers),
    total: new Float64Array(count),
    firstOf: new Map(),
  };
  const waits = new Map(packed.waits.map((wait) => [wait[0], wait]));
  const stored = Float64Array.from([...packed.start, 0]);
  let clock = 0;
  let number = 0;
  for (let i = 0; i < count; i += 1) {
    number += packed.steps[i];
    const [code, repeated, stage, variant, seconds, during, after] = data.effects[number];
    plan.effects[i] = { code, name: data.codes[code], repeated: repeated === 1, stage, variant };
    if (!plan.firstOf.has(stage)) plan.firstOf.set(stage, i);
    const [, waitBefore, waitAfter, copiedBy] = waits.get(i) ?? [i, 0, 0, null];
    if (copiedBy !== null) plan.waitsFor.set(i, copiedBy);
    plan.begin[i] = clock;
    plan.start[i] = clock + waitBefore;
    plan.end[i] = plan.start[i] + seconds;
    plan.finish[i] = plan.end[i] + waitAfter;
    clock = plan.finish[i];
    const base = i * numLayers;
    plan.before.set(stored, base);
    plan.during.set(stored, base);
    for (let at = 0; at < during.length; at += 2) plan.during[base + during[at]] += during[at + 1];
    for (let layer = 0; layer < numLayers; layer += 1) plan.total[i] += plan.during[base + layer];
    for (let at = 0; at < after.length; at += 2) stored[after[at]] += after[at + 1];
  }
  plan.makespan = Math.max(clock, packed.seconds);
  plan.copies = packed.copies.map(([index, start, end, bytes]) => ({
    index, start, end, bytes, toHost: plan.effects[index].name.startsWith("offload"),
  }));
  plan.overOperations = piecesOverOperations(plan);
  plan.overTime = piecesOverTime(plan, numLayers);
  return plan;
}

// What a stacked chart draws: piece i reaches from edges[i] to edges[i + 1], belongs to operation[i], and its layers
// stand in `layers` from at[i] on.
function piecesOverOperations(plan) {
  const edges = new Float64Array(plan.count + 1);
  const operation = new Int32Array(plan.count);
  const numLayers = plan.during.length / Math.max(1, plan.count);
  const at = new Int32Array(plan.count);
  for (let i = 0; i < plan.count; i += 1) {
    edges[i + 1] = i + 1;
    operation[i] = i;
    at[i] = i * numLayers;
  }
  return { count: plan.count, edges, operation, at, layers: plan.during };
}

function piecesOverTime(plan, numLayers) {
  const pieces = [];
  for (let i = 0; i < plan.count; i += 1) {
    const isTransfer = plan.effects[i].code > 4;
    if (plan.start[i] > plan.begin[i]) pieces.push([plan.start[i], i, "before"]);
    // What is waited for is still in flight: a transfer that waits changes nothing before the wait is over.
    if (!isTransfer || plan.finish[i] === plan.begin[i]) pieces.push([plan.end[i], i, "during"]);
    if (plan.finish[i] > plan.end[i]) pieces.push([plan.finish[i], i, isTransfer ? "before" : "held"]);
  }
  const edges = new Float64Array(pieces.length + 1);
  const operation = new Int32Array(pieces.length);
  const at = new Int32Array(pieces.length);
  const layers = new Float64Array(pieces.length * numLayers);
  pieces.forEach(([edge, i, which], index) => {
    edges[index + 1] = edge;
    operation[index] = i;
    at[index] = index * numLayers;
    const source = which === "before" ? plan.before : plan.during;
    layers.set(source.subarray(i * numLayers, (i + 1) * numLayers), at[index]);
    if (which === "held") layers[at[index] + numLayers - 1] = 0; // the transient bytes are gone
  });
  return { count: pieces.length, edges, operation, at, layers };
}

// The fastest of all strategies at any memory: points [bytes, seconds, strategy], from little memory to much.
function envelopeOf(curves) {
  const points = curves.flatMap((curve) => curve.points.map(([bytes, seconds]) => [bytes, seconds, curve.strategy]));
  points.sort((one, other) => one[0] - other[0] || one[1] - other[1]);
  return points.filter(
    (() => {
      let best = Infinity;
      return ([, seconds]) => seconds < best && ((best = seconds), true);
    })(),
  );
}

// The last of sorted points that fits into a memory, or null.
function pointAt(points, bytes) {
  let found = null;
  for (const point of points) {
    if (point[0] > bytes) break;
    found = point;
  }
  return found;
}

// Words for operations and values.

function valueWords(data, kind, stage) {
  if (kind === "s") return data.chain.sides[stage - 1];
  if (stage === 0) return "the input";
  const name = data.chain.names[stage - 1];
  return { a: `the output of ${name}`, abar: `what ${name} saved`, w: `the weights of ${name}`,
    opt: `the optimizer state of ${name}`, g: `the weight gradients of ${name}` }[kind];
}

function operationWords(data, effect) {
  const name = effect.stage ? data.chain.names[effect.stage - 1] : "the input";
  const [verb, what] = effect.name.split(" ");
  if (verb === "forward") {
    const variant = effect.variant ? ` (${data.chain.variants[effect.stage - 1][effect.variant - 1]})` : "";
    return `${effect.repeated ? "Recompute" : "Forward of"} ${name}${variant}`;
  }
  if (verb === "backward") return `Backward of ${name}`;
  if (verb === "update") return `Optimizer step of ${name}`;
  const value = valueWords(data, what, effect.stage);
  return { offload: `Start copying ${value} to the host`, release: `Free ${value} on the device`,
    prefetch: `Start copying ${value} back`, await: `Wait until ${value} has arrived` }[verb];
}

function savesWords(effect) {
  return { "forward all": "keeps all that its backward needs", "forward keep": "keeps its input and its output",
    "forward drop": "frees its input", backward: "frees what its forward saved" }[effect.name] ?? "";
}

function waitWords(data, plan, index) {
  const copiedBy = plan.waitsFor.get(index);
  if (copiedBy === undefined) return "";
  const copy = plan.effects[copiedBy];
  const [verb, kind] = copy.name.split(" ");
  const value = valueWords(data, kind, copy.stage);
  return verb === "offload" ? `for ${value} to reach the host` : `for ${value} to come back`;
}

function phaseOf(effect) {
  if (effect.code > 4) return null;
  if (effect.code >= 3) return "backward"; // 4: an optimizer step
  return effect.repeated ? "recompute" : "forward";
}
