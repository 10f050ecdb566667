// The page: one state, the parts that draw it, and what changes it.

const byId = (id) => document.getElementById(id);

class Page {
  constructor(data) {
    const envelope = envelopeOf(data.curves);
    this.state = { data, envelope, index: data.selected, plan: null };
    this.spelled = new Map();
    this.view = new View((moved) => this.drawView(moved));
    this.open(data.selected);
    byId("page").hidden = false;
    this.frontier = new FrontierChart(this.state, (index) => this.choose(index));
    this.strategies = new StrategyTable(this.state, this.frontier);
    this.memory = new MemoryChart(this.state, this.view);
    this.readout = new Readout(this.state, this.view);
    this.lanes = new Lanes(this.state, this.view);
    this.waits = new Waits(this.state, this.view);
    this.stages = new StageTable(this.state, this.view);
    this.fixed();
    this.controls();
    this.drawAll();
  }

  open(index) {
    const { data } = this.state;
    if (!this.spelled.has(index)) this.spelled.set(index, spellOut(data, data.plans[index]));
    this.state.index = index;
    this.state.plan = this.spelled.get(index);
    this.view.open(this.state.plan);
  }

  choose(index) {
    if (index === this.state.index) return;
    this.open(index);
    this.drawAll();
  }

  drawAll() {
    this.drawVerdict();
    this.drawBudget();
    this.frontier.draw();
    this.strategies.draw();
    this.readout.open();
    this.waits.draw();
    this.stages.draw();
    this.drawView(true);
  }

  // `moved`: more than the cursor has changed.
  drawView(moved) {
    if (!this.memory) return;
    if (moved) {
      this.memory.draw();
      this.lanes.draw();
      const whole = this.view.high - this.view.low >= this.state.plan.count;
      byId("zoom-out").disabled = byId("zoom-all").disabled = whole;
    } else {
      this.memory.drawCursor();
      this.lanes.drawCursor();
    }
    this.readout.draw();
  }

  // What no budget changes.
  fixed() {
    const { data } = this.state;
    const { chain, storeAll, measured } = data;
    byId("chain-name").textContent = chain.name;
    byId("chain-facts").textContent =
      `${formatCount(chain.names.length, "stage", "stages")}. Plain training takes ${formatBytes(storeAll.peak)} and ${formatSeconds(storeAll.seconds)} a step.`;
    const devices = [...new Set([measured?.device, chain.provenance.device].filter(Boolean))];
    byId("chain-device").hidden = !devices.length;
    byId("chain-device").textContent = devices.length > 1 ? `${devices[0]} (${devices[1]})` : devices[0] ?? "";
    byId("written").textContent = `Written by lowtide ${data.version}.`;
    this.provenance();
    this.measured();
  }

  // Folded, because few want to know; what is too long for a page is named only.
  provenance() {
    const { provenance } = this.state.data.chain;
    const said = Object.entries(provenance).filter(([, value]) => value !== null);
    const unsaid = Object.keys(provenance).filter((key) => provenance[key] === null);
    if (unsaid.length) said.push(["in the chain file only", unsaid.join(", ")]);
    byId("provenance").hidden = !said.length;
    const list = byId("provenance").querySelector("dl");
    for (const [key, value] of said) {
      element("dt", {}, list, key.replaceAll("_", " "));
      element("dd", {}, list, value);
    }
  }

  // What a run saw beside what the simulator said of the same schedule.
  measured() {
    const { data } = this.state;
    const { measured } = data;
    const table = byId("measured");
    byId("measured-region").hidden = !measured;
    const own = data.plans[data.own ?? data.selected];
    if (!measured) {
      byId("measured-text").textContent = "Nothing was executed: all figures of this page are predictions of the simulator.";
      return;
    }
    const over = measured.num_steps ? `over ${formatCount(measured.num_steps, "step", "steps")}` : "in a trial step, before training,";
    const where = [measured.device && `on ${measured.device}`, over];
    byId("measured-text").textContent = ["Measured", ...where.filter(Boolean), `with a budget of ${formatBytes(own.budget)}.`].join(" ");
    const head = element("tr", {}, table.tHead);
    for (const title of ["", "Predicted", "Measured", "Difference"]) element("th", { scope: "col", class: title ? "number" : "" }, head, title);
    const rows = [["Peak memory", own.peak, measured.peak_bytes, formatBytes], ["Step time", own.seconds, measured.seconds, formatSeconds]];
    for (const [title, predicted, seen, text] of rows) {
      if (seen === null) continue;
      const row = element("tr", {}, table.tBodies[0]);
      element("th", { scope: "row" }, row, title);
      const difference = seen / predicted - 1;
      for (const value of [text(predicted), text(seen), signedPercent(difference)]) {
        element("td", { class: "number" }, row, value);
      }
    }
  }

