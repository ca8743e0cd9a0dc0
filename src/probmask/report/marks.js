// Colour, mark and dash of each method, the same in every plot.

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
const COLOURS = SHAPES.length;

/** The style of a method: colours and shapes repeat together, then dashes and hollow marks differ. */
function styleOf(method, context = false) {
  if (DATA.methods[method] === "dense")
    return { colour: context ? "kx" : "kd", path: SHAPES[0], dash: null, mark: "mark fill stroke" };
  return {
    colour: context ? "kx" : `k${method % COLOURS}`,
    path: SHAPES[method % COLOURS],
    dash: DASHES[Math.floor(method / COLOURS) % DASHES.length],
    mark: Math.floor(method / COLOURS) % 2 ? "mark hollow" : "mark fill stroke",
  };
}

function key(method) {
  const style = styleOf(method);
  return shape(
    "svg",
    {
      class: `key ${style.colour}`,
      width: 11,
      height: 11,
      viewBox: "-6 -6 12 12",
      "aria-hidden": "true",
    },
    shape("path", { class: style.mark, d: style.path(4) }),
  );
}
