// Plots as SVG: scales, axes, marks, labels beside lines, tooltips, saving.

const SHAPES = [
  (r) => `M${-r},0A${r},${r} 0 1,1 ${r},0A${r},${r} 0 1,1 ${-r},0Z`,
  (r) => `M${-r},${-r}H${r}V${r}H${-r}Z`,
  (r) => `M0,${-1.25 * r}L${1.2 * r},${0.9 * r}H${-1.2 * r}Z`,
  (r) => `M0,${-1.35 * r}L${1.35 * r},0L0,${1.35 * r}L${-1.35 * r},0Z`,
  (r) => `M0,${1.25 * r}L${1.2 * r},${-0.9 * r}H${-1.2 * r}Z`,
  (r) => `M${-r / 2},${-1.2 * r}H${r / 2}V${-r / 2}H${1.2 * r}V${r / 2}H${r / 2}V${1.2 * r}H${-r / 2}V${r / 2}H${-1.2 * r}V${-r / 2}H${-r / 2}Z`,
  (r) => `M0,${-1.4 * r}L${0.4 * r},${-0.4 * r}L${1.4 * r},0L${0.4 * r},${0.4 * r}L0,${1.4 * r}L${-0.4 * r},${0.4 * r}L${-1.4 * r},0L${-0.4 * r},${-0.4 * r}Z`,
];
const DASHES = [null, "7 4", "2 4", "9 3 2 3"];
const COLOURS = SHAPES.length;

/** How a method is drawn: colour and shape go round together, then dash and hollow marks differ. */
function styleOf(method, context = false) {
  if (DATA.methods[method] === "dense") return { colour: context ? "kx" : "kd", path: SHAPES[0], dash: null, mark: "mark fill stroke" };
  return {
    colour: context ? "kx" : `k${method % COLOURS}`,
    path: SHAPES[method % COLOURS],
    dash: DASHES[Math.floor(method / COLOURS) % DASHES.length],
    mark: Math.floor(method / COLOURS) % 2 ? "mark hollow" : "mark fill stroke",
  };
}

function key(method) {
  const style = styleOf(method);
  return shape("svg", { class: `key ${style.colour}`, width: 11, height: 11, viewBox: "-6 -6 12 12", "aria-hidden": "true" },
    shape("path", { class: style.mark, d: style.path(4) }));
}

const linear = ([a, b], [from, to]) => (value) => from + ((value - a) / (b - a || 1)) * (to - from);
const logarithmic = ([a, b], range) => {
  const scale = linear([Math.log10(a), Math.log10(b)], range);
  return (value) => scale(Math.log10(value));
};

/** Round values from low to high, about so many. */
function ticks(low, high, about) {
  const rough = (high - low) / Math.max(1, about) || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find((each) => each * power >= rough) * power;
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + 1e-9 * step; i++) found.push(Number((i * step).toPrecision(12)));
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

/** The span of the values and a little more, so that no mark touches the frame. */
function span(values, share = 0.08, least = 1) {
  let low = Infinity, high = -Infinity;
  for (const value of values) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  const pad = Math.max((high - low) * share, high - low < least ? (least - (high - low)) / 2 : 0);
  return [low - pad, high + pad];
}

