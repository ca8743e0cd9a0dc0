// The tables of the page: cells by method and sparsity, and every run with its settings.

const PAGE = 50;

/** Fill a table whose headings sort it. columns: [{name, title, value, show, text}]. */
function fillTable(table, { columns, rows, order, change, rowOf, label, foot = [] }) {
  const column = columns.find((each) => each.name === order.by);
  const sorted = column ? [...rows].sort((a, b) => compared(column.value(a), column.value(b), order.sign)) : rows;
  const heads = columns.map((each) => element("th", {
    scope: "col", class: each.text ? "name" : null,
    "aria-sort": each === column ? (order.sign > 0 ? "ascending" : "descending") : "none",
  }, element("button", {
    type: "button", "data-sort": each.name,
    onclick: () => change({ by: each.name, sign: each === column ? -order.sign : each.text ? 1 : -1 }),
  }, each.title)));
  const focused = table.contains(document.activeElement) ? document.activeElement.dataset.sort : null;
  table.replaceChildren(
    element("caption", { class: "hidden" }, label),
    element("thead", {}, element("tr", {}, ...heads)),
    element("tbody", {}, ...rowOf(sorted)),
    element("tfoot", {}, ...foot),
  );
  if (focused) table.querySelector(`[data-sort="${focused}"]`)?.focus();
}

/** What is not known comes last, whichever way; figures by size, text as people sort it. */
function compared(a, b, sign) {
  if (a === b) return 0;
  if (a === null || a === undefined) return 1;
  if (b === null || b === undefined) return -1;
  return sign * (typeof a === "string" ? a.localeCompare(b, "en", { numeric: true }) : a - b);
}

const methodCell = (cell) => element("td", { class: "name", title: cell.label }, key(cell.method), cell.label);

const accuracyParts = (cell) => [
  cell.best ? element("span", { title: "best at this sparsity", role: "img", "aria-label": "best: " }, "★ ") : null,
  fixed(cell.mean),
  element("span", { class: "dim" }, (cell.deviation === null ? "" : ` ± ${fixed(cell.deviation)}`) + (cell.verified ? "" : " †")),
];

/** A row for each method, a column for each sparsity; of one column only, all there is to say. */
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
  document.getElementById("headline-note").textContent = headlineNotes(view).join(" ");
}

function headlineNotes(view) {
  const notes = [`Test accuracy of the finished network after the last epoch, in percent: ${overSeeds(view.cells) || "no run is in view"}.`];
  if (view.cells.some((cell) => cell.best)) notes.push("★ is the highest mean at its sparsity; a lead smaller than the deviations may be chance.");
  if (view.cells.some((cell) => known(cell.paper))) notes.push("“Paper” is what the ProbMask paper reports for the same network, data and sparsity.");
  if (view.cells.some((cell) => !cell.verified)) notes.push("† did not end at the sparsity that was asked for, and is not compared.");
  return notes;
}

function drawCrossed(view, levels, methods) {
  const cells = new Map(view.cells.map((cell) => [`${cell.method} ${levelOf(cell)}`, cell]));
  const at = (method, level) => cells.get(`${method} ${levelOf(level)}`);
  const columns = [
    { name: "method", title: "method", text: true, value: (method) => DATA.methods[method] },
    ...levels.map((level) => ({
      name: levelOf(level), title: sparsityText(level),
      value: (method) => at(method, level)?.mean ?? null,
    })),
  ];
  const entry = (cell) => (cell
    ? element("td", { class: cell.best ? "best" : null }, ...accuracyParts(cell), known(cell.paper) ? element("span", { class: "dim paper" }, `paper ${fixed(cell.paper)}`) : null)
    : element("td", { class: "dim" }, "–"));
  const rowOf = (rows) => rows.map((method) => element("tr", {},
    methodCell({ method, label: DATA.methods[method] }), ...levels.map((level) => entry(at(method, level)))));
  const foot = view.cells.filter((cell) => cell.sparsity === 0).map((cell) => element("tr", {},
    methodCell(cell), element("td", { colspan: levels.length }, ...accuracyParts(cell), element("span", { class: "dim" }, ", nothing removed"))));
  fillTable(document.getElementById("headline"), {
    columns, rows: methods, order: state.crossed, rowOf, foot, label: "Test accuracy by method and sparsity",
    change: (order) => { state.crossed = order; drawHeadline(currentView()); },
  });
}

