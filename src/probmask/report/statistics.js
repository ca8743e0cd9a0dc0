// Means and standard deviations, by the same rules as `probmask compare`.

/** The sum, with the rounding errors carried along (Neumaier). */
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

/** The standard deviation of a sample; null for fewer than two. */
function deviation(values) {
  if (values.length < 2) return null;
  const middle = mean(values);
  return Math.sqrt(sum(values.map((value) => (value - middle) ** 2)) / (values.length - 1));
}

/** The mean of what is known; null if nothing is. */
const meanKnown = (values) => mean(values.filter(known));
