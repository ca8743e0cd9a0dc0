// The figures of the page: what is drawn of the runs in view.

// More lines than this in colour cannot be told apart; the rest is shown in grey.
const COLOURED = 7;
// More bars than this are left to the tables.
const BARS = 16;

/** A card with a title, tools, plots and a caption; `draw` fills its body. */
function figure(id, { title, caption, tools = [], draw, two = false }) {
  const card = document.getElementById(id);
  const body = element("div", { class: two ? "plot-body two" : "plot-body" });
  const saves = element("div", { class: "plot-tools" }, ...tools);
  card.replaceChildren(
    element("div", { class: "plot-head" }, element("h3", {}, title), saves),
    body,
    element("figcaption", { class: "caption" }, caption),
  );
  draw(body);
  if (!body.querySelector("svg")) return;
  const save = (kind, each) => element("button", {
    type: "button", "aria-label": `Save “${title}” as ${kind}`,
    onclick: () => body.querySelectorAll("svg").forEach((svg, i) => each(svg, `probmask-${id}${i ? `-${i + 1}` : ""}`)),
  }, kind);
  saves.append(save("SVG", saveSvg), save("PNG", savePng));
}

const nothing = (text) => (body) => body.append(element("p", { class: "empty" }, text));

function choice(label, options, chosen, change) {
  return element("select", { "aria-label": label, onchange: (event) => change(event.target.value) },
    ...options.map(([value, text]) => element("option", { value, selected: value === chosen }, text)));
}

const accuracyText = (cell) => `${fixed(cell.mean)}${cell.deviation === null ? "" : ` ± ${fixed(cell.deviation)}`} %`;
const seedsText = (n) => (n === 1 ? "1 seed" : `${n} seeds`);

/** "mean ± standard deviation over 2 seeds": how many runs stand behind each mark. */
function overSeeds(cells) {
  const counts = [...new Set(cells.map((cell) => cell.n))].sort((a, b) => a - b);
  if (!counts.length) return "";
  if (counts.at(-1) === 1) return cells.length === 1 ? "one seed" : "one seed each";
  const range = counts.length === 1 ? `${counts[0]}` : `${counts[0]} to ${counts.at(-1)}`;
  return `mean ± standard deviation over ${range} seeds`;
}

const sparsityText = (cell) => percent(cell.sparsity) + (cell.cost === "flops" ? " of MACs" : "");

function accuracyTip(cell) {
  const lines = [cell.label, `${accuracyText(cell)} at ${sparsityText(cell)}`, `${seedsText(cell.n)} · ${whole(cell.kept)} weights · ${counted(cell.macs)} MACs`];
  if (!cell.verified) lines.push(`reached ${percent(cell.reached)}`);
  return lines;
}

/** The sparse cells as lines, one for each method, and which of them stay grey. */
function linesOf(cells, point) {
  const methods = new Map();
  for (const cell of cells) {
    if (!methods.has(cell.method)) methods.set(cell.method, []);
    methods.get(cell.method).push(cell);
  }
  const order = [...methods.keys()].sort((a, b) => a - b), dense = DATA.methods.indexOf("dense");
  const coloured = new Set([...order.slice(0, Math.max(COLOURED, state.methods.size)), dense]);
  return order.map((method) => ({
    method, name: DATA.methods[method], context: !coloured.has(method),
    points: methods.get(method).map(point).sort((a, b) => a.x - b.x),
  }));
}

function greyNote(series) {
  const grey = series.filter((each) => each.context).length;
  return grey ? ` The first ${series.length - grey} methods are in colour; choose methods above to colour others.` : "";
}

function accuracyAxis(points, references, height = 300) {
  const values = points.flatMap((point) => [point.y, point.low ?? point.y, point.high ?? point.y]).concat(references.map((each) => each.y));
  let [low, high] = span(values, 0.08, 2);
  high = Math.min(high, Math.max(100, ...values) + 0.5);
  const marks = ticks(low, high, height / 55);
  const digits = marks.length > 1 && marks[1] - marks[0] < 1 ? 1 : 0;
  return { domain: [low, high], ticks: marks, format: (value) => fixed(value, digits), title: "test accuracy, %" };
}

