// Size and speed.

// The largest number of bars; the tables list all.
const BARS = 16;

/** The dense network in view that the cells of the focused sparsity are compared with. */
function barRows(view, value, text, tip) {
  const cells = focusCells(view, true).filter((cell) => known(value(cell)));
  return cells
    .sort((a, b) => (a.sparsity > 0) - (b.sparsity > 0) || a.method - b.method)
    .slice(0, BARS)
    .map((cell) => ({
      name: cell.label,
      method: cell.sparsity > 0 ? cell.method : null,
      value: value(cell),
      text: text(cell),
      tip: tip(cell),
    }));
}

const barNote = (rows) =>
  rows.length === BARS ? `The first ${BARS}; the tables list all.` : "";

/** "4.0× smaller", or "1.2× larger" for a ratio below 1. */
const ratioText = (ratio, less, more) =>
  ratio >= 1 ? `${times(ratio)} ${less}` : `${times(1 / ratio)} ${more}`;

const imagesText = (batch) =>
  !known(batch) ? "" : batch === 1 ? " for one image" : ` for ${whole(batch)} images`;

/** Text that compares a cell with the dense network in view. */
function againstDense(view, name, less, more) {
  const twin = view.cells.find((cell) => cell.sparsity === 0 && known(cell[name]));
  return (cell) =>
    twin && cell !== twin ? ` · ${ratioText(twin[name] / cell[name], less, more)}` : "";
}

function drawSize(view) {
  const title = "File";
  const against = againstDense(view, "bytes", "smaller", "larger");
  const rows = barRows(
    view,
    (cell) => cell.bytes,
    (cell) => bytes(cell.bytes) + against(cell),
    (cell) => [
      cell.label,
      `${whole(cell.bytes)} bytes`,
      `${whole(cell.kept)} of ${whole(cell.size)} weights kept`,
    ],
  );
  if (!rows.length)
    return figure("size", {
      title,
      caption: "",
      draw: nothing("No run in view has a file size."),
    });
  figure("size", {
    title: `File size at ${focusText(view)}`,
    caption: sentences(
      "The whole artifact: kept weights, their positions,",
      "and all dense tensors, such as those of BatchNorm.",
      barNote(rows),
    ),
    draw: (body) => drawBars(body, { title: "File size", rows }),
  });
}

function drawSpeed(view) {
  const against = againstDense(view, "latency", "faster", "slower");
  const rows = barRows(
    view,
    (cell) => cell.latency,
    (cell) => milliseconds(cell.latency) + against(cell),
    (cell) => [
      cell.label,
      `${fixed(cell.latency, 3)} ms${imagesText(cell.batch)}`,
      `${counted(cell.macs)} MACs per image`,
    ],
  );
  if (rows.length) {
    return figure("speed", {
      title: `Time of one forward pass at ${focusText(view)}`,
      caption: sentences(
        "Measured by “probmask bench” on the machine named in the record; means over seeds.",
        "Compare only times of the same machine.",
        barNote(rows),
      ),
      draw: (body) => drawBars(body, { title: "Latency", rows }),
    });
  }
  const fewer = (cell) =>
    known(cell.dense_macs) && cell.sparsity > 0
      ? ` · ${times(cell.dense_macs / cell.macs)} fewer`
      : "";
  const macs = barRows(
    view,
    (cell) => cell.macs,
    (cell) => counted(cell.macs) + fewer(cell),
    (cell) => [
      cell.label,
      `${whole(cell.macs)} MACs per image`,
      `dense: ${whole(cell.dense_macs)}`,
    ],
  );
  if (!macs.length)
    return figure("speed", {
      title: "Speed",
      caption: "",
      draw: nothing("No run in view was timed."),
    });
  figure("speed", {
    title: `Multiply-accumulates per image at ${focusText(view)}`,
    caption: sentences(
      "These runs have no timings, so the plot shows multiply-accumulates:",
      "the amount of computation, not its duration.",
      "Run “probmask bench RUN” to measure and show the time.",
      barNote(macs),
    ),
    draw: (body) => drawBars(body, { title: "Multiply-accumulates", rows: macs }),
  });
}
