// What compute and the two channels do over time. Compute is coloured by phase; a gap is a wait, with its reason.

const PHASES = ["forward", "recompute", "backward"];
const LANE_REM = 1.9;
const LANE_GAP_REM = 0.5;

class Lanes {
  constructor(state, view) {
    this.state = state;
    this.view = view;
    this.figure = document.getElementById("lanes-chart");
    this.figure.setAttribute("tabindex", "0");
    this.figure.setAttribute("role", "slider");
    this.figure.setAttribute("aria-label", "Operation on the lanes: arrow keys move, plus and minus zoom");
    this.figure.setAttribute("aria-valuemin", "1");
    this.hasCopies = state.data.plans.some((plan) => plan.copies.length);
    this.titles = this.hasCopies ? ["compute", "to host", "to device"] : ["compute"];
    document.querySelectorAll(".phases .copying").forEach((item) => (item.hidden = !this.hasCopies));
    const height = 0.4 + this.titles.length * (LANE_REM + LANE_GAP_REM) + 1.75;
    this.frame = new Frame(this.figure, height, () => this.draw());
    listen(this.figure, view, (x) => view.operationAt(this.timeUnder(x)), () => this.frame.hideTip());
    this.figure.addEventListener("pointermove", (event) => this.hover(event));
  }

  timeUnder(x) {
    const [low, high] = this.view.timeRange;
    return low + ((x - this.frame.left) / (this.frame.right - this.frame.left)) * (high - low);
  }

  x(time) {
    const [low, high] = this.view.timeRange;
    return this.frame.left + ((time - low) / (high - low || 1)) * (this.frame.right - this.frame.left);
  }

  top(lane) {
    return (0.4 + lane * (LANE_REM + LANE_GAP_REM)) * rem();
  }

  draw() {
    const { frame, view } = this;
    if (!frame.measure({ top: 0.4 })) return;
    const [low, high] = view.timeRange;
    frame.axisX(timeTicks(low, high, frame.width / (5.5 * rem())), (value) => this.x(value));
    this.titles.forEach((title, lane) => {
      const y = this.top(lane);
      svg("rect", { x: frame.left, y, width: Math.max(0, frame.right - frame.left), height: LANE_REM * rem(), class: "lane" }, frame.svg);
      svg("text", { x: frame.left - 0.5 * rem(), y: y + 1.25 * rem(), "text-anchor": "end", class: "lane-title" }, frame.svg, title);
    });
    const context = frame.canvas.getContext("2d");
    context.clearRect(0, 0, frame.canvas.width, frame.canvas.height);
    this.paintCompute(context);
    if (this.hasCopies) this.paintCopies(context);
    this.marks = svg("g", {}, frame.svg);
    this.drawCursor();
  }

  // A column of pixels has the colour of what takes most of its time.
  paintCompute(context) {
    const { frame, view } = this;
    const { plan } = this.state;
    const columns = Math.max(1, Math.round((frame.right - frame.left) * frame.ratio));
    const [low, high] = view.timeRange;
    const perColumn = (high - low) / columns || 1;
    const shares = [0, 1, 2, 3].map(() => new Float64Array(columns));
    const add = (share, from, to) => {
      const first = Math.max(0, Math.floor((from - low) / perColumn));
      const last = Math.min(columns - 1, Math.floor((to - low) / perColumn));
      for (let c = first; c <= last; c += 1) {
        share[c] += Math.max(0, Math.min(to, low + (c + 1) * perColumn) - Math.max(from, low + c * perColumn));
      }
    };
    for (let i = Math.floor(view.low); i < Math.min(plan.count, Math.ceil(view.high)); i += 1) {
      const phase = phaseOf(plan.effects[i]);
      if (phase) add(shares[PHASES.indexOf(phase)], plan.start[i], plan.end[i]);
      if (plan.start[i] > plan.begin[i]) add(shares[3], plan.begin[i], plan.start[i]);
      if (plan.finish[i] > plan.end[i]) add(shares[3], plan.end[i], plan.finish[i]);
    }
    const colours = [...PHASES.map((phase) => cssColour(`--${phase}`)), this.hatching(context)];
    const left = Math.round(frame.left * frame.ratio);
    const [y, height] = [this.top(0) * frame.ratio, LANE_REM * rem() * frame.ratio];
    let from = 0;
    let current = -1;
    for (let c = 0; c <= columns; c += 1) {
      let best = -1;
      if (c < columns) shares.forEach((share, index) => share[c] > (best < 0 ? 0 : shares[best][c]) && (best = index));
      if (best === current && c < columns) continue;
      if (current >= 0) {
        context.fillStyle = colours[current];
        context.fillRect(left + from, y, c - from, height);
      }
      [from, current] = [c, best];
    }
    this.separate(context);
  }

