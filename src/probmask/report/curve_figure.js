// Metrics by epoch.

const CURVES = {
  loss: "training loss",
  train_accuracy: "training accuracy, %",
  learning_rate: "learning rate",
  temperature: "temperature",
  kept_fraction: "fraction of weights kept",
  expected_sparsity: "expected sparsity",
};

function drawCurves(view) {
  const title = "Training";
  const cells = focusCells(view, true).filter((cell) => cell.curves);
  const kinds = DATA.curves.filter((name) => cells.some((cell) => cell.curves.values[name]));
  if (!kinds.length)
    return figure("curves", { title, caption: "", draw: nothing("No run in view has a history.") });
  const kind = kinds.includes(state.curve)
    ? state.curve
    : kinds.includes("train_accuracy")
      ? "train_accuracy"
      : kinds[0];
  const series = linesOf(
    cells.filter((cell) => cell.curves.values[kind]),
    (cell) => ({ x: 0, cell }),
  )
    .map((line) => {
      const { cell } = line.points[0],
        { epochs, values } = cell.curves;
      const points = values[kind]
        .map((value, i) => ({
          x: epochs[i],
          y: value,
          tip: [
            cell.label,
            `${CURVES[kind] || kind}: ${Number(value?.toPrecision(4))}`,
            `epoch ${epochs[i]}`,
          ],
        }))
        .filter((point) => known(point.y));
      return { ...line, points, marks: points.length === 1 };
    })
    .filter((line) => line.points.length);
  const all = series.flatMap((each) => each.points),
    epochs = all.map((point) => point.x);
  const [low, high] = span(
    all.map((point) => point.y),
    0.05,
    1e-6,
  );
  const [first, last] = [Math.min(...epochs), Math.max(...epochs)];
  const marks = ticks(low, high, 5),
    digits = Math.max(0, Math.min(5, -Math.floor(Math.log10(marks[1] - marks[0] || 1))));
  const withDense = cells.some((cell) => cell.sparsity === 0);
  figure("curves", {
    title,
    tools: [
      choice(
        "Curve",
        kinds.map((name) => [name, CURVES[name] || name]),
        kind,
        (name) => {
          state.curve = name;
          drawCurves(currentView());
        },
      ),
    ],
    caption: sentences(
      `At ${focusText(view)}${withDense ? ", and the dense network" : ""};`,
      overAllSeeds(cells),
      "Measured on augmented training images during the epoch.",
      greyNote(series),
    ),
    draw: (body) =>
      drawLines(body, {
        title: `Training: ${CURVES[kind] || kind}`,
        series,
        x: {
          domain: [first, last > first ? last : first + 1],
          ticks: ticks(first, last, 6).filter(Number.isInteger),
          format: whole,
          title: "epoch",
        },
        y: {
          domain: [low, high],
          ticks: marks,
          format: (value) => fixed(value, digits),
          title: CURVES[kind] || kind,
        },
      }),
  });
}