/** Labels pushed apart until none covers another, within the frame. */
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
function drawLines(body, { title, series, x, y, height = 300, references = [], labels = true, dodge = 0 }) {
  const width = Math.max(240, body.clientWidth);
  const named = labels ? series.filter((each) => !each.context && each.points.length) : [];
  // Single points have their names beside them, lines at their ends.
  const beside = named.every((each) => each.points.length === 1) && named.length < 9;
  const longest = Math.max(0, ...(beside ? [] : named.map((each) => each.name)).concat(references.map((each) => each.name)).map((name) => textWidth(name, LABEL)));
  const margin = { top: 22, right: longest ? Math.min(12 + longest, width * 0.3) : 16, bottom: 42, left: 46 };
  const inner = { right: width - margin.right, bottom: height - margin.bottom };
  const make = (axis, range) => (axis.scale === "log" ? logarithmic : linear)(axis.domain, range);
  const atX = make(x, [margin.left, inner.right]), atY = make(y, [inner.bottom, margin.top]);
  const svg = canvas(body, width, height, title);
  drawAxes(svg, { x, y, atX, atY, margin, inner, width, height });
  for (const each of references) {
    const at = atY(each.y);
    svg.append(shape("line", { class: "reference", x1: margin.left, x2: inner.right, y1: at, y2: at }));
  }
  const spots = [];
  const drawn = series.map((each, order) => ({ ...each, order, style: styleOf(each.method, each.context) }));
  const colourful = drawn.filter((each) => !each.context);
  // What is in the background is drawn first.
  for (const each of [...drawn.filter((one) => one.context), ...colourful]) {
    const rank = colourful.indexOf(each);
    const shift = rank < 0 ? 0 : (rank - (colourful.length - 1) / 2) * dodge;
    svg.append(drawSeries(each, { atX: (value) => atX(value) + shift, atY, spots }));
  }
  const wanted = named.map((each) => {
    const line = drawn.find((one) => one.name === each.name && one.method === each.method);
    const last = spots.findLast((spot) => spot.series === line);
    return { text: each.name, y: last.cy, from: last, style: line.style, order: line.order, method: line.method };
  });
  wanted.push(...references.map((each, i) => ({ text: each.name, y: atY(each.y), order: -1 - i, reference: true })));
  const atEnd = wanted.filter((label) => !beside || label.reference);
  for (const label of spread(atEnd, 14, margin.top, inner.bottom)) drawLabel(svg, label, inner.right, width);
  if (beside) nameSpots(svg, wanted.filter((label) => !label.reference), margin.left, width);
  hoverable(svg, spots);
  return svg;
}

function canvas(body, width, height, title) {
  const svg = shape("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", tabindex: "0", "aria-label": `${title}. Arrow keys go from point to point.` });
  body.append(svg);
  return svg;
}

function drawAxes(svg, { x, y, atX, atY, margin, inner, width, height }) {
  for (const value of y.ticks) {
    const at = atY(value);
    svg.append(shape("line", { class: "gridline", x1: margin.left, x2: inner.right, y1: at, y2: at }),
      shape("text", { x: margin.left - 8, y: at + 4, "text-anchor": "end" }, y.format(value)));
  }
  svg.append(shape("line", { class: "axis", x1: margin.left, x2: inner.right, y1: inner.bottom, y2: inner.bottom }));
  let taken = -Infinity;
  for (const value of x.ticks) {
    const at = atX(value), text = x.format(value);
    svg.append(shape("line", { class: "axis", x1: at, x2: at, y1: inner.bottom, y2: inner.bottom + 4 }));
    const half = textWidth(text) / 2;
    if (at - half < taken + 6) continue;
    taken = at + half;
    svg.append(shape("text", { x: at, y: inner.bottom + 17, "text-anchor": "middle" }, text));
  }
  svg.append(shape("text", { class: "axis-title", x: (margin.left + inner.right) / 2, y: height - 6, "text-anchor": "middle" }, x.title),
    shape("text", { class: "axis-title", x: 2, y: 11 }, y.title));
}

function drawSeries(series, { atX, atY, spots }) {
  const { style, points } = series;
  const group = shape("g", { class: `series ${style.colour}`, "data-method": series.method });
  const places = points.map((point) => ({ point, cx: atX(point.x), cy: atY(point.y), tip: point.tip, series }));
  if (series.line !== false && places.length > 1) {
    const d = places.map((place, i) => `${i ? "L" : "M"}${place.cx.toFixed(1)},${place.cy.toFixed(1)}`).join("");
    group.append(shape("path", { class: "series-line stroke", d, "stroke-dasharray": style.dash }));
  }
  if (!series.context) {
    for (const { point, cx } of places) {
      for (const value of point.seeds || []) group.append(shape("circle", { class: "seed fill", cx, cy: atY(value), r: 2.4 }));
      if (known(point.low) && point.high > point.low) {
        const [top, bottom] = [atY(point.high), atY(point.low)];
        group.append(shape("path", { class: "bars stroke", d: `M${cx - 4},${top}H${cx + 4}M${cx},${top}V${bottom}M${cx - 4},${bottom}H${cx + 4}` }));
      }
    }
    if (series.marks !== false) {
      for (const { cx, cy, point } of places) {
        group.append(shape("path", { class: point.hollow ? "mark hollow" : style.mark, transform: `translate(${cx.toFixed(1)},${cy.toFixed(1)})`, d: style.path(4) }));
      }
    }
  }
  spots.push(...places);
  return group;
}