/** One row for each method at each sparsity. */
function drawCells(view, id) {
  const dense = view.cells.find((cell) => cell.sparsity === 0);
  const paper = view.cells.some((cell) => known(cell.paper)), twin = dense && view.cells.length > 1;
  const columns = [
    { name: "method", title: "method", text: true, value: (cell) => cell.label },
    { name: "sparsity", title: "sparsity", value: (cell) => cell.sparsity },
    { name: "accuracy", title: "test accuracy, %", value: (cell) => cell.mean },
    { name: "seeds", title: "seeds", value: (cell) => cell.n },
    ...(paper ? [{ name: "paper", title: "paper, %", value: (cell) => cell.paper }] : []),
    ...(twin ? [{ name: "dense", title: "against dense", value: (cell) => (cell === dense ? null : cell.mean - dense.mean) }] : []),
    { name: "kept", title: "weights kept", value: (cell) => cell.kept },
    { name: "macs", title: "MACs", value: (cell) => cell.macs },
    { name: "bytes", title: "file", value: (cell) => cell.bytes },
    { name: "seconds", title: "trained in", value: (cell) => cell.seconds },
  ];
  const rowOf = (cells) => cells.slice(0, state.cellsShown).map((cell) => element("tr", {},
    methodCell(cell),
    element("td", {}, sparsityText(cell), cell.verified ? null : element("span", { class: "dim" }, ` (reached ${percent(cell.reached)})`)),
    element("td", { class: cell.best ? "best" : null }, ...accuracyParts(cell)),
    element("td", {}, whole(cell.n)),
    paper ? element("td", {}, fixed(cell.paper)) : null,
    twin ? element("td", {}, cell === dense ? "–" : (cell.mean > dense.mean ? "+" : "") + fixed(cell.mean - dense.mean)) : null,
    element("td", {}, whole(cell.kept)),
    element("td", {}, counted(cell.macs)),
    element("td", {}, bytes(cell.bytes)),
    element("td", {}, lasting(cell.seconds)),
  ));
  fillTable(document.getElementById(id), {
    columns, rows: view.cells, order: state.cells, rowOf, label: "Every method at every sparsity",
    change: (order) => { state.cells = order; drawHeadline(currentView()); },
  });
  const more = document.getElementById("more-cells"), left = view.cells.length - state.cellsShown;
  more.hidden = left <= 0;
  more.textContent = `Show ${whole(left)} more`;
}

