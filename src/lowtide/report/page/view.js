// What part of a plan is looked at, shared by the memory chart and the lanes: a window of operations, and a cursor.

const SMALLEST_WINDOW = 8; // operations

class View {
  constructor(changed) {
    this.changed = changed; // called with true where more than the cursor has changed
    this.cursor = 0;
    this.over = "operations";
  }

  open(plan) {
    this.plan = plan;
    this.low = 0;
    this.high = plan.count;
    this.cursor = plan.peakIndex;
  }

  get pieces() {
    return this.over === "time" ? this.plan.overTime : this.plan.overOperations;
  }

  // The window on the axis of the memory chart.
  get range() {
    return this.over === "time" ? this.timeRange : [this.low, this.high];
  }

  get timeRange() {
    return [this.timeAt(this.low), this.timeAt(this.high)];
  }

  timeAt(position) {
    const { plan } = this;
    const i = Math.floor(position);
    if (i >= plan.count) return plan.makespan;
    return plan.begin[i] + (position - i) * (plan.finish[i] - plan.begin[i]);
  }

  // The operation under way at a time: the first that is done after it.
  operationAt(time) {
    const { finish, count } = this.plan;
    let low = 0;
    let high = count - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (finish[middle] > time) high = middle;
      else low = middle + 1;
    }
    return low;
  }

  // Where an operation stands on the axis of the memory chart.
  middleOf(i) {
    return this.over === "time" ? this.middleTimeOf(i) : i + 0.5;
  }

  middleTimeOf(i) {
    return (this.plan.start[i] + this.plan.end[i]) / 2;
  }

  moveTo(i) {
    const target = Math.max(0, Math.min(this.plan.count - 1, Math.round(i)));
    if (target === this.cursor) return;
    this.cursor = target;
    const size = this.high - this.low;
    let moved = true;
    if (target < this.low) this.shift(target - this.low - 0.1 * size);
    else if (target + 1 > this.high) this.shift(target + 1 - this.high + 0.1 * size);
    else moved = false;
    this.changed(moved);
  }

  shift(operations) {
    const by = Math.max(-this.low, Math.min(this.plan.count - this.high, operations));
    this.low += by;
    this.high += by;
  }

  pan(operations) {
    this.shift(operations);
    this.changed(true);
  }

  zoom(factor, around = this.cursor + 0.5) {
    const { count } = this.plan;
    const size = Math.min(count, Math.max(Math.min(SMALLEST_WINDOW, count), (this.high - this.low) * factor));
    const share = Math.max(0, Math.min(1, (around - this.low) / (this.high - this.low)));
    this.low = Math.max(0, Math.min(count - size, around - share * size));
    this.high = this.low + size;
    this.changed(true);
  }

  showAll() {
    this.low = 0;
    this.high = this.plan.count;
    this.changed(true);
  }

  drawOver(what) {
    this.over = what;
    this.changed(true);
  }
}

// Pointer, wheel and keys on a chart that stands over the view. `operationUnder` says which operation is at an x.
function listen(figure, view, operationUnder, leave) {
  const under = (event) => operationUnder(event.clientX - figure.getBoundingClientRect().left);
  figure.addEventListener("pointermove", (event) => view.moveTo(under(event)));
  figure.addEventListener("pointerdown", (event) => view.moveTo(under(event)));
  figure.addEventListener("pointerleave", leave);
  figure.addEventListener("blur", leave);
  figure.addEventListener(
    "wheel",
    (event) => {
      const size = view.high - view.low;
      if (event.ctrlKey || event.metaKey) view.zoom(Math.exp(event.deltaY * 0.005), under(event) + 0.5);
      else if (Math.abs(event.deltaX) > Math.abs(event.deltaY) && size < view.plan.count) view.pan((size * event.deltaX) / 1000);
      else return; // a plain wheel scrolls the page
      event.preventDefault();
    },
    { passive: false },
  );
  figure.addEventListener("keydown", (event) => {
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    const leap = Math.max(1, Math.round((view.high - view.low) / 10));
    const actions = {
      ArrowLeft: () => view.moveTo(view.cursor - 1),
      ArrowRight: () => view.moveTo(view.cursor + 1),
      ArrowDown: () => view.moveTo(view.cursor - 1),
      ArrowUp: () => view.moveTo(view.cursor + 1),
      PageDown: () => view.moveTo(view.cursor - leap),
      PageUp: () => view.moveTo(view.cursor + leap),
      Home: () => view.moveTo(0),
      End: () => view.moveTo(view.plan.count - 1),
      p: () => view.moveTo(view.plan.peakIndex),
      "+": () => view.zoom(0.5),
      "=": () => view.zoom(0.5),
      "-": () => view.zoom(2),
      0: () => view.showAll(),
    };
    if (!actions[event.key]) return;
    actions[event.key]();
    event.preventDefault();
  });
}
