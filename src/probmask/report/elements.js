// Create elements and format numbers.

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
