// Means and standard deviations, by the same rules as `probmask compare`.

/** The compensated sum (Neumaier). */
function sum(values) {
  let total = 0,
    lost = 0;
  for (const value of values) {
    const next = total + value;
    lost += Math.abs(total) >= Math.abs(value) ? total - next + value : value - next + total;
    total = next;
  }
  return total + lost;
}

const mean = (values) => (values.length ? sum(values) / values.length : null);

/** The sample standard deviation; null for fewer than two values. */
function deviation(values) {
  if (values.length < 2) return null;
  const middle = mean(values);
  return Math.sqrt(sum(values.map((value) => (value - middle) ** 2)) / (values.length - 1));
}

/** The mean of the known values; null if none are known. */
const meanKnown = (values) => mean(values.filter(known));
