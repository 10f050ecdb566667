// Memory over the operations or over time, as stacked areas on a canvas: a column of pixels shows the operation with
// the highest peak among those that fall on it, so that no peak is lost however long the list is.

class MemoryChart {
  constructor(state, view) {
    this.state = state;
    this.view = view;
    this.figure = document.getElementById("memory-chart");
    this.figure.setAttribute("tabindex", "0");
    this.figure.setAttribute("role", "slider");
    this.figure.setAttribute("aria-label", "Operation: arrow keys move, p goes to the peak, plus and minus zoom");
    this.figure.setAttribute("aria-valuemin", "1");
    this.frame = new Frame(this.figure, 20, () => this.draw());
    listen(this.figure, view, (x) => this.operationUnder(x), () => this.frame.hideTip());
  }

  operationUnder(x) {
    const [low, high] = this.view.range;
    const value = low + ((x - this.frame.left) / (this.frame.right - this.frame.left)) * (high - low);
    return this.view.over === "time" ? this.view.operationAt(value) : Math.floor(value);
  }

  x(value) {
    const [low, high] = this.view.range;
    return this.frame.left + ((value - low) / (high - low || 1)) * (this.frame.right - this.frame.left);
  }

  y(bytes) {
    return this.frame.bottom - (bytes / this.topBytes) * (this.frame.bottom - this.frame.top);
  }

  draw() {
    const { frame, state, view } = this;
    const { plan } = state;
    if (!frame.measure({ top: 0.5 })) return;
    // A budget far above the peak would only squeeze the areas: then it is named and its line is left out.
    this.showsBudget = plan.budget <= 1.6 * plan.peak;
    this.topBytes = 1.14 * Math.max(plan.peak, this.showsBudget ? plan.budget : 0, 1);
    frame.axisY(byteTicks(0, this.topBytes, 6), (value) => this.y(value));
    const [low, high] = view.range;
    const count = frame.width / (5.5 * rem());
    const found = view.over === "time"
      ? timeTicks(low, high, count)
      : ticks(low, high, count).map((value) => ({ value, label: String(value) }));
    frame.axisX(found, (value) => this.x(value));
    this.paint();
    this.annotate();
    this.marks = svg("g", {}, frame.svg);
    this.drawCursor();
  }

  paint() {
    const { frame, state, view } = this;
    const { pieces } = view;
    const context = frame.canvas.getContext("2d");
    const ratio = frame.ratio;
    const left = Math.round(frame.left * ratio);
    const columns = Math.max(1, Math.round((frame.right - frame.left) * ratio));
    const runs = this.runs(columns);
    const numLayers = state.data.layers.length;
    const bottom = Math.round(frame.bottom * ratio);
    const perByte = (bottom - frame.top * ratio) / this.topBytes;
    context.clearRect(0, 0, frame.canvas.width, frame.canvas.height);
    context.fillStyle = cssColour("--rule");
    for (const y of frame.rules) context.fillRect(left, Math.round(y * ratio), columns, Math.max(1, Math.round(ratio)));
    const below = new Float64Array(runs.length);
    for (let layer = 0; layer < numLayers; layer += 1) {
      context.fillStyle = cssColour(`--layer-${layer}`);
      runs.forEach(({ from, to, piece }, index) => {
        const bytes = pieces.layers[pieces.at[piece] + layer];
        if (!bytes) return;
        const y0 = Math.round(below[index] * perByte);
        below[index] += bytes;
        const y1 = Math.round(below[index] * perByte);
        const gap = to - from > 8 * ratio ? ratio : 0; // bars that are wide enough stand apart
        context.fillRect(left + from, bottom - y1, to - from - gap, Math.max(y1 - y0, y1 > 0 && y0 === y1 ? 0 : 1));
      });
    }
  }

  // The columns of pixels in runs that show the same piece.
  runs(columns) {
    const { pieces } = this.view;
    const [low, high] = this.view.range;
    const totals = this.totalsOf(pieces);
    const found = [];
    let next = 0;
    while (next < pieces.count && pieces.edges[next + 1] <= low) next += 1;
    for (let column = 0; column < columns; column += 1) {
      const end = low + ((column + 1) * (high - low)) / columns;
      let piece = Math.min(next, pieces.count - 1);
      for (let i = next; i < pieces.count && pieces.edges[i] < end; i += 1) {
        if (totals[i] > totals[piece]) piece = i;
        if (pieces.edges[i + 1] <= end) next = i + 1;
      }
      const last = found[found.length - 1];
      if (last && last.piece === piece) last.to = column + 1;
      else found.push({ from: column, to: column + 1, piece });
    }
    return found;
  }

  totalsOf(pieces) {
    if (!pieces.totals) {
      const numLayers = this.state.data.layers.length;
      pieces.totals = new Float64Array(pieces.count);
      for (let i = 0; i < pieces.count; i += 1) {
        for (let layer = 0; layer < numLayers; layer += 1) pieces.totals[i] += pieces.layers[pieces.at[i] + layer];
      }
    }
    return pieces.totals;
  }

