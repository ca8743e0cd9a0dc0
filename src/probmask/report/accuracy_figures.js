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
  const coloured = series.filter((each) => !each.context).length;
  figure("by-sparsity", {
    title,
    caption: sentences(
      `${capital(overSeeds(cells))}, at the last epoch.`,
      cells.some((cell) => cell.n > 1) && "Pale dots are the seeds.",
      !alone && "The sparsity axis is logarithmic in the fraction kept.",
      alone &&
        coloured > 1 &&
        "All have the same sparsity; they are spread horizontally for legibility.",
      note,
      greyNote(series),
    ),
    draw: (body) =>
      drawLines(body, {
        title,
        series,
        references,
        dodge: alone
          ? Math.min(60, (0.55 * body.clientWidth) / Math.max(1, coloured))
          : Math.min(5, 22 / coloured),
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
      greyNote(series),
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
