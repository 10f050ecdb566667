// Step time against memory: a line for each strategy, the best of all, and the budget as a line that can be dragged.

// Beyond this ratio of most to least memory the axis is logarithmic: else all that matters would be at its left end.
const LARGEST_LINEAR_RATIO = 8;
const LARGEST_LINEAR_SLOWDOWN = 2.5;

// What fills a bar of the table, at the most: times plain training.
const LONGEST_BAR_SLOWDOWN = 2;

// What was measured is drawn to scale up to this factor above all that was simulated.
const LARGEST_MEASURED_SLOWDOWN = 1.25;

// The marks of an axis of factors: times plain training.
const FACTORS = [1, 1.25, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128];

// Each strategy has a mark of its own beside its colour: lines stay apart without colour. As many as there are strategies.
const MARKS = [
  "M-3 -3H3V3H-3Z", // a square
  "M0 -4L4 3H-4Z", // triangles: up, down, left, right
  "M0 4L4 -3H-4Z",
  "M-4 0L3 -4V4Z",
  "M4 0L-3 -4V4Z",
  "M0 -4.5L4.5 0L0 4.5L-4.5 0Z", // a diamond
  "M-4 -1.3H-1.3V-4H1.3V-1.3H4V1.3H1.3V4H-1.3V1.3H-4Z", // a plus
  "M-4 -2.6L-2.6 -4L0 -1.4L2.6 -4L4 -2.6L1.4 0L4 2.6L2.6 4L0 1.4L-2.6 4L-4 2.6L-1.4 0Z", // a cross
  "M0 -4.8L1.2 -1.5L4.6 -1.5L1.9 0.6L2.8 3.9L0 2L-2.8 3.9L-1.9 0.6L-4.6 -1.5L-1.2 -1.5Z", // a star
  "M-4 -4H4L-4 4H4Z", // an hourglass
  "M-4 -4V4L4 -4V4Z", // the same, lying
  "M-1.4 -4.5H1.4V4.5H-1.4Z", // bars: standing, lying
  "M-4.5 -1.4H4.5V1.4H-4.5Z",
  "M-4 2A4 4 0 0 1 4 2Z", // half a disc
  "M-4 -4H4V4H-4ZM-2.2 -2.2V2.2H2.2V-2.2Z", // a frame
  "M-4.5 0L-2.2 -4H2.2L4.5 0L2.2 4H-2.2Z", // a hexagon
];
const STORE_ALL_MARK = "M-4 0A4 4 0 1 1 4 0A4 4 0 1 1 -4 0ZM-2 0A2 2 0 1 0 2 0A2 2 0 1 0 -2 0Z"; // a ring
const LINE_COLOURS = [3, 4, 6, 5, 2, 7, 1];

// How close the pointer must be to a point to name it.
const REACH_PIXELS = 9;

class FrontierChart {
  constructor(state, choose) {
    this.state = state;
    this.choose = choose;
    this.highlighted = null;
    const { measured } = state.data;
    this.measured = measured?.seconds && measured.peak_bytes ? [measured.peak_bytes, measured.seconds] : null;
    this.figure = document.getElementById("frontier");
    this.frame = new Frame(this.figure, 20, () => this.draw(), { canvas: false });
    this.curves = state.data.curves.filter((curve) => curve.strategy !== "store-all" && curve.points.length);
    this.curves.forEach((curve, index) => {
      curve.colour = `var(--layer-${LINE_COLOURS[index % LINE_COLOURS.length]})`;
      curve.mark = MARKS[index % MARKS.length];
    });
    const area = this.frame.svg;
    const follow = (event) => {
      const box = area.getBoundingClientRect();
      this.choose(this.nearestPlan(this.memoryAt(event.clientX - box.left)));
    };
    area.addEventListener("pointerdown", (event) => {
      area.setPointerCapture(event.pointerId);
      this.dragging = true;
      follow(event);
    });
    area.addEventListener("pointermove", (event) => (this.dragging ? follow(event) : this.hover(event)));
    area.addEventListener("pointerleave", () => this.frame.hideTip());
    for (const name of ["pointerup", "pointercancel"]) area.addEventListener(name, () => (this.dragging = false));
  }