  annotate() {
    const { frame, view } = this;
    const { plan } = this.state;
    const peakX = this.x(view.middleOf(plan.peakIndex));
    const widthOf = (text) => 0.47 * rem() * text.length;
    const peakText = `peak ${formatBytes(plan.peak)}`;
    const budgetText = `budget ${formatBytes(plan.budget)}`;
    const y = this.y(plan.peak);
    const labelY = this.y(this.showsBudget ? Math.max(plan.budget, plan.peak) : plan.peak) - 0.4 * rem();
    // The budget is named at the far end from the peak, the peak beside its mark where there is room for both.
    const atLeft = peakX > (frame.left + frame.right) / 2;
    const [from, to] = atLeft
      ? [frame.left + widthOf(budgetText) + 1 * rem(), frame.right]
      : [frame.left, frame.right - widthOf(budgetText) - 1 * rem()];
    if (this.showsBudget) {
      const lineY = this.y(plan.budget);
      svg("line", { x1: frame.left, x2: frame.right, y1: lineY, y2: lineY, class: "budget-line" }, frame.svg);
      svg("text", { x: atLeft ? frame.left + 6 : frame.right - 6, y: lineY - 0.4 * rem(), "text-anchor": atLeft ? "start" : "end", class: "budget-label" },
        frame.svg, budgetText);
    }
    if (peakX < frame.left - 1 || peakX > frame.right + 1) return;
    svg("path", { d: `M${peakX} ${y - 1}l-5 -9h10Z`, class: "peak" }, frame.svg);
    const fitsBefore = peakX - 10 - widthOf(peakText) >= from;
    const fitsAfter = peakX + 10 + widthOf(peakText) <= to;
    const before = atLeft ? fitsBefore || !fitsAfter : fitsBefore && !fitsAfter;
    const anchor = before ? "end" : "start";
    const lower = fitsBefore || fitsAfter ? 0 : 1.6 * rem();
    svg("text", { x: peakX + (anchor === "end" ? -10 : 10), y: labelY + lower, "text-anchor": anchor, class: "peak-label" },
      frame.svg, peakText);
  }

  drawCursor() {
    const { frame, view } = this;
    const { plan, data } = this.state;
    if (!this.marks) return;
    const i = view.cursor;
    const x = this.x(view.middleOf(i));
    this.marks.replaceChildren();
    if (x >= frame.left - 1 && x <= frame.right + 1) {
      svg("line", { x1: x, x2: x, y1: frame.top, y2: frame.bottom, class: "cursor" }, this.marks);
      svg("circle", { cx: x, cy: this.y(plan.total[i]), r: 3.5, class: "cursor-dot" }, this.marks);
    }
    const words = operationWords(data, plan.effects[i]);
    this.figure.setAttribute("aria-valuemax", plan.count);
    this.figure.setAttribute("aria-valuenow", i + 1);
    this.figure.setAttribute("aria-valuetext", `Operation ${i + 1} of ${plan.count}: ${words}, ${formatBytes(plan.total[i])}`);
    if (this.figure.matches(":hover, :focus-visible")) {
      frame.showTip([words, `${formatBytes(plan.total[i])}, operation ${i + 1}`], x, frame.top);
    }
  }
}

// What the operation under the cursor is, and the bytes of each layer while it runs; the legend at the same time.
class Readout {
  constructor(state, view) {
    this.state = state;
    this.view = view;
    this.list = document.getElementById("legend");
    this.values = state.data.layers.map((layer, index) => {
      const item = element("li", {}, this.list);
      const swatch = element("i", { class: "swatch" }, item);
      swatch.style.background = `var(--layer-${index})`;
      element("span", {}, item, layer.title);
      return element("b", {}, item);
    });
  }

  // Layers that this plan never uses are left out.
  open() {
    const { plan, data } = this.state;
    const numLayers = data.layers.length;
    const used = new Array(numLayers).fill(false);
    for (let at = 0; at < plan.during.length; at += 1) if (plan.during[at]) used[at % numLayers] = true;
    [...this.list.children].forEach((item, index) => (item.hidden = !used[index]));
  }

  draw() {
    const { plan, data } = this.state;
    const i = this.view.cursor;
    const effect = plan.effects[i];
    document.getElementById("operation-title").textContent = operationWords(data, effect);
    const facts = [`operation ${i + 1} of ${plan.count}`];
    if (effect.stage) facts.push(`stage ${effect.stage} of ${data.chain.names.length}`);
    if (savesWords(effect)) facts.push(savesWords(effect));
    facts.push(`${formatBytes(plan.total[i])} on the device`);
    if (plan.end[i] > plan.start[i]) facts.push(`${formatSeconds(plan.end[i] - plan.start[i])} from ${formatSeconds(plan.start[i])}`);
    const waited = plan.finish[i] - plan.begin[i] - (plan.end[i] - plan.start[i]);
    if (waited > 0) facts.push(`waits ${formatSeconds(waited)} ${waitWords(data, plan, i)}`);
    document.getElementById("operation-text").textContent = facts.join(" · ");
    const base = i * data.layers.length;
    this.values.forEach((value, layer) => (value.textContent = formatBytes(plan.during[base + layer])));
  }
}