/** The dense network as a line, or in words if it is so far off that the others would be squeezed. */
function denseReference(view, points) {
  const dense = view.cells.find((cell) => cell.sparsity === 0);
  if (!dense) return { references: [], said: "" };
  const [low, high] = span(points.map((point) => point.y), 0, 2);
  const far = Math.max(dense.mean - high, low - dense.mean) > 1.5 * (high - low);
  return far
    ? { references: [], said: ` Dense has ${fixed(dense.mean)} %, outside the frame.` }
    : { references: [{ name: `dense ${fixed(dense.mean, 1)}`, y: dense.mean }], said: "" };
}

function drawBySparsity(view) {
  const cells = view.cells.filter((cell) => cell.sparsity > 0);
  const title = "Accuracy against sparsity";
  if (!cells.length) return figure("by-sparsity", { title, caption: "", draw: nothing("No sparse run is in view.") });
  const series = linesOf(cells, (cell) => ({
    x: 1 - cell.sparsity, y: cell.mean, hollow: !cell.verified,
    low: cell.deviation === null ? null : cell.mean - cell.deviation,
    high: cell.deviation === null ? null : cell.mean + cell.deviation,
    seeds: cell.n > 1 && cell.n <= 10 ? cell.accuracies : [], tip: accuracyTip(cell),
  }));
  for (const each of series) each.points.reverse();
  const densities = [...new Set(cells.map((cell) => 1 - cell.sparsity))].sort((a, b) => b - a);
  const alone = densities.length === 1;
  const pad = alone ? 2 : Math.max(1.06, (densities[0] / densities.at(-1)) ** 0.05);
  const { references, said } = denseReference(view, series.flatMap((each) => each.points));
  const coloured = series.filter((each) => !each.context).length;
  figure("by-sparsity", {
    title,
    caption: `${capital(overSeeds(cells))}, at the last epoch${cells.some((cell) => cell.n > 1) ? "; pale dots are the seeds" : ""}. The sparsity axis is logarithmic in what is kept.${said}${greyNote(series)}`,
    draw: (body) => drawLines(body, {
      title, series, references,
      dodge: alone ? Math.min(60, (0.55 * body.clientWidth) / Math.max(1, coloured)) : Math.min(5, 22 / coloured),
      x: { scale: "log", domain: [densities[0] * pad, densities.at(-1) / pad], ticks: densities, format: (density) => percent(1 - density), title: "sparsity" },
      y: accuracyAxis(series.flatMap((each) => each.points), references),
    }),
  });
}

function drawByMacs(view) {
  const cells = view.cells.filter((cell) => known(cell.macs) && cell.macs > 0);
  const title = "Accuracy against multiply-accumulates";
  if (!cells.length) return figure("by-macs", { title, caption: "", draw: nothing("No record in view counts MACs.") });
  const sparse = cells.filter((cell) => cell.sparsity > 0), shown = sparse.length ? sparse : cells;
  const series = linesOf(shown, (cell) => ({
    x: cell.macs, y: cell.mean, hollow: !cell.verified,
    low: cell.deviation === null ? null : cell.mean - cell.deviation,
    high: cell.deviation === null ? null : cell.mean + cell.deviation, tip: accuracyTip(cell),
  }));
  const macs = shown.map((cell) => cell.macs);
  const low = Math.min(...macs), high = Math.max(...macs), pad = Math.max(1.12, (high / low) ** 0.06);
  const { references, said } = sparse.length ? denseReference(view, series.flatMap((each) => each.points)) : { references: [], said: "" };
  const dense = shown.find((cell) => known(cell.dense_macs))?.dense_macs;
  let marks = logTicks(low / pad, high * pad);
  if (marks.length < 2) marks = ticks(low / pad, high * pad, 4);
  figure("by-macs", {
    title,
    caption: `Per image, on a logarithmic axis${known(dense) ? `; dense takes ${counted(dense)}` : ""}. A multiply-accumulate counts once (STR's convention, without pooling). ${capital(overSeeds(shown))}.${said}${greyNote(series)}`,
    draw: (body) => drawLines(body, {
      title, series, references,
      x: { scale: "log", domain: [low / pad, high * pad], ticks: marks, format: roundCount, title: "MACs per image" },
      y: accuracyAxis(series.flatMap((each) => each.points), references),
    }),
  });
}

