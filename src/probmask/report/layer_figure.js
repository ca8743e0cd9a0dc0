// The fraction of each layer that each method keeps.

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
      greyNote(lines),
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
