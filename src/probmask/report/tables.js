// Tables that can be sorted by their headings: results by method and sparsity, and runs.

/**
 * Fill a table with sortable columns: [{name, title, value, show, text}]. `order` is the key of the
 * state that holds the sort order; `redraw` draws the table again.
 */
function fillTable(id, { columns, rows, order: kept, redraw, rowOf, label, foot = [] }) {
  const table = document.getElementById(id),
    order = state[kept];
  const change = (by) => {
    state[kept] = by;
    redraw(currentView());
  };
  const column = columns.find((each) => each.name === order.by);
  const sorted = column
    ? [...rows].sort((a, b) => compared(column.value(a), column.value(b), order.sign))
    : rows;
  const heads = columns.map((each) =>
    element(
      "th",
      {
        scope: "col",
        class: each.text ? "name" : null,
        "aria-sort": each === column ? (order.sign > 0 ? "ascending" : "descending") : "none",
      },
      element(
        "button",
        {
          type: "button",
          "data-sort": each.name,
          onclick: () =>
            change({ by: each.name, sign: each === column ? -order.sign : each.text ? 1 : -1 }),
        },
        each.title,
      ),
    ),
  );
  const focused = table.contains(document.activeElement)
    ? document.activeElement.dataset.sort
    : null;
  table.replaceChildren(
    element("caption", { class: "hidden" }, label),
    element("thead", {}, element("tr", {}, ...heads)),
    element("tbody", {}, ...rowOf(sorted)),
    element("tfoot", {}, ...foot),
  );
  if (focused) table.querySelector(`[data-sort="${focused}"]`)?.focus();
}

/** Compare values: unknown ones last in either direction, numbers by size, text by locale. */
function compared(a, b, sign) {
  if (a === b) return 0;
  if (a === null || a === undefined) return 1;
  if (b === null || b === undefined) return -1;
  return sign * (typeof a === "string" ? a.localeCompare(b, "en", { numeric: true }) : a - b);
}

/** Columns of cells and runs: weights, MACs, file size, time. */
const costColumns = (rows, weights) =>
  [
    { name: "kept", title: weights, show: (row) => whole(row.kept) },
    { name: "macs", title: "MACs", show: (row) => counted(row.macs) },
    { name: "bytes", title: "file", show: (row) => bytes(row.bytes) },
    { name: "latency", title: "forward pass", show: (row) => milliseconds(row.latency) },
    { name: "seconds", title: "trained in", show: (row) => lasting(row.seconds) },
  ]
    .map((column) => ({ ...column, value: (row) => row[column.name] }))
    .filter((column) => column.name !== "latency" || rows.some((row) => known(row.latency)));

const milliseconds = (value) => (known(value) ? `${fixed(value)} ms` : "–");

/** A row of the table; a column returns a text or a whole cell. */
const rowBy = (columns, row) =>
  element(
    "tr",
    {},
    ...columns.map((column) => {
      const shown = column.show(row);
      return shown instanceof HTMLTableCellElement ? shown : element("td", {}, shown);
    }),
  );

/** Show a button that adds the next `step` rows. */
function offerMore(id, left, step = left) {
  const more = document.getElementById(id);
  more.hidden = left <= 0;
  more.textContent = `Show ${whole(Math.min(left, step))} more`;
}

const methodCell = (cell) =>
  element("td", { class: "name", title: cell.label }, key(cell.method), cell.label);

// The results: methods by sparsity.

const accuracyParts = (cell, seeds = "") => [
  cell.best
    ? element("span", { title: "best at this sparsity", role: "img", "aria-label": "best: " }, "★ ")
    : null,
  fixed(cell.mean),
  element(
    "span",
    { class: "dim spread" },
    (cell.deviation === null ? "" : ` ± ${fixed(cell.deviation)}`) +
      seeds +
      (cell.verified ? "" : " †"),
  ),
];

/** Whether cells have different numbers of seeds, so that each shows its own. */
const uneven = (view) => new Set(view.cells.map((cell) => cell.n)).size > 1;

/** A row per method and a column per sparsity; with one sparsity, a column per figure. */
function drawHeadline(view) {
  const sparse = view.cells.filter((cell) => cell.sparsity > 0);
  const levels = [...new Map(sparse.map((cell) => [levelOf(cell), cell])).values()];
  const methods = [...new Set(sparse.map((cell) => cell.method))].sort((a, b) => a - b);
  const crossed = levels.length > 1 && methods.length > 1;
  document.getElementById("cells-box").hidden = !crossed;
  if (crossed) {
    drawCrossed(view, levels, methods);
    drawCells(view, "cells");
  } else drawCells(view, "headline");
  document.getElementById("headline-note").textContent = headlineNotes(view, crossed);
}