const layerName = (name) => name.replace(/\.weight$/, "");

/** One row a layer, from the input down; one line a method. */
function drawLayers(view) {
  const title = "What is kept of each layer";
  const cells = focusCells(view).filter((cell) => cell.layers.length);
  if (!cells.length) return figure("layers", { title, caption: "", draw: nothing("No run in view tells what it kept of its layers.") });
  const { layers, sizes } = view.setting;
  const share = (cell, i) => cell.layers[i] / sizes[i];
  const shares = cells.flatMap((cell) => layers.map((_, i) => share(cell, i))).filter((value) => value > 0);
  const low = Math.min(...shares, 1 - cells[0].sparsity || 1) / 1.4;
  const lines = linesOf(cells, (cell) => ({ x: 0, cell }));
  figure("layers", {
    title,
    caption: `Layers from the input (top) to the output, at ${focusText(view)}; means over seeds. The dashed line is the whole network. A hollow mark at the left edge: nothing is kept.${greyNote(lines)}`,
    draw: (body) => drawLayerRows(body, { title, lines, layers, sizes, share, low, overall: 1 - cells[0].sparsity }),
  });
}

function drawLayerRows(body, { title, lines, layers, sizes, share, low, overall }) {
  const width = Math.max(240, body.clientWidth);
  const step = Math.max(14, Math.min(64, 300 / layers.length));
  const names = Math.min(width * 0.34, 12 + Math.max(...layers.map((name) => textWidth(layerName(name)))));
  const bottom = layers.length * step + 8, height = bottom + 38;
  const atX = logarithmic([low, 1], [names + 6, width - 22]), atY = (i) => 6 + (i + 0.5) * step;
  const svg = canvas(body, width, height, title);
  layers.forEach((name, i) => {
    svg.append(shape("line", { class: "gridline", x1: names, x2: width - 10, y1: atY(i), y2: atY(i) }),
      shape("text", { x: names - 6, y: atY(i) + 4, "text-anchor": "end" }, fitted(layerName(name), names - 8, { end: true })));
  });
  let taken = Infinity;
  for (const value of logTicks(low, 1).reverse()) {
    const at = atX(value), text = percent(value), half = textWidth(text) / 2;
    svg.append(shape("line", { class: "axis", x1: at, x2: at, y1: bottom, y2: bottom + 4 }));
    if (at + half > taken - 6) continue;
    taken = at - half;
    svg.append(shape("text", { x: at, y: bottom + 17, "text-anchor": "middle" }, text));
  }
  svg.append(shape("line", { class: "axis", x1: names, x2: width - 10, y1: bottom, y2: bottom }),
    shape("text", { class: "axis-title", x: (names + width) / 2, y: height - 4, "text-anchor": "middle" }, "weights kept, % of the layer"));
  if (overall < 1 && overall > low) svg.append(shape("line", { class: "reference", x1: atX(overall), x2: atX(overall), y1: 2, y2: bottom }));
  const spots = [];
  for (const line of [...lines.filter((each) => each.context), ...lines.filter((each) => !each.context)]) {
    const { cell } = line.points[0];
    const points = layers.map((name, i) => ({
      x: Math.max(low, share(cell, i)), y: i, hollow: cell.layers[i] === 0,
      tip: [cell.label, layerName(name), `${fixed(100 * share(cell, i))} % kept: ${whole(cell.layers[i])} of ${whole(sizes[i])}`],
    }));
    svg.append(drawSeries({ ...line, points, style: styleOf(line.method, line.context) }, { atX, atY, spots }));
  }
  spots.sort((a, b) => a.cy - b.cy);
  hoverable(svg, spots);
}