  scale() {
    const { data, envelope } = this.state;
    const budgets = data.plans.map((plan) => plan.budget);
    const seen = this.measured ? [this.measured] : [];
    const least = Math.min(data.minimum, ...budgets, ...seen.map((point) => point[0]));
    const most = Math.max(data.storeAll.peak, ...budgets, ...seen.map((point) => point[0]));
    this.logarithmic = most > LARGEST_LINEAR_RATIO * least && least > 0;
    const pad = this.logarithmic ? (most / least) ** 0.04 : 0.04 * (most - least || most);
    this.least = this.logarithmic ? least / pad : Math.max(0, least - pad);
    this.most = this.logarithmic ? most * pad : most + pad;
    const plain = data.storeAll.seconds;
    const simulated = Math.max(plain, ...envelope.map((point) => point[1]), ...data.plans.map((plan) => plan.seconds));
    // A run on a busy machine would squeeze all curves: such a mark stands at the upper end instead.
    this.isBeyond = seen.length > 0 && seen[0][1] > LARGEST_MEASURED_SLOWDOWN * simulated;
    const slowest = this.isBeyond ? simulated : Math.max(simulated, ...seen.map((point) => point[1]));
    // Times that differ by factors are compared by factors.
    this.byFactors = plain > 0 && slowest > LARGEST_LINEAR_SLOWDOWN * plain;
    const space = this.byFactors ? Math.log(slowest / plain) : slowest - plain || plain || 1;
    this.fast = this.byFactors ? plain * Math.exp(-0.08 * space) : plain - 0.08 * space;
    this.slow = this.byFactors ? slowest * Math.exp(0.1 * space) : slowest + 0.1 * space;
  }

  x(bytes) {
    const { left, right } = this.frame;
    const share = this.logarithmic
      ? Math.log(bytes / this.least) / Math.log(this.most / this.least)
      : (bytes - this.least) / (this.most - this.least);
    return left + share * (right - left);
  }

  memoryAt(x) {
    const { left, right } = this.frame;
    const share = (x - left) / (right - left);
    return this.logarithmic ? this.least * (this.most / this.least) ** share : this.least + share * (this.most - this.least);
  }

  y(seconds) {
    const { top, bottom } = this.frame;
    const share = this.byFactors
      ? Math.log(seconds / this.fast) / Math.log(this.slow / this.fast)
      : (seconds - this.fast) / (this.slow - this.fast);
    return bottom - share * (bottom - top);
  }

  nearestPlan(bytes) {
    const x = this.x(Math.max(bytes, 1));
    const distances = this.state.data.plans.map((plan) => Math.abs(this.x(plan.budget) - x));
    return distances.indexOf(Math.min(...distances));
  }

  path(points) {
    let line = "";
    points.forEach(([bytes, seconds], index) => {
      line += index ? `H${this.x(bytes)}V${this.y(seconds)}` : `M${this.x(bytes)} ${this.y(seconds)}`;
    });
    return `${line}H${this.frame.right}`;
  }

  draw() {
    const { frame, state } = this;
    if (!frame.measure({ top: 1.5, bottom: 2.75 })) return;
    this.scale();
    const memoryTicks = this.logarithmic ? this.doublings() : byteTicks(this.least, this.most, frame.width / (6 * rem()));
    frame.axisX(memoryTicks, (value) => this.x(value));
    const found = this.byFactors
      ? FACTORS.map((factor) => ({ value: factor * state.data.storeAll.seconds, label: `${factor} ×` }))
      : timeTicks(this.fast, this.slow, 6);
    frame.axisY(found, (value) => this.y(value));
    const clip = svg("clipPath", { id: "frontier-clip" }, frame.svg);
    svg("rect", { x: frame.left, y: 0, width: Math.max(0, frame.right - frame.left), height: frame.bottom }, clip);
    const lines = svg("g", { "clip-path": "url(#frontier-clip)" }, frame.svg);
    const plain = state.data.storeAll;
    svg("line", { x1: frame.left, x2: frame.right, y1: this.y(plain.seconds), y2: this.y(plain.seconds), class: "plain" }, lines);
    svg("path", { d: this.path(state.envelope), class: "best" }, lines);
    for (const curve of this.curves) this.drawCurve(curve, lines);
    if (this.highlighted) this.drawCurve(this.highlighted, lines);
    this.drawMarks(lines);
  }

