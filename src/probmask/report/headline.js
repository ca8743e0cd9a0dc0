// The results: tiles of the best method, and tables of methods by sparsity.

function drawTiles(view) {
  const sparse = view.cells.filter((cell) => cell.sparsity > 0 && cell.verified);
  const dense = view.cells.find((cell) => cell.sparsity === 0);
  const tile = (what, figureText, small, who) =>
    element(
      "div",
      { class: "tile" },
      element("div", { class: "what" }, what),
      element(
        "div",
        { class: "figure" },
        figureText,
        small ? element("small", {}, ` ${small}`) : null,
      ),
      element("div", { class: "who" }, who),
    );
  const levels = [...new Set(sparse.map((cell) => cell.sparsity))].sort((a, b) => a - b);
  const bestAt = (level) =>
    sparse.filter((cell) => cell.sparsity === level).reduce((a, b) => (b.mean > a.mean ? b : a));
  const spreadText = (cell) => (cell.deviation === null ? "" : `± ${fixed(cell.deviation)}`);
  const tiles = [];
  if (levels.length === 1) {
    const best = bestAt(levels[0]);
    const against = dense ? `${best.label}; dense reaches ${fixed(dense.mean)} %` : best.label;
    tiles.push(
      tile(
        `test accuracy at ${sparsityText(best)}`,
        `${fixed(best.mean)} %`,
        spreadText(best),
        against,
      ),
      tile("weights kept", whole(best.kept), "", `of ${whole(best.size)}`),
      tile(
        "MACs per image",
        counted(best.macs),
        "MACs",
        known(best.dense_macs) ? `${times(best.dense_macs / best.macs)} fewer than dense` : "",
      ),
      tile(
        "file",
        bytes(best.bytes),
        "",
        dense && known(dense.bytes)
          ? `${times(dense.bytes / best.bytes)} smaller than dense`
          : "the whole artifact",
      ),
    );
  } else {
    if (dense)
      tiles.push(
        tile("dense", `${fixed(dense.mean)} %`, spreadText(dense), `${whole(dense.size)} weights`),
      );
    const most = 5 - tiles.length;
    const shown =
      levels.length <= most
        ? levels
        : Array.from(
            { length: most },
            (_, i) => levels[Math.round((i * (levels.length - 1)) / (most - 1))],
          );
    for (const level of shown) {
      const best = bestAt(level),
        methods = sparse.filter((cell) => cell.sparsity === level).length;
      tiles.push(
        tile(
          methods > 1 ? `best at ${sparsityText(best)}` : `at ${sparsityText(best)}`,
          `${fixed(best.mean)} %`,
          spreadText(best),
          methods > 1 ? `${best.label}, of ${methods} methods` : best.label,
        ),
      );
    }
  }
  document.getElementById("tiles").replaceChildren(...tiles);
}

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