  // Operations that are wide enough stand apart and carry their stage's number.
  separate(context) {
    const { frame, view } = this;
    const { plan } = this.state;
    const [y, height] = [this.top(0), LANE_REM * rem()];
    const labels = [];
    context.save();
    context.scale(frame.ratio, frame.ratio);
    context.fillStyle = cssColour("--ground");
    for (let i = Math.floor(view.low); i < Math.min(plan.count, Math.ceil(view.high)); i += 1) {
      const phase = phaseOf(plan.effects[i]);
      const [x0, x1] = [Math.max(frame.left, this.x(plan.start[i])), Math.min(frame.right, this.x(plan.end[i]))];
      if (!phase || x1 - x0 < 5) continue;
      context.fillRect(x1 - 1, y, 1, height);
      const text = String(plan.effects[i].stage);
      if (x1 - x0 > (0.5 * text.length + 0.4) * rem()) labels.push({ text, x: (x0 + x1) / 2, phase });
    }
    // Choosing a font makes the browser lay out the page: only where there is something to write.
    if (labels.length) {
      context.font = `${0.75 * rem()}px system-ui, sans-serif`;
      context.textAlign = "center";
      context.textBaseline = "middle";
    }
    for (const { text, x, phase } of labels) {
      context.fillStyle = cssColour(`--on-${phase}`);
      context.fillText(text, x, y + height / 2);
    }
    context.restore();
  }

  hatching(context) {
    const size = 6 * this.frame.ratio;
    const tile = document.createElement("canvas");
    [tile.width, tile.height] = [size, size];
    const pen = tile.getContext("2d");
    pen.strokeStyle = cssColour("--muted");
    pen.lineWidth = this.frame.ratio;
    for (const shift of [-size, 0, size]) {
      pen.moveTo(shift, size);
      pen.lineTo(shift + size, 0);
    }
    pen.stroke();
    return context.createPattern(tile, "repeat");
  }

  paintCopies(context) {
    const { frame } = this;
    context.save();
    context.scale(frame.ratio, frame.ratio);
    context.beginPath();
    context.rect(frame.left, 0, Math.max(0, frame.right - frame.left), frame.height);
    context.clip();
    context.fillStyle = cssColour("--copy");
    for (const copy of this.state.plan.copies) {
      const [x0, x1] = [this.x(copy.start), this.x(copy.end)];
      if (x1 < frame.left || x0 > frame.right) continue;
      const gap = x1 - x0 > 5 ? 1 : 0;
      context.fillRect(x0, this.top(copy.toHost ? 1 : 2), Math.max(0.5, x1 - x0 - gap), LANE_REM * rem());
    }
    context.restore();
  }

  drawCursor() {
    const { frame, view } = this;
    const { plan, data } = this.state;
    if (!this.marks) return;
    this.marks.replaceChildren();
    const i = view.cursor;
    const x = this.x(view.middleTimeOf(i));
    if (x >= frame.left - 1 && x <= frame.right + 1) {
      svg("line", { x1: x, x2: x, y1: 0, y2: frame.bottom, class: "cursor" }, this.marks);
    }
    const words = operationWords(data, plan.effects[i]);
    this.figure.setAttribute("aria-valuemax", plan.count);
    this.figure.setAttribute("aria-valuenow", i + 1);
    this.figure.setAttribute("aria-valuetext", `Operation ${i + 1} of ${plan.count}: ${words}, at ${formatSeconds(plan.start[i])}`);
    if (this.figure.matches(":focus-visible") && !this.figure.matches(":hover")) frame.showTip(this.describe(i), x, frame.top);
  }