  drawCurve(curve, parent) {
    const faded = this.highlighted && this.highlighted !== curve;
    const chosen = this.highlighted === curve;
    const group = svg("g", { class: `curve${faded ? " faded" : ""}${chosen ? " chosen" : ""}` }, parent);
    const line = svg("path", { d: this.path(curve.points), stroke: curve.colour }, group);
    if (curve.skipped) line.setAttribute("stroke-dasharray", "5 4"); // between its points it may be faster
    for (const [bytes, seconds] of curve.points) {
      svg("path", { d: curve.mark, fill: curve.colour, class: "mark", transform: `translate(${this.x(bytes)} ${this.y(seconds)})` }, group);
    }
  }

  drawMarks(lines) {
    const { frame, state } = this;
    const { data, plan } = state;
    const below = frame.bottom + 2.1 * rem();
    const note = (bytes, text, anchor) => {
      svg("line", { x1: this.x(bytes), x2: this.x(bytes), y1: frame.bottom, y2: frame.bottom + 1.35 * rem(), class: "pointer" }, frame.svg);
      svg("text", { x: this.x(bytes), y: below, "text-anchor": anchor, class: "note" }, frame.svg, text);
    };
    note(data.minimum, `least ${formatBytes(data.minimum)}`, "start");
    note(data.storeAll.peak, `store-all ${formatBytes(data.storeAll.peak)}`, "end");
    svg("circle", { cx: this.x(data.storeAll.peak), cy: this.y(data.storeAll.seconds), r: 5, class: "store-all" }, lines);
    if (this.measured) this.drawMeasured(lines);
    if (data.own !== null) {
      const own = data.plans[data.own];
      svg("path", { d: `M${this.x(own.budget)} ${frame.top}V${frame.bottom}`, class: "own" }, lines);
    }
    const x = this.x(plan.budget);
    svg("path", { d: `M${x} ${frame.top}V${frame.bottom}`, class: "budget" }, frame.svg);
    svg("circle", { cx: x, cy: this.y(plan.seconds), r: 7, class: "handle" }, frame.svg);
    const anchor = x > (frame.left + frame.right) / 2 ? "end" : "start";
    const words = data.own === state.index ? "your budget" : "budget";
    svg("text", { x: x + (anchor === "end" ? -6 : 6), y: frame.top - 0.35 * rem(), "text-anchor": anchor, class: "budget-label" },
      frame.svg, `${words} ${formatBytes(plan.budget)}`);
  }

  // What a run saw, apart from all that was simulated.
  drawMeasured(lines) {
    const { frame } = this;
    const [x, y] = [this.x(this.measured[0]), this.isBeyond ? frame.top + 8 : this.y(this.measured[1])];
    const words = this.isBeyond ? `measured: ${formatSeconds(this.measured[1])} ↑` : "measured";
    svg("path", { d: `M${x - 5} ${y - 5}L${x + 5} ${y + 5}M${x - 5} ${y + 5}L${x + 5} ${y - 5}`, class: "measured" }, lines);
    const anchor = x > (frame.left + frame.right) / 2 ? "end" : "start";
    svg("text", { x: x + (anchor === "end" ? -10 : 10), y: y + 0.28 * rem(), "text-anchor": anchor, class: "measured-label" }, frame.svg, words);
  }

  // Names the strategies whose point is under the pointer.
  hover(event) {
    const box = this.frame.svg.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    const near = [];
    for (const curve of this.state.data.curves) {
      const [distance, point] = curve.points
        .map((one) => [Math.hypot(this.x(one[0]) - x, this.y(one[1]) - y), one])
        .reduce((best, one) => (one[0] < best[0] ? one : best), [REACH_PIXELS, null]);
      if (point) near.push({ distance, text: `${curve.strategy}: ${formatSeconds(point[1])} from ${formatBytes(point[0])} on` });
    }
    near.sort((one, other) => one.distance - other.distance);
    if (near.length) this.frame.showTip(near.slice(0, 4).map((one) => one.text), x, y + 12);
    else this.frame.hideTip();
  }

