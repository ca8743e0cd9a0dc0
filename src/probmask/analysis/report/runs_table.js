// Every run, with its settings.

function drawRuns(view) {
  const columns = [
    { name: "name", title: "run", text: true, value: (run) => run.name },
    { name: "method", title: "method", text: true, value: (run) => run.cell.label },
    { name: "sparsity", title: "sparsity", value: (run) => run.cell.sparsity },
    { name: "seed", title: "seed", value: (run) => run.seed },
    { name: "accuracy", title: "test, %", value: (run) => run.accuracy },
    { name: "validation", title: "validation, %", value: (run) => run.validation },
    { name: "kept", title: "weights", value: (run) => run.kept },
    { name: "macs", title: "MACs", value: (run) => run.macs },
    { name: "bytes", title: "file", value: (run) => run.bytes },
    { name: "seconds", title: "trained in", value: (run) => run.seconds },
  ].filter(
    (column) => column.name !== "validation" || view.runs.some((run) => known(run.validation)),
  );
  const cells = {
    method: (run) =>
      element("td", { class: "name", title: run.cell.label }, key(run.cell.method), run.cell.label),
    sparsity: (run) => element("td", {}, sparsityText(run.cell)),
    seed: (run) => element("td", {}, String(run.seed)),
    accuracy: (run) => element("td", {}, fixed(run.accuracy)),
    validation: (run) => element("td", {}, fixed(run.validation)),
    kept: (run) => element("td", {}, whole(run.kept)),
    macs: (run) => element("td", {}, counted(run.macs)),
    bytes: (run) => element("td", {}, bytes(run.bytes)),
    seconds: (run) => element("td", {}, lasting(run.seconds)),
  };
  const rowOf = (runs) =>
    runs.slice(0, state.page).flatMap((run) => {
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
      const row = element(
        "tr",
        {},
        element("td", { class: "name" }, button),
        ...columns.slice(1).map((column) => cells[column.name](run)),
      );
      return open
        ? [
            row,
            element(
              "tr",
              { class: "settings" },
              element("td", { colspan: columns.length }, settingsOf(run)),
            ),
          ]
        : [row];
    });
  fillTable(document.getElementById("runs"), {
    columns,
    rows: view.runs,
    order: state.runs,
    rowOf,
    label: "All runs",
    change: (order) => {
      state.runs = order;
      drawRuns(currentView());
    },
  });
  const more = document.getElementById("more"),
    left = view.runs.length - state.page;
  more.hidden = left <= 0;
  more.textContent = `Show ${whole(Math.min(left, 4 * PAGE))} more`;
  document.getElementById("runs-note").textContent =
    left > 0
      ? `${whole(state.page)} of ${whole(view.runs.length)} runs are listed.`
      : "A run's name opens its whole configuration.";
}

/** The settings of a run: those that are its own first, then those that most runs share. */
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
  if (own.length) box.append(element("h4", {}, "Its own"), list(own));
  if (shared.length)
    box.append(element("h4", {}, own.length ? "As in most runs" : "Configuration"), list(shared));
  return box;
}

/** Keys and values of a run's settings: what it has for itself, and what it has as most do. */
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