function drawTiles(view) {
  const sparse = view.cells.filter((cell) => cell.sparsity > 0 && cell.verified);
  const dense = view.cells.find((cell) => cell.sparsity === 0);
  const tile = (what, figureText, small, who) => element("div", { class: "tile" },
    element("div", { class: "what" }, what),
    element("div", { class: "figure" }, figureText, small ? element("small", {}, ` ${small}`) : null),
    element("div", { class: "who" }, who));
  const levels = [...new Set(sparse.map((cell) => cell.sparsity))].sort((a, b) => a - b);
  const bestAt = (level) => sparse.filter((cell) => cell.sparsity === level).reduce((a, b) => (b.mean > a.mean ? b : a));
  const spreadText = (cell) => (cell.deviation === null ? "" : `± ${fixed(cell.deviation)}`);
  const tiles = [];
  if (levels.length === 1) {
    const best = bestAt(levels[0]);
    const against = dense ? `${best.label}; dense has ${fixed(dense.mean)} %` : best.label;
    tiles.push(
      tile(`test accuracy at ${sparsityText(best)}`, `${fixed(best.mean)} %`, spreadText(best), against),
      tile("weights kept", whole(best.kept), "", `of ${whole(best.size)}`),
      tile("work per image", counted(best.macs), "MACs", known(best.dense_macs) ? `${times(best.dense_macs / best.macs)} fewer than dense` : ""),
      tile("file", bytes(best.bytes), "", dense && known(dense.bytes) ? `${times(dense.bytes / best.bytes)} smaller than dense` : "the whole artifact"),
    );
  } else {
    if (dense) tiles.push(tile("dense", `${fixed(dense.mean)} %`, spreadText(dense), `${whole(dense.size)} weights`));
    const most = 5 - tiles.length;
    const shown = levels.length <= most ? levels : Array.from({ length: most }, (_, i) => levels[Math.round((i * (levels.length - 1)) / (most - 1))]);
    for (const level of shown) {
      const best = bestAt(level), rivals = sparse.filter((cell) => cell.sparsity === level).length;
      tiles.push(tile(rivals > 1 ? `best at ${sparsityText(best)}` : `at ${sparsityText(best)}`, `${fixed(best.mean)} %`, spreadText(best), rivals > 1 ? `${best.label}, of ${rivals} methods` : best.label));
    }
  }
  document.getElementById("tiles").replaceChildren(...tiles);
}

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
  ].filter((column) => column.name !== "validation" || view.runs.some((run) => known(run.validation)));
  const cells = {
    method: (run) => element("td", { class: "name", title: run.cell.label }, key(run.cell.method), run.cell.label),
    sparsity: (run) => element("td", {}, sparsityText(run.cell)),
    seed: (run) => element("td", {}, String(run.seed)),
    accuracy: (run) => element("td", {}, fixed(run.accuracy)),
    validation: (run) => element("td", {}, fixed(run.validation)),
    kept: (run) => element("td", {}, whole(run.kept)),
    macs: (run) => element("td", {}, counted(run.macs)),
    bytes: (run) => element("td", {}, bytes(run.bytes)),
    seconds: (run) => element("td", {}, lasting(run.seconds)),
  };
  const rowOf = (runs) => runs.slice(0, state.page).flatMap((run) => {
    const open = state.open.has(run.index);
    const button = element("button", {
      type: "button", class: "open", "aria-expanded": String(open), title: run.name,
      onclick: () => { state.open[open ? "delete" : "add"](run.index); drawRuns(currentView()); document.querySelector(`#runs [data-run="${run.index}"]`)?.focus(); },
      "data-run": run.index,
    }, run.name);
    const row = element("tr", {}, element("td", { class: "name" }, button), ...columns.slice(1).map((column) => cells[column.name](run)));
    return open ? [row, element("tr", { class: "settings" }, element("td", { colspan: columns.length }, settingsOf(run)))] : [row];
  });
  fillTable(document.getElementById("runs"), {
    columns, rows: view.runs, order: state.runs, rowOf, label: "All runs",
    change: (order) => { state.runs = order; drawRuns(currentView()); },
  });
  const more = document.getElementById("more"), left = view.runs.length - state.page;
  more.hidden = left <= 0;
  more.textContent = `Show ${whole(Math.min(left, 4 * PAGE))} more`;
  document.getElementById("runs-note").textContent = left > 0 ? `${whole(state.page)} of ${whole(view.runs.length)} runs are listed.` : "A run's name opens its whole configuration.";
}

/** The settings of a run: those that are its own first, then those that most runs share. */
function settingsOf(run) {
  const { own, shared } = configurationOf(run);
  const list = (pairs) => element("dl", {}, ...pairs.map(([key, value]) => element("div", {},
    element("dt", {}, key), element("dd", {}, value))));
  const box = element("div", { class: "settings-box" });
  if (own.length) box.append(element("h4", {}, "Its own"), list(own));
  if (shared.length) box.append(element("h4", {}, own.length ? "As in most runs" : "Configuration"), list(shared));
  return box;
}

/** Keys and values of a run's settings: what it has for itself, and what it has as most do. */
function configurationOf(run) {
  const { keys, values, base, variants } = DATA.config, variant = variants[run.config], own = new Map();
  for (let i = 0; i < variant.length; i += 2) own.set(variant[i], variant[i + 1]);
  const named = (pairs) => pairs.filter(([, value]) => value >= 0).map(([key, value]) => [keys[key], values[value]]);
  return { own: named([...own]), shared: named([...base.entries()].filter(([key]) => !own.has(key))) };
}
