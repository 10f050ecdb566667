// Pieces that all charts share: SVG elements, ticks, and a frame of a canvas under an SVG.

function element(tag, attributes = {}, parent = null, text = null) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== null) made.textContent = text;
  if (parent) parent.append(made);
  return made;
}

function svg(tag, attributes, parent, text = null) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== null) made.textContent = text;
  if (parent) parent.append(made);
  return made;
}

// Round numbers between two, about `count` of them.
function ticks(low, high, count) {
  const span = high - low;
  if (!(span > 0)) return [low];
  const rough = span / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].find((factor) => factor * power >= rough * 0.999) * power;
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high * (1 + 1e-12); i += 1) found.push(i * step);
  return found;
}

function byteUnit(bytes) {
  for (const [name, power] of [["TiB", 4], ["GiB", 3], ["MiB", 2], ["KiB", 1]]) {
    if (bytes >= 1024 ** power) return { name, factor: 1024 ** power };
  }
  return { name: "B", factor: 1 };
}

// Ticks at round numbers of one binary unit, with their labels.
function byteTicks(low, high, count) {
  const unit = byteUnit(high);
  return ticks(low / unit.factor, high / unit.factor, count).map((number) => ({
    value: number * unit.factor,
    label: `${Number(number.toPrecision(6))} ${unit.name}`,
  }));
}

function timeTicks(low, high, count) {
  const span = high - low || high;
  const unit = high >= 1 ? { name: "s", factor: 1 } : high >= 1e-3 ? { name: "ms", factor: 1e-3 } : { name: "µs", factor: 1e-6 };
  return ticks(low / unit.factor, high / unit.factor, count).map((number) => ({
    value: number * unit.factor,
    label: `${Number(number.toPrecision(span / high < 0.01 ? 8 : 6))} ${unit.name}`,
  }));
}

// What the style says is read once and kept until it changes: each reading makes the browser lay out the page.
const styleCache = new Map();

function forgetStyle() {
  styleCache.clear();
}

function fromStyle(name, read) {
  if (!styleCache.has(name)) styleCache.set(name, read(getComputedStyle(document.documentElement)));
  return styleCache.get(name);
}

function rem() {
  return fromStyle("rem", (style) => parseFloat(style.fontSize));
}

function cssColour(name) {
  return fromStyle(name, (style) => style.getPropertyValue(name).trim());
}

// A canvas for what is large and an SVG over it for text and marks. `draw` is called when the size changes.
class Frame {
  constructor(figure, heightRem, draw, { canvas = true } = {}) {
    this.figure = figure;
    this.heightRem = heightRem;
    this.canvas = canvas ? element("canvas", { "aria-hidden": "true" }, figure) : null;
    this.svg = svg("svg", { "aria-hidden": "true" }, figure);
    this.tip = element("div", { class: "tip", "aria-hidden": "true", hidden: "" }, figure);
    new ResizeObserver(([entry]) => {
      forgetStyle(); // the size of text may have changed too
      this.width = entry.contentRect.width;
      draw();
    }).observe(figure);
  }

  // Sizes in CSS pixels; the plot lies between left and right, top and bottom.
  measure({ left = 4.4, right = 0.75, top = 1.25, bottom = 1.75 } = {}) {
    const unit = rem();
    this.width ??= this.figure.clientWidth;
    this.height = this.heightRem * unit;
    this.left = left * unit;
    this.right = this.width - right * unit;
    this.top = top * unit;
    this.bottom = this.height - bottom * unit;
    this.svg.setAttribute("width", this.width);
    this.svg.setAttribute("height", this.height);
    this.svg.replaceChildren();
    this.rules = []; // heights of the grid's lines; on a canvas they are painted beneath everything
    if (this.canvas) {
      this.ratio = window.devicePixelRatio || 1;
      this.canvas.width = Math.round(this.width * this.ratio);
      this.canvas.height = Math.round(this.height * this.ratio);
      this.canvas.style.width = `${this.width}px`;
      this.canvas.style.height = `${this.height}px`;
    }
    return this.width > 0;
  }

  axisX(found, place) {
    const group = svg("g", { class: "axis" }, this.svg);
    let free = -Infinity;
    for (const { value, label } of found) {
      const x = place(value);
      if (x < this.left - 1 || x > this.right + 1) continue;
      svg("line", { x1: x, x2: x, y1: this.bottom, y2: this.bottom + 4 }, group);
      const half = label.length * 0.22 * rem();
      const middle = Math.min(Math.max(x, half), this.width - half);
      if (middle - half < free) continue;
      free = middle + half + 0.4 * rem();
      svg("text", { x: middle, y: this.bottom + 1.1 * rem(), "text-anchor": "middle" }, group, label);
    }
    svg("line", { x1: this.left, x2: this.right, y1: this.bottom, y2: this.bottom, class: "floor" }, group);
  }

  axisY(found, place) {
    const group = svg("g", { class: "axis" }, this.svg);
    for (const { value, label } of found) {
      const y = place(value);
      if (y < this.top - 1 || y > this.bottom + 1) continue;
      if (this.canvas) this.rules.push(y);
      else svg("line", { x1: this.left, x2: this.right, y1: y, y2: y, class: "rule" }, group);
      svg("text", { x: this.left - 0.5 * rem(), y: y + 0.28 * rem(), "text-anchor": "end" }, group, label);
    }
  }

  showTip(lines, x, y) {
    this.tip.replaceChildren();
    lines.forEach((line, index) => element(index ? "span" : "strong", {}, this.tip, line));
    this.tip.hidden = false;
    const width = this.tip.offsetWidth;
    const left = x + width + 14 > this.width ? x - width - 14 : x + 14;
    this.tip.style.left = `${Math.max(0, Math.min(left, this.width - width))}px`;
    this.tip.style.top = `${Math.max(0, y)}px`;
  }

  hideTip() {
    this.tip.hidden = true;
  }
}
