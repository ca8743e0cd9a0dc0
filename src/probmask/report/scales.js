// Scales, ticks and the placement of labels.

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