function headlineNotes(view, crossed) {
  const { cells } = view;
  if (!cells.length) return "No runs match the filters.";
  const chance = cells.some((cell) => cell.n > 1)
    ? "a difference smaller than the deviations may be chance."
    : "with one seed each, a small difference may be chance.";
  return sentences(
    `Test accuracy of the finished network after the last epoch, in percent: ${overSeeds(cells)}${crossed && uneven(view) ? " (their number in parentheses)" : ""}.`,
    cells.some((cell) => cell.best) && `★ is the highest mean at its sparsity; ${chance}`,
    cells.some((cell) => known(cell.paper)) &&
      "“Paper” is the accuracy in the ProbMask paper for the same network, data, method and sparsity; its training may differ.",
    cells.some((cell) => !cell.verified) &&
      "† missed its target sparsity and is not ranked.",
  );
}

function drawCrossed(view, levels, methods) {
  const cells = new Map(view.cells.map((cell) => [`${cell.method} ${levelOf(cell)}`, cell]));
  const at = (method, level) => cells.get(`${method} ${levelOf(level)}`);
  const entry = (cell) =>
    cell
      ? element(
          "td",
          { class: cell.best ? "best" : null },
          ...accuracyParts(cell, uneven(view) ? ` (${cell.n})` : ""),
          known(cell.paper)
            ? element("span", { class: "dim paper" }, `paper ${fixed(cell.paper)}`)
            : null,
        )
      : element("td", { class: "dim" }, "–");
  const columns = [
    {
      name: "method",
      title: "method",
      text: true,
      value: (method) => DATA.methods[method],
      show: (method) => methodCell({ method, label: DATA.methods[method] }),
    },
    ...levels.map((level) => ({
      name: levelOf(level),
      title: sparsityText(level),
      value: (method) => at(method, level)?.mean ?? null,
      show: (method) => entry(at(method, level)),
    })),
  ];
  const rowOf = (rows) => rows.map((method) => rowBy(columns, method));
  const foot = view.cells
    .filter((cell) => cell.sparsity === 0)
    .map((cell) =>
      element(
        "tr",
        {},
        methodCell(cell),
        element(
          "td",
          { colspan: levels.length },
          ...accuracyParts(cell),
          element("span", { class: "dim" }, ", nothing pruned"),
        ),
      ),
    );
  fillTable("headline", {
    columns,
    rows: methods,
    order: "crossed",
    rowOf,
    foot,
    label: "Test accuracy by method and sparsity",
    redraw: drawHeadline,
  });
}

/** A row per method and sparsity. */
function drawCells(view, id) {
  const dense = view.cells.find((cell) => cell.sparsity === 0);
  const columns = [
    { name: "method", title: "method", text: true, value: (cell) => cell.label, show: methodCell },
    { name: "sparsity", title: "sparsity", value: (cell) => cell.sparsity, show: sparsityCell },
    { name: "accuracy", title: "test accuracy, %", value: (cell) => cell.mean, show: accuracyCell },
    { name: "seeds", title: "seeds", value: (cell) => cell.n, show: (cell) => whole(cell.n) },
    view.cells.some((cell) => known(cell.paper)) && {
      name: "paper",
      title: "paper, %",
      value: (cell) => cell.paper,
      show: (cell) => fixed(cell.paper),
    },
    dense && view.cells.length > 1 && againstColumn(dense),
    ...costColumns(view.cells, "weights kept"),
  ].filter(Boolean);
  fillTable(id, {
    columns,
    rows: view.cells,
    order: "cells",
    rowOf: (cells) => cells.slice(0, state.cellsShown).map((cell) => rowBy(columns, cell)),
    label: "Every method at every sparsity",
    redraw: drawHeadline,
  });
  offerMore("more-cells", view.cells.length - state.cellsShown);
}

const accuracyCell = (cell) =>
  element("td", { class: cell.best ? "best" : null }, ...accuracyParts(cell));

const sparsityCell = (cell) =>
  element(
    "td",
    {},
    sparsityText(cell),
    cell.verified ? null : element("span", { class: "dim" }, ` (reached ${percent(cell.reached)})`),
  );

const againstColumn = (dense) => ({
  name: "dense",
  title: "against dense",
  value: (cell) => (cell === dense ? null : cell.mean - dense.mean),
  show: (cell) =>
    cell === dense ? "–" : (cell.mean > dense.mean ? "+" : "") + fixed(cell.mean - dense.mean),
});

// The runs with their settings.

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