/** Names to the right of their points, or to the left where there is no room, none over another. */
function nameSpots(svg, labels, left, right) {
  const taken = labels.map(({ from }) => ({ x1: from.cx - 6, x2: from.cx + 6, y: from.cy }));
  for (const label of labels) {
    const room = Math.max(label.from.cx - left, right - label.from.cx) - 14;
    const text = fitted(label.text, room, { font: LABEL }), wide = textWidth(text, LABEL);
    const x = label.from.cx + 11 + wide < right ? label.from.cx + 10 : label.from.cx - 10 - wide;
    const clash = (y) => taken.some((box) => box.x1 < x + wide && box.x2 > x && Math.abs(box.y - y) < 13);
    let y = label.y;
    for (let step = 1; clash(y) && step < 12; step++) y = label.y + Math.ceil(step / 2) * (step % 2 ? 13 : -13);
    taken.push({ x1: x, x2: x + wide, y });
    svg.append(shape("g", { class: `series ${label.style.colour}`, "data-method": label.method },
      shape("text", { class: "label fill", x, y: y + 4 }, text)));
  }
}

function drawLabel(svg, label, right, width) {
  const text = fitted(label.text, width - right - 9, { font: LABEL });
  if (label.reference) {
    svg.append(shape("text", { class: "label", x: right + 9, y: label.at + 4 }, text));
    return;
  }
  const group = shape("g", { class: `series ${label.style.colour}`, "data-method": label.method });
  if (right - label.from.cx > 14 || Math.abs(label.at - label.y) > 3) {
    group.append(shape("path", { class: "leader stroke", d: `M${label.from.cx + 7},${label.from.cy}L${right + 6},${label.at}` }));
  }
  group.append(shape("text", { class: "label fill", x: right + 9, y: label.at + 4 }, text));
  svg.append(group);
}

/** Show what the nearest point says, to a mouse, a finger, or the arrow keys. */
function hoverable(svg, spots, reach = 34) {
  if (!spots.length) return;
  const order = [...spots].sort((a, b) => a.cx - b.cx || a.cy - b.cy);
  let halo = null, current = -1;
  const show = (spot) => {
    halo?.remove();
    halo = spot.box
      ? shape("rect", { class: "halo", ...spot.box })
      : shape("circle", { class: "halo", cx: spot.cx, cy: spot.cy, r: 8 });
    svg.append(halo);
    const frame = svg.getBoundingClientRect();
    showTip(spot.tip, frame.left + spot.cx * (frame.width / svg.viewBox.baseVal.width), frame.top + spot.cy * (frame.height / svg.viewBox.baseVal.height));
  };
  const hide = () => { halo?.remove(); halo = null; hideTip(); };
  const nearest = (event) => {
    const frame = svg.getBoundingClientRect(), factor = svg.viewBox.baseVal.width / frame.width;
    const px = (event.clientX - frame.left) * factor, py = (event.clientY - frame.top) * factor;
    let best = null, distance = reach;
    for (const spot of order) {
      const inside = spot.box && px >= spot.box.x && px <= spot.box.x + spot.box.width && py >= spot.box.y && py <= spot.box.y + spot.box.height;
      const away = inside ? 0 : spot.box ? Infinity : Math.hypot(spot.cx - px, spot.cy - py) + (spot.series?.context ? 8 : 0);
      if (away < distance) [best, distance] = [spot, away];
    }
    if (best) { current = order.indexOf(best); show(best); } else hide();
  };
  svg.addEventListener("pointermove", nearest);
  svg.addEventListener("pointerdown", nearest);
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("blur", hide);
  svg.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (event.key === "Escape") hide();
    if (!step) return;
    event.preventDefault();
    current = (current + step + order.length + (current < 0 && step < 0 ? 1 : 0)) % order.length;
    show(order[current]);
  });
}