  drawVerdict() {
    const { data, plan, envelope } = this.state;
    const fits = plan.peak <= plan.budget;
    byId("verdict-title").textContent = fits ? `Fits in ${formatBytes(plan.budget)}` : `Does not fit in ${formatBytes(plan.budget)}`;
    byId("verdict-title").className = fits ? "fits" : "fails";
    const plain = data.storeAll.seconds;
    const overhead = plain ? plan.seconds / plain - 1 : 0;
    const cost = Math.abs(overhead) < 0.0005 ? "as fast as plain training" : `${formatPercent(Math.abs(overhead))} ${overhead < 0 ? "faster" : "slower"} than plain training`;
    const best = pointAt(envelope, plan.budget);
    // Where trial steps have decided for a plan, what is faster by simulation alone is no advice.
    const decided = data.attached && this.state.index === data.own;
    const better = !decided && best && best[1] < plan.seconds * 0.999 ? ` A faster one fits too: ${best[2]}, ${formatSeconds(best[1])}.` : "";
    byId("verdict-text").textContent = `A step takes ${formatSeconds(plan.seconds)} (${plan.strategy}), ${cost}.${better}`;
    this.drawKind();
    const forwards = plan.forwards.reduce((sum, count) => sum + count, 0);
    const figures = [
      ["Peak memory", formatBytes(plan.peak), `${((100 * plan.peak) / plan.budget).toFixed(1)}\u00a0% of the budget`],
      ["Step time", formatSeconds(plan.seconds), plain ? `${(plan.seconds / plain).toFixed(3)} × plain training` : ""],
      ["Recomputed", plan.recomputed.toLocaleString("en"), `of ${forwards.toLocaleString("en")} forwards`],
      ["Moved", plan.moved ? formatBytes(plan.moved) : "nothing", data.bandwidth ? `at ${formatBandwidth(data.bandwidth)}` : "no link given"],
      ["Waiting", plan.idle > 1e-12 * plan.seconds ? formatSeconds(plan.idle) : "never", plan.seconds ? `${formatPercent(plan.idle / plan.seconds)} of the step` : ""],
    ];
    byId("figures").replaceChildren();
    for (const [title, value, note] of figures) {
      const group = element("div", {}, byId("figures"));
      element("dt", {}, group, title);
      const cell = element("dd", {}, group);
      element("b", {}, cell, value);
      element("span", {}, cell, note);
    }
    byId("gigabyte").textContent = this.gigabyte();
    const peak = operationWords(data, plan.effects[plan.peakIndex]);
    byId("peak-text").textContent = `The peak, ${formatBytes(plan.peak)}, is reached at operation ${plan.peakIndex + 1} of ${plan.count.toLocaleString("en")}: ${peak}.`;
  }

  // Whether this schedule was executed, and what was seen then; and what its maker says of it.
  drawKind() {
    const { data, index } = this.state;
    const { measured } = data;
    const isOwn = index === data.own;
    const kind = byId("verdict-kind");
    kind.className = `kind ${isOwn && measured ? "executed" : "simulated"}`;
    const seen = measured && [
      measured.seconds && `${formatSeconds(measured.seconds)} a step`,
      measured.peak_bytes && `a peak of ${formatBytes(measured.peak_bytes)}`,
    ].filter(Boolean).join(" and ");
    if (!isOwn || !measured) kind.textContent = "Simulated, not executed.";
    else if (measured.num_steps) kind.textContent = `Executed for ${formatCount(measured.num_steps, "step", "steps")}: ${seen}. What follows is simulated.`;
    else kind.textContent = `Tried in a step before training: ${seen}. What follows is simulated.`;
    const notes = byId("notes");
    notes.hidden = !isOwn || !data.notes.length;
    notes.querySelector("ul").replaceChildren(...data.notes.map((note) => element("li", {}, null, note)));
  }