  doublings() {
    const found = [];
    for (let power = Math.floor(Math.log2(this.least)); 2 ** power <= this.most; power += 1) {
      for (const value of [2 ** power, 1.5 * 2 ** power]) {
        const unit = byteUnit(value);
        if (value >= this.least && value <= this.most) found.push({ value, label: `${value / unit.factor} ${unit.name}` });
      }
    }
    return found;
  }

  highlight(curve) {
    this.highlighted = curve;
    this.draw();
  }
}

// What each strategy comes to at the budget, the fastest first.
class StrategyTable {
  constructor(state, frontier) {
    this.state = state;
    this.frontier = frontier;
    this.table = document.getElementById("strategies");
  }

  draw() {
    const { data, plan } = this.state;
    const plain = data.storeAll.seconds;
    const rows = data.curves.map((curve) => ({ curve, point: pointAt(curve.points, plan.budget) }));
    rows.sort((one, other) => (one.point?.[1] ?? Infinity) - (other.point?.[1] ?? Infinity) || one.curve.minimum - other.curve.minimum);
    const slowest = Math.max(plain, ...rows.filter((row) => row.point).map((row) => row.point[1]));
    const full = Math.min(slowest, LONGEST_BAR_SLOWDOWN * plain); // one that is far behind would flatten all others
    this.table.caption.textContent = `Every strategy within ${formatBytes(plan.budget)}, simulated`;
    const focused = document.activeElement?.closest?.("#strategies button")?.textContent;
    const body = this.table.tBodies[0];
    body.replaceChildren();
    for (const { curve, point } of rows) {
      const row = element("tr", point ? {} : { class: "infeasible" }, body);
      this.name(row, curve, focused);
      if (!point) {
        element("td", { colspan: 3 }, row, `needs ${formatBytes(curve.minimum)}`);
        continue;
      }
      const isKnown = !curve.skipped || curve.tried.includes(plan.budget);
      element("td", { class: "number" }, row, `${isKnown ? "" : "≤ "}${formatSeconds(point[1])}`);
      element("td", { class: "number" }, row, plain ? signedPercent(point[1] / plain - 1) : "");
      const bar = element("i", { class: "bar" }, element("td", { class: "bar-cell" }, row));
      bar.style.width = `${Math.min(100, Math.max(0, (100 * (point[1] - plain)) / (full - plain || 1)))}%`;
    }
    this.hint(body, "Tried at few budgets only, for lack of time, and dashed", (curve) => curve.skipped);
    this.hint(body, "Moves weights; auto does not try it", (curve) => curve.managesWeights);
  }

  hint(body, words, applies) {
    const names = this.state.data.curves.filter(applies).map((curve) => curve.strategy).join(", ");
    if (names) element("td", { colspan: 4, class: "hint" }, element("tr", {}, body), `${words}: ${names}.`);
  }

  name(row, curve, focused) {
    const head = element("th", { scope: "row" }, row);
    const drawMark = (parent, path, colour) => {
      const mark = svg("svg", { viewBox: "-5 -5 10 10", width: 12, height: 12, "aria-hidden": "true" }, parent);
      svg("path", { d: path, fill: colour }, mark);
    };
    if (curve.strategy === "store-all") {
      const name = element("span", { class: "strategy" }, head);
      drawMark(name, STORE_ALL_MARK, "var(--ink)");
      name.append(curve.strategy);
      return;
    }
    const isChosen = () => this.frontier.highlighted === curve;
    const button = element("button", { type: "button", "aria-pressed": String(isChosen()), title: "Show this line" }, head);
    drawMark(button, curve.mark ?? "", curve.colour ?? "none");
    button.append(curve.strategy);
    button.addEventListener("click", () => {
      this.frontier.highlight(isChosen() ? null : curve);
      this.draw();
    });
    if (focused === curve.strategy) button.focus();
  }
}
