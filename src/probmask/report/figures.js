// Shared by all figures: cards, captions, and the grouping of runs into lines.

// The largest number of lines that colours can distinguish; further lines are grey.
const COLOURED = 7;

/** Create a card with a title, tools, plots and a caption; `draw` fills its body. */
function figure(id, { title, caption, tools = [], draw, two = false }) {
  const card = document.getElementById(id);
  const body = element("div", { class: two ? "plot-body two" : "plot-body" });
  const saves = element("div", { class: "plot-tools" }, ...tools);
  card.replaceChildren(
    element("div", { class: "plot-head" }, element("h3", {}, unbroken(title)), saves),
    body,
    element("figcaption", { class: "caption" }, unbroken(caption)),
  );
  draw(body);
  if (!body.querySelector("svg")) return;
  const save = (kind, each) =>
    element(
      "button",
      {
        type: "button",
        "aria-label": `Save “${title}” as ${kind}`,
        onclick: () =>
          body
            .querySelectorAll("svg")
            .forEach((svg, i) => each(svg, `probmask-${id}${i ? `-${i + 1}` : ""}`)),
      },
      kind,
    );
  saves.append(save("SVG", saveSvg), save("PNG", savePng));
}

const nothing = (text) => (body) => body.append(element("p", { class: "empty" }, text));

function choice(label, options, chosen, change) {
  return element(
    "select",
    { "aria-label": label, onchange: (event) => change(event.target.value) },
    ...options.map(([value, text]) =>
      element("option", { value, selected: value === chosen }, text),
    ),
  );
}

const accuracyText = (cell) =>
  `${fixed(cell.mean)}${cell.deviation === null ? "" : ` ± ${fixed(cell.deviation)}`} %`;
const seedsText = (n) => (n === 1 ? "1 seed" : `${n} seeds`);

/** The number of runs per mark: "mean ± standard deviation over 2 seeds". */
function overSeeds(cells) {
  const counts = [...new Set(cells.map((cell) => cell.n))].sort((a, b) => a - b);
  if (!counts.length) return "";
  if (counts.at(-1) === 1) return cells.length === 1 ? "one seed" : "one seed each";
  const range = counts.length === 1 ? `${counts[0]}` : `${counts[0]} to ${counts.at(-1)}`;
  return `mean ± standard deviation over ${range} seeds`;
}

/** The number of runs per curve or layer; these always include all seeds. */
const overAllSeeds = (cells) =>
  cells.some((cell) => cell.total > 1) ? "means over all seeds." : "one seed.";

const sparsityText = (cell) => percent(cell.sparsity) + (cell.cost === "flops" ? " of MACs" : "");

function accuracyTip(cell) {
  const lines = [
    cell.label,
    `${accuracyText(cell)} at ${sparsityText(cell)}`,
    `${seedsText(cell.n)} · ${whole(cell.kept)} weights · ${counted(cell.macs)} MACs`,
  ];
  if (!cell.verified) lines.push(`reached ${percent(cell.reached)}`);
  return lines;
}

/** The sparse cells as one line per method, and the number of lines in grey. */
function linesOf(cells, point) {
  const methods = new Map();
  for (const cell of cells) {
    if (!methods.has(cell.method)) methods.set(cell.method, []);
    methods.get(cell.method).push(cell);
  }
  const order = [...methods.keys()].sort((a, b) => a - b),
    dense = DATA.methods.indexOf("dense");
  const coloured = new Set([...order.slice(0, Math.max(COLOURED, state.methods.size)), dense]);
  return order.map((method) => ({
    method,
    name: DATA.methods[method],
    context: !coloured.has(method),
    points: methods
      .get(method)
      .map(point)
      .sort((a, b) => a.x - b.x),
  }));
}

function greyNote(series) {
  const grey = series.filter((each) => each.context).length;
  return grey
    ? `The first ${series.length - grey} methods are in colour; choose methods above to colour others.`
    : "";
}

const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);

const sentences = (...parts) => parts.filter(Boolean).join(" ");
