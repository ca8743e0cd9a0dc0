// Figures over the training: metrics by epoch, and histograms of probabilities.

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
      "Measured on the training data during the epoch, augmented if it is images.",
      grayNote(series),
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

// Probabilities over training: one epoch as bars, all epochs as shades.

function drawHistogram(view) {
  const cells = focusCells(view).filter((cell) => cell.histograms);
  const title = "Probabilities over training";
  if (!cells.length) {
    return figure("histogram", {
      title,
      caption: "",
      draw: nothing(
        "No run in view has a histogram; methods with probabilities or scores, such as probmask, record one.",
      ),
    });
  }
  const options = cells.flatMap((cell) =>
    Object.keys(cell.histograms).map((name) => [
      `${cell.index}:${name}`,
      name === "prob" ? cell.label : `${cell.label}: ${name}`,
    ]),
  );
  const chosen = options.some(([value]) => value === state.histogram)
    ? state.histogram
    : options[0][0];
  const [index, ...rest] = chosen.split(":"),
    name = rest.join(":");
  const cell = cells.find((each) => each.index === Number(index)),
    { low, high, epochs, counts, seed } = cell.histograms[name];
  const what = name === "prob" ? "probability of being kept" : name;
  figure("histogram", {
    title,
    two: true,
    tools:
      options.length > 1
        ? [
            choice("Histogram of", options, chosen, (value) => {
              state.histogram = value;
              drawHistogram(currentView());
            }),
          ]
        : [],
    caption: sentences(
      `${cell.label} at ${sparsityText(cell)}, seed ${seed}:`,
      `all ${whole(sum(counts[0]))} weights by their ${what}. Counts and shades are logarithmic.`,
      "At the end of training, each weight is kept or pruned.",
    ),
    draw: (body) => {
      const left = element("div"),
        right = element("div");
      body.append(left, right);
      const most = Math.max(...counts.flat(), 1),
        bins = counts[0].length;
      const edge = (bin) => low + ((high - low) * bin) / bins;
      const range = (bin) =>
        `${Number(edge(bin).toPrecision(3))} to ${Number(edge(bin + 1).toPrecision(3))}`;
      const tip = (at, bin) => [
        `${whole(counts[at][bin])} weights`,
        `${what} ${range(bin)}`,
        `epoch ${epochs[at]}`,
      ];
      const shown = element("output", {}, "");
      const slider = element("input", {
        type: "range",
        min: 0,
        max: epochs.length - 1,
        value: epochs.length - 1,
        "aria-label": "Epoch of the histogram",
      });
      const frame = element("div");
      left.append(frame, element("label", { class: "slider" }, "epoch", slider, shown));
      const heat = drawHeat(right, {
        title: `${title}, all epochs`,
        epochs,
        counts,
        most,
        edge,
        tip,
        what,
        low,
        high,
      });
      const show = () => {
        const at = Number(slider.value);
        shown.textContent = String(epochs[at]);
        slider.setAttribute("aria-valuetext", `epoch ${epochs[at]}`);
        frame.replaceChildren();
        drawBins(frame, {
          title: `${title}, epoch ${epochs[at]}`,
          counts: counts[at],
          most,
          edge,
          tip: (bin) => tip(at, bin),
          what,
          low,
          high,
        });
        heat(at);
      };
      slider.addEventListener("input", show);
      show();
    },
  });
}

const logShare = (count, most) => Math.log10(1 + count) / Math.log10(1 + most);

function drawBins(body, { title, counts, most, edge, tip, what, low, high }) {
  const width = Math.max(240, body.clientWidth),
    height = 250;
  const margin = { top: 22, left: 52 },
    inner = { right: width - 12, bottom: height - 42 };
  const svg = canvas(body, width, height, title);
  const atX = linear([low, high], [margin.left, inner.right]),
    atY = (count) => inner.bottom - logShare(count, most) * (inner.bottom - margin.top);
  const powers = [];
  for (let value = 1; value <= most; value *= 10) powers.push(value);
  drawAxes(svg, {
    x: { ticks: ticks(low, high, 5), format: (value) => String(value), title: what },
    y: { ticks: powers, format: roundCount, title: "weights" },
    atX,
    atY,
    margin,
    inner,
    width,
    height,
  });
  const spots = counts.map((count, bin) => {
    const left = atX(edge(bin)) + 1,
      right = atX(edge(bin + 1)) - 1,
      top = atY(count);
    svg.append(
      shape("rect", {
        class: "bar k0",
        x: left,
        y: top,
        width: Math.max(1, right - left),
        height: Math.max(0, inner.bottom - top),
      }),
    );
    return {
      cx: (left + right) / 2,
      cy: top,
      box: {
        x: left,
        y: margin.top,
        width: Math.max(1, right - left),
        height: inner.bottom - margin.top,
      },
      tip: tip(bin),
    };
  });
  hoverable(svg, spots);
}

/** Draw epochs to the right, probability upwards, counts as shades; return the epoch marker. */
function drawHeat(body, { title, epochs, counts, most, edge, tip, what, low, high }) {
  const width = Math.max(240, body.clientWidth),
    height = 250;
  const margin = { top: 22, left: 46 },
    inner = { right: width - 12, bottom: height - 42 };
  const svg = canvas(body, width, height, title);
  const slot = (inner.right - margin.left) / epochs.length,
    atX = (at) => margin.left + at * slot;
  const atY = linear([low, high], [inner.bottom, margin.top]);
  const every = Math.max(1, Math.ceil(epochs.length / Math.max(2, Math.floor(width / 60))));
  drawAxes(svg, {
    x: {
      ticks: epochs.map((_, at) => at).filter((at) => at % every === 0),
      format: (at) => String(epochs[at]),
      title: "epoch",
    },
    y: { ticks: ticks(low, high, 5), format: (value) => String(value), title: what },
    atX: (at) => atX(at) + slot / 2,
    atY,
    margin,
    inner,
    width,
    height,
  });
  const spots = [];
  counts.forEach((bins, at) =>
    bins.forEach((count, bin) => {
      const top = atY(edge(bin + 1)),
        tall = atY(edge(bin)) - top;
      const box = { x: atX(at), y: top, width: slot, height: tall };
      if (count)
        svg.append(
          shape("rect", {
            class: "heat",
            ...box,
            "fill-opacity": (0.06 + 0.94 * logShare(count, most)).toFixed(3),
          }),
        );
      spots.push({ cx: atX(at) + slot / 2, cy: top + tall / 2, box, tip: tip(at, bin) });
    }),
  );
  const marker = shape("rect", {
    class: "halo",
    y: margin.top,
    width: slot,
    height: inner.bottom - margin.top,
  });
  svg.append(marker);
  hoverable(svg, spots);
  return (at) => marker.setAttribute("x", atX(at));
}