function showTip([head, ...lines], x, y) {
  const tip = document.getElementById("tip");
  tip.replaceChildren(element("b", {}, head), ...lines.map((line) => element("div", {}, line)));
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const left = Math.min(Math.max(8, x + 14), innerWidth - box.width - 8);
  const above = y - box.height - 14;
  tip.style.left = `${left}px`;
  tip.style.top = `${above > 8 ? above : Math.min(y + 18, innerHeight - box.height - 8)}px`;
}

function hideTip() { document.getElementById("tip").hidden = true; }

/** Bars to the right, one a row, each with its figure. rows: [{name, method, value, text, tip}]. */
function drawBars(body, { title, rows }) {
  const width = Math.max(240, body.clientWidth), step = 28;
  const names = Math.min(width * 0.36, 12 + Math.max(...rows.map((row) => textWidth(row.name))));
  const values = 12 + Math.max(...rows.map((row) => textWidth(row.text)));
  const height = rows.length * step + 8;
  const svg = canvas(body, width, height, title);
  const room = Math.max(20, width - names - values);
  const most = Math.max(...rows.map((row) => row.value));
  const spots = rows.map((row, i) => {
    const y = 4 + i * step, long = Math.max(1.5, (row.value / most) * room);
    const style = row.method === null ? { colour: "kx" } : styleOf(row.method);
    svg.append(shape("g", { class: `series ${style.colour}`, "data-method": row.method },
      shape("text", { x: names - 8, y: y + 18, "text-anchor": "end" }, fitted(row.name, names - 10)),
      shape("rect", { class: "bar", x: names, y: y + 5, width: long, height: step - 10, rx: 3 }),
      shape("text", { class: "value", x: names + long + 7, y: y + 18 }, row.text)));
    return { cx: names + long, cy: y + step / 2, box: { x: 0, y, width, height: step }, tip: row.tip };
  });
  hoverable(svg, spots);
  return svg;
}

// What an SVG must say of itself once it is away from the page's style.
const LOOKS = ["fill", "stroke", "stroke-width", "stroke-dasharray", "stroke-linejoin", "stroke-linecap", "opacity", "fill-opacity", "font-family", "font-size", "font-weight"];

/** A copy of a plot that looks the same anywhere. */
function standalone(svg) {
  const copy = svg.cloneNode(true);
  const originals = [svg, ...svg.querySelectorAll("*")], copies = [copy, ...copy.querySelectorAll("*")];
  copies.forEach((node, i) => {
    const look = getComputedStyle(originals[i]);
    for (const name of LOOKS) node.setAttribute(name, look.getPropertyValue(name));
    node.removeAttribute("class");
  });
  copy.querySelectorAll("g").forEach((group) => group.setAttribute("opacity", "1"));
  copy.setAttribute("xmlns", SVG);
  copy.removeAttribute("tabindex");
  const ground = getComputedStyle(document.body).getPropertyValue("--card").trim();
  copy.prepend(shape("rect", { width: "100%", height: "100%", fill: ground, stroke: "none" }));
  return new XMLSerializer().serializeToString(copy);
}

function download(blob, name) {
  const link = element("a", { href: URL.createObjectURL(blob), download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

function saveSvg(svg, name) {
  download(new Blob([standalone(svg)], { type: "image/svg+xml" }), `${name}.svg`);
}

/** Save a plot as a picture of twice its size, sharp enough to print. */
async function savePng(svg, name) {
  const picture = new Image();
  picture.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(standalone(svg))}`;
  await picture.decode();
  const paper = element("canvas", { width: 2 * svg.viewBox.baseVal.width, height: 2 * svg.viewBox.baseVal.height });
  paper.getContext("2d").drawImage(picture, 0, 0, paper.width, paper.height);
  paper.toBlob((blob) => download(blob, `${name}.png`), "image/png");
}