const CURVES = {
  loss: "training loss", train_accuracy: "training accuracy, %", learning_rate: "learning rate",
  temperature: "temperature", kept_fraction: "weights kept, share", expected_sparsity: "expected sparsity",
};

function drawCurves(view) {
  const title = "Training";
  const cells = focusCells(view, true).filter((cell) => cell.curves);
  const kinds = DATA.curves.filter((name) => cells.some((cell) => cell.curves.values[name]));
  if (!kinds.length) return figure("curves", { title, caption: "", draw: nothing("No run in view has a history.") });
  const kind = kinds.includes(state.curve) ? state.curve : kinds.includes("train_accuracy") ? "train_accuracy" : kinds[0];
  const series = linesOf(cells.filter((cell) => cell.curves.values[kind]), (cell) => ({ x: 0, cell })).map((line) => {
    const { cell } = line.points[0], { epochs, values } = cell.curves;
    const points = values[kind]
      .map((value, i) => ({ x: epochs[i], y: value, tip: [cell.label, `${CURVES[kind] || kind}: ${Number(value?.toPrecision(4))}`, `epoch ${epochs[i]}`] }))
      .filter((point) => known(point.y));
    return { ...line, points, marks: points.length === 1 };
  }).filter((line) => line.points.length);
  const all = series.flatMap((each) => each.points), epochs = all.map((point) => point.x);
  const [low, high] = span(all.map((point) => point.y), 0.05, 1e-6);
  const [first, last] = [Math.min(...epochs), Math.max(...epochs)];
  const marks = ticks(low, high, 5), digits = Math.max(0, Math.min(5, -Math.floor(Math.log10(marks[1] - marks[0] || 1))));
  figure("curves", {
    title, tools: [choice("Curve", kinds.map((name) => [name, CURVES[name] || name]), kind, (name) => { state.curve = name; drawCurves(currentView()); })],
    caption: `At ${focusText(view)}${cells.some((cell) => cell.sparsity === 0) ? ", and the dense network" : ""}; ${cells.some((cell) => cell.total > 1) ? "means over all seeds" : "one seed"}. Measured on the training images, with augmentation, while the weights change.${greyNote(series)}`,
    draw: (body) => drawLines(body, {
      title: `Training: ${CURVES[kind] || kind}`, series,
      x: { domain: [first, last > first ? last : first + 1], ticks: ticks(first, last, 6).filter(Number.isInteger), format: whole, title: "epoch" },
      y: { domain: [low, high], ticks: marks, format: (value) => fixed(value, digits), title: CURVES[kind] || kind },
    }),
  });
}

