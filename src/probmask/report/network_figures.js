// Figures of the finished networks: weights kept in each layer, file size and speed.

const layerName = (name) => name.replace(/\.weight$/, "");

/** A row per layer, from the input down; a line per method. */
function drawLayers(view) {
  const title = "Weights kept in each layer";
  const cells = focusCells(view).filter((cell) => cell.layers.length);
  if (!cells.length)
    return figure("layers", {
      title,
      caption: "",
      draw: nothing("No run in view has figures per layer."),
    });
  const { layers, sizes } = view.setting;
  const share = (cell, i) => cell.layers[i] / sizes[i];
  const shares = cells
    .flatMap((cell) => layers.map((_, i) => share(cell, i)))
    .filter((value) => value > 0);
  const low = Math.min(...shares, 1 - cells[0].sparsity || 1) / 1.4;
  const lines = linesOf(cells, (cell) => ({ x: 0, cell }));
  figure("layers", {
    title,
    caption: sentences(
      `Layers from the input (top) to the output, at ${focusText(view)};`,
      overAllSeeds(cells),
      "The dashed line is the whole network. A hollow mark at the left edge means that no weight is kept.",
      grayNote(lines),
    ),
    draw: (body) =>
      drawLayerRows(body, {
        title,
        lines,
        layers,
        sizes,
        share,
        low,
        overall: 1 - cells[0].sparsity,
      }),
  });
}

function drawLayerRows(body, { title, lines, layers, sizes, share, low, overall }) {
  const width = Math.max(240, body.clientWidth);
  const step = Math.max(14, Math.min(64, 300 / layers.length));
  const names = Math.min(
    width * 0.34,
    12 + Math.max(...layers.map((name) => textWidth(layerName(name)))),
  );
  const bottom = layers.length * step + 8,
    height = bottom + 38;
  const atX = logarithmic([low, 1], [names + 6, width - 22]),
    atY = (i) => 6 + (i + 0.5) * step;
  const svg = canvas(body, width, height, title);
  layers.forEach((name, i) => {
    svg.append(
      shape("line", { class: "gridline", x1: names, x2: width - 10, y1: atY(i), y2: atY(i) }),
      shape(
        "text",
        { x: names - 6, y: atY(i) + 4, "text-anchor": "end" },
        fitted(layerName(name), names - 8, { end: true }),
      ),
    );
  });
  let taken = Infinity;
  for (const value of logTicks(low, 1).reverse()) {
    const at = atX(value),
      text = percent(value),
      half = textWidth(text) / 2;
    svg.append(shape("line", { class: "axis", x1: at, x2: at, y1: bottom, y2: bottom + 4 }));
    if (at + half > taken - 6) continue;
    taken = at - half;
    svg.append(shape("text", { x: at, y: bottom + 17, "text-anchor": "middle" }, text));
  }
  svg.append(
    shape("line", { class: "axis", x1: names, x2: width - 10, y1: bottom, y2: bottom }),
    shape(
      "text",
      { class: "axis-title", x: (names + width) / 2, y: height - 4, "text-anchor": "middle" },
      "weights kept, % of the layer",
    ),
  );
  if (overall < 1 && overall > low)
    svg.append(
      shape("line", { class: "reference", x1: atX(overall), x2: atX(overall), y1: 2, y2: bottom }),
    );
  const spots = [];
  for (const line of [
    ...lines.filter((each) => each.context),
    ...lines.filter((each) => !each.context),
  ]) {
    const { cell } = line.points[0];
    const points = layers.map((name, i) => ({
      x: Math.max(low, share(cell, i)),
      y: i,
      hollow: cell.layers[i] === 0,
      tip: [
        cell.label,
        layerName(name),
        `${fixed(100 * share(cell, i))} % kept: ${whole(cell.layers[i])} of ${whole(sizes[i])}`,
      ],
    }));
    svg.append(
      drawSeries(
        { ...line, points, style: styleOf(line.method, line.context) },
        { atX, atY, spots },
      ),
    );
  }
  spots.sort((a, b) => a.cy - b.cy);
  hoverable(svg, spots);
}

// Size and speed.

