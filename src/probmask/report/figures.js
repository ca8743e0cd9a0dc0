// Cards, captions and lines of all figures; the tiles and figures of accuracy.

// The largest number of lines that colors can distinguish; further lines are gray.
const COLORED = 7;

/** Create a card with a title, tools, plots and a caption; `draw` fills its body. */
function figure(id, { title, caption, tools = [], draw, two = false }) {
  const card = document.getElementById(id);
  const body = element("div", { class: two ? "plot-body two" : "plot-body" });
  const saves = element("div", { class: "plot-tools" }, ...tools);
  card.replaceChildren(
    element("div", { class: "plot-head" }, element("h3", {}, unbroken(title)), saves),
    body,
    element("figcaption", { class: "caption" }, unbroken(caption)),
  );
  draw(body);
  if (!body.querySelector("svg")) return;
  const save = (kind, each) =>
    element(
      "button",
      {
        type: "button",
        "aria-label": `Save “${title}” as ${kind}`,
        onclick: () =>
          body
            .querySelectorAll("svg")
            .forEach((svg, i) => each(svg, `probmask-${id}${i ? `-${i + 1}` : ""}`)),
      },
      kind,
    );
  saves.append(save("SVG", saveSvg), save("PNG", savePng));
}

const nothing = (text) => (body) => body.append(element("p", { class: "empty" }, text));

function choice(label, options, chosen, change) {
  return element(
    "select",
    { "aria-label": label, onchange: (event) => change(event.target.value) },
    ...options.map(([value, text]) =>
      element("option", { value, selected: value === chosen }, text),
    ),
  );
}

const accuracyText = (cell) =>
  `${fixed(cell.mean)}${cell.deviation === null ? "" : ` ± ${fixed(cell.deviation)}`} %`;
const seedsText = (n) => (n === 1 ? "1 seed" : `${n} seeds`);

/** The number of runs per mark: "mean ± standard deviation over 2 seeds". */
function overSeeds(cells) {
  const counts = [...new Set(cells.map((cell) => cell.n))].sort((a, b) => a - b);
  if (!counts.length) return "";
  if (counts.at(-1) === 1) return cells.length === 1 ? "one seed" : "one seed each";
  const range = counts.length === 1 ? `${counts[0]}` : `${counts[0]} to ${counts.at(-1)}`;
  return `mean ± standard deviation over ${range} seeds`;
}

/** The number of runs per curve or layer; these always include all seeds. */
const overAllSeeds = (cells) =>
  cells.some((cell) => cell.total > 1) ? "means over all seeds." : "one seed.";

const sparsityText = (cell) => percent(cell.sparsity) + (cell.cost === "flops" ? " of MACs" : "");

function accuracyTip(cell) {
  const lines = [
    cell.label,
    `${accuracyText(cell)} at ${sparsityText(cell)}`,
    `${seedsText(cell.n)} · ${whole(cell.kept)} weights · ${counted(cell.macs)} MACs`,
  ];
  if (!cell.verified) lines.push(`reached ${percent(cell.reached)}`);
  return lines;
}

/** The sparse cells as one line per method, and the number of lines in gray. */
function linesOf(cells, point) {
  const methods = new Map();
  for (const cell of cells) {
    if (!methods.has(cell.method)) methods.set(cell.method, []);
    methods.get(cell.method).push(cell);
  }
  const order = [...methods.keys()].sort((a, b) => a - b),
    dense = DATA.methods.indexOf("dense");
  const colored = new Set([...order.slice(0, Math.max(COLORED, state.methods.size)), dense]);
  return order.map((method) => ({
    method,
    name: DATA.methods[method],
    context: !colored.has(method),
    points: methods
      .get(method)
      .map(point)
      .sort((a, b) => a.x - b.x),
  }));
}

function grayNote(series) {
  const gray = series.filter((each) => each.context).length;
  return gray
    ? `The first ${series.length - gray} methods are in color; choose methods above to color others.`
    : "";
}

const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);

const sentences = (...parts) => parts.filter(Boolean).join(" ");