function drawHistogram(view) {
  const cells = focusCells(view).filter((cell) => cell.histograms);
  const title = "Probabilities over training";
  if (!cells.length) {
    return figure("histogram", { title, caption: "", draw: nothing("No run in view recorded a histogram: methods with probabilities or scores, such as probmask, do.") });
  }
  const options = cells.flatMap((cell) => Object.keys(cell.histograms).map((name) => [`${cell.index}:${name}`, name === "prob" ? cell.label : `${cell.label}: ${name}`]));
  const chosen = options.some(([value]) => value === state.histogram) ? state.histogram : options[0][0];
  const [index, ...rest] = chosen.split(":"), name = rest.join(":");
  const cell = cells.find((each) => each.index === Number(index)), { low, high, epochs, counts, seed } = cell.histograms[name];
  const what = name === "prob" ? "probability of being kept" : name;
  figure("histogram", {
    title, two: true,
    tools: options.length > 1 ? [choice("Histogram of", options, chosen, (value) => { state.histogram = value; drawHistogram(currentView()); })] : [],
    caption: `${cell.label} at ${sparsityText(cell)}, seed ${seed}: all ${whole(sum(counts[0]))} weights by their ${what}. Counts and shades are logarithmic. Training ends with a choice: each weight is kept or removed.`,
    draw: (body) => {
      const left = element("div"), right = element("div");
      body.append(left, right);
      const most = Math.max(...counts.flat(), 1), bins = counts[0].length;
      const edge = (bin) => low + ((high - low) * bin) / bins;
      const range = (bin) => `${Number(edge(bin).toPrecision(3))} to ${Number(edge(bin + 1).toPrecision(3))}`;
      const tip = (at, bin) => [`${whole(counts[at][bin])} weights`, `${what} ${range(bin)}`, `epoch ${epochs[at]}`];
      const said = element("output", {}, "");
      const slider = element("input", { type: "range", min: 0, max: epochs.length - 1, value: epochs.length - 1, "aria-label": "Epoch of the histogram" });
      const frame = element("div");
      left.append(frame, element("label", { class: "slider" }, "epoch", slider, said));
      const heat = drawHeat(right, { title: `${title}, all epochs`, epochs, counts, most, edge, tip, what, low, high });
      const show = () => {
        const at = Number(slider.value);
        said.textContent = String(epochs[at]);
        slider.setAttribute("aria-valuetext", `epoch ${epochs[at]}`);
        frame.replaceChildren();
        drawBins(frame, { title: `${title}, epoch ${epochs[at]}`, counts: counts[at], most, edge, tip: (bin) => tip(at, bin), what, low, high });
        heat(at);
      };
      slider.addEventListener("input", show);
      show();
    },
  });
}

const logShare = (count, most) => Math.log10(1 + count) / Math.log10(1 + most);

function drawBins(body, { title, counts, most, edge, tip, what, low, high }) {
  const width = Math.max(240, body.clientWidth), height = 250;
  const margin = { top: 22, left: 52 }, inner = { right: width - 12, bottom: height - 42 };
  const svg = canvas(body, width, height, title);
  const atX = linear([low, high], [margin.left, inner.right]), atY = (count) => inner.bottom - logShare(count, most) * (inner.bottom - margin.top);
  const powers = [];
  for (let value = 1; value <= most; value *= 10) powers.push(value);
  drawAxes(svg, {
    x: { ticks: ticks(low, high, 5), format: (value) => String(value), title: what },
    y: { ticks: powers, format: roundCount, title: "weights" }, atX, atY, margin, inner, width, height,
  });
  const spots = counts.map((count, bin) => {
    const left = atX(edge(bin)) + 1, right = atX(edge(bin + 1)) - 1, top = atY(count);
    svg.append(shape("rect", { class: "bar k0", x: left, y: top, width: Math.max(1, right - left), height: Math.max(0, inner.bottom - top) }));
    return { cx: (left + right) / 2, cy: top, box: { x: left, y: margin.top, width: Math.max(1, right - left), height: inner.bottom - margin.top }, tip: tip(bin) };
  });
  hoverable(svg, spots);
}

/** Epochs to the right, probability upwards, counts as shades; returns what marks an epoch. */
function drawHeat(body, { title, epochs, counts, most, edge, tip, what, low, high }) {
  const width = Math.max(240, body.clientWidth), height = 250;
  const margin = { top: 22, left: 46 }, inner = { right: width - 12, bottom: height - 42 };
  const svg = canvas(body, width, height, title);
  const slot = (inner.right - margin.left) / epochs.length, atX = (at) => margin.left + at * slot;
  const atY = linear([low, high], [inner.bottom, margin.top]);
  const every = Math.max(1, Math.ceil(epochs.length / Math.max(2, Math.floor(width / 60))));
  drawAxes(svg, {
    x: { ticks: epochs.map((_, at) => at).filter((at) => at % every === 0), format: (at) => String(epochs[at]), title: "epoch" },
    y: { ticks: ticks(low, high, 5), format: (value) => String(value), title: what },
    atX: (at) => atX(at) + slot / 2, atY, margin, inner, width, height,
  });
  const spots = [];
  counts.forEach((bins, at) => bins.forEach((count, bin) => {
    const top = atY(edge(bin + 1)), tall = atY(edge(bin)) - top;
    const box = { x: atX(at), y: top, width: slot, height: tall };
    if (count) svg.append(shape("rect", { class: "heat", ...box, "fill-opacity": (0.06 + 0.94 * logShare(count, most)).toFixed(3) }));
    spots.push({ cx: atX(at) + slot / 2, cy: top + tall / 2, box, tip: tip(at, bin) });
  }));
  const marker = shape("rect", { class: "halo", y: margin.top, width: slot, height: inner.bottom - margin.top });
  svg.append(marker);
  hoverable(svg, spots);
  return (at) => marker.setAttribute("x", atX(at));
}

