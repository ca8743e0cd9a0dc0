// The table of runs with their settings.

function drawRuns(view) {
  const columns = [
    { name: "name", title: "run", text: true, value: (run) => run.name, show: nameCell },
    {
      name: "method",
      title: "method",
      text: true,
      value: (run) => run.cell.label,
      show: (run) => methodCell(run.cell),
    },
    {
      name: "sparsity",
      title: "sparsity",
      value: (run) => run.cell.sparsity,
      show: (run) => sparsityText(run.cell),
    },
    { name: "seed", title: "seed", value: (run) => run.seed, show: (run) => String(run.seed) },
    accuracyColumn("accuracy", "test, %"),
    view.runs.some((run) => known(run.validation)) && accuracyColumn("validation", "validation, %"),
    ...costColumns(view.runs, "weights"),
  ].filter(Boolean);
  fillTable("runs", {
    columns,
    rows: view.runs,
    order: "runs",
    rowOf: (runs) => runs.slice(0, state.page).flatMap((run) => rowsOf(columns, run)),
    label: "All runs",
    redraw: drawRuns,
  });
  const left = view.runs.length - state.page;
  offerMore("more", left, 4 * PAGE);
  document.getElementById("runs-note").textContent =
    left > 0
      ? `${whole(state.page)} of ${whole(view.runs.length)} runs are shown.`
      : "Select the name of a run to see its configuration.";
}

const accuracyColumn = (name, title) => ({
  name,
  title,
  value: (run) => run[name],
  show: (run) => fixed(run[name]),
});

/** The row of a run, followed by its settings if it is open. */
function rowsOf(columns, run) {
  const row = rowBy(columns, run);
  if (!state.open.has(run.index)) return [row];
  const settings = element("td", { colspan: columns.length }, settingsOf(run));
  return [row, element("tr", { class: "settings" }, settings)];
}

/** The name of a run as a button that opens its settings. */
function nameCell(run) {
  const open = state.open.has(run.index);
  const button = element(
    "button",
    {
      type: "button",
      class: "open",
      "aria-expanded": String(open),
      title: run.name,
      onclick: () => {
        state.open[open ? "delete" : "add"](run.index);
        drawRuns(currentView());
        document.querySelector(`#runs [data-run="${run.index}"]`)?.focus();
      },
      "data-run": run.index,
    },
    run.name,
  );
  return element("td", { class: "name" }, button);
}

/** The settings of a run: first those that differ from most runs, then the shared ones. */
function settingsOf(run) {
  const { own, shared } = configurationOf(run);
  const list = (pairs) =>
    element(
      "dl",
      {},
      ...pairs.map(([key, value]) =>
        element("div", {}, element("dt", {}, key), element("dd", {}, value)),
      ),
    );
  const box = element("div", { class: "settings-box" });
  if (own.length) box.append(element("h4", {}, "Different from most runs"), list(own));
  if (shared.length)
    box.append(element("h4", {}, own.length ? "Same as in most runs" : "Configuration"), list(shared));
  return box;
}

/** Keys and values of the settings that differ from most runs, and of those that are shared. */
function configurationOf(run) {
  const { keys, values, base, variants } = DATA.config,
    variant = variants[run.config],
    own = new Map();
  for (let i = 0; i < variant.length; i += 2) own.set(variant[i], variant[i + 1]);
  const named = (pairs) =>
    pairs.filter(([, value]) => value >= 0).map(([key, value]) => [keys[key], values[value]]);
  return {
    own: named([...own]),
    shared: named([...base.entries()].filter(([key]) => !own.has(key))),
  };
}