// The largest number of bars; the tables list all.
const BARS = 16;

/** The dense network in view that the cells of the focused sparsity are compared with. */
function barRows(view, value, text, tip) {
  const cells = focusCells(view, true).filter((cell) => known(value(cell)));
  return cells
    .sort((a, b) => (a.sparsity > 0) - (b.sparsity > 0) || a.method - b.method)
    .slice(0, BARS)
    .map((cell) => ({
      name: cell.label,
      method: cell.sparsity > 0 ? cell.method : null,
      value: value(cell),
      text: text(cell),
      tip: tip(cell),
    }));
}

const barNote = (rows) =>
  rows.length === BARS ? `The first ${BARS}; the tables list all.` : "";

/** "4.0× smaller", or "1.2× larger" for a ratio below 1. */
const ratioText = (ratio, less, more) =>
  ratio >= 1 ? `${times(ratio)} ${less}` : `${times(1 / ratio)} ${more}`;

const imagesText = (batch) =>
  !known(batch) ? "" : batch === 1 ? " for one image" : ` for ${whole(batch)} images`;

/** Text that compares a cell with the dense network in view. */
function againstDense(view, name, less, more) {
  const twin = view.cells.find((cell) => cell.sparsity === 0 && known(cell[name]));
  return (cell) =>
    twin && cell !== twin ? ` · ${ratioText(twin[name] / cell[name], less, more)}` : "";
}

function drawSize(view) {
  const title = "File";
  const against = againstDense(view, "bytes", "smaller", "larger");
  const rows = barRows(
    view,
    (cell) => cell.bytes,
    (cell) => bytes(cell.bytes) + against(cell),
    (cell) => [
      cell.label,
      `${whole(cell.bytes)} bytes`,
      `${whole(cell.kept)} of ${whole(cell.size)} weights kept`,
    ],
  );
  if (!rows.length)
    return figure("size", {
      title,
      caption: "",
      draw: nothing("No run in view has a file size."),
    });
  figure("size", {
    title: `File size at ${focusText(view)}`,
    caption: sentences(
      "The whole artifact: kept weights, their positions,",
      "and all dense tensors, such as those of BatchNorm.",
      barNote(rows),
    ),
    draw: (body) => drawBars(body, { title: "File size", rows }),
  });
}

function drawSpeed(view) {
  const against = againstDense(view, "latency", "faster", "slower");
  const rows = barRows(
    view,
    (cell) => cell.latency,
    (cell) => milliseconds(cell.latency) + against(cell),
    (cell) => [
      cell.label,
      `${fixed(cell.latency, 3)} ms${imagesText(cell.batch)}`,
      `${counted(cell.macs)} MACs per image`,
    ],
  );
  if (rows.length) {
    return figure("speed", {
      title: `Time of one forward pass at ${focusText(view)}`,
      caption: sentences(
        "Measured by “probmask bench” on the machine named in the record; means over seeds.",
        "Compare only times of the same machine.",
        barNote(rows),
      ),
      draw: (body) => drawBars(body, { title: "Latency", rows }),
    });
  }
  const fewer = (cell) =>
    known(cell.dense_macs) && cell.sparsity > 0
      ? ` · ${times(cell.dense_macs / cell.macs)} fewer`
      : "";
  const macs = barRows(
    view,
    (cell) => cell.macs,
    (cell) => counted(cell.macs) + fewer(cell),
    (cell) => [
      cell.label,
      `${whole(cell.macs)} MACs per image`,
      `dense: ${whole(cell.dense_macs)}`,
    ],
  );
  if (!macs.length)
    return figure("speed", {
      title: "Speed",
      caption: "",
      draw: nothing("No run in view was timed."),
    });
  figure("speed", {
    title: `Multiply-accumulates per image at ${focusText(view)}`,
    caption: sentences(
      "These runs have no timings, so the plot shows multiply-accumulates:",
      "the amount of computation, not its duration.",
      "Run “probmask bench RUN” to measure and show the time.",
      barNote(macs),
    ),
    draw: (body) => drawBars(body, { title: "Multiply-accumulates", rows: macs }),
  });
}