/** A dense network in view beside the cells of the focused sparsity, most often their twin. */
function barRows(view, value, text, tip) {
  const cells = focusCells(view, true).filter((cell) => known(value(cell)));
  return cells
    .sort((a, b) => (a.sparsity > 0) - (b.sparsity > 0) || a.method - b.method)
    .slice(0, BARS)
    .map((cell) => ({ name: cell.label, method: cell.sparsity > 0 ? cell.method : null, value: value(cell), text: text(cell), tip: tip(cell) }));
}

const barNote = (rows) => (rows.length === BARS ? ` The first ${BARS}; the tables have them all. ` : "");

function drawSize(view) {
  const title = "File";
  const twin = view.cells.find((cell) => cell.sparsity === 0 && known(cell.bytes));
  const against = (cell) => (twin && cell !== twin ? ` · ${times(twin.bytes / cell.bytes)} smaller` : "");
  const rows = barRows(view, (cell) => cell.bytes, (cell) => bytes(cell.bytes) + against(cell),
    (cell) => [cell.label, `${whole(cell.bytes)} bytes`, `${whole(cell.kept)} of ${whole(cell.size)} weights kept`]);
  if (!rows.length) return figure("size", { title, caption: "", draw: nothing("No run in view tells the size of its file.") });
  figure("size", {
    title: `File size at ${focusText(view)}`, caption: barNote(rows) + "The whole artifact: kept values, their positions, and everything that stays dense, such as BatchNorm.",
    draw: (body) => drawBars(body, { title: "File size", rows }),
  });
}

function drawSpeed(view) {
  const twin = view.cells.find((cell) => cell.sparsity === 0 && known(cell.latency));
  const against = (cell) => (twin && cell !== twin ? ` · ${times(twin.latency / cell.latency)} faster` : "");
  const rows = barRows(view, (cell) => cell.latency, (cell) => `${fixed(cell.latency)} ms${against(cell)}`,
    (cell) => [cell.label, `${fixed(cell.latency, 3)} ms for ${cell.batch === 1 ? "one image" : `${cell.batch} images`}`, `${counted(cell.macs)} MACs per image`]);
  if (rows.length) {
    return figure("speed", {
      title: `Time of one forward pass at ${focusText(view)}`, caption: "As measured on the machine that the record names; means over seeds. Compare only what was measured on one machine.",
      draw: (body) => drawBars(body, { title: "Latency", rows }),
    });
  }
  const macs = barRows(view, (cell) => cell.macs, (cell) => `${counted(cell.macs)}${known(cell.dense_macs) && cell.sparsity > 0 ? ` · ${times(cell.dense_macs / cell.macs)} fewer` : ""}`,
    (cell) => [cell.label, `${whole(cell.macs)} MACs per image`, `dense: ${whole(cell.dense_macs)}`]);
  if (!macs.length) return figure("speed", { title: "Speed", caption: "", draw: nothing("No run in view was timed.") });
  figure("speed", {
    title: `Work for one image at ${focusText(view)}`,
    caption: "None of these runs was timed, so this counts multiply-accumulates: how much work is left, not how long it takes. Once a record holds a “latency” in milliseconds, this figure shows it." + barNote(macs),
    draw: (body) => drawBars(body, { title: "Multiply-accumulates", rows: macs }),
  });
}

const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);
