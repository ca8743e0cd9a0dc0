// Plots as SVG: scales, axes, lines with marks, error bars and labels, and bars.

const linear =
  ([a, b], [from, to]) =>
  (value) =>
    from + ((value - a) / (b - a || 1)) * (to - from);
const logarithmic = ([a, b], range) => {
  const scale = linear([Math.log10(a), Math.log10(b)], range);
  return (value) => scale(Math.log10(value));
};

/** Round values from low to high, `about` of them. */
function ticks(low, high, about) {
  const rough = (high - low) / Math.max(1, about) || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find((each) => each * power >= rough) * power;
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + 1e-9 * step; i++)
    found.push(Number((i * step).toPrecision(12)));
  return found;
}

function logTicks(low, high) {
  const found = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) {
    for (const each of [1, 2, 5]) {
      const value = each * 10 ** power;
      if (value >= low * 0.999 && value <= high * 1.001) found.push(Number(value.toPrecision(6)));
    }
  }
  const powers = found.filter((value) => Math.abs(Math.log10(value) % 1) < 1e-9);
  return found.length > 7 && powers.length > 1 ? powers : found;
}

/** The range of the values with a margin, so that no mark touches the frame. */
function span(values, share = 0.08, least = 1) {
  let low = Infinity,
    high = -Infinity;
  for (const value of values) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  const pad = Math.max((high - low) * share, high - low < least ? (least - (high - low)) / 2 : 0);
  return [low - pad, high + pad];
}

/** Move labels apart until none overlap, within the frame. */
function spread(labels, gap, low, high) {
  labels.sort((a, b) => a.y - b.y || a.order - b.order);
  let last = -Infinity;
  for (const label of labels) last = label.at = Math.max(label.y, last + gap, low);
  last = Infinity;
  for (const label of [...labels].reverse()) last = label.at = Math.min(label.at, last - gap, high);
  return labels;
}

/**
 * Draw lines of points into `body`, and return the SVG.
 *
 * series: [{method, name, context, points: [{x, y, low, high, seeds, tip}], line, marks}], with x and
 * y in the units of the axes: {scale: "linear"|"log", domain, ticks, format, title}.
 */
function drawLines(
  body,
  { title, series, x, y, height = 300, references = [], labels = true, dodge = 0 },
) {
  const width = Math.max(240, body.clientWidth);
  const named = labels ? series.filter((each) => !each.context && each.points.length) : [];
  // Single points are labelled next to the point, lines at their end.
  const atPoint = named.every((each) => each.points.length === 1) && named.length < 9;
  const longest = Math.max(
    0,
    ...(atPoint ? [] : named.map((each) => each.name))
      .concat(references.map((each) => each.name))
      .map((name) => textWidth(name, LABEL)),
  );
  const margin = {
    top: 22,
    right: longest ? Math.min(12 + longest, width * 0.3) : 16,
    bottom: 42,
    left: 46,
  };
  const inner = { right: width - margin.right, bottom: height - margin.bottom };
  const make = (axis, range) => (axis.scale === "log" ? logarithmic : linear)(axis.domain, range);
  const atX = make(x, [margin.left, inner.right]),
    atY = make(y, [inner.bottom, margin.top]);
  const svg = canvas(body, width, height, title);
  drawAxes(svg, { x, y, atX, atY, margin, inner, width, height });
  for (const each of references) {
    const at = atY(each.y);
    svg.append(
      shape("line", { class: "reference", x1: margin.left, x2: inner.right, y1: at, y2: at }),
    );
  }
  const spots = [];
  const drawn = series.map((each, order) => ({
    ...each,
    order,
    style: styleOf(each.method, each.context),
  }));
  const colorful = drawn.filter((each) => !each.context);
  // Series in the background are drawn first.
  for (const each of [...drawn.filter((one) => one.context), ...colorful]) {
    const rank = colorful.indexOf(each);
    const shift = rank < 0 ? 0 : (rank - (colorful.length - 1) / 2) * dodge;
    svg.append(drawSeries(each, { atX: (value) => atX(value) + shift, atY, spots }));
  }
  const wanted = named.map((each) => {
    const line = drawn.find((one) => one.name === each.name && one.method === each.method);
    const last = spots.findLast((spot) => spot.series === line);
    return {
      text: each.name,
      y: last.cy,
      from: last,
      style: line.style,
      order: line.order,
      method: line.method,
    };
  });
  wanted.push(
    ...references.map((each, i) => ({
      text: each.name,
      y: atY(each.y),
      order: -1 - i,
      reference: true,
    })),
  );
  const atEnd = wanted.filter((label) => !atPoint || label.reference);
  for (const label of spread(atEnd, 14, margin.top, inner.bottom))
    drawLabel(svg, label, inner.right, width);
  if (atPoint)
    nameSpots(
      svg,
      wanted.filter((label) => !label.reference),
      margin.left,
      width,
    );
  hoverable(svg, spots);
  return svg;
}

function canvas(body, width, height, title) {
  const svg = shape("svg", {
    width,
    height,
    viewBox: `0 0 ${width} ${height}`,
    role: "img",
    tabindex: "0",
    "aria-label": `${title}. Arrow keys move between points.`,
  });
  body.append(svg);
  return svg;
}