// The tiles of the best method.

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
    for (const level of levels) {
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

// Accuracy against sparsity, and against multiply-accumulates.

function accuracyAxis(points, references, height = 300) {
  const values = points
    .flatMap((point) => [point.y, point.low ?? point.y, point.high ?? point.y])
    .concat(references.map((each) => each.y));
  let [low, high] = span(values, 0.08, 2);
  high = Math.min(high, Math.max(100, ...values) + 0.5);
  const marks = ticks(low, high, height / 55);
  const digits = marks.length > 1 && marks[1] - marks[0] < 1 ? 1 : 0;
  return {
    domain: [low, high],
    ticks: marks,
    format: (value) => fixed(value, digits),
    title: "test accuracy, %",
  };
}

/** The dense network as a line, or as text if it would compress the scale too much. */
function denseReference(view, points) {
  const dense = view.cells.find((cell) => cell.sparsity === 0);
  if (!dense) return { references: [], note: "" };
  const [low, high] = span(
    points.map((point) => point.y),
    0,
    2,
  );
  const far = Math.max(dense.mean - high, low - dense.mean) > 1.5 * (high - low);
  return far
    ? { references: [], note: `Dense reaches ${fixed(dense.mean)} %, outside the plot.` }
    : { references: [{ name: `dense ${fixed(dense.mean)}`, y: dense.mean }], note: "" };
}

/** A cell as a point: its mean, with the standard deviation as error bar. */
const accuracyPoint = (cell, x) => ({
  x,
  y: cell.mean,
  hollow: !cell.verified,
  low: cell.deviation === null ? null : cell.mean - cell.deviation,
  high: cell.deviation === null ? null : cell.mean + cell.deviation,
  tip: accuracyTip(cell),
});

const pointsOf = (series) => series.flatMap((each) => each.points);

function drawBySparsity(view) {
  const cells = view.cells.filter((cell) => cell.sparsity > 0);
  const title = "Accuracy against sparsity";
  if (!cells.length)
    return figure("by-sparsity", {
      title,
      caption: "",
      draw: nothing("No sparse run is in view."),
    });
  const series = linesOf(cells, (cell) => ({
    ...accuracyPoint(cell, 1 - cell.sparsity),
    seeds: cell.n > 1 && cell.n <= 10 ? cell.accuracies : [],
  }));
  for (const each of series) each.points.reverse();
  const densities = [...new Set(cells.map((cell) => 1 - cell.sparsity))].sort((a, b) => b - a);
  const alone = densities.length === 1;
  const pad = alone ? 2 : Math.max(1.06, (densities[0] / densities.at(-1)) ** 0.05);
  const { references, note } = denseReference(view, pointsOf(series));
  const colored = series.filter((each) => !each.context).length;
  figure("by-sparsity", {
    title,
    caption: sentences(
      `${capital(overSeeds(cells))}, at the last epoch.`,
      cells.some((cell) => cell.n > 1) && "Pale dots are the seeds.",
      !alone && "The sparsity axis is logarithmic in the fraction kept.",
      alone &&
        colored > 1 &&
        "All have the same sparsity; they are spread horizontally for legibility.",
      note,
      grayNote(series),
    ),
    draw: (body) =>
      drawLines(body, {
        title,
        series,
        references,
        dodge: alone
          ? Math.min(60, (0.55 * body.clientWidth) / Math.max(1, colored))
          : Math.min(5, 22 / colored),
        x: {
          scale: "log",
          domain: [densities[0] * pad, densities.at(-1) / pad],
          ticks: densities,
          format: (density) => percent(1 - density),
          title: "sparsity",
        },
        y: accuracyAxis(pointsOf(series), references),
      }),
  });
}

function drawByMacs(view) {
  const cells = view.cells.filter((cell) => known(cell.macs) && cell.macs > 0);
  const title = "Accuracy against multiply-accumulates";
  if (!cells.length)
    return figure("by-macs", {
      title,
      caption: "",
      draw: nothing("No record in view counts MACs."),
    });
  const sparse = cells.filter((cell) => cell.sparsity > 0),
    shown = sparse.length ? sparse : cells;
  const series = linesOf(shown, (cell) => accuracyPoint(cell, cell.macs));
  const macs = shown.map((cell) => cell.macs);
  const low = Math.min(...macs),
    high = Math.max(...macs),
    pad = Math.max(1.12, (high / low) ** 0.06);
  const { references, note } = sparse.length
    ? denseReference(view, pointsOf(series))
    : { references: [], note: "" };
  const dense = shown.find((cell) => known(cell.dense_macs))?.dense_macs;
  let marks = logTicks(low / pad, high * pad);
  if (marks.length < 2) marks = ticks(low / pad, high * pad, 4);
  figure("by-macs", {
    title,
    caption: sentences(
      "Per image, on a logarithmic axis.",
      known(dense) && `Dense needs ${counted(dense)}.`,
      "One multiply-accumulate counts as one (STR's convention, without pooling).",
      `${capital(overSeeds(shown))}.`,
      note,
      grayNote(series),
    ),
    draw: (body) =>
      drawLines(body, {
        title,
        series,
        references,
        x: {
          scale: "log",
          domain: [low / pad, high * pad],
          ticks: marks,
          format: roundCount,
          title: "MACs per image",
        },
        y: accuracyAxis(pointsOf(series), references),
      }),
  });
}