  describe(i) {
    const { plan, data } = this.state;
    const lines = [operationWords(data, plan.effects[i])];
    if (plan.end[i] > plan.start[i]) lines.push(`${formatSeconds(plan.end[i] - plan.start[i])} from ${formatSeconds(plan.start[i])}`);
    const waited = plan.finish[i] - plan.begin[i] - (plan.end[i] - plan.start[i]);
    if (waited > 0) lines.push(`waits ${formatSeconds(waited)} ${waitWords(data, plan, i)}`);
    return lines;
  }

  // Under the pointer: the operation, the wait, or the copy.
  hover(event) {
    const { frame, view } = this;
    const { plan, data } = this.state;
    const box = this.figure.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    const time = this.timeUnder(x);
    const lane = Math.floor((y - 0.4 * rem()) / ((LANE_REM + LANE_GAP_REM) * rem()));
    const i = view.operationAt(time);
    let lines = this.describe(i);
    if (lane === 0 && (time < plan.start[i] || time > plan.end[i])) {
      const [from, to] = time < plan.start[i] ? [plan.begin[i], plan.start[i]] : [plan.end[i], plan.finish[i]];
      if (to > from) lines = [`Waiting ${formatSeconds(to - from)} ${waitWords(data, plan, i)}`, `at: ${operationWords(data, plan.effects[i])}`];
    } else if (lane === 1 || lane === 2) {
      const copy = plan.copies.find((one) => one.toHost === (lane === 1) && one.start <= time && time <= one.end);
      const effect = copy && plan.effects[copy.index];
      lines = copy
        ? [`Copying ${valueWords(data, effect.name.split(" ")[1], effect.stage)} ${copy.toHost ? "to the host" : "back"}`,
          `${formatBytes(copy.bytes)} in ${formatSeconds(copy.end - copy.start)}`]
        : ["Nothing to copy"];
    }
    frame.showTip(lines, x, frame.height);
  }
}

// How much compute waits, in words, and the longest waits as places to go to.
class Waits {
  constructor(state, view) {
    this.state = state;
    this.view = view;
  }

  draw() {
    const { data, plan } = this.state;
    const text = document.getElementById("lanes-text");
    const list = document.getElementById("waits");
    list.replaceChildren();
    if (!plan.copies.length) {
      text.textContent = data.bandwidth
        ? "This schedule moves nothing between device and host: compute never waits."
        : "Nothing moves between device and host: no bandwidth was given.";
      return;
    }
    const link = `${formatBandwidth(data.bandwidth)} ${data.duplex ? "each way" : "for both ways together"}`;
    const moved = `${formatBytes(plan.moved)} move between device and host at ${link}`;
    const waits = plan.waits.map(([index, before, after]) => ({ index, seconds: before + after }));
    waits.sort((one, other) => other.seconds - one.seconds);
    text.textContent = waits.length
      ? `${moved}. Compute waits ${formatSeconds(plan.idle)} of ${formatSeconds(plan.seconds)}, in ${formatCount(waits.length, "place", "places")}${waits.length > 5 ? "; the longest" : ""}:`
      : `${moved}, all of it beside computation: compute never waits.`;
    for (const { index, seconds } of waits.slice(0, 5)) {
      const item = element("li", {}, list);
      const button = element("button", { type: "button", class: "quiet" }, item, `${formatSeconds(seconds)} at ${formatSeconds(plan.begin[index])}`);
      item.append(` ${waitWords(data, plan, index)}`);
      button.addEventListener("click", () => this.view.moveTo(index));
    }
  }
}