function drawAxes(svg, { x, y, atX, atY, margin, inner, width, height }) {
  for (const value of y.ticks) {
    const at = atY(value);
    svg.append(
      shape("line", { class: "gridline", x1: margin.left, x2: inner.right, y1: at, y2: at }),
      shape("text", { x: margin.left - 8, y: at + 4, "text-anchor": "end" }, y.format(value)),
    );
  }
  svg.append(
    shape("line", {
      class: "axis",
      x1: margin.left,
      x2: inner.right,
      y1: inner.bottom,
      y2: inner.bottom,
    }),
  );
  let taken = -Infinity;
  for (const value of x.ticks) {
    const at = atX(value),
      text = x.format(value);
    svg.append(
      shape("line", { class: "axis", x1: at, x2: at, y1: inner.bottom, y2: inner.bottom + 4 }),
    );
    const half = textWidth(text) / 2;
    if (at - half < taken + 6) continue;
    taken = at + half;
    svg.append(shape("text", { x: at, y: inner.bottom + 17, "text-anchor": "middle" }, text));
  }
  svg.append(
    shape(
      "text",
      {
        class: "axis-title",
        x: (margin.left + inner.right) / 2,
        y: height - 6,
        "text-anchor": "middle",
      },
      x.title,
    ),
    shape("text", { class: "axis-title", x: 2, y: 11 }, y.title),
  );
}

function drawSeries(series, { atX, atY, spots }) {
  const { style, points } = series;
  const group = shape("g", { class: `series ${style.color}`, "data-method": series.method });
  const places = points.map((point) => ({
    point,
    cx: atX(point.x),
    cy: atY(point.y),
    tip: point.tip,
    series,
  }));
  if (series.line !== false && places.length > 1) {
    const d = places
      .map((place, i) => `${i ? "L" : "M"}${place.cx.toFixed(1)},${place.cy.toFixed(1)}`)
      .join("");
    group.append(shape("path", { class: "series-line stroke", d, "stroke-dasharray": style.dash }));
  }
  if (!series.context) {
    for (const { point, cx } of places) {
      for (const value of point.seeds || [])
        group.append(shape("circle", { class: "seed fill", cx, cy: atY(value), r: 2.4 }));
      if (known(point.low) && point.high > point.low) {
        const [top, bottom] = [atY(point.high), atY(point.low)];
        group.append(
          shape("path", {
            class: "bars stroke",
            d: `M${cx - 4},${top}H${cx + 4}M${cx},${top}V${bottom}M${cx - 4},${bottom}H${cx + 4}`,
          }),
        );
      }
    }
    if (series.marks !== false) {
      for (const { cx, cy, point } of places) {
        group.append(
          shape("path", {
            class: point.hollow ? "mark hollow" : style.mark,
            transform: `translate(${cx.toFixed(1)},${cy.toFixed(1)})`,
            d: style.path(4),
          }),
        );
      }
    }
  }
  spots.push(...places);
  return group;
}

/** Place labels right of their points, or left where there is no room, without overlaps. */
function nameSpots(svg, labels, left, right) {
  const taken = labels.map(({ from }) => ({ x1: from.cx - 6, x2: from.cx + 6, y: from.cy }));
  for (const label of labels) {
    const room = Math.max(label.from.cx - left, right - label.from.cx) - 14;
    const text = fitted(label.text, room, { font: LABEL }),
      wide = textWidth(text, LABEL);
    const x = label.from.cx + 11 + wide < right ? label.from.cx + 10 : label.from.cx - 10 - wide;
    const clash = (y) =>
      taken.some((box) => box.x1 < x + wide && box.x2 > x && Math.abs(box.y - y) < 13);
    let y = label.y;
    for (let step = 1; clash(y) && step < 12; step++)
      y = label.y + Math.ceil(step / 2) * (step % 2 ? 13 : -13);
    taken.push({ x1: x, x2: x + wide, y });
    svg.append(
      shape(
        "g",
        { class: `series ${label.style.color}`, "data-method": label.method },
        shape("text", { class: "label fill", x, y: y + 4 }, text),
      ),
    );
  }
}

function drawLabel(svg, label, right, width) {
  const text = fitted(label.text, width - right - 9, { font: LABEL });
  if (label.reference) {
    svg.append(shape("text", { class: "label", x: right + 9, y: label.at + 4 }, text));
    return;
  }
  const group = shape("g", { class: `series ${label.style.color}`, "data-method": label.method });
  if (right - label.from.cx > 14 || Math.abs(label.at - label.y) > 3) {
    group.append(
      shape("path", {
        class: "leader stroke",
        d: `M${label.from.cx + 7},${label.from.cy}L${right + 6},${label.at}`,
      }),
    );
  }
  group.append(shape("text", { class: "label fill", x: right + 9, y: label.at + 4 }, text));
  svg.append(group);
}

/** Draw horizontal bars, one per row, with their values. rows: [{name, method, value, text, tip}]. */
function drawBars(body, { title, rows }) {
  const width = Math.max(240, body.clientWidth),
    step = 28;
  const names = Math.min(width * 0.36, 12 + Math.max(...rows.map((row) => textWidth(row.name))));
  const values = 12 + Math.max(...rows.map((row) => textWidth(row.text)));
  const height = rows.length * step + 8;
  const svg = canvas(body, width, height, title);
  const room = Math.max(20, width - names - values);
  const most = Math.max(...rows.map((row) => row.value));
  const spots = rows.map((row, i) => {
    const y = 4 + i * step,
      long = Math.max(1.5, (row.value / most) * room);
    const style = row.method === null ? { color: "kx" } : styleOf(row.method);
    svg.append(
      shape(
        "g",
        { class: `series ${style.color}`, "data-method": row.method },
        shape(
          "text",
          { x: names - 8, y: y + 18, "text-anchor": "end" },
          fitted(row.name, names - 10),
        ),
        shape("rect", { class: "bar", x: names, y: y + 5, width: long, height: step - 10, rx: 3 }),
        shape("text", { class: "value", x: names + long + 7, y: y + 18 }, row.text),
      ),
    );
    return {
      cx: names + long,
      cy: y + step / 2,
      box: { x: 0, y, width, height: step },
      tip: row.tip,
    };
  });
  hoverable(svg, spots);
  return svg;
}
