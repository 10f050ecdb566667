// The table of stages: what each costs, and what the schedule does with it. A heading sorts by its column.

class StageTable {
  constructor(state, view) {
    this.state = state;
    this.view = view;
    this.table = document.getElementById("stages");
    this.sorted = { column: 0, descending: false };
    const { chain, plans } = state.data;
    const bytes = (name) => ({ value: (k) => chain[name][k], text: formatBytes, number: true });
    const seconds = (name) => ({ value: (k) => chain[name][k], text: formatSeconds, number: true });
    this.columns = [
      { title: "#", value: (k) => k + 1, text: String, number: true },
      { title: "Stage", value: (k) => chain.names[k], text: String, isName: true },
      { title: "Forward", ...seconds("forward") },
      { title: "Backward", ...seconds("backward") },
      { title: "Output", ...bytes("output") },
      { title: "Saved", ...bytes("saved") },
      ...(chain.weight.some((weight) => weight) ? [{ title: "Weights", ...bytes("weight") }] : []),
      { title: "Runs", value: (k) => this.state.plan.forwards[k], text: (count) => `${count}×`, number: true, changes: true },
      { title: "Its activations are", value: (k) => this.state.plan.fates[k], text: (fate) => state.data.fates[fate], changes: true, isFate: true },
      ...(chain.variants.some((names) => names.length)
        ? [{ title: "Runs as", value: (k) => chain.variants[k][this.state.plan.variants[k] - 1] ?? "as it is", text: String, changes: true }]
        : []),
      ...(plans.some((plan) => plan.moved)
        ? [{ title: "Moved", value: (k) => this.state.plan.stageMoved[k], text: (moved) => (moved ? formatBytes(moved) : "–"), number: true, changes: true }]
        : []),
    ];
    this.build();
    document.getElementById("filter").addEventListener("input", () => this.arrange());
  }

  build() {
    const { chain } = this.state.data;
    const head = element("tr", {}, this.table.tHead);
    this.columns.forEach((column, index) => {
      const cell = element("th", { scope: "col", class: column.number ? "number" : "" }, head);
      const button = element("button", { type: "button" }, cell, column.title);
      button.addEventListener("click", () => this.sortBy(index));
    });
    this.rows = chain.names.map((name, k) => {
      const row = element("tr");
      const cells = this.columns.map((column) => {
        const cell = element(column.isName ? "th" : "td", column.isName ? { scope: "row" } : { class: column.number ? "number" : "" }, row);
        if (column.isName) {
          const button = element("button", { type: "button", title: "Go to its first operation" }, cell, name);
          button.addEventListener("click", () => this.view.moveTo(this.state.plan.firstOf.get(k + 1)));
        } else if (column.isFate) {
          element("i", { class: "swatch" }, cell);
          element("span", {}, cell);
        } else if (!column.changes) cell.textContent = column.text(column.value(k));
        return cell;
      });
      return { k, row, cells, name: name.toLowerCase() };
    });
  }

  draw() {
    for (const { k, cells } of this.rows) {
      this.columns.forEach((column, index) => {
        if (!column.changes) return;
        const value = column.value(k);
        if (column.isFate) {
          cells[index].firstChild.className = `swatch fate-${value}`;
          cells[index].lastChild.textContent = column.text(value);
        } else cells[index].textContent = column.text(value);
      });
    }
    const { plan, data } = this.state;
    const counts = {};
    for (const fate of plan.fates) counts[fate] = (counts[fate] ?? 0) + 1;
    const parts = Object.keys(data.fates).filter((fate) => counts[fate]).map((fate) => `${counts[fate]} ${data.fates[fate]}`);
    document.getElementById("stages-text").textContent = `Of ${formatCount(plan.fates.length, "stage", "stages")}: ${parts.join("; ")}.`;
    this.arrange();
  }

  sortBy(index) {
    const again = this.sorted.column === index;
    // Numbers start with the largest, names with the first.
    this.sorted = { column: index, descending: again ? !this.sorted.descending : Boolean(this.columns[index].number) && index > 0 };
    this.arrange();
  }

  arrange() {
    const { column, descending } = this.sorted;
    const { value } = this.columns[column];
    const wanted = document.getElementById("filter").value.trim().toLowerCase();
    const shown = this.rows.filter((row) => row.name.includes(wanted));
    const compare = (one, other) => (typeof one === "number" ? one - other : one.localeCompare(other, "en", { numeric: true }));
    shown.sort((one, other) => (descending ? -1 : 1) * compare(value(one.k), value(other.k)) || one.k - other.k);
    this.table.tBodies[0].replaceChildren(...shown.map((row) => row.row));
    [...this.table.tHead.rows[0].cells].forEach((cell, index) => {
      if (index === column) cell.setAttribute("aria-sort", descending ? "descending" : "ascending");
      else cell.removeAttribute("aria-sort");
    });
  }
}
