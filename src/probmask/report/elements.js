// Elements of the page: creation, numbers as text, the marks of methods, tooltips, saved plots.

const SVG = "http://www.w3.org/2000/svg";

/** Create an HTML element. Strings become text, never markup, because records are untrusted. */
function element(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

/** Create an SVG element. */
function shape(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

const known = (value) => typeof value === "number" && Number.isFinite(value);

/** 1234567 as "1,234,567"; whole numbers only. */
const whole = (value) => (known(value) ? Math.round(value).toLocaleString("en-US") : "–");

/** A number with a fixed number of digits after the point, and a true minus sign. */
function fixed(value, digits = 2) {
  if (!known(value)) return "–";
  const text = Math.abs(value).toLocaleString("en-US", {
    minimumFractionDigits: digits,
    maximumFractionDigits: digits,
  });
  return value < 0 && Number(value.toFixed(digits)) !== 0 ? `−${text}` : text;
}

/** 0.98 as "98 %", 0.9995 as "99.95 %". */
const percent = (fraction) => `${Number((100 * fraction).toFixed(4))} %`;

/** The text with non-breaking spaces between numbers and units. */
const unbroken = (text) => text.replace(/(\d) (?=(%|[kMG]|kB|MB|ms)(?![\w]))/g, "$1\u00a0");

/** A count with a unit prefix: 154,530 as "154.5 k". */
function counted(value) {
  if (!known(value)) return "–";
  const [unit, name] =
    value >= 1e9 ? [1e9, " G"] : value >= 1e6 ? [1e6, " M"] : value >= 1e3 ? [1e3, " k"] : [1, ""];
  const scaled = value / unit;
  return (unit === 1 ? whole(value) : fixed(scaled, scaled < 10 ? 2 : scaled < 100 ? 1 : 0)) + name;
}

/** A count with a unit prefix for the ticks of an axis: 1,000 as "1 k". */
const roundCount = (value) => counted(value).replace(/\.0+(?= |$)/, "");

const bytes = (value) =>
  !known(value)
    ? "–"
    : value < 1000
      ? `${value} B`
      : value < 1e6
        ? `${fixed(value / 1e3, 1)} kB`
        : `${fixed(value / 1e6, 2)} MB`;

function lasting(seconds) {
  if (!known(seconds)) return "–";
  if (seconds < 120) return `${Math.round(seconds)} s`;
  if (seconds < 7200) return `${fixed(seconds / 60, 1)} min`;
  return `${fixed(seconds / 3600, 1)} h`;
}

const times = (ratio) => (known(ratio) && ratio > 0 ? `${fixed(ratio, ratio < 10 ? 1 : 0)}×` : "–");

const measuring = document.createElement("canvas").getContext("2d");

/** The width of a text in a plot, in pixels. */
function textWidth(text, font = "11.5px") {
  measuring.font = `${font} ${getComputedStyle(document.body).fontFamily}`;
  return measuring.measureText(text).width;
}

const LABEL = "600 12px";

/** The text truncated to a width, at its start or at its end. */
function fitted(text, room, { font, end = false } = {}) {
  if (textWidth(text, font) <= room) return text;
  for (let length = text.length - 1; length > 1; length--) {
    const cut = end ? `…${text.slice(-length)}` : `${text.slice(0, length)}…`;
    if (textWidth(cut, font) <= room) return cut;
  }
  return "…";
}

// Color, mark and dash of each method, the same in every plot.

const SHAPES = [
  (r) => `M${-r},0A${r},${r} 0 1,1 ${r},0A${r},${r} 0 1,1 ${-r},0Z`,
  (r) => `M${-r},${-r}H${r}V${r}H${-r}Z`,
  (r) => `M0,${-1.25 * r}L${1.2 * r},${0.9 * r}H${-1.2 * r}Z`,
  (r) => `M0,${-1.35 * r}L${1.35 * r},0L0,${1.35 * r}L${-1.35 * r},0Z`,
  (r) => `M0,${1.25 * r}L${1.2 * r},${-0.9 * r}H${-1.2 * r}Z`,
  (r) =>
    `M${-r / 2},${-1.2 * r}H${r / 2}V${-r / 2}H${1.2 * r}V${r / 2}H${r / 2}V${1.2 * r}H${-r / 2}V${r / 2}H${-1.2 * r}V${-r / 2}H${-r / 2}Z`,
  (r) =>
    `M0,${-1.4 * r}L${0.4 * r},${-0.4 * r}L${1.4 * r},0L${0.4 * r},${0.4 * r}L0,${1.4 * r}L${-0.4 * r},${0.4 * r}L${-1.4 * r},0L${-0.4 * r},${-0.4 * r}Z`,
];
const DASHES = [null, "7 4", "2 4", "9 3 2 3"];
const COLORS = SHAPES.length;

/** The style of a method: colors and shapes repeat together, then dashes and hollow marks differ. */
function styleOf(method, context = false) {
  if (DATA.methods[method] === "dense")
    return { color: context ? "kx" : "kd", path: SHAPES[0], dash: null, mark: "mark fill stroke" };
  return {
    color: context ? "kx" : `k${method % COLORS}`,
    path: SHAPES[method % COLORS],
    dash: DASHES[Math.floor(method / COLORS) % DASHES.length],
    mark: Math.floor(method / COLORS) % 2 ? "mark hollow" : "mark fill stroke",
  };
}

function key(method) {
  const style = styleOf(method);
  return shape(
    "svg",
    {
      class: `key ${style.color}`,
      width: 11,
      height: 11,
      viewBox: "-6 -6 12 12",
      "aria-hidden": "true",
    },
    shape("path", { class: style.mark, d: style.path(4) }),
  );
}

/** Highlight a method in every plot. */
function emphasize(method) {
  for (const svg of document.querySelectorAll(".plot svg")) {
    const own = [...svg.querySelectorAll(`.series[data-method="${method}"]`)];
    svg.classList.toggle("focused", own.length > 0 && method !== null);
    svg
      .querySelectorAll(".series")
      .forEach((node) => node.classList.toggle("on", own.includes(node)));
  }
}

// Tooltips of points.

/** Show the tooltip of the nearest point for the mouse, touch or arrow keys. */
function hoverable(svg, spots, reach = 34) {
  if (!spots.length) return;
  const order = [...spots].sort((a, b) => a.cx - b.cx || a.cy - b.cy);
  let halo = null,
    current = -1;
  const show = (spot) => {
    halo?.remove();
    halo = spot.box
      ? shape("rect", { class: "halo", ...spot.box })
      : shape("circle", { class: "halo", cx: spot.cx, cy: spot.cy, r: 8 });
    svg.append(halo);
    const frame = svg.getBoundingClientRect();
    showTip(
      spot.tip,
      frame.left + spot.cx * (frame.width / svg.viewBox.baseVal.width),
      frame.top + spot.cy * (frame.height / svg.viewBox.baseVal.height),
    );
  };
  const hide = () => {
    halo?.remove();
    halo = null;
    hideTip();
  };
  const nearest = (event) => {
    const frame = svg.getBoundingClientRect(),
      factor = svg.viewBox.baseVal.width / frame.width;
    const px = (event.clientX - frame.left) * factor,
      py = (event.clientY - frame.top) * factor;
    let best = null,
      distance = reach;
    for (const spot of order) {
      const inside =
        spot.box &&
        px >= spot.box.x &&
        px <= spot.box.x + spot.box.width &&
        py >= spot.box.y &&
        py <= spot.box.y + spot.box.height;
      const away = inside
        ? 0
        : spot.box
          ? Infinity
          : Math.hypot(spot.cx - px, spot.cy - py) + (spot.series?.context ? 8 : 0);
      if (away < distance) [best, distance] = [spot, away];
    }
    if (best) {
      current = order.indexOf(best);
      show(best);
    } else hide();
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

function hideTip() {
  document.getElementById("tip").hidden = true;
}

// Plots saved as files.

// Style properties that an SVG needs outside the page.
const LOOKS = [
  "fill",
  "stroke",
  "stroke-width",
  "stroke-dasharray",
  "stroke-linejoin",
  "stroke-linecap",
  "opacity",
  "fill-opacity",
  "font-family",
  "font-size",
  "font-weight",
];

/** A copy of a plot that does not depend on the style of the page. */
function standalone(svg) {
  const copy = svg.cloneNode(true);
  const originals = [svg, ...svg.querySelectorAll("*")],
    copies = [copy, ...copy.querySelectorAll("*")];
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

/** Save a plot as an image of twice its size, for printing. */
async function savePng(svg, name) {
  const picture = new Image();
  picture.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(standalone(svg))}`;
  await picture.decode();
  const paper = element("canvas", {
    width: 2 * svg.viewBox.baseVal.width,
    height: 2 * svg.viewBox.baseVal.height,
  });
  paper.getContext("2d").drawImage(picture, 0, 0, paper.width, paper.height);
  paper.toBlob((blob) => download(blob, `${name}.png`), "image/png");
}