  // What a little more memory would buy, and what a little less would cost.
  gigabyte() {
    const { data, plan, envelope } = this.state;
    const range = data.storeAll.peak - data.minimum;
    if (range <= 0) return "Plain training is the only way, and it fits.";
    const gibibyte = 1024 ** 3;
    const amount = range >= 4 * gibibyte ? gibibyte : 2 ** Math.max(0, Math.floor(Math.log2(range / 4)));
    const unit = byteUnit(amount);
    const words = `${amount / unit.factor} ${unit.name}`;
    const now = pointAt(envelope, plan.budget)?.[1] ?? plan.seconds;
    const more = pointAt(envelope, plan.budget + amount)?.[1] ?? now;
    const less = pointAt(envelope, plan.budget - amount)?.[1];
    const gain = now - more > 0.0005 * now
      ? `${words} more would save ${formatSeconds(now - more)} a step (${formatPercent(1 - more / now)})`
      : `${words} more would save next to nothing`;
    const loss = less === undefined
      ? `${words} less is too little`
      : less - now > 0.0005 * now ? `${words} less would cost ${formatSeconds(less - now)} (${formatPercent(less / now - 1)})` : `${words} less would cost next to nothing`;
    return `${gain}; ${loss}.`;
  }

  drawBudget() {
    const { data, plan, index } = this.state;
    const slider = byId("budget");
    slider.max = data.plans.length - 1;
    slider.value = index;
    const summary = `${plan.strategy} · peak ${formatBytes(plan.peak)} · ${formatSeconds(plan.seconds)}`;
    byId("budget-value").value = formatBytes(plan.budget);
    this.say("");
    byId("budget-summary").textContent = summary;
    slider.setAttribute("aria-valuetext", `${formatBytes(plan.budget)}: ${summary}`);
    byId("budget-own").hidden = data.own === null || data.own === index;
  }

  // A line beneath the budget; empty: none.
  say(words) {
    byId("budget-hint").hidden = !words;
    byId("budget-hint").textContent = words;
  }

  // The schedule for a budget that was typed: the next one that was computed for no more than that.
  type(text) {
    const { plans } = this.state.data;
    const bytes = parseBytes(text);
    if (bytes === null) return this.say(`“${text}” is not a number of bytes; write it like 8GiB, 512MiB or 8GB.`);
    const wanted = formatBytes(bytes);
    const same = plans.findIndex((plan) => formatBytes(plan.budget) === wanted);
    const index = same >= 0 ? same : plans.findLastIndex((plan) => plan.budget <= bytes);
    if (index < 0) return this.say(`${wanted} is too little: the least that works is ${formatBytes(plans[0].budget)}.`);
    this.choose(index);
    this.drawBudget();
    if (same < 0) this.say(`Schedules are computed for ${plans.length} budgets; this is the next one below ${wanted}.`);
  }

  controls() {
    byId("budget-value").addEventListener("change", (event) => this.type(event.target.value));
    byId("budget").addEventListener("input", (event) => this.choose(Number(event.target.value)));
    byId("budget-own").addEventListener("click", () => {
      this.choose(this.state.data.own);
      byId("budget").focus();
    });
    byId("over").addEventListener("change", (event) => this.view.drawOver(event.target.value));
    byId("zoom-in").addEventListener("click", () => this.view.zoom(0.5));
    byId("zoom-out").addEventListener("click", () => this.view.zoom(2));
    byId("zoom-all").addEventListener("click", () => this.view.showAll());
    const dark = window.matchMedia("(prefers-color-scheme: dark)");
    const isDark = () => (document.documentElement.dataset.theme ?? (dark.matches ? "dark" : "light")) === "dark";
    const name = () => (byId("theme").textContent = isDark() ? "Light" : "Dark");
    const repaint = () => {
      forgetStyle();
      name();
      this.drawView(true);
    };
    name();
    dark.addEventListener("change", repaint);
    byId("theme").addEventListener("click", () => {
      document.documentElement.dataset.theme = isDark() ? "light" : "dark";
      repaint();
    });
  }
}

unpack(byId("data").textContent).then(
  (data) => new Page(data),
).catch((error) => {
  byId("failure").hidden = false;
  byId("failure").textContent = `This page cannot be drawn (${error.message}); it needs a browser from 2023 or later.`;
  console.error(error);
});
